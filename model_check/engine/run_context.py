"""What a run gets from the process that it is in, and what no setting says."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from model_check.config.drill import Drill
from model_check.config.schema import TrainingSettings
from model_check.data.read.loader import Batch
from model_check.dist.world import ALONE, World
from model_check.engine.metrics import Meter
from model_check.engine.stop import StopSignal
from model_check.events import EventSink, Note, Scalar
from model_check.hooks.hook import RunObserver
from model_check.model import Llama
from model_check.utils.words import Say

Splits = Mapping[str, Callable[[], Iterable[Batch]]]
"""Name -> its batches, from the first; the last may be smaller."""


@dataclass(frozen=True)
class Identity:
    """Which run this is."""

    worker: str
    """`GPU3`"""
    run_name: str | None = None
    """The name that all workers of one launch share; None: the worker runs alone."""
    started_at: float = field(default_factory=time.time)
    """When this process began, seconds since the epoch."""
    data: Mapping[str, Scalar] = field(default_factory=dict)
    """Where the batches come from; a checkpoint of other data is refused."""


@dataclass(frozen=True)
class Channels:
    """Where a run reports to."""

    say_own: Say
    """Lines for people, of this worker alone: a failure."""
    sink: EventSink
    """Events for the supervisor."""
    observers: tuple[RunObserver, ...] = ()
    """Called at every step and evaluation, after the run's own log; closed when the run is over."""
    is_quiet: bool = False
    """Another rank says what is true of all."""

    def say(self, text: str) -> None:
        """Lines for people: progress, which one rank tells for all."""
        if not self.is_quiet:
            self.say_own(text)

    def note(self, text: str) -> None:
        """To both: people read it now, where this rank speaks; the report quotes it later."""
        self.say(text)
        self.sink.emit(Note(text=text))


@dataclass(frozen=True)
class Prompts:
    """What a model in training is asked, and how it answers."""

    prompts: Sequence[str]
    answer: Callable[[Llama, str, Callable[[], None]], str]
    """The text with which a model goes on. It draws from a generator of its own, and calls its
    last argument between tokens, which may raise."""


class Claim(NamedTuple):
    """Where a run writes its checkpoints, and the files of a failure that people are told of."""

    directory: Path
    """Of checkpoints; all ranks of a job have the same one."""
    of_rank: Path | None = None
    """Where a further rank leaves evidence, beside the checkpoints; None: among them."""
    check: Callable[[], None] = lambda: None
    """Raises StorageError when another run has taken the directory."""


@dataclass(frozen=True)
class RunContext:
    """Everything that a run needs besides its settings and its batches."""

    identity: Identity
    channels: Channels
    device: torch.device
    claim: Claim
    meter: Meter
    stop: StopSignal
    drill: Drill | None = None
    """The fault to inject."""
    splits: Splits = field(default_factory=dict)
    """The validation splits, by name."""
    run_dir: Path | None = None
    """Of the launcher; None: the worker runs alone."""
    replay_to: int | None = None
    """The last step of a replay; None: this is a run of its own, to training.max_steps."""
    tokenizer: bytes | None = None
    """The tokenizer.json that made the batches, for checkpoints; None: nobody gave one."""
    end_token: str | None = None
    """What ended each document of theirs, for checkpoints; None: nobody told."""
    chat: dict[str, str | None] | None = None
    """The chat template that made text of the data's messages, for checkpoints; None: none did."""
    prompts: Prompts | None = None
    """Of training.sample_interval; None: nobody asks."""
    weights: Path | None = None
    """The directory of safetensors that model.init_from names; None: it names none."""
    world: World = ALONE

    def num_steps(self, training: TrainingSettings) -> int:
        """Optimizer steps after which it ends."""
        return training.max_steps if self.replay_to is None else self.replay_to + 1

    @property
    def directory(self) -> Path:
        return self.claim.directory

    @property
    def evidence(self) -> Path:
        return self.claim.of_rank or self.claim.directory

    @property
    def dossier(self) -> Path:
        """Where evidence goes: into the run directory; without one, beside the checkpoints."""
        if self.run_dir is None:
            return self.evidence / "dossier"
        return self.run_dir / "dossier" / self.identity.worker.lower()
