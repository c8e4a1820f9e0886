"""One job on all places: what it cannot be asked for, and where its ranks find each other: a port
of loopback that is taken before they start, so that nobody else can take it, and two jobs on one
machine never meet. Rank 0 is the one that listens there: until it comes, the others are refused."""

import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from launcher.plan import Meeting, Place
from model_check.config.ranks import check_ranks
from model_check.config.schema import Settings
from model_check.errors import ConfigError, InternalError, UsageError

_LOOPBACKS = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))
_NOT_IN_A_JOB = "--mode ddp runs one job, and {}: leave it out, or run --mode replicate"


def check_job(settings: Settings, places: Sequence[Place], command: Sequence[str]) -> None:
    """Raises UsageError or ConfigError."""
    launch = settings.launch
    if command:
        raise UsageError(
            "--mode ddp is for our trainer: a command of your own is a job by its own launcher "
            "(torchrun), or runs on every GPU alone without --mode ddp"
        )
    if launch.golden is not None:
        raise ConfigError(_NOT_IN_A_JOB.format("launch.golden holds isolated workers against it"))
    if launch.on_suspect == "continue":
        raise ConfigError(_NOT_IN_A_JOB.format("no rank goes on without another one (on_suspect)"))
    if slices := [place.name for place in places if place.gpu and place.gpu.mig_index is not None]:
        raise ConfigError(f"--mode ddp: NCCL joins whole GPUs; {', '.join(slices)}: MIG instances")
    check_ranks(settings, len(places))


@contextmanager
def open_meeting() -> Iterator[Meeting]:
    """Taken until the ranks are gone. Raises InternalError where loopback has no free port."""
    with _taken() as place:
        address, port = place.getsockname()[:2]
        yield Meeting(address, port, place.fileno())


def _taken() -> socket.socket:
    for family, address in _LOOPBACKS:
        with suppress(OSError), ExitStack() as stack:
            place = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            place.bind((address, 0))
            stack.pop_all()
            return place
    raise InternalError("no port is free on 127.0.0.1 or ::1, where ranks find each other")
