"""What follows a step that is not finite: find where it began, report it, save the evidence, end
with exit code 20."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn

from model_check.dist.world import BAD_STEP, OwnState, of_bad_step
from model_check.engine.checkpoint import write_checkpoint
from model_check.engine.results import StepData, StepMetrics, StepResult
from model_check.engine.run_context import RunContext
from model_check.errors import NonFiniteError, PeerLost
from model_check.events import Beat, NonFinite, Phase
from model_check.forensics.dump import dump_tensors
from model_check.forensics.optimizer import Optimizer, moments_of, tensors_of
from model_check.forensics.origin import Found
from model_check.forensics.report import BadStep, block, module_line, summary
from model_check.forensics.scan import BadTensor, bad_gradients, bad_parameters, bad_tensors
from model_check.forensics.shard import own_values
from model_check.hooks.evidence import EvidenceWriter
from model_check.hooks.hook import Hook
from model_check.hooks.inject import Injector
from model_check.hooks.recompute import (
    Repeat,
    bad_norms,
    bad_state,
    noted_origin,
    repeated_origin,
)
from model_check.hooks.site_monitor import SiteMonitor
from model_check.utils.words import first_line

SITES = "sites"
"""The note of a step."""
_ALONE = "this rank alone has seen it, and others hold parts of the model"


class NonFiniteHandler(Hook):
    """The model's weights are those before the bad step: the optimizer refused it."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        context: RunContext,
        compute_again: Repeat,
        monitor: SiteMonitor,
        injector: Injector,
        evidence: EvidenceWriter,
        *,
        lag: int,
        proves: bool,
        capture: Callable[[int, float], dict[str, Any]] | None = None,
        advise: Callable[[], str] = lambda: "",
        dumps_tensors: bool = False,
    ) -> None:
        """`monitor`: watches both passes of a step. `lag`: later steps that may have overwritten
        the gradients of the bad one: it is computed again for them. `proves`: what was computed
        from a changed state proves something: each change would have been noticed. `capture`: gives
        a checkpoint of the state after so many steps and of that loss; None: there is none to save.
        `advise`: a line, of settings that can have made it. `dumps_tensors`: all of them are saved
        in a file of their own."""
        self._model, self._optimizer, self._context = model, optimizer, context
        self._compute_again, self._monitor = compute_again, monitor
        self._injector, self._evidence = injector, evidence
        self._recomputes, self._proves = lag > 0, proves
        self._capture, self._advise, self._dumps_tensors = capture, advise, dumps_tensors
        self._last: StepMetrics | None = None

    def after_update(self, _data: StepData, result: StepResult) -> None:
        result.notes[SITES] = self._monitor.counts

    def on_result(self, metrics: StepMetrics) -> None:
        self._last = metrics
        if metrics.bad:
            self.raise_for(metrics)

    def raise_for(
        self, metrics: StepMetrics, gradients: Sequence[BadTensor] | None = None
    ) -> NoReturn:
        """`gradients`: those that were not finite; None: still to be found.

        What is known is reported before anything else is tried: the process may die of it. Raises
        PeerLost where it began on another rank.
        """
        self._raise_if_of_other_ranks(metrics)
        is_overwritten = self._recomputes and gradients is None
        if gradients is None:
            gradients = [] if is_overwritten else bad_gradients(self._model)
        bad = self._first_look(metrics, gradients)
        self._report(bad, self._names(bad, metrics))
        if is_overwritten:
            bad, found = self._repeat(replace(bad, recomputed=True), metrics)
            dumped = self._show(bad)
        else:
            dumped = self._show(bad)
            bad, found = self._repeat(bad, metrics)
        names = self._names(bad, metrics)
        self._report(bad, names)
        self._end(bad, module_line(bad), *self._save(bad, names, found), *dumped)

    def check_weights(self) -> None:
        """An update can spoil the weights although the step's loss and gradients are finite. Raises
        NonFiniteError; no checkpoint may hold them."""
        last = self._last  # the step that made them
        if last is None or not (spoilt := bad_tensors(_kept_tensors(self._optimizer))):
            return
        found = bad_state(self._model, self._optimizer)
        bad = BadStep(
            worker=self._context.identity.worker,
            step=last.step,
            loss=last.loss,
            grad_norm=last.grad_norm,
            gradients=[],
            parameters=spoilt,
            origin=found.origin if found else None,
        )
        names = [tensor.name for tensor in spoilt]
        self._report(bad, names)
        lines = self._show(bad)
        if self._context.replay_to is None:
            lines = [self._keep_dossier(_event(bad, names), last.step + 1, found), *lines]
        self._end(bad, *lines)

    def tell_changed(self) -> None:
        """Tell the other ranks that state of this rank has changed by itself, which may be why the
        step is not finite on all. This rank does not compute the step again."""
        with suppress(PeerLost):
            self._exchange(OwnState.CHANGED)

    def _raise_if_of_other_ranks(self, metrics: StepMetrics) -> None:
        """Sums spread a NaN to all ranks in the same step, and where they share weights, a weight
        does so, too: the rank on which it began reports it. Where it began on none, as in a sum
        that is too large or that went wrong on this rank alone, each rank that has it does. Raises
        PeerLost."""
        world, ranks = self._context.world, metrics.bad_ranks
        what = "loss or gradients of rank {}"
        states = self._states()
        if any(states):
            ranks = [rank for rank, state in enumerate(states) if state]
            what = "weights on rank {} had changed, or"
        if not ranks or world.rank in ranks:
            return
        if world.is_sharded and OwnState.CHANGED not in states:
            self._join_repeat(metrics)
        of = what.format(", ".join(map(str, ranks)))
        raise PeerLost(f"step {metrics.step}: {of} are not finite")

    def _states(self) -> list[int]:
        """Returns the OwnState of each rank that shares the model; none where this rank alone has
        such a step."""
        if not self._context.world.is_sharded:
            return []
        is_finite = not bad_parameters(self._model)
        with suppress(PeerLost):
            of_ranks = self._exchange(OwnState.FINITE if is_finite else OwnState.NOT_FINITE)
            if all(first == BAD_STEP for first, *_ in of_ranks):
                return [state for _, state, _ in of_ranks]
        return []

    def _exchange(self, state: OwnState = OwnState.FINITE) -> list[list[int]]:
        sink = self._context.channels.sink
        return self._context.world.offer(*of_bad_step(state)).take(lambda: sink.emit(Beat()))

    def _join_repeat(self, metrics: StepMetrics) -> None:
        """Compute the step again with the ranks that search for their module. What fails here is no
        news: this rank is about to end for their sake."""
        with suppress(PeerLost, RuntimeError, MemoryError):
            if self._all_repeat():
                self._look_again(metrics)

    def _all_repeat(self) -> bool:
        """Whether all ranks compute the step again: where they share the model, none can do it
        without the others. Each offers it in the exchange that would begin its next step. A rank
        that has seen nothing begins that one."""
        return all(first == BAD_STEP for first, *_ in self._exchange())

    def _first_look(self, metrics: StepMetrics, gradients: Sequence[BadTensor]) -> BadStep:
        """Returns what is known from the step itself; nothing is computed again yet."""
        site = self._monitor.first_bad(metrics.result.notes[SITES])
        return BadStep(
            worker=self._context.identity.worker,
            step=metrics.step,
            loss=metrics.loss,
            grad_norm=metrics.grad_norm,
            gradients=gradients,
            parameters=bad_parameters(self._model),
            origin=noted_origin(self._optimizer, metrics, site),
            elsewhere=self._elsewhere(metrics, gradients),
        )

    def _elsewhere(self, metrics: StepMetrics, own: Sequence[BadTensor]) -> list[str]:
        """Names the parameters whose gradients are not finite in the shards of other ranks
        alone."""
        if not self._context.world.is_sharded:
            return []
        known = {tensor.name for tensor in own}
        return [name for name in bad_norms(self._optimizer, metrics) if name not in known]

    def _names(self, bad: BadStep, metrics: StepMetrics) -> list[str]:
        """Names the parameters that are not finite, or whose gradients are not."""
        if bad.gradients:
            return [tensor.name for tensor in bad.gradients]
        noted = bad_norms(self._optimizer, metrics)
        return noted or [tensor.name for tensor in bad.parameters]

    def _repeat(self, bad: BadStep, metrics: StepMetrics) -> tuple[BadStep, Found | None]:
        """Compute the step again; return what that shows. A GPU that fails for good, or lacks the
        memory, must not hide what is known."""
        self._injector.repeat(bad.step)
        channels, world = self._context.channels, self._context.world
        try:
            if world.is_sharded and not self._all_repeat():
                channels.note(f"step {bad.step} was not computed again: {_ALONE}")
                return bad, None
            held = bad_state(self._model, self._optimizer)
            again, repeated = self._look_again(metrics)
            gradients = bad_gradients(self._model) if bad.recomputed else bad.gradients
        except (RuntimeError, MemoryError, PeerLost) as error:
            channels.note(f"step {bad.step} could not be computed again: {first_line(error)}")
            world.settle(self._model)
            return bad, None
        found = held or again
        # What comes again in no module comes of a sum: the step's own note of a block is refuted.
        noted = None if repeated else bad.origin
        origin = found.origin if found else noted
        # Computed from a state that may have changed by itself, it proves nothing.
        is_known = held is None or self._proves
        came_again = repeated if is_known else None
        return replace(bad, origin=origin, repeated=came_again, gradients=gradients), found

    def _look_again(self, metrics: StepMetrics) -> tuple[Found | None, bool]:
        world, again = self._context.world, self._compute_again
        return repeated_origin(self._model, self._optimizer, world, again, metrics.data)

    def _report(self, bad: BadStep, names: Sequence[str]) -> None:
        num_bytes, error = self._evidence_bytes(), NonFiniteError(summary(bad))
        self._context.channels.sink.emit(_event(bad, names, num_bytes))
        self._context.world.tell_saving(error, bad.step, num_bytes)

    def _show(self, bad: BadStep) -> list[str]:
        """Say the block of lines. Where that was asked for, all tensors are saved beside the
        checkpoints, now: a repeat overwrites the gradients. Returns a line about them, for
        later."""
        channels = self._context.channels
        channels.say_own(block(bad))
        channels.say_own("")
        channels.sink.emit(Phase(name="save"))
        if not self._dumps_tensors:
            return []
        path = self._context.evidence / "debug" / f"nan_debug_step_{bad.step}.pkl"
        write = partial(dump_tensors, model=self._model)
        return [self._evidence.file("Debug tensors", path, write)]

    def _save(self, bad: BadStep, names: Sequence[str], found: Found | None) -> Iterator[str]:
        """Yields a line for each file. The dossier comes first: it is in the run directory."""
        if self._context.replay_to is not None:
            return  # the evidence of its run stays
        yield self._keep_dossier(_event(bad, names), bad.step, found)
        if self._context.world.is_sharded:
            yield self._evidence.shards(bad.step)
            return
        if (capture := self._capture) is None:
            return
        yield self._evidence.file(
            "Checkpoint",  # of the state before the step
            self._context.evidence / f"nan_grad_step_{bad.step}.pt",
            lambda path: write_checkpoint(path, capture(bad.step, bad.loss)),
        )

    def _end(self, bad: BadStep, *lines: str) -> NoReturn:
        """Say what became of files; and advice, but not in a replay, nor where the fault did not
        come again: no setting made it."""
        is_advised = bad.repeated is not False and self._context.replay_to is None
        for line in (*lines, *([self._advise()] if is_advised else [])):
            self._context.channels.say_own(line)
        raise NonFiniteError(summary(bad))

    def _keep_dossier(self, event: NonFinite, state_after: int, found: Found | None) -> str:
        """Write the dossier. Gradients that were not computed again may be those of a later step:
        they are no evidence."""
        tensors = dict(tensors_of(self._model, self._optimizer))
        if event.repeated is None:
            tensors = {n: t for n, t in tensors.items() if not n.startswith("gradients/")}
        around = _around(found, tensors)
        suspects = [*around, *_suspects(event, tensors)]
        return self._evidence.dossier(
            "nonfinite",
            state_after,
            around | tensors,
            step=event.step,
            guilty=suspects,
            event=event,
        )

    def _evidence_bytes(self) -> int:
        """Of the checkpoint, of the dossier, and of the dump where that was asked for."""
        weights = sum(own_values(p).nbytes for p in self._optimizer.named.values())
        others = weights * (5 if self._dumps_tensors else 3)
        return others + min(self._evidence.dossier_bytes, weights * 4)


def _kept_tensors(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Those that a checkpoint holds, by the names of their parameters."""
    yield from optimizer.named.items()
    yield from ((name, moment) for _, name, moment in moments_of(optimizer))


def _around(found: Found | None, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What its module made, and of what; weights and gradients are among `tensors` already."""
    held = {tensor.data_ptr() for tensor in tensors.values()}
    evidence = found.evidence.items() if found is not None else ()
    return {f"around/{name}": t for name, t in evidence if t.data_ptr() not in held}


def _suspects(event: NonFinite, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Names the tensors of the module that made it, then what else is not finite."""
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
