"""Writes the checkpoints of a run, one at a time, in a thread where asked for; removes old ones of
this run, and of no other. Where ranks share weights each of them writes its part."""

import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from model_check.config.ranks import FIRST_TIMEOUT_S
from model_check.config.schema import TrainingSettings
from model_check.engine.checkpoint import storing, write_checkpoint
from model_check.engine.memory import OutOfMemory
from model_check.engine.run_context import RunContext
from model_check.engine.saving.checkpoint_files import sweep_leftovers
from model_check.engine.saving.earlier import (
    keep_file,
    keeping_shards,
    move_closed,
    remove_checkpoint,
)
from model_check.engine.saving.lineage import contents_of, header_of
from model_check.engine.saving.staging import Staging
from model_check.engine.sharded.parts import like
from model_check.engine.sharded.shards import Sums, own_sums
from model_check.engine.state import TrainingState
from model_check.errors import PeerLost
from model_check.events import Saved
from model_check.forensics.fingerprint import Fingerprint
from model_check.forensics.shard import own_values
from model_check.utils.checkpoint_names import content_of, sharded_name, steps_of
from model_check.utils.wire import BEAT_S

if TYPE_CHECKING:
    from model_check.engine.sharded.together import Together

PATIENCE = 10
"""So much longer than for its first step a rank waits for what another one writes: a disk may be
slow. One that is gone is noticed at once."""
LAST_WAIT_S = 5.0
"""For a write that another rank may keep for ever."""


class _Content(NamedTuple):
    """What a checkpoint is written from."""

    state: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    """Those that ranks share, of which this one has a part; else none."""
    sums: Sums
    """Of this part."""


class Saver:
    """Writes the checkpoints of a run: `close` it at the end."""

    def __init__(
        self, training: TrainingSettings, state: TrainingState, kernel: Fingerprint
    ) -> None:
        """Where ranks share weights, all of them make one at the same time, and `kernel` computes
        the sums of what they save."""
        context = state.context
        self.directory, self._check_place = context.directory, context.claim.check
        self._progress, self._sink = state.progress, context.channels.sink
        self._is_claimed = context.replay_to is None
        self._device, self._is_first = context.device, context.world.is_first
        self._tensors = state.sharded
        self._together = _together(context) if state.sharded else None
        self._kernel = kernel
        self._keep_last = training.keep_last
        # On a CPU the copy and its thread cost training as much as they save (docs/log.md).
        on_gpu = context.device.type != "cpu"
        self._in_thread = on_gpu if training.async_save is None else training.async_save
        self._say, self._beat = context.channels.say, context.world.beat
        self._staging, self._optimizer = Staging(context.device), state.optimizer
        self._staged: tuple[int, Callable[[], _Content]] | None = None
        """After how many steps it was copied, and what gives the copy."""
        self._thread: threading.Thread | None = None
        """The last one: it begins when those before it have ended."""
        self._failure: BaseException | None = None
        self._kept: list[Path] = []
        """This run's `step_N.pt`, oldest first."""
        self._own: set[Path] = set()
        """What this process has written."""
        self._attempt: int | None = None
        """The number of this process among those that saved here; None: it has not saved."""
        self._news: list[str | Saved] = []
        """The thread's results, which the training thread reports."""

    def begin(self) -> None:
        """Clear away what writes that were killed have left."""
        if self._is_first and self._is_claimed:  # one rank for all
            sweep_leftovers(self.directory)

    def close(self, error: BaseException | None) -> None:
        """Wait for the write under way. Where the run fails of `error`, that reason stays, and a
        failed write is printed."""
        self.wait(LAST_WAIT_S if isinstance(error, PeerLost) else None)
        self._staged = None
        self._staging.close()
        self._report()
        if error is None:
            self.check()
        elif self._failure is not None:
            self._say(f"Checkpoint not saved: {self._failure}")

    @property
    def is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def adopt(self, kept: list[str]) -> None:
        """Take over the files that the resumed run had kept, if they lie here and are its own."""
        paths = [self.directory / name for name in dict.fromkeys(kept) if Path(name).name == name]
        self._kept = [path for path in paths if steps_of(path) is not None and self._is_own(path)]

    def check(self) -> None:
        """Raises the error of a write that has failed since the last call, whatever it is."""
        self._report()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def save(self, name: str, state: dict[str, Any], *, wait: bool = False) -> Path:
        """Write `state` as `name`; where ranks share weights, as a directory, and all of them call
        it. Raises StorageError, PeerLost, and whatever ended an earlier write.

        `wait`: return when it is written, without a copy of the state: training is over.
        """
        waits = wait or not self._in_thread
        # Two names may be due after one step: both are written from one copy.
        is_staged = self._staged is not None and self._staged[0] == state["step"] and not waits
        if not is_staged:
            self.wait()
        self.check()
        path = self.directory / (sharded_name(name) if self._tensors else name)
        self._check_place()
        kept = {"kept": [kept.name for kept in self._kept], "attempt": self._number()}
        if waits:
            self._write_now(path, state | kept)
            self.check()
            return path
        if not is_staged:
            self._staged = state["step"], self._stage(path, state)
        assert self._staged is not None
        content = self._staged[1]
        self._begin(path, lambda: self._write(path, content(), kept))
        return path

    def _write_now(self, path: Path, state: dict[str, Any]) -> None:
        content = _Content(state, self._tensors, own_sums(self._tensors, self._kernel))
        if self._together is None:
            self._write(path, content, {})
            return
        # For other ranks, too: meanwhile signals are heard, which gloo hears none of.
        self._begin(path, lambda: self._write(path, content, {}))
        self.wait()

    def _stage(self, path: Path, state: dict[str, Any]) -> Callable[[], _Content]:
        """Gives the copy when it is whole."""
        own = {name: own_values(tensor) for name, tensor in self._tensors.items()}
        try:
            staged = self._staging.copy({"state": state, "own": own})
        except MemoryError as error:
            raise _no_memory(path, error) from error
        if staged.done is not None:
            self._optimizer.awaited.append(staged.done)
        sums = own_sums(self._tensors, self._kernel)

        def content() -> _Content:
            copy = staged.wait()
            placed = {n: like(t, copy["own"][n]) for n, t in self._tensors.items()}
            return _Content(copy["state"], placed, sums)

        return content

    def wait(self, at_most_s: float | None = None) -> None:
        """Return when no write is under way, or after so long. A rank that only waits for others
        says that it does not hang; one whose disk does is silent."""
        until = math.inf if at_most_s is None else time.monotonic() + at_most_s
        while self.is_writing and (left_s := until - time.monotonic()) > 0:
            assert self._thread is not None
            self._thread.join(min(BEAT_S, left_s))
            if self._together is not None and self._together.waiting.is_set():
                self._beat()
        self._thread = None

    def _begin(self, path: Path, write: Callable[[], None]) -> None:
        """A daemon: a process that must end at once must not wait for a disk."""
        before = self._thread

        def run() -> None:
            if before is not None:
                before.join()
            try:
                if self._device.type == "cuda":  # a new thread begins on the first GPU
                    torch.cuda.set_device(self._device)
                write()
            except MemoryError as error:
                self._failure = _no_memory(path, error)
            except BaseException as failure:  # `check` raises it where somebody hears it
                self._failure = failure

        self._thread = threading.Thread(target=run, name="save", daemon=True)
        self._thread.start()

    def _report(self) -> None:
        while self._news:
            match self._news.pop(0):
                case Saved() as event:
                    self._sink.emit(event)
                case line:
                    self._say(line)

    def _number(self) -> int:
        """Returns the number of this attempt; only the first rank's is used."""
        if self._attempt is None:
            with storing(self.directory):
                found = contents_of(self.directory).headers if self._is_first else []
            numbers = [self._progress.resumed_at[0], *(header.attempt for header in found)]
            self._attempt = 1 + max(numbers)
        return self._attempt

    def _is_own(self, path: Path) -> bool:
        """Whether this process has written it, or it is of the past that this run goes on from: a
        later state is of another branch."""
        if path in self._own:
            return True
        if (header := header_of(path)) is None or header.run_id != self._progress.run_id:
            return False
        return header.progress <= self._progress.resumed_at

    def _write(self, path: Path, content: _Content, kept: Mapping[str, Any]) -> None:
        state = {**content.state, **kept}
        is_others = self._is_first and os.path.lexists(path) and not self._is_own(path)
        if self._together is None:
            earlier: list[Path | None] = []
            keep = (lambda: earlier.append(keep_file(path))) if is_others else None
            write_checkpoint(path, state, before=keep)
        else:
            from model_check.engine.sharded.writing import write_shards

            with storing(path):
                earlier = [move_closed(path)] if is_others else []
                keep_shards = partial(keeping_shards, path) if is_others else None
                shards = (content.tensors, content.sums, self._together)
                kept_as = write_shards(path, state, *shards, keep=keep_shards)
                earlier.append(kept_as)
        for place in filter(None, earlier):
            self._news.append(f"An earlier run's {path.name} is kept as {place}")
        self._own.add(path)
        if not self._is_first:
            return
        sums = content_of(path)
        self._news.append(f"Checkpoint saved: {path}")
        self._news.append(Saved(step=state["step"], path=str(path.absolute()), content=sums))
        if steps_of(path) is not None:
            self._kept = [kept for kept in self._kept if kept != path] + [path]
            self._remove_old()

    def _remove_old(self) -> None:
        while self._keep_last is not None and len(self._kept) > self._keep_last:
            with suppress(OSError):  # it was removed already
                remove_checkpoint(self._kept.pop(0))


def _together(context: RunContext) -> "Together":
    from model_check.engine.sharded.together import Together

    return Together.new(context.world.rank, context.world.size, PATIENCE * FIRST_TIMEOUT_S)


def _no_memory(path: Path, error: MemoryError) -> OutOfMemory:
    return OutOfMemory(
        f"{path}: not written: the host is out of memory ({error or 'MemoryError'}); "
        "training.async_save=false needs no copy of the state"
    )
