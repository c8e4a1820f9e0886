"""Why a run ends before all its workers do: the supervisor decides it, the verdict tells it."""

from msgspec import Struct


class Stop(Struct, frozen=True):
    """End the run now."""

    reason: str
    """A sentence for people."""
    exit_code: int
    culprits: tuple[str, ...]
    """Names of the workers that are blamed; none: a signal to us, or a tie."""
    is_hang: bool = False
    """Save what the workers are doing before any of them is stopped."""
    tied: tuple[str, ...] = ()
    """Names of the workers that failed together: it is unknown which was first, so none is
    blamed."""
