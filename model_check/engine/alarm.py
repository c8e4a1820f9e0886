"""What happens when a step is not finite: find where, report it, save the evidence, end with exit
code 20."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from model_check.engine.checkpoint import storing, write_checkpoint
from model_check.engine.inject import Injector
from model_check.engine.reading import StepMetrics
from model_check.engine.state import TrainingState
from model_check.engine.step import StepPlan, accumulate
from model_check.errors import NonFiniteError, StorageError
from model_check.events import Evidence, NonFinite, Phase
from model_check.forensics.dump import dump_tensors
from model_check.forensics.report import BadStep, block, summary
from model_check.forensics.scan import BadTensor, bad_gradients, bad_parameters, bad_tensors


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
        model = self.state.model
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
        self._report(bad)
        self._keep(
            "Checkpoint",  # of the state before the step
            self.state.context.directory / f"nan_grad_step_{bad.step}.pt",
            lambda path: write_checkpoint(path, self.state.capture(bad.step, bad.loss)),
        )
        self._end(bad)

    def check_weights(self, last: StepMetrics | None) -> None:
        """`last`: the step that made the weights. An update can spoil them although the step's loss
        and gradients are finite. Raises NonFiniteError; no checkpoint may hold them."""
        if last is None or not (spoilt := bad_tensors(_kept_tensors(self.state))):
            return
        worker = self.state.context.identity.worker
        bad = BadStep(worker, last.step, last.loss, last.grad_norm, [], spoilt)
        self._report(bad)
        self._end(bad)

    def _report(self, bad: BadStep) -> None:
        channels = self.state.context.channels
        channels.sink.emit(_event(bad))
        channels.say(block(bad))
        channels.say("")
        channels.sink.emit(Phase(name="save"))

    def _end(self, bad: BadStep) -> NoReturn:
        """Where that was asked for, with all tensors beside the checkpoints."""
        if self.state.settings.debug.dump_tensors:
            self._keep(
                "Debug tensors",
                self.state.context.directory / "debug" / f"nan_debug_step_{bad.step}.pkl",
                lambda path: dump_tensors(path, self.state.model),
            )
        raise NonFiniteError(summary(bad))

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


def _kept_tensors(state: TrainingState) -> Iterator[tuple[str, Tensor]]:
    """Those that a checkpoint holds, by the names of their parameters."""
    named = list(state.model.named_parameters())
    yield from ((name, parameter.detach()) for name, parameter in named)
    for moments in (state.optimizer.first_moments, state.optimizer.second_moments):
        yield from zip((name for name, _ in named), moments, strict=True)


def _event(bad: BadStep) -> NonFinite:
    names = [tensor.name for tensor in bad.gradients or bad.parameters]
    return NonFinite(
        step=bad.step,
        where=bad.where,
        loss=bad.loss.hex(),
        grad_norm=bad.grad_norm.hex(),
        names=list(dict.fromkeys(names)),
    )
