"""What happens when a step is not finite: find where, report it, save the evidence, end with exit
code 20."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from model_check.engine.checkpoint import storing, write_checkpoint
from model_check.engine.inject import Injector
from model_check.engine.reading import StepMetrics
from model_check.engine.state import TrainingState
from model_check.engine.step import StepPlan, accumulate
from model_check.errors import NonFiniteError, StorageError
from model_check.events import Evidence, NonFinite, Phase
from model_check.forensics.dump import dump_tensors
from model_check.forensics.report import BadStep, block, summary
from model_check.forensics.scan import BadTensor, bad_gradients, bad_parameters


@dataclass(frozen=True)
class Alarm:
    """The model's weights are those before the bad step: the optimizer refused it."""

    state: TrainingState
    plan: StepPlan
    injector: Injector
    recomputes: bool
    """Later steps may have overwritten the gradients of the bad one: compute them again."""

    def raise_for(
        self, metrics: StepMetrics, gradients: Sequence[BadTensor] | None = None
    ) -> NoReturn:
        """`gradients`: those that were not finite; None: still to be found."""
        model, channels = self.state.model, self.state.context.channels
        if self.recomputes and gradients is None:
            self.injector.repeat(metrics.step)
            accumulate(model, metrics.data, self.state.optimizer, self.plan)
        bad = BadStep(
            worker=self.state.context.identity.worker,
            step=metrics.step,
            loss=metrics.loss,
            grad_norm=metrics.grad_norm,
            gradients=bad_gradients(model) if gradients is None else gradients,
            parameters=bad_parameters(model),
            recomputed=self.recomputes,
        )
        channels.sink.emit(_event(bad))
        channels.say(block(bad))
        channels.say("")
        channels.sink.emit(Phase(name="save"))
        self._save_evidence(metrics)
        raise NonFiniteError(summary(bad))

    def _save_evidence(self, metrics: StepMetrics) -> None:
        """A checkpoint of the state before the step and, where asked for, all tensors."""
        step, directory = metrics.step, self.state.context.directory
        self._keep(
            "Checkpoint",
            directory / f"nan_grad_step_{step}.pt",
            lambda path: write_checkpoint(path, self.state.capture(step, metrics.loss)),
        )
        if self.state.settings.debug.dump_tensors:
            self._keep(
                "Debug tensors",
                directory / "debug" / f"nan_debug_step_{step}.pkl",
                lambda path: dump_tensors(path, self.state.model),
            )

    def _keep(self, what: str, path: Path, write: Callable[[Path], None]) -> None:
        """A full disk, or a GPU that fails for good, must not hide the finding: it is reported, and
        the exit code stays 20."""
        channels = self.state.context.channels
        try:
            with storing(path):
                write(path)
        except (StorageError, torch.AcceleratorError) as error:
            channels.say(f"{what} not saved: {error}")
            return
        channels.say(f"{what} saved: {path}")
        channels.sink.emit(Evidence(path=str(path.absolute()), what=what.lower()))


def _event(bad: BadStep) -> NonFinite:
    return NonFinite(
        step=bad.step,
        where="gradient" if math.isfinite(bad.loss) else "loss",
        loss=bad.loss.hex(),
        grad_norm=bad.grad_norm.hex(),
        names=[tensor.name for tensor in bad.gradients],
    )
