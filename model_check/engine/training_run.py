"""The training run of one worker: what surrounds the loop."""

from dataclasses import dataclass

from model_check.engine.memory import explained
from model_check.engine.metrics import Meter, peak_memory_bytes
from model_check.engine.state import TrainingState
from model_check.engine.stop import EndedEarly
from model_check.events import Phase, Scalar
from model_check.train import Trainer


@dataclass(frozen=True)
class TrainingRun:
    """Trains from where its state is to its last step."""

    state: TrainingState
    trainer: Trainer

    def run(self) -> None:
        """Train to the end. Raises NonFiniteError, Terminated, EndedEarly, OutOfMemory,
        StorageError."""
        context, num_steps = self.state.context, self.state.num_steps
        channels, stop, first = context.channels, context.stop, self.state.progress.step
        channels.sink.emit(Phase(name="train", detail=self._beginning()))
        if first >= num_steps:
            raise EndedEarly(f"had nothing left to train: {first} steps were done before")
        with stop.deferred(), explained(self.state.settings, context):
            num_done = self.trainer.run()
        channels.say(_conclusion(context.meter))
        if num_done < num_steps:
            done = f"{num_done} of {num_steps} steps, saved"
            raise EndedEarly(f"ended early by {stop.notice_name}: {done}")

    def _beginning(self) -> dict[str, Scalar]:
        """What the phase says of a run that is resumed, and of a job, which may be restarted; and
        what was asked for and depends on a trial."""
        progress = self.state.progress
        detail: dict[str, Scalar] = {}
        if self.state.settings.training.compile:
            detail["compiled"] = self.state.model.loss.is_compiled
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
