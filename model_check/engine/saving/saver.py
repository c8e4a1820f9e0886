"""Writes the checkpoints of a run, one at a time, in a thread where asked for; removes old ones of
this run, and of no other."""

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from model_check.config.schema import TrainingSettings
from model_check.engine.checkpoint import storing, write_checkpoint
from model_check.engine.run_context import RunContext
from model_check.engine.saving.checkpoint_files import keep_earlier, steps_of, sweep_leftovers
from model_check.engine.state import snapshot
from model_check.errors import StorageError


class Saver:
    """A context for as long as the run lasts. On leaving, it waits for the write under way."""

    def __init__(self, training: TrainingSettings, context: RunContext) -> None:
        self.directory = context.directory
        self._interval, self._keep_last = training.save_interval, training.keep_last
        # On a CPU the copy and its thread cost training as much as they save (docs/log.md).
        on_gpu = context.device.type != "cpu"
        self._in_thread = on_gpu if training.async_save is None else training.async_save
        self._say = context.channels.say
        self._thread: threading.Thread | None = None
        self._failure: StorageError | None = None
        self._kept: list[Path] = []
        """This run's `step_N.pt`, oldest first."""
        self._own: set[Path] = set()
        """What this run has written."""
        self._goes_on = False
        """Whether files that were in the directory before are this run's as well."""

    def __enter__(self) -> Self:
        sweep_leftovers(self.directory)
        return self

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        """Where the run fails for another reason, that reason stays, and a failed write is
        printed."""
        self.wait()
        sweep_leftovers(self.directory)  # some were too young when this run began
        if error is None:
            self.check()
        elif self._failure is not None:
            self._say(f"Checkpoint not saved: {self._failure}")

    @property
    def is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def adopt(self, resumed: Path, kept: list[str]) -> None:
        """Count the resumed checkpoint, and those that its run had kept, as this run's, if they are
        in this directory. Every other file here belongs to another run."""
        if resumed.parent.absolute() == self.directory.absolute():
            self._goes_on = True
            names = [name for name in (*kept, resumed.name) if Path(name).name == name]
            paths = [self.directory / name for name in dict.fromkeys(names)]
            self._kept = [path for path in paths if steps_of(path) is not None and path.exists()]

    def due(self, num_done: int) -> bool:
        return self._interval is not None and num_done % self._interval == 0

    def check(self) -> None:
        """Raises StorageError if a write has failed since the last call."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def save(self, name: str, state: dict[str, Any], *, wait: bool = False) -> Path:
        """Write `state` as `name`. Raises StorageError, also for an earlier write.

        `wait`: return when it is written, without a copy of the state: training is over.
        """
        self.wait()
        self.check()
        path = self.directory / name
        self._keep_earlier(path)
        state = state | {"kept": [kept.name for kept in self._kept]}
        if wait or not self._in_thread:
            self._write(path, state)
        else:
            copy = snapshot(state)
            # A daemon: a process that must end at once must not wait for a disk.
            thread = threading.Thread(
                target=self._write_in_thread, args=(path, copy), name="save", daemon=True
            )
            thread.start()
            self._thread = thread
        return path

    def wait(self) -> None:
        """Return when no write is under way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _keep_earlier(self, path: Path) -> None:
        """An earlier run may have left a file of this name, and this run does not resume it: keep
        it under another name."""
        if self._goes_on or path in self._own:
            return
        with storing(path):
            earlier = keep_earlier(path)
        if earlier is not None:
            self._say(f"An earlier run's {path.name} is kept as {earlier}")
        self._own.add(path)

    def _write_in_thread(self, path: Path, state: dict[str, Any]) -> None:
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
            with suppress(OSError):  # it was removed already
                self._kept.pop(0).unlink()
