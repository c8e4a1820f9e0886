"""The hooks that take and compare fingerprints: those of each step, of the first step computed
twice, and of the state that an update left."""

from collections.abc import Callable
from dataclasses import replace

import msgspec
from torch import Tensor, nn

from model_check.dist.world import ALONE, World
from model_check.engine.results import StepData, StepMetrics, StepResult
from model_check.engine.rng import kept_rng
from model_check.engine.run_context import RunContext
from model_check.errors import BrokenStateError
from model_check.events import Break, Dump, Kept
from model_check.forensics.checksums import ChecksumVector, joined
from model_check.forensics.optimizer import Optimizer
from model_check.hooks.checksum_log import ChecksumLog
from model_check.hooks.evidence import EvidenceWriter
from model_check.hooks.fingerprints import Fingerprints
from model_check.hooks.hook import Hook, Loop
from model_check.hooks.lockstep import SupervisorClient
from model_check.hooks.nonfinite import NonFiniteHandler
from model_check.hooks.recompute import bad_state
from model_check.loss_scale import LossScale

Compute = Callable[[StepData], Tensor]
"""Computes both passes of a step, whose gradients `.grad` holds afterwards; returns its loss."""
CHECKSUMS = "checksums"
"""The note of a step."""


class DeterminismCheck(Hook):
    """First of the hooks, before a fault is injected. Computes both passes of the first step once
    before it: equal kernels must give equal bits, or no difference between workers would prove
    anything. Ranks do it once more, before: after its first pass DDP sorts gradients into other
    buckets, which changes the order of sums."""

    def __init__(
        self,
        compute: Compute,
        fingerprints: Fingerprints,
        log: ChecksumLog,
        world: World = ALONE,
        *,
        is_deterministic: bool,
        loss_scale: LossScale | None = None,
    ) -> None:
        """`is_deterministic`: equal bits are to be expected. `loss_scale`: what gradients carry."""
        self._passes, self._fingerprints, self._log = compute, fingerprints, log
        self._world, self._loss_scale = world, loss_scale
        self._is_deterministic, self._is_done = is_deterministic, False

    def before_step(self, data: StepData) -> None:
        if self._is_done:
            return
        self._is_done = True
        if not self._world.is_alone:
            self._compute(data)
        if not (self._fingerprints.are_taken and self._is_deterministic):
            self._log.begin(self._fingerprints.of_state_now())
            return
        loss = self._compute(data)
        scale = self._loss_scale
        used = None if scale is None else float(scale.value)  # sync
        self._log.begin(self._fingerprints.of_passes(), float(loss), used)  # sync

    def _compute(self, data: StepData) -> Tensor:
        """Both passes, which leave no trace but gradients; returns this rank's loss."""
        with kept_rng():
            loss = self._passes(data)
        self._world.wait_for_device()  # what reads it has no limit
        return loss


class StateCheck(Hook):
    """Behind the log of the steps, which tells the step that found its state changed. Ends the run
    where a weight, a buffer or a moment has changed between two updates."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        fingerprints: Fingerprints,
        log: ChecksumLog,
        nonfinite: NonFiniteHandler,
        evidence: EvidenceWriter,
        client: SupervisorClient,
        context: RunContext,
        *,
        num_steps: int,
    ) -> None:
        """`num_steps`: those after which the training ends."""
        self._model, self._optimizer, self._context = model, optimizer, context
        self._fingerprints, self._log, self._num_steps = fingerprints, log, num_steps
        self._nonfinite, self._evidence, self._client = nonfinite, evidence, client

    def on_result(self, _metrics: StepMetrics) -> None:
        self._raise_if(self._log.check())

    def check_bad_step(self) -> None:
        """State that changed by itself may be why the latest step is not finite. Raises
        BrokenStateError."""
        found = self._log.check()
        if found is not None and self._context.world.is_sharded:
            self._nonfinite.tell_changed()
        self._raise_if(found)

    def check_now(self) -> None:
        """The state is what the last update left, and finite. Raises BrokenStateError,
        NonFiniteError."""
        self._raise_if(self._log.check_state(self._fingerprints.of_state_now()))
        self._nonfinite.check_weights()

    def on_last_step(self, *, early: bool) -> None:
        self.check_now()
        if not early and (vectors := self._log.last_vectors) is not None:
            self._context.channels.sink.emit(vectors)

    def _raise_if(self, found: Break | None) -> None:
        if found is None:
            return
        if bad_state(self._model, self._optimizer) is not None:
            found = msgspec.structs.replace(found, is_finite=False)
        context = self._context
        context.channels.sink.emit(found)
        error = _ChangedState(found)
        num_bytes = self._evidence.dossier_bytes
        context.world.tell_saving(error, self._client.num_done, num_bytes)
        raise error

    def on_error(self, error: Exception, loop: Loop) -> None:
        """Keeps the changed state after as many steps as a healthy worker keeps its own; alone,
        where it is."""
        context = self._context
        if not isinstance(error, _ChangedState) or context.replay_to is not None:
            return
        found = error.found
        alone = Dump(step=loop.num_done, of_step=found.step, tensors=[found.kept_as])
        # A rank takes no step that the others do not take, too.
        dump = (self._client.wait_for_dump() if context.world.is_alone else None) or alone
        # Nobody looks at these steps: the state that they begin with is known to be wrong.
        until = min(dump.step, self._num_steps)
        while loop.num_done < until and not context.stop.asked(on_notice=False):
            loop.train_unchecked()
        if context.stop.asked(on_notice=False):
            return
        suspects = dump.tensors
        kept = self._evidence.dossier(
            "break", loop.num_done, step=found.step, guilty=suspects, event=found
        )
        context.channels.say_own(kept)
        context.channels.sink.emit(Kept(step=loop.num_done, of_step=dump.of_step))


class _ChangedState(BrokenStateError):
    def __init__(self, found: Break) -> None:
        super().__init__(f"{found.what}: nothing in this program did that")
        self.found = found


class Checksums(Hook):
    """Before the search for NaN: state that changed by itself may be why a step is not finite."""

    def __init__(
        self,
        fingerprints: Fingerprints,
        log: ChecksumLog,
        state_check: StateCheck,
        audit: Compute | None = None,
        audit_interval: int | None = None,
    ) -> None:
        """`fingerprints`: watch both passes of a step, and its update. `audit`: what each rank
        computes alone: what one computes wrong would spread to all by the sum, and differ nowhere.
        `audit_interval`: steps from one audit to the next; None: there is none."""
        self._fingerprints, self._log, self._state_check = fingerprints, log, state_check
        self._compute_audit, self._audit_interval = audit, audit_interval
        self._audit: ChecksumVector | None = None
        self._vectors: dict[int, ChecksumVector] = {}
        """Of the steps whose numbers are on their way to the host."""

    def before_step(self, data: StepData) -> None:
        self._audit = self._audited(data)

    def after_backward(self, _data: StepData) -> None:
        self._fingerprints.begin_update()

    def after_update(self, data: StepData, result: StepResult) -> None:
        vector = self._fingerprints.end_update(result.grad_norms)
        if self._audit is not None:
            vector = replace(joined(self._audit, vector), taken=vector.taken)
        self._audit, self._vectors[data.step] = None, vector
        result.notes[CHECKSUMS] = vector.values

    def on_result(self, metrics: StepMetrics) -> None:
        vector, values = self._vectors.pop(metrics.step), metrics.result.notes[CHECKSUMS]
        self._log.take(metrics, replace(vector, values=values, step=metrics.step))
        if metrics.bad:
            self._state_check.check_bad_step()

    def _audited(self, data: StepData) -> ChecksumVector | None:
        compute, interval = self._compute_audit, self._audit_interval
        if compute is None or interval is None or data.step % interval:
            return None
        with kept_rng():
            compute(data)
        return self._fingerprints.of_audit()
