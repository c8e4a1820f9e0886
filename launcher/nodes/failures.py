"""How a job of several nodes ends before its ranks begin; and how long a node may be silent. Cheap
to import: every run does."""

import signal

from msgspec.structs import asdict

from launcher.verdict.record import RunEnd, Stop
from model_check.errors import EXIT_SIGNAL_BASE, ModelCheckError

SILENCE_S = 30.0
"""A node that is not heard for so long is gone; for launch.rank_timeout_s, where that is less."""
LEAST_SILENCE_S = 3.0
TELL_S = 10.0
"""Who leaves before all have come stays so long, to tell the late ones why. Slurm starts tasks
within seconds of each other, and its KillWait is 30 s."""


class JobEnded(ModelCheckError):
    """The job has ended before its ranks began here."""

    def __init__(self, stop: Stop, requests: tuple[int, ...] = ()) -> None:
        super().__init__(str(stop.reason))
        self.exit_code = stop.exit_code
        self.end = RunEnd(**asdict(stop), requests=requests)


class Asked(JobEnded):
    """A signal asked us to end while we waited for other nodes."""

    def __init__(self, signum: int) -> None:
        reason = f"{signal.Signals(signum).name} received"
        super().__init__(Stop(reason, EXIT_SIGNAL_BASE + signum), (signum,))
        self.signum = signum


def silence_limit_s(rank_timeout_s: float | None) -> float:
    """How long another node may be silent."""
    return max(LEAST_SILENCE_S, min(SILENCE_S, rank_timeout_s or SILENCE_S))
