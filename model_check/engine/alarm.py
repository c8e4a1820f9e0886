"""What happens when a step is not finite: find where, report it, save the evidence, end with exit
code 20."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import NoReturn

from torch import Tensor

from model_check.engine.checkpoint import write_checkpoint
from model_check.engine.distributed.world import BAD_STEP, OwnState, of_bad_step
from model_check.engine.inject import Injector
from model_check.engine.keeper import Keeper
from model_check.engine.reading import StepMetrics
from model_check.engine.repeat import bad_state, noted_origin, repeated_origin
from model_check.engine.state import TrainingState
from model_check.engine.step import StepPlan
from model_check.errors import NonFiniteError, PeerLost
from model_check.events import Beat, NonFinite, Phase
from model_check.forensics.advice import advice
from model_check.forensics.dump import dump_tensors
from model_check.forensics.origin import Found
from model_check.forensics.report import BadStep, block, module_line, summary
from model_check.forensics.scan import BadTensor, bad_gradients, bad_parameters, bad_tensors
from model_check.utils.words import first_line

_ALONE = "this rank alone has seen it, and others hold parts of the model"


@dataclass(frozen=True)
class Alarm:
    """The model's weights are those before the bad step: the optimizer refused it."""

    state: TrainingState
    plan: StepPlan
    injector: Injector
    keeper: Keeper
    recomputes: bool
    """Later steps may have overwritten the gradients of the bad one: compute them again."""

    def raise_for(
        self, metrics: StepMetrics, gradients: Sequence[BadTensor] | None = None
    ) -> NoReturn:
        """`gradients`: those that were not finite; None: still to be found.

        What is known is told before anything else is tried: the process may die of it. Raises
        PeerLost where it began on another rank.
        """
        self._leave_to_others(metrics)
        is_overwritten = self.recomputes and gradients is None
        if gradients is None:
            gradients = [] if is_overwritten else bad_gradients(self.state.model)
        bad = self._first_look(metrics, gradients)
        self._confess(bad, self._names(bad, metrics))
        if is_overwritten:
            bad, found = self._repeat(replace(bad, recomputed=True), metrics)
            dumped = self._tell(bad)
        else:
            dumped = self._tell(bad)
            bad, found = self._repeat(bad, metrics)
        names = self._names(bad, metrics)
        self._confess(bad, names)
        kept = (*self._save(bad, names, found), *dumped)
        for line in (module_line(bad), *kept, *self._advice(bad)):
            self.state.context.channels.say_own(line)
        raise NonFiniteError(summary(bad))

    def check_weights(self, last: StepMetrics | None) -> None:
        """`last`: the step that made the weights. An update can spoil them although the step's loss
        and gradients are finite. Raises NonFiniteError; no checkpoint may hold them."""
        if last is None or not (spoilt := bad_tensors(_kept_tensors(self.state))):
            return
        found = bad_state(self.state.model, self.state.optimizer)
        bad = BadStep(
            worker=self.state.context.identity.worker,
            step=last.step,
            loss=last.loss,
            grad_norm=last.grad_norm,
            gradients=[],
            parameters=spoilt,
            origin=found.origin if found else None,
        )
        names = [tensor.name for tensor in spoilt]
        self._confess(bad, names)
        dumped = self._tell(bad)
        if self.state.context.replay_to is None:
            kept = self._keep_dossier(_event(bad, names), last.step + 1, found)
            dumped = chain([kept], dumped)
        for line in chain(dumped, self._advice(bad)):
            self.state.context.channels.say_own(line)
        raise NonFiniteError(summary(bad))

    def tell_changed(self) -> None:
        """What lies on this rank has changed by itself, and may be why the step is not finite on
        all. This rank does not compute the step again."""
        with suppress(PeerLost):
            self._told(OwnState.CHANGED)

    def _leave_to_others(self, metrics: StepMetrics) -> None:
        """Sums spread it to all ranks in the same step, and where they share weights a weight does,
        too. Where no rank has it of its own, as of a sum that is too large, or that went wrong on
        this rank alone, who has it tells it."""
        world, ranks, what = self.plan.world, metrics.bad_ranks, "loss or gradients of rank {}"
        states = self._states()
        if any(states):
            ranks = tuple(rank for rank, state in enumerate(states) if state)
            what = "weights on rank {} had changed, or"
        if not ranks or world.rank in ranks:
            return
        if world.is_sharded and OwnState.CHANGED not in states:
            self._join_repeat(metrics)
        of = what.format(", ".join(map(str, ranks)))
        raise PeerLost(f"step {metrics.step}: {of} are not finite")

    def _states(self) -> list[int]:
        """Of the ranks that share the model. Empty: this one alone has such a step."""
        if not self.plan.world.is_sharded:
            return []
        is_finite = not bad_parameters(self.state.model)
        with suppress(PeerLost):
            told = self._told(OwnState.FINITE if is_finite else OwnState.NOT_FINITE)
            if all(first == BAD_STEP for first, *_ in told):
                return [state for _, state, _ in told]
        return []

    def _told(self, state: OwnState = OwnState.FINITE) -> list[list[int]]:
        sink = self.state.context.channels.sink
        return self.plan.world.offer(*of_bad_step(state)).take(lambda: sink.emit(Beat()))

    def _join_repeat(self, metrics: StepMetrics) -> None:
        """Lead the ranks that look for their module through the step. What fails here is no news:
        this rank is about to end for their sake."""
        with suppress(PeerLost, RuntimeError, MemoryError):
            if self._all_repeat():
                repeated_origin(self.state.model, self.state.optimizer, metrics, self.plan)

    def _all_repeat(self) -> bool:
        """Where ranks share the model, none can compute the step again without the others: each
        tells that it is about to, in the words that it would begin its next step with. A rank that
        has seen nothing begins that one."""
        return all(first == BAD_STEP for first, *_ in self._told())

    def _first_look(self, metrics: StepMetrics, gradients: Sequence[BadTensor]) -> BadStep:
        """What the step itself has noted; nothing is computed again yet."""
        return BadStep(
            worker=self.state.context.identity.worker,
            step=metrics.step,
            loss=metrics.loss,
            grad_norm=metrics.grad_norm,
            gradients=gradients,
            parameters=bad_parameters(self.state.model),
            origin=noted_origin(self.state, self.plan, metrics),
            elsewhere=self._elsewhere(metrics, gradients),
        )

    def _elsewhere(self, metrics: StepMetrics, own: Sequence[BadTensor]) -> list[str]:
        """Whose gradients are not finite in the shards of other ranks alone."""
        if not self.plan.world.is_sharded or metrics.details is None:
            return []
        names = list(self.state.optimizer.named)
        noted = [names[number] for number in self.plan.watch.bad_norms(metrics.details)]
        return [name for name in noted if name not in {tensor.name for tensor in own}]

    def _names(self, bad: BadStep, metrics: StepMetrics) -> list[str]:
        """Of the parameters that are not finite, or whose gradients are not."""
        if bad.gradients or metrics.details is None:
            return [tensor.name for tensor in bad.gradients or bad.parameters]
        names = [n for n, p in self.state.optimizer.named.items() if p.grad is not None]
        noted = [names[number] for number in self.plan.watch.bad_norms(metrics.details)]
        return noted or [tensor.name for tensor in bad.parameters]

    def _repeat(self, bad: BadStep, metrics: StepMetrics) -> tuple[BadStep, Found | None]:
        """What the step shows when it is computed again. A GPU that fails for good, or lacks the
        memory, must not hide what is known."""
        model, optimizer = self.state.model, self.state.optimizer
        self.injector.repeat(bad.step)
        channels, world = self.state.context.channels, self.plan.world
        try:
            if world.is_sharded and not self._all_repeat():
                channels.note(f"step {bad.step} was not computed again: {_ALONE}")
                return bad, None
            held = bad_state(model, optimizer)
            again, repeated = repeated_origin(model, optimizer, metrics, self.plan)
            gradients = bad_gradients(model) if bad.recomputed else bad.gradients
        except (RuntimeError, MemoryError, PeerLost) as error:
            channels.note(f"step {bad.step} could not be computed again: {first_line(error)}")
            world.settle(model)
            return bad, None
        found = held or again
        # What comes again in no module comes of a sum: the step's own note of a block is refuted.
        noted = None if repeated else bad.origin
        origin = found.origin if found else noted
        # Computed from a state that may have changed by itself, it proves nothing.
        is_known = held is None or self.plan.fingerprints.see_all
        came_again = repeated if is_known else None
        return replace(bad, origin=origin, repeated=came_again, gradients=gradients), found

    def _confess(self, bad: BadStep, names: Sequence[str]) -> None:
        num_bytes, told = self._evidence_bytes(), NonFiniteError(summary(bad))
        self.state.context.channels.sink.emit(_event(bad, names, num_bytes))
        self.plan.world.tell_saving(told, bad.step, num_bytes)

    def _tell(self, bad: BadStep) -> Iterator[str]:
        """The block. Where that was asked for, all tensors are saved beside the checkpoints, now: a
        repeat overwrites the gradients. What became of them is for later."""
        channels = self.state.context.channels
        channels.say_own(block(bad))
        channels.say_own("")
        channels.sink.emit(Phase(name="save"))
        if not self.state.settings.debug.dump_tensors:
            return iter(())
        path = self.state.context.evidence / "debug" / f"nan_debug_step_{bad.step}.pkl"
        write = partial(dump_tensors, model=self.state.model)
        return iter([self.keeper.file("Debug tensors", path, write)])

    def _save(self, bad: BadStep, names: Sequence[str], found: Found | None) -> Iterator[str]:
        """Yields what became of each file. The dossier comes first: it is in the run directory."""
        if self.state.context.replay_to is not None:
            return  # the evidence of its run stays
        yield self._keep_dossier(_event(bad, names), bad.step, found)
        if self.plan.world.is_sharded:
            yield self.keeper.shards(bad.step)
            return
        yield self.keeper.file(
            "Checkpoint",  # of the state before the step
            self.state.context.evidence / f"nan_grad_step_{bad.step}.pt",
            lambda path: write_checkpoint(path, self.state.capture(bad.step, bad.loss)),
        )

    def _advice(self, bad: BadStep) -> Iterator[str]:
        """Nothing in a replay, nor where the fault did not come again: no setting made it."""
        if bad.repeated is not False and self.state.context.replay_to is None:
            settings, progress = self.state.settings, self.state.progress
            is_fresh = settings.model.init_from is None and progress.resumed is None
            yield advice(settings, is_fresh=is_fresh)

    def _keep_dossier(self, event: NonFinite, state_after: int, found: Found | None) -> str:
        """Gradients that were not computed again may be those of a later step: they are no
        evidence."""
        tensors = dict(self.state.tensors())
        if event.repeated is None:
            tensors = {n: t for n, t in tensors.items() if not n.startswith("gradients/")}
        around = _around(found, tensors)
        guilty = [*around, *_guilty(event, tensors)]
        return self.keeper.dossier(
            "nonfinite",
            state_after,
            around | tensors,
            step=event.step,
            guilty=guilty,
            event=event,
        )

    def _evidence_bytes(self) -> int:
        """Of the checkpoint, of the dossier, and of the dump where that was asked for."""
        weights = sum(tensor.nbytes for tensor in self.state.optimizer.weights)
        others = weights * (5 if self.state.settings.debug.dump_tensors else 3)
        return others + min(self.keeper.dossier_bytes, weights * 4)


def _kept_tensors(state: TrainingState) -> Iterator[tuple[str, Tensor]]:
    """Those that a checkpoint holds, by the names of their parameters."""
    optimizer = state.optimizer
    yield from optimizer.named.items()
    for moments in optimizer.moments.values():
        yield from zip(optimizer.named, moments, strict=True)


def _around(found: Found | None, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What its module made, and of what; weights and gradients are among `tensors` already."""
    held = {tensor.data_ptr() for tensor in tensors.values()}
    evidence = found.evidence.items() if found is not None else ()
    return {f"around/{name}": t for name, t in evidence if t.data_ptr() not in held}


def _guilty(event: NonFinite, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """What belongs to the module that made it, then what else is not finite."""
    module = None if event.origin is None else event.origin.module
    owned = [name for name in tensors if name.partition("/")[2].rpartition(".")[0] == module]
    named = [n for n in tensors if n.partition("/")[2].partition("[")[0] in event.names]
    yield from dict.fromkeys((*owned, *named))


def _event(bad: BadStep, names: Sequence[str], evidence_bytes: int = 0) -> NonFinite:
    return NonFinite(
        step=bad.step,
        where=bad.where,
        loss=bad.loss.hex(),
        grad_norm=bad.grad_norm.hex(),
        names=list(dict.fromkeys(names)),
        origin=bad.origin,
        repeated=bad.repeated,
        evidence_bytes=evidence_bytes,
    )
