"""Writes a run's checkpoints: beside training where asked for, one after the other, and removes the
old ones of this very run."""

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from model_check.config.schema import TrainingSettings
from model_check.engine.checkpoint import storing, write_checkpoint
from model_check.engine.saving.checkpoint_files import keep_earlier, steps_of, sweep_leftovers
from model_check.engine.state import snapshot
from model_check.errors import StorageError


class Saver:
    """Entered for as long as the run lasts; on leaving it waits for what is being written."""

    def __init__(
        self,
        directory: Path,
        training: TrainingSettings,
        device: torch.device,
        say: Callable[[str], None],
    ) -> None:
        self.directory = directory
        self._interval, self._keep_last = training.save_interval, training.keep_last
        # On a CPU the copy and its writer take from training what they save it (docs/log.md).
        on_gpu = device.type != "cpu"
        self._beside = on_gpu if training.async_save is None else training.async_save
        self._say = say
        self._thread: threading.Thread | None = None
        self._failure: StorageError | None = None
        self._kept: list[Path] = []
        """This run's `step_N.pt`, oldest first."""
        self._own: set[Path] = set()
        """What this run has written."""
        self._goes_on = False
        """Whether what was in the directory before is this run's as well."""

    def __enter__(self) -> Self:
        sweep_leftovers(self.directory)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """A run that fails for another reason keeps that reason; this one is told."""
        self.wait()
        sweep_leftovers(self.directory)  # some were too young to be judged when this run began
        if error is None:
            self.check()
        elif self._failure is not None:
            self._say(f"Checkpoint not saved: {self._failure}")

    @property
    def is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def adopt(self, resumed: Path, kept: list[str]) -> None:
        """Count the resumed checkpoint, and those that its run had kept, as this run's; not if they
        lie elsewhere. Every other file here is somebody else's."""
        if resumed.parent.absolute() == self.directory.absolute():
            self._goes_on = True
            names = [name for name in (*kept, resumed.name) if Path(name).name == name]
            paths = [self.directory / name for name in dict.fromkeys(names)]
            self._kept = [path for path in paths if steps_of(path) is not None and path.exists()]

    def due(self, num_done: int) -> bool:
        return self._interval is not None and num_done % self._interval == 0

    def check(self) -> None:
        """Raises StorageError if a write has failed since."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def save(self, name: str, state: dict[str, Any], *, wait: bool = False) -> Path:
        """Write `state` as `name`. Raises StorageError, of an earlier write too.

        `wait`: be done on return, without a copy of the state: training is over.
        """
        self.wait()
        self.check()
        path = self.directory / name
        self._keep_earlier(path)
        state = state | {"kept": [kept.name for kept in self._kept]}
        if wait or not self._beside:
            self._write(path, state)
        else:
            copy = snapshot(state)
            # A daemon: a process that must end at once does not wait for a disk.
            thread = threading.Thread(
                target=self._write_beside, args=(path, copy), name="save", daemon=True
            )
            thread.start()
            self._thread = thread
        return path

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _keep_earlier(self, path: Path) -> None:
        """What a run that was not resumed left under this name is not lost at once."""
        if self._goes_on or path in self._own:
            return
        with storing(path):
            earlier = keep_earlier(path)
        if earlier is not None:
            self._say(f"An earlier run's {path.name} is kept as {earlier}")
        self._own.add(path)

    def _write_beside(self, path: Path, state: dict[str, Any]) -> None:
        try:
            self._write(path, state)
        except StorageError as failure:
            self._failure = failure

    def _write(self, path: Path, state: dict[str, Any]) -> None:
        write_checkpoint(path, state)
        if steps_of(path) is not None:
            self._kept = [kept for kept in self._kept if kept != path] + [path]
            self._remove_old()

    def _remove_old(self) -> None:
        while self._keep_last is not None and len(self._kept) > self._keep_last:
            with suppress(OSError):  # somebody else removed it
                self._kept.pop(0).unlink()
