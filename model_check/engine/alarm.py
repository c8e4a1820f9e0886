"""What happens when a step is not finite: find where, tell it, save the evidence, end with exit
code 20."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import nn

from model_check.engine.checkpoint import storing
from model_check.engine.reading import Reading
from model_check.errors import NonFiniteError, StorageError
from model_check.events import EventSink, Evidence, NonFinite, Phase
from model_check.forensics.dump import dump_tensors
from model_check.forensics.report import Finding, block, summary
from model_check.forensics.scan import bad_gradients, bad_parameters


@dataclass(frozen=True)
class Alarm:
    """The weights in `model` are those of before the bad step: the optimizer refused it."""

    worker: str
    model: nn.Module
    directory: Path
    dump: bool
    """Whether to write every parameter and gradient as well."""
    say: Callable[[str], None]
    sink: EventSink
    recompute: Callable[[Reading], None] | None
    """Puts the step's own gradients back where later steps have overwritten them."""
    save: Callable[[Path, Reading], None]
    """Writes a checkpoint of the state before the step."""

    def raise_for(self, reading: Reading) -> NoReturn:
        if self.recompute is not None:
            self.recompute(reading)
        finding = Finding(
            worker=self.worker,
            step=reading.step,
            loss=reading.loss,
            grad_norm=reading.grad_norm,
            gradients=bad_gradients(self.model),
            parameters=bad_parameters(self.model),
            repeated=self.recompute is not None,
        )
        self.sink.emit(_event(finding))
        self.say(block(finding))
        self.say("")
        self._save_evidence(reading)
        raise NonFiniteError(summary(finding))

    def _save_evidence(self, reading: Reading) -> None:
        self.sink.emit(Phase(name="save"))
        checkpoint = self.directory / f"nan_grad_step_{reading.step}.pt"
        self._keep("Checkpoint", checkpoint, lambda path: self.save(path, reading))
        if self.dump:
            tensors = self.directory / "debug" / f"nan_debug_step_{reading.step}.pkl"
            self._keep("Debug tensors", tensors, lambda path: dump_tensors(path, self.model))

    def _keep(self, what: str, path: Path, write: Callable[[Path], None]) -> None:
        """A full disk, or a GPU that fails for good, must not hide the finding: it is told, and the
        exit code stays 20."""
        try:
            with storing(path):
                write(path)
        except (StorageError, torch.AcceleratorError) as error:
            self.say(f"{what} not saved: {error}")
            return
        self.say(f"{what} saved: {path}")
        self.sink.emit(Evidence(path=str(path.absolute()), what=what.lower()))


def _event(finding: Finding) -> NonFinite:
    finite_loss = math.isfinite(finding.loss)
    return NonFinite(
        step=finding.step,
        where="gradient" if finite_loss else "loss",
        loss=finding.loss.hex(),
        grad_norm=finding.grad_norm.hex(),
        names=[tensor.name for tensor in finding.gradients],
    )
