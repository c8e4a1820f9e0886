"""The training run of one worker: the loop, and what happens between two steps. `assembly` makes
it."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from model_check.config.derived import num_micro_batches
from model_check.engine.alarm import Alarm
from model_check.engine.batches import Batch, BatchSource, gather
from model_check.engine.checkpoint import write_checkpoint
from model_check.engine.evaluation import Evaluator
from model_check.engine.inject import Injector
from model_check.engine.memory import explained
from model_check.engine.metrics import Meter, peak_memory_bytes
from model_check.engine.reading import Reader, Reading
from model_check.engine.run_context import Surroundings
from model_check.engine.saving.checkpoint_files import BEST, LAST, step_name
from model_check.engine.saving.resume import resume
from model_check.engine.saving.saver import Saver
from model_check.engine.schedule import learning_rate
from model_check.engine.state import TrainingState
from model_check.engine.step import StepPlan, accumulate, train_step
from model_check.engine.stop import EndedEarly
from model_check.events import Phase, PhaseName


class Trainer:
    """Trains from where its state is to training.max_steps, telling its observers each step."""

    def __init__(
        self,
        state: TrainingState,
        source: BatchSource,
        plan: StepPlan,
        reader: Reader,
        here: Surroundings,
    ) -> None:
        self.state, self.settings, self.training = state, state.settings, state.settings.training
        self.model, self.optimizer, self.observers = state.model, state.optimizer, state.observers
        self.source, self.plan, self.reader, self.here = source, plan, reader, here
        self.num_micro_batches = num_micro_batches(self.settings)
        self.injector = Injector(here.drill, here.worker, self.model)
        self.evaluator = Evaluator(state, plan, here.splits, here.sink)
        self.saver = Saver(here.directory, self.training, here.device, here.say)
        self.alarm = Alarm(
            worker=here.worker,
            model=self.model,
            directory=here.directory,
            dump=self.settings.debug.dump_tensors,
            say=here.say,
            sink=here.sink,
            recompute=self._recompute if reader.lag else None,
            save=self._save_evidence,
        )
        if self.training.resume is not None:
            resume(state, self.training.resume, self.saver, here)
            self.injector.check_reached(from_step=state.progress.step)

    def run(self) -> None:
        """Train to the end. Raises NonFiniteError, Terminated, EndedEarly, OutOfMemory,
        StorageError."""
        here, first = self.here, self.state.progress.step
        here.sink.emit(Phase(name="train", detail={"first_step": first} if first else {}))
        if first >= self.training.max_steps:
            raise EndedEarly(f"had nothing left to train: {first} steps were done before")
        with (
            here.stop.deferred(),
            explained(self.settings, here),
            closing(self.source.batches(self.state.progress.position)) as stream,
            self.saver,
            ExitStack() as stack,
        ):
            for observer in self.observers:
                stack.callback(observer.close)
            here.meter.start()
            num_done = self._loop(stream)
            self._finish(num_done)
        here.say(_conclusion(here.meter))
        if num_done < self.training.max_steps:
            done = f"{num_done} of {self.training.max_steps} steps, saved"
            raise EndedEarly(f"ended early by {here.stop.notice_name}: {done}")
        if not self.optimizer.num_steps.item():  # sync; a run like this must prove nothing
            raise EndedEarly(
                f"changed no weight: gradients overflowed in float16 in all of {num_done} steps, "
                "which is usual only at the start; train more steps, or training.precision=bf16"
            )

    def _loop(self, stream: Iterator[Batch]) -> int:
        """Steps done when it ends: all, or as many as there was time for."""
        num_done = self.state.progress.step
        for step in range(num_done, self.training.max_steps):
            for observer in self.observers:
                observer.before_step(step)
            data = gather(stream, step, self.num_micro_batches, self.plan.device)
            self.injector.before_step(step)
            lr = learning_rate(step, self.training)
            result = train_step(self.model, data, self.optimizer, lr, self.plan)
            self._take(self.reader.push(data, lr, result))
            num_done = step + 1
            self._between_steps(num_done)
            if self.here.stop.asked(self.training.save_on_signal):
                break
        return num_done

    def _take(self, readings: Iterable[Reading]) -> None:
        for reading in readings:
            if reading.bad:
                self.alarm.raise_for(reading)
            seconds = self.here.meter.finish_step(reading.loss, reading.data.num_positions)
            for observer in self.observers:
                observer.on_reading(reading, seconds)

    def _between_steps(self, num_done: int) -> None:
        """What is due now; first the evaluation, so that a checkpoint knows the best loss."""
        self.saver.check()
        evaluate, save = self.evaluator.due(num_done), self.saver.due(num_done)
        if evaluate or save:
            self._take(self.reader.flush())  # neither sees a step that nobody has looked at
        if evaluate:
            self._evaluate(num_done)
        if save:
            self._save(step_name(num_done), num_done)

    def _finish(self, num_done: int) -> None:
        self._take(self.reader.flush())
        self.here.stop.check()
        is_early = num_done < self.training.max_steps
        if not is_early and self.evaluator.due_at_end(num_done):
            self._evaluate(num_done)
        if is_early or self.training.save_last:
            self._save(LAST, num_done, wait=True)
        elif self.saver.is_writing:
            with self._phase("save"):
                self.saver.wait()

    def _evaluate(self, num_done: int) -> None:
        is_best = False
        with self._phase("eval"):
            for evaluation in self.evaluator.evaluate(num_done, self.here.stop.check):
                is_best |= evaluation.best
                for observer in self.observers:
                    observer.on_evaluation(evaluation)
        if is_best and self.training.save_best:
            self._save(BEST, num_done)

    def _save(self, name: str, num_done: int, *, wait: bool = False) -> None:
        with self._phase("save"):
            captured = self.state.capture(
                num_done, self._position(num_done), self.here.meter.loss_last
            )
            self.saver.save(name, captured, wait=wait)

    def _save_evidence(self, path: Path, bad: Reading) -> None:
        write_checkpoint(path, self.state.capture(bad.step, self._position(bad.step), bad.loss))

    def _position(self, num_done: int) -> int:
        """Batches consumed by then."""
        start = self.state.progress
        return start.position + (num_done - start.step) * self.num_micro_batches

    @contextmanager
    def _phase(self, name: PhaseName) -> Iterator[None]:
        """Something else than training; its time is no step's."""
        self.here.sink.emit(Phase(name=name))
        yield
        self.here.sink.emit(Phase(name="train"))
        self.here.meter.start()

    def _recompute(self, reading: Reading) -> None:
        self.injector.repeat(reading.step)
        accumulate(self.model, reading.data, self.optimizer, self.plan)


def _conclusion(meter: Meter) -> str:
    rate = "n/a" if meter.tokens_per_s is None else f"{meter.tokens_per_s:,.0f}"
    return (
        f"Trained {meter.num_steps} steps: loss {meter.loss_first:.4f} -> {meter.loss_last:.4f}, "
        f"{rate} tokens/s, peak memory {peak_memory_bytes() / 2**30:.2f} GiB"
    )
