"""A run's fingerprints on the host: the roll-ups of each step, the vectors of the last ones,
whether the first step gives the same bits twice, and whether state stays as an update left it."""

from collections import deque
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import msgspec
import torch
from torch import Tensor

from model_check.engine.distributed.world import ALONE
from model_check.engine.results import StepData, StepMetrics, StepResult
from model_check.engine.rng import kept_rng
from model_check.engine.state import TrainingState
from model_check.errors import BrokenStateError
from model_check.events import Break, Dump, Kept, Vectors
from model_check.hooks.evidence import EvidenceWriter
from model_check.hooks.fingerprints import Entry, Fingerprints, Layout, Prints, with_audit
from model_check.hooks.hook import Hook, Loop
from model_check.hooks.lockstep import SupervisorClient
from model_check.hooks.nonfinite import NonFiniteHandler
from model_check.hooks.recompute import bad_state
from model_check.train import StepContext, accumulate
from model_check.utils.fingerprint import BEFORE, flipped

CHECKSUMS = "checksums"
"""The note of a step."""
NUM_KEPT = 8
"""Steps whose vectors stay: more than workers may be apart."""
_NUM_LAYOUTS = 1024
"""A run needs a few for each slot of a rotation."""
_PASSES = ("forward", "backward", "gradients")
"""What depends on weights and data alone."""
_MODULUS = 1 << 64


@dataclass(frozen=True)
class StepPrints:
    """A step's fingerprints, on the host."""

    step: int
    prints: Prints

    @cached_property
    def roll_ups(self) -> dict[str, str]:
        return self.prints.layout.roll_ups(self.prints.values)

    @cached_property
    def values(self) -> dict[Entry, int]:
        """Unsigned, in the order of the entries."""
        numbers = self.prints.values.tolist()
        return dict(zip(self.prints.layout.entries, (n % _MODULUS for n in numbers), strict=True))

    def vectors(self) -> Vectors:
        found: dict[str, dict[str, str]] = {}
        for entry, value in self.values.items():
            found.setdefault(entry.quantity, {})[entry.tensor] = f"{value:016x}"
        sizes = {e.tensor: (e.num_values, e.num_bits) for e in self.values if e.num_bits}
        return Vectors(step=self.step, fp=found, sizes=sizes)

    def of(self, quantities: tuple[str, ...]) -> dict[Entry, int]:
        return {e: value for e, value in self.values.items() if e.quantity in quantities}


class ChecksumLog:
    """The fingerprints of one worker."""

    def __init__(self) -> None:
        self._kept: deque[StepPrints] = deque(maxlen=NUM_KEPT)
        self._first: dict[Entry, int] = {}
        """Of the first step, when it was computed before it."""
        self._of_first: tuple[str, float | None] = "", None
        """Its loss, exact, and the scale of that."""
        self._left: StepPrints | None = None
        """What the last update left is among these."""
        self._left_at: int | None = None
        self.repeated: bool | None = None
        """Whether the latest step, if it is the first, gave the same bits as before it."""

    @property
    def roll_ups(self) -> dict[str, str]:
        """Of the latest step."""
        return self._kept[-1].roll_ups if self._kept else {}

    @property
    def taken(self) -> str:
        """Which tensors the roll-ups cover."""
        return self._kept[-1].prints.taken if self._kept else ""

    def begin(self, prints: Prints, loss: float = 0.0, loss_scale: float | None = None) -> None:
        """The state that the first step begins with, and both its passes, where they were computed
        once before it: they gave this loss, of this rank, at this loss scale."""
        self._left = _on_host(-1, replace(prints, layout=_as_left(prints.layout)))
        self._first = self._left.of(_PASSES)
        self._of_first = loss.hex(), loss_scale

    def take(self, metrics: StepMetrics, prints: Prints) -> None:
        """A step that was just read; `prints`: of it, on the host."""
        taken = StepPrints(metrics.step, prints)
        self.repeated = None
        # Where it overflowed it was trained again at a smaller scale.
        loss, scale = self._of_first
        is_same = self._first and metrics.loss_scale == scale
        if is_same and self._changed(taken) is None:  # from the same state
            own = metrics.loss if metrics.own_loss is None else metrics.own_loss
            self.repeated = self._first == taken.of(_PASSES) and own.hex() == loss
        self._first = {}
        self._kept.append(taken)

    def check(self) -> Break | None:
        """Whether the latest step found its state as the update before had left it."""
        if not self._kept:
            return None
        taken = self._kept[-1]
        found = self._changed(taken)
        self._left, self._left_at = taken, taken.step
        return found

    def check_state(self, prints: Prints) -> Break | None:
        """The same for the state now, behind the latest step."""
        if self._left_at is None:
            return None
        return self._changed(_on_host(self._left_at + 1, prints))

    def vectors(self, step: int) -> Vectors:
        """Without fingerprints where the step is not kept any more."""
        found = next((taken for taken in reversed(self._kept) if taken.step == step), None)
        return Vectors(step=step) if found is None else found.vectors()

    @property
    def last_vectors(self) -> Vectors | None:
        """Of the latest step; None: no fingerprints are taken."""
        return self._kept[-1].vectors() if self._kept and self._kept[-1].values else None

    def _changed(self, taken: StepPrints) -> Break | None:
        if self._left is None:
            return None
        left, now = self._left.prints, taken.prints
        was, again = _taken_twice(left.layout, now.layout)
        changed = (left.values[was] != now.values[again]).nonzero().flatten().tolist()
        if not changed:
            return None
        first = changed[0]
        entry = left.layout.entries[was[first]]
        before, after = int(left.values[was[first]]), int(now.values[again[first]])
        return Break(
            step=taken.step,
            quantity=entry.quantity,
            tensor=entry.tensor,
            num_tensors=len(changed),
            since=self._left_at,
            found=flipped(before, after, entry.num_values, entry.num_bits),
        )


class DeterminismCheck(Hook):
    """First of the hooks, before a fault is injected. Computes both passes of the first step once
    before it: equal kernels must give equal bits, or no difference between workers would prove
    anything. Ranks do it once more, before: after its first pass DDP sorts gradients into other
    buckets, which changes the order of sums."""

    def __init__(
        self,
        context: StepContext,
        fingerprints: Fingerprints,
        log: ChecksumLog,
        *,
        is_deterministic: bool,
    ) -> None:
        self._context, self._fingerprints, self._log = context, fingerprints, log
        self._is_deterministic, self._is_done = is_deterministic, False

    def before_step(self, data: StepData) -> None:
        if self._is_done:
            return
        self._is_done = True
        if not self._context.world.is_alone:
            self._compute(data)
        if not (self._fingerprints.are_taken and self._is_deterministic):
            self._log.begin(self._fingerprints.of_state_now())
            return
        loss = self._compute(data)
        scale = self._context.optimizer.loss_scale
        used = None if scale is None else float(scale.value)  # sync
        self._log.begin(self._fingerprints.of_passes(), float(loss), used)  # sync

    def _compute(self, data: StepData) -> Tensor:
        """Both passes, which leave no trace but gradients; returns this rank's loss."""
        with kept_rng():
            loss = accumulate(self._context, data)
        self._context.world.wait_for_device()  # what reads it has no limit
        return loss


class StateCheck(Hook):
    """Behind the log of the steps, which tells the step that found its state changed. Ends the run
    where a weight, a buffer or a moment has changed between two updates."""

    def __init__(
        self,
        state: TrainingState,
        fingerprints: Fingerprints,
        log: ChecksumLog,
        nonfinite: NonFiniteHandler,
        evidence: EvidenceWriter,
        client: SupervisorClient,
    ) -> None:
        self._state, self._fingerprints, self._log = state, fingerprints, log
        self._nonfinite, self._evidence, self._client = nonfinite, evidence, client

    def on_result(self, _metrics: StepMetrics) -> None:
        self._raise_if(self._log.check())

    def check_bad_step(self) -> None:
        """State that changed by itself may be why the latest step is not finite. Raises
        BrokenStateError."""
        found = self._log.check()
        if found is not None and self._state.context.world.is_sharded:
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
            self._state.context.channels.sink.emit(vectors)

    def _raise_if(self, found: Break | None) -> None:
        if found is None:
            return
        if bad_state(self._state.model, self._state.optimizer) is not None:
            found = msgspec.structs.replace(found, is_finite=False)
        context = self._state.context
        context.channels.sink.emit(found)
        error = _ChangedState(found)
        num_bytes = self._evidence.dossier_bytes
        context.world.tell_saving(error, self._client.num_done, num_bytes)
        raise error

    def on_error(self, error: Exception, loop: Loop) -> None:
        """Keeps the changed state after as many steps as a healthy worker keeps its own; alone,
        where it is."""
        context = self._state.context
        if not isinstance(error, _ChangedState) or context.replay_to is not None:
            return
        found = error.found
        alone = Dump(step=loop.num_done, of_step=found.step, tensors=[found.kept_as])
        # A rank takes no step that the others do not take, too.
        dump = (self._client.wait_for_dump() if context.world.is_alone else None) or alone
        # Nobody looks at these steps: the state that they begin with is known to be wrong.
        until = min(dump.step, self._state.num_steps)
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
        context: StepContext,
        fingerprints: Fingerprints,
        log: ChecksumLog,
        state_check: StateCheck,
        audit_interval: int | None,
    ) -> None:
        """`fingerprints`: a watcher of `context`, and its looker. `audit_interval`: see `_audited`;
        None: never."""
        self._context, self._fingerprints, self._log = context, fingerprints, log
        self._state_check, self._audit_interval = state_check, audit_interval
        self._audit: Prints | None = None
        self._prints: dict[int, Prints] = {}
        """Of the steps whose numbers are on their way to the host."""

    def before_step(self, data: StepData) -> None:
        self._audit = self._audited(data)

    def after_backward(self, _data: StepData) -> None:
        self._fingerprints.begin_update()

    def after_update(self, data: StepData, result: StepResult) -> None:
        prints, audit = self._fingerprints.end_update(result.grad_norms), self._audit
        self._audit = None
        self._prints[data.step] = prints if audit is None else with_audit(audit, prints)
        result.notes[CHECKSUMS] = self._prints[data.step].values

    def on_result(self, metrics: StepMetrics) -> None:
        prints = self._prints.pop(metrics.step)
        self._log.take(metrics, replace(prints, values=metrics.notes[CHECKSUMS]))
        if metrics.bad:
            self._state_check.check_bad_step()

    def _audited(self, data: StepData) -> Prints | None:
        """Where it is due, each rank computes the first one's micro-batch, alone: what a rank
        computes wrong would spread to all by the sum, and differ nowhere."""
        interval, world = self._audit_interval, self._context.world
        if world.is_alone or interval is None or data.step % interval:
            return None
        batch = tuple(map(world.of_first, data.micro_batches[0]))
        with kept_rng():
            one = replace(data, micro_batches=[batch])
            accumulate(replace(self._context, world=ALONE), one)
        return self._fingerprints.of_audit()


def _on_host(step: int, prints: Prints) -> StepPrints:
    return StepPrints(step, replace(prints, values=prints.values.cpu()))


def _as_left(layout: Layout) -> Layout:
    """What an update begins with, as if one had left it."""
    left = (replace(e, quantity=e.quantity.removeprefix(BEFORE)) for e in layout.entries)
    return Layout(tuple(left))


@lru_cache(_NUM_LAYOUTS)
def _taken_twice(left: Layout, now: Layout) -> tuple[Tensor, Tensor]:
    """The numbers of what an update left, and of the same tensors before the next one."""
    places = {(entry.quantity, entry.tensor): number for number, entry in enumerate(left.entries)}
    pairs = [
        (places[place], number)
        for number, entry in enumerate(now.entries)
        if entry.quantity.startswith(BEFORE)
        and (place := (entry.quantity.removeprefix(BEFORE), entry.tensor)) in places
    ]
    was, again = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).unbind(1)
    return was, again
