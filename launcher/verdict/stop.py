"""Why a run ends before all its workers have: the supervisor decides it, the verdict tells it."""

from msgspec import Struct


class Stop(Struct, frozen=True):
    """End the run now."""

    reason: str
    """A sentence for people."""
    exit_code: int
    culprits: tuple[str, ...]
    """Names of the workers that are blamed; none: nobody's fault (a signal to us), or a tie."""
    is_hang: bool = False
    """What the workers are doing is worth saving before anybody is stopped."""
    tied: tuple[str, ...] = ()
    """Names of the workers that failed first together: nobody knows which, so none is blamed."""
