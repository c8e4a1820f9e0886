"""What a checkpoint holds: everything that the next step depends on, and what people ask of a file.

`schema`, `step` (optimizer steps done), `model`, `optimizer`, `rng`, `num_ranks` (of the job),
`rng_of_ranks` (of a checkpoint of several), `num_threads` (of the CPU: a resumed run takes as many,
unless system.num_threads says another), `loader` (`sequences` consumed),
`loss` (of the last step), `val_loss` (split -> the latest), `best_split`, `best_val_loss`,
`best_step`, `total_tokens`, `settings`, `model_cfg` (the geometry), `data` (token cache, dataset,
tokenizer), `tokenizer` (its tokenizer.json, packed), `chat` (the chat template of its messages),
`logging` (what observers keep, a W&B run's id for one), `kept` (the `step_N.pt` of its run that
were there; the saver adds it).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor

from model_check.config.derived import num_micro_batches
from model_check.config.schema import Settings
from model_check.config.shape import Geometry
from model_check.engine.checkpoint import SCHEMA, Weights, packed
from model_check.engine.observer import RunObserver
from model_check.engine.optim import AdamW
from model_check.engine.rng import rng_states, set_rng_states
from model_check.engine.run_context import RunContext
from model_check.events import Natural, Scalar
from model_check.models.basic_llama import BasicLlama


@dataclass
class Validation:
    """Losses on validation splits; a checkpoint holds each by its name here."""

    val_loss: dict[str, float] = field(default_factory=dict)
    """The latest of each split."""
    best_split: str | None = None
    best_val_loss: float | None = None
    """Lowest loss of best_split, after best_step steps."""
    best_step: int | None = None


class _Moments(msgspec.Struct):
    step: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class _Optimizer(msgspec.Struct):
    state: dict[int, _Moments]
    loss_scale: dict[str, Tensor] | None = None


class _Loader(msgspec.Struct):
    sequences: Natural | None = None
    position: Natural | None = None
    """An older checkpoint counts batches."""

    def __post_init__(self) -> None:
        if self.sequences is None and self.position is None:
            raise ValueError("how far it has read is missing")


class Resumable(Weights):
    """What a checkpoint must hold to be resumed, as `capture` gives it. What is inside a random
    state, and whether moments fit their weights, shows when they are put back."""

    step: Natural
    optimizer: _Optimizer
    rng: dict[str, Any]
    loader: _Loader
    val_loss: dict[str, float]
    best_split: str | None
    best_val_loss: float | None
    best_step: Natural | None
    total_tokens: Natural
    data: dict[str, Scalar]
    logging: dict[str, Scalar]
    kept: list[str] = msgspec.field(default_factory=list)
    """An alarm's checkpoint names no others."""
    num_threads: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """An older checkpoint does not know it, nor the next two."""
    num_ranks: Annotated[int, msgspec.Meta(ge=1)] = 1
    rng_of_ranks: list[dict[str, Any]] = msgspec.field(default_factory=list)


@dataclass
class RunProgress:
    """How far a run is, beside weights and moments."""

    step: int = 0
    """Optimizer steps done before this process's first."""
    sequences: int = 0
    """Sequences consumed before it."""
    validation: Validation = field(default_factory=Validation)
    resumed: Path | None = None
    """The checkpoint that it goes on from."""


@dataclass(frozen=True)
class TrainingState:
    """The parts of a run that a checkpoint is made of."""

    settings: Settings
    shape: Geometry
    context: RunContext
    model: BasicLlama
    optimizer: AdamW
    observers: Sequence[RunObserver]
    progress: RunProgress = field(default_factory=RunProgress)

    @property
    def num_steps(self) -> int:
        """Optimizer steps after which training ends."""
        return self.context.num_steps(self.settings.training)

    def capture(
        self, step: int, loss: float | None, rng_of_ranks: Sequence[dict[str, Any]] = ()
    ) -> dict[str, Any]:
        """The state after `step` steps. Its tensors are the live ones. `rng_of_ranks`: the random
        states of each rank; none: those of this process."""
        progress, training = self.progress, self.settings.training
        num_ranks = self.context.world.size
        a_step = num_micro_batches(self.settings, num_ranks) * num_ranks * training.batch_size
        return {
            "schema": SCHEMA,
            "step": step,
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "rng": rng_of_ranks[0] if rng_of_ranks else rng_states(),
            "num_ranks": num_ranks,
            "rng_of_ranks": list(rng_of_ranks) if num_ranks > 1 else [],
            "num_threads": torch.get_num_threads(),
            "loader": {"sequences": progress.sequences + (step - progress.step) * a_step},
            "loss": loss,
            **asdict(progress.validation),
            "total_tokens": self.context.meter.total_tokens,
            "settings": msgspec.to_builtins(self.settings),
            "model_cfg": msgspec.to_builtins(self.shape),
            "data": dict(self.context.identity.data),
            "tokenizer": self._tokenizer,
            "chat": self.context.chat,
            "logging": {name: value for o in self.observers for name, value in o.kept().items()},
        }

    @cached_property
    def _tokenizer(self) -> Tensor | None:
        """Packed once, for the first checkpoint."""
        return None if self.context.tokenizer is None else packed(self.context.tokenizer)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All that a step reads and writes, by its name in a dossier: `weights/norm.weight`, a
        buffer too, `gradients/`, `exp_avg/`, `exp_avg_sq/`. The live ones."""
        named = list(self.model.named_parameters())
        for name, tensor in (*named, *self.model.named_buffers()):
            yield f"weights/{name}", tensor.detach()
        for name, parameter in named:
            if parameter.grad is not None:
                yield f"gradients/{name}", parameter.grad
        for kind, moments in self.optimizer.moments.items():
            for (name, _), moment in zip(named, moments, strict=True):
                yield f"{kind}/{name}", moment

    def restore(self, state: dict[str, Any]) -> None:
        """Put back what `capture` gave, in place. It must fit; `resume` checks that."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.context.meter.total_tokens = state["total_tokens"]
        world, num_ranks = self.context.world, state.get("num_ranks", 1)
        is_same = world.size == num_ranks
        before = state.get("num_threads")
        if self.settings.system.num_threads is None and before and is_same:
            # The order of sums on a CPU depends on it.
            torch.set_num_threads(before)
        progress = self.progress
        progress.step, progress.sequences = state["step"], _sequences_read(state)
        progress.validation = Validation(**{f.name: state[f.name] for f in fields(Validation)})
        for observer in self.observers:
            observer.restore(state["logging"])
        of_ranks = state.get("rng_of_ranks") or []  # evidence holds those of its own rank alone
        own = of_ranks[world.rank] if is_same and of_ranks else state["rng"]
        set_rng_states(own)  # last: nothing above may draw from it


def _sequences_read(state: Mapping[str, Any]) -> int:
    loader = state["loader"]
    if "sequences" in loader:
        return int(loader["sequences"])
    return int(loader["position"] * state["settings"]["training"]["batch_size"])


def snapshot(value: Any, copies: dict[tuple[object, ...], Tensor] | None = None) -> Any:
    """A copy on the CPU that training does not change; tensors that share memory still do.
    `copies`: those that were made already."""
    copies = {} if copies is None else copies
    if isinstance(value, dict):
        return {name: snapshot(inner, copies) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(snapshot(inner, copies) for inner in value)
    if not isinstance(value, Tensor):
        return value
    place = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
    if place not in copies:
        copies[place] = value.detach().to("cpu", copy=True)
    return copies[place]
