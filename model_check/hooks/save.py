"""Saves checkpoints when they are due, and what was done where an error ends the run."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from model_check.engine.checkpoint import write_checkpoint
from model_check.engine.rng import rng_states
from model_check.engine.saving.checkpoint_files import step_name
from model_check.engine.saving.saver import Saver
from model_check.engine.state import TrainingState
from model_check.errors import BrokenStateError, NonFiniteError, PeerLost
from model_check.events import Phase
from model_check.hooks.evidence import EvidenceWriter
from model_check.hooks.hook import Loop, Periodic
from model_check.hooks.lockstep import SupervisorClient
from model_check.hooks.recompute import bad_state
from model_check.utils.checkpoint_names import ERROR, LAST
from model_check.utils.words import first_line

_HAVE_EVIDENCE = (NonFiniteError, BrokenStateError, PeerLost)
"""Errors of the state leave evidence of their own, and so does the rank that a PeerLost names."""
_LEFT_ALONE = (torch.AcceleratorError, BrokenPipeError)
"""A GPU that fails for good must not be asked for anything; a reader that is gone is no error."""


class Save(Periodic):
    """Behind all that a checkpoint holds."""

    def __init__(
        self,
        state: TrainingState,
        saver: Saver,
        evidence: EvidenceWriter,
        client: SupervisorClient,
        check_state: Callable[[], None],
    ) -> None:
        """`check_state` raises where the state is not to be saved."""
        super().__init__(state.settings.training.save_interval)
        self._state, self._saver, self._evidence = state, saver, evidence
        self._client, self._check_state = client, check_state
        self._saves_last = state.settings.training.save_last

    def begin(self) -> None:
        self._saver.begin()

    def on_result(self, _metrics: object) -> None:
        self._saver.check()

    def between_steps(self, num_done: int) -> None:
        self.save(step_name(num_done), num_done)

    def finish(self, num_done: int, *, early: bool) -> None:
        if early or self._saves_last:
            self.save(LAST, num_done, wait=True)
        elif self._saver.is_writing:
            with self._state.phase("save"):
                self._saver.wait()

    def save(self, name: str, num_done: int, *, wait: bool = False) -> None:
        """One rank writes for all; where they share weights, each its part."""
        self._check_state()
        context = self._state.context
        with self._state.phase("save"):
            self._client.serve()
            states = context.world.gathered(rng_states())
            if context.world.is_first or self._state.sharded:
                captured = self._state.capture(num_done, context.meter.loss_last, states)
                self._saver.save(name, captured, wait=wait)
            context.world.meet(self._client.beat)

    def on_error(self, error: Exception, loop: Loop) -> None:
        """Leaves the steps that were done in `error.pt`."""
        if isinstance(error, (*_HAVE_EVIDENCE, *_LEFT_ALONE)):
            return
        has_begun = loop.num_done > self._state.progress.step
        if has_begun and self._state.context.replay_to is None:
            with suppress(OSError):  # standard output, on a full disk
                self._keep_what_is_done(error, loop)

    def _keep_what_is_done(self, error: Exception, loop: Loop) -> None:
        """The error is said before anything is tried: the process may die of it."""
        context, num_done = self._state.context, loop.num_done
        context.channels.say_own(
            f"After {num_done} steps: {type(error).__name__}: {first_line(error)}"
        )
        context.channels.sink.emit(Phase(name="save"))
        try:
            for metrics in loop.flush():
                num_tokens = metrics.data.num_positions
                context.meter.finish_step(metrics.loss, num_tokens, metrics.done)
            what_became = self._save_finite(context.evidence / ERROR, num_done)
        except Exception as failure:  # it must not hide the error
            what_became = f"Checkpoint not saved: {first_line(failure)}"
        context.channels.say_own(what_became)

    def _save_finite(self, path: Path, num_done: int) -> str:
        """Writes the state after `num_done` steps; returns what became of it. One that an update
        has left half done, or that is not finite, is nothing to go on from."""
        state = self._state
        if state.context.world.is_sharded:
            return (
                f"Checkpoint not saved: {path.name} would hold the part of this rank alone; "
                "--resume auto goes on from the newest step_N"
            )
        if int(state.optimizer.num_steps) != num_done:  # sync
            return f"Checkpoint not saved: the update of step {num_done} was not whole"
        if bad_state(state.model, state.optimizer) is not None:
            return "Checkpoint not saved: weights or moments are not finite"
        captured = state.capture(num_done, state.context.meter.loss_last)
        return self._evidence.file("Checkpoint", path, partial(write_checkpoint, state=captured))

    def close(self, error: BaseException | None) -> None:
        self._saver.close(error)
