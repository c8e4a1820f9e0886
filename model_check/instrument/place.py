"""A process's place in a supervised run, as its environment tells it."""

import os
from dataclasses import dataclass
from pathlib import Path

from torch import distributed

from model_check.utils import wire

_SIZES = "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"
"""Of torchrun and of MPI."""


@dataclass(frozen=True)
class Place:
    """What the environment says."""

    worker: str
    run_dir: Path
    events_fd: int
    is_held: bool = False
    stop_after: int | None = None
    """The step behind which it ends."""
    is_replay: bool = False

    @classmethod
    def from_environ(cls) -> "Place | None":
        get = os.environ.get
        fd, run_dir = get(wire.EVENTS_FD, ""), get(wire.RUN_DIR)
        if not (fd.isdigit() and run_dir):
            return None
        stop_after = get(wire.STOP_AFTER, "")
        return cls(
            get(wire.WORKER, "worker"),
            Path(run_dir),
            int(fd),
            bool(get(wire.HELD)),
            int(stop_after) if stop_after.isdigit() else None,
            bool(get(wire.REPLAY)),
        )

    def computes_again(self, step: int) -> bool:
        """Whether what is called in this step is called again behind it."""
        return self.is_replay and step == self.stop_after

    def claim(self) -> bool:
        """Whether this process is the worker: rank 0 of a job; of processes that have no rank the
        first that steps."""
        if _is_of_job() and distributed.get_rank():
            return False
        # The number of the socket: a replay has the same name.
        number = os.fstat(self.events_fd).st_ino
        mark = self.run_dir / f"{self.worker.lower()}.{number}.claimed"
        try:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True


def has_peers() -> bool:
    """Whether other processes may compute a part of the same model."""
    sizes = [os.environ.get(name, "") for name in _SIZES]
    is_one_of_many = _is_of_job() and distributed.get_world_size() > 1
    return is_one_of_many or any(size.isdigit() and int(size) > 1 for size in sizes)


def _is_of_job() -> bool:
    return distributed.is_available() and distributed.is_initialized()
