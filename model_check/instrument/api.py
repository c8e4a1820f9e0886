"""For a script that the hooks of the start cannot reach: `from model_check import watch`."""

from torch import nn
from torch.optim import Optimizer

from model_check.instrument.install import install


def watch(model: nn.Module, *optimizers: Optimizer) -> None:
    """Compares what each step of these optimizers computes. Does nothing without a supervisor."""
    if (watcher := install()) is not None:
        for optimizer in optimizers:
            watcher.meet(optimizer, model)
