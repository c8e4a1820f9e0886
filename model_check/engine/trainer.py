"""The training run of one worker: the loop, and what happens between two steps. Its parts are made
in `assembly`."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace

import msgspec
import torch

from model_check.config.derived import num_micro_batches
from model_check.data.read.loader import Batch
from model_check.engine.alarm import Alarm
from model_check.engine.batches import BatchSource, StepData, gather
from model_check.engine.busy import moment
from model_check.engine.distributed.world import ALONE
from model_check.engine.evaluation import Evaluator
from model_check.engine.fingerprint_log import FingerprintLog
from model_check.engine.fingerprints import Prints, with_audit
from model_check.engine.in_step import InStep
from model_check.engine.inject import Injector
from model_check.engine.keeper import Keeper
from model_check.engine.memory import explained
from model_check.engine.metrics import Meter, peak_memory_bytes
from model_check.engine.overflow import Overflow
from model_check.engine.reading import Reader, StepMetrics
from model_check.engine.repeat import bad_state
from model_check.engine.rng import kept_rng, rng_states
from model_check.engine.sampling import SampleMaker
from model_check.engine.saving.checkpoint_files import step_name
from model_check.engine.saving.saver import Saver
from model_check.engine.schedule import learning_rate
from model_check.engine.state import TrainingState
from model_check.engine.step import StepPlan, accumulate, train_step
from model_check.engine.stop import EndedEarly
from model_check.errors import BrokenStateError, NonFiniteError, PeerLost
from model_check.events import Beat, Break, Dump, Kept, Phase, PhaseName, Scalar
from model_check.utils.checkpoint_names import BEST, ERROR, LAST
from model_check.utils.words import first_line


@dataclass(frozen=True)
class Trainer:
    """Trains from where its state is to its last step; calls its observers at each step."""

    state: TrainingState
    source: BatchSource
    plan: StepPlan
    reader: Reader
    fingerprints: FingerprintLog
    injector: Injector
    evaluator: Evaluator
    sample_maker: SampleMaker
    saver: Saver
    alarm: Alarm
    overflow: Overflow
    in_step: InStep
    keeper: Keeper

    def run(self) -> None:
        """Train to the end. Raises NonFiniteError, Terminated, EndedEarly, OutOfMemory,
        StorageError."""
        channels, stop = self.state.context.channels, self.state.context.stop
        first, num_steps = self.state.progress.step, self.state.num_steps
        channels.sink.emit(Phase(name="train", detail=_beginning(self.state, self.plan)))
        if first >= num_steps:
            raise EndedEarly(f"had nothing left to train: {first} steps were done before")
        with (
            stop.deferred(),
            explained(self.state.settings, self.state.context),
            closing(self.source.batches(self.state.progress.sequences)) as stream,
            self.saver,
            ExitStack() as stack,
            self._kept_if_broken(stream),
        ):
            for observer in self.state.observers:
                stack.callback(observer.close)
            self.state.context.meter.start(moment(self.plan.device))
            with self._kept_on_error():
                num_done = self._loop(stream)
                self._finish(num_done)
            if num_done == num_steps:
                self.in_step.wait_for_go()
        channels.say(_conclusion(self.state.context.meter))
        if num_done < num_steps:
            done = f"{num_done} of {num_steps} steps, saved"
            raise EndedEarly(f"ended early by {stop.notice_name}: {done}")

    @contextmanager
    def _kept_on_error(self) -> Iterator[None]:
        """An error leaves the steps that were done in `error.pt`, and goes on as it is. Those of
        the state have evidence of their own, and so has the rank that a PeerLost tells of; a GPU
        that fails for good is left alone; a reader that is gone is no error."""
        try:
            yield
        except (NonFiniteError, BrokenStateError, PeerLost):
            raise
        except (torch.AcceleratorError, BrokenPipeError):
            raise
        except Exception as error:
            has_begun = self.in_step.num_done > self.state.progress.step
            if has_begun and self.state.context.replay_to is None:
                with suppress(OSError):  # standard output, on a full disk
                    self._keep_what_is_done(error)
            raise

    def _keep_what_is_done(self, error: Exception) -> None:
        """The error is told before anything is tried: the process may die of it."""
        channels, num_done = self.state.context.channels, self.in_step.num_done
        channels.say_own(f"After {num_done} steps: {type(error).__name__}: {first_line(error)}")
        channels.sink.emit(Phase(name="save"))
        try:
            for metrics in self.reader.flush():
                self._count(metrics)
            path = self.state.context.evidence / ERROR
            told = self.keeper.finite_state(path, num_done)
        except Exception as failure:  # it must not hide the error
            told = f"Checkpoint not saved: {first_line(failure)}"
        channels.say_own(told)

    def _loop(self, stream: Iterator[Batch]) -> int:
        """How many steps are done when it ends: all of them, or fewer after a notice."""
        state, num_done = self.state, self.state.progress.step
        first = self._gather(stream, num_done)
        self._rehearse(first)
        for step in range(num_done, state.num_steps):
            data = first if step == first.step else self._gather(stream, step)
            if data.asked_to_end and step > first.step:
                break
            for observer in state.observers:
                observer.before_step(step)
            read = self._train(data)
            num_done = step + 1
            self._take(read)
            self._between_steps(num_done)
            self._stay_in_step(num_done)
        return num_done

    def _gather(self, stream: Iterator[Batch], step: int) -> StepData:
        """What the step trains on, in step with the other ranks."""
        state, world = self.state, self.plan.world
        ends = state.context.stop.asked(state.settings.training.save_on_signal)
        return gather(
            stream,
            step,
            num_micro_batches(state.settings, world.size),
            self.plan.device,
            world,
            is_asked_to_end=ends,
            meanwhile=self._wait_for_ranks,
        )

    def _wait_for_ranks(self) -> None:
        """While others are not there yet: who waits for them does not hang."""
        self.state.context.channels.sink.emit(Beat())
        self.in_step.serve()

    def _train(self, data: StepData) -> list[StepMetrics]:
        """One step; the metrics that are due behind it."""
        state = self.state
        self.injector.before_step(data.step)
        audit = self._audit(data)
        lr = learning_rate(data.step, state.settings.training)
        result = train_step(state.model, data, state.optimizer, lr, self.plan)
        if audit is not None and result.prints is not None:
            result = replace(result, prints=with_audit(audit, result.prints))
        self.in_step.num_done = data.step + 1
        self.injector.after_step(data)
        data.busy.end()
        return self.reader.push(data, lr, result)

    def _audit(self, data: StepData) -> Prints | None:
        """Where it is due, each rank computes the first one's micro-batch, alone: what a rank
        computes wrong would spread to all by the sum, and differ nowhere."""
        interval, world = self.state.settings.launch.audit_interval, self.plan.world
        if world.is_alone or interval is None or data.step % interval:
            return None
        batch = tuple(map(world.of_first, data.micro_batches[0]))
        alone = replace(self.plan, world=ALONE)
        with kept_rng():
            one = replace(data, micro_batches=[batch])
            accumulate(self.state.model, one, self.state.optimizer, alone)
        return self.plan.fingerprints.of_audit()

    def _rehearse(self, data: StepData) -> None:
        """Compute both passes of the first step once before it: equal kernels must give equal bits,
        or no difference between workers would prove anything. Ranks do it once more, before: after
        its first pass DDP sorts gradients into other buckets, which changes the order of sums."""
        taken = self.plan.fingerprints
        if not self.plan.world.is_alone:
            self._compute(data)
        if not (taken.are_taken and self.state.settings.system.deterministic):
            self.fingerprints.begin(taken.of_state_now())
            return
        loss = self._compute(data)
        scale = self.state.optimizer.loss_scale
        at = None if scale is None else float(scale.value)  # sync
        self.fingerprints.begin(taken.of_rehearsal(), float(loss), at)  # sync

    def _compute(self, data: StepData) -> torch.Tensor:
        """Both passes, which leave no trace but gradients; this rank's loss."""
        with kept_rng():
            loss = accumulate(self.state.model, data, self.state.optimizer, self.plan)
        self.plan.world.wait_for_device()  # what reads it has no limit
        return loss

    def _take(self, steps: Iterable[StepMetrics]) -> None:
        for metrics in map(self.overflow.settle, steps):
            self.fingerprints.take(metrics)
            if metrics.bad:
                self._heed_what_changed()
                self.alarm.raise_for(metrics)
            seconds = self._count(metrics)
            self.plan.world.expect(self.state.context.meter.step_s)
            for observer in self.state.observers:
                observer.on_step(metrics, seconds)
            self._heed(self.fingerprints.check())

    def _count(self, step: StepMetrics) -> float:
        """Its wall time in seconds."""
        meter = self.state.context.meter
        return meter.finish_step(step.loss, step.data.num_positions, step.done)

    def _heed_what_changed(self) -> None:
        """State that changed by itself may be why a step is not finite."""
        if (found := self.fingerprints.check()) is not None and self.plan.world.is_sharded:
            self.alarm.tell_changed()
        self._heed(found)

    def _between_steps(self, num_done: int) -> None:
        """What is due now; first the evaluation, so that a checkpoint knows the best loss."""
        self.saver.check()
        evaluate, save = self.evaluator.due(num_done), self.saver.due(num_done)
        sample = self.sample_maker.due(num_done)
        if evaluate or sample or save:
            self._take(self.reader.flush())  # none may use a step that was not checked yet
        if evaluate:
            self._evaluate(num_done)
        if sample:
            self._sample(num_done)
        if save:
            self._save(step_name(num_done), num_done)

    def _stay_in_step(self, num_done: int) -> None:
        """Wait until the next step may begin; the time counts for no step. A GPU keeps the step
        that is under way while the wait is short, unless the others wait for that very step."""
        settings, lag = self.state.settings, self.reader.lag
        if num_done == self.state.num_steps or self.in_step.may_begin(num_done):
            return
        if 0 < lag < settings.launch.max_lead and self.in_step.may_begin_soon(num_done):
            return
        self._take(self.reader.flush())
        self.in_step.wait_for_credit(num_done)
        self.state.context.meter.start(moment(self.plan.device))

    def _finish(self, num_done: int) -> None:
        training = self.state.settings.training
        self._take(self.reader.flush())
        self.state.context.stop.check()
        self._check_state()
        is_early = num_done < self.state.num_steps
        if not is_early:
            self._tell_last_vectors()
            self.in_step.tell_finished()
        if not is_early and self.evaluator.due_at_end(num_done):
            self._evaluate(num_done)
        if not is_early and self.sample_maker.due_at_end(num_done):
            self._sample(num_done)
        if is_early or training.save_last:
            self._save(LAST, num_done, wait=True)
        elif self.saver.is_writing:
            with self._phase("save"):
                self.saver.wait()

    def _tell_last_vectors(self) -> None:
        if (vectors := self.fingerprints.last_vectors) is not None:
            self.state.context.channels.sink.emit(vectors)

    def _evaluate(self, num_done: int) -> None:
        is_best = False
        with self._phase("eval"):
            for evaluation in self.evaluator.evaluate(num_done, self._between_batches):
                is_best |= evaluation.best
                for observer in self.state.observers:
                    observer.on_evaluation(evaluation)
        if is_best and self.state.settings.training.save_best:
            self._save(BEST, num_done)

    def _sample(self, num_done: int) -> None:
        with self._phase("eval"):
            samples = list(self.sample_maker.samples(num_done, self._between_batches))
            for observer in self.state.observers:
                observer.on_samples(samples)

    def _between_batches(self) -> None:
        self.state.context.stop.check()
        self.in_step.serve()

    def _save(self, name: str, num_done: int, *, wait: bool = False) -> None:
        """One rank writes for all; where they share weights, each its part."""
        self._check_state()
        world = self.plan.world
        with self._phase("save"):
            self.in_step.serve()
            states = world.gathered(rng_states())
            if world.is_first or self.state.sharded:
                captured = self.state.capture(num_done, self.state.context.meter.loss_last, states)
                self.saver.save(name, captured, wait=wait)
            world.meet(self._wait_for_ranks)

    def _check_state(self) -> None:
        """It is what the last update left, and finite."""
        self._heed(self.fingerprints.check_state(self.plan.fingerprints.of_state_now()))
        self.alarm.check_weights(self.reader.last)

    def _heed(self, found: Break | None) -> None:
        """Raises BrokenStateError."""
        if found is None:
            return
        if bad_state(self.state.model, self.state.optimizer) is not None:
            found = msgspec.structs.replace(found, is_finite=False)
        self.state.context.channels.sink.emit(found)
        broken = _Broken(found)
        self.plan.world.tell_saving(broken, self.in_step.num_done, self.keeper.dossier_bytes)
        raise broken

    @contextmanager
    def _kept_if_broken(self, stream: Iterator[Batch]) -> Iterator[None]:
        """A run that ends of a state that changed by itself keeps it first."""
        try:
            yield
        except _Broken as broken:
            if self.state.context.replay_to is None:
                self._keep_broken(broken.found, stream)
            raise

    def _keep_broken(self, found: Break, stream: Iterator[Batch]) -> None:
        """When a healthy worker keeps the state after as many steps; alone, where it is."""
        channels, stop, in_step = self.state.context.channels, self.state.context.stop, self.in_step
        alone = Dump(step=in_step.num_done, of_step=found.step, tensors=[found.kept_as])
        # A rank takes no step that the others do not take, too.
        dump = (in_step.wait_for_dump() if self.plan.world.is_alone else None) or alone
        self._train_untold(stream, dump.step)
        if stop.asked(on_notice=False):
            return
        num_done, guilty = in_step.num_done, dump.tensors
        kept = self.keeper.dossier("break", num_done, step=found.step, guilty=guilty, event=found)
        channels.say_own(kept)
        channels.sink.emit(Kept(step=num_done, of_step=dump.of_step))

    def _train_untold(self, stream: Iterator[Batch], until: int) -> None:
        """The steps up to `until`, as the others take them. Nobody judges their numbers: the state
        that they begin with is known to be wrong."""
        for step in range(self.in_step.num_done, min(until, self.state.num_steps)):
            if self.state.context.stop.asked(on_notice=False):
                return
            self._train(self._gather(stream, step))

    @contextmanager
    def _phase(self, name: PhaseName) -> Iterator[None]:
        """Work that is not training: its time counts for no step."""
        self.state.context.channels.sink.emit(Phase(name=name))
        self._pause(True)
        yield
        self._pause(False)
        self.state.context.channels.sink.emit(Phase(name="train"))
        self.state.context.meter.start(moment(self.plan.device))

    def _pause(self, paused: bool) -> None:
        for observer in self.state.observers:
            observer.pause(paused)


class _Broken(BrokenStateError):
    def __init__(self, found: Break) -> None:
        super().__init__(f"{found.what}: nothing in this program did that")
        self.found = found


def _beginning(state: TrainingState, plan: StepPlan) -> dict[str, Scalar]:
    """What the phase says of a run that is resumed, and of a job, which may be restarted; and what
    was asked for and depends on a trial."""
    progress = state.progress
    detail: dict[str, Scalar] = {}
    if state.settings.training.compile:
        detail["compiled"] = state.model.loss.is_compiled
    if progress.resumed is not None:
        detail |= {"first_step": progress.step, "resumed": str(progress.resumed)}
        detail["resumed_content"] = progress.resumed_content
    return detail


def _conclusion(meter: Meter) -> str:
    rate = "n/a" if meter.tokens_per_s is None else f"{meter.tokens_per_s:,.0f}"
    return (
        f"Trained {meter.num_steps} steps: loss {meter.loss_first:.4f} -> {meter.loss_last:.4f}, "
        f"{rate} tokens/s, peak memory {peak_memory_bytes() / 2**30:.2f} GiB"
    )
