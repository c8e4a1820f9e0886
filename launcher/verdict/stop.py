"""Why a run ends before all its workers do: the supervisor decides it, the verdict tells it."""

from msgspec import Struct


class Stop(Struct, frozen=True):
    """End the run now."""

    reason: str | None
    """A sentence for people; None only in a `RunEnd`."""
    exit_code: int
    culprits: tuple[str, ...] = ()
    """Names of the workers that are blamed; none: a signal to us, or a tie."""
    is_hang: bool = False
    """It ends for silence: what the workers are doing is saved before any of them is stopped. An
    exit code 124 alone may also be a worker's own."""
    tied: tuple[str, ...] = ()
    """Names of the workers that failed together: it is unknown which was first, so none is
    blamed."""
