"""What a run has of its process."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from model_check.config.drill import Drill
from model_check.engine.evaluation import Splits
from model_check.engine.metrics import Meter
from model_check.engine.observer import Observer
from model_check.engine.stop import StopSignal
from model_check.events import EventSink, Scalar


@dataclass(frozen=True)
class Surroundings:
    """Everything that is the process's and not the settings'."""

    worker: str
    """`GPU3`"""
    device: torch.device
    directory: Path
    """Of checkpoints and dumps."""
    drill: Drill | None
    say: Callable[[str], None]
    sink: EventSink
    stop: StopSignal
    meter: Meter
    splits: Splits = field(default_factory=dict)
    """What can be evaluated."""
    data: Mapping[str, Scalar] = field(default_factory=dict)
    """What the batches come from; a checkpoint of other data is refused."""
    run_name: str | None = None
    """What the workers of one launch have in common; None: it runs alone."""
    started_at: float = field(default_factory=time.time)
    """When this process began, seconds since the epoch."""
    observers: tuple[Observer, ...] = ()
    """Told of every step and evaluation, after the run's own log; closed when the run is over."""
