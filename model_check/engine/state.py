"""What a checkpoint holds: everything that the next step depends on, and what people ask of a file.

`schema`, `step` (optimizer steps done), `model`, `optimizer`, `rng`, `num_ranks` (of the job),
`rng_of_ranks` (of a checkpoint of several), `num_threads` (of the CPU: a resumed run takes as many,
unless system.num_threads says another), `loader` (`sequences` consumed), `since` (`Counts`: from
there on each step read as many), `loss` (of the last step), `val_loss` (split -> the latest),
`best_split`, `best_val_loss`, `best_step`, `total_tokens`, `settings`, `model_cfg` (the geometry),
`data` (token cache, dataset, tokenizer), `tokenizer` (its tokenizer.json, packed), `end_token`
(what ended each document), `chat` (the chat
template of its messages), `logging` (what observers keep, a W&B run's id for one), `launch` (the
name that the workers of one launch share), `run_id`, and, which the saver adds, `attempt`
(saving/lineage.py) and `kept` (the `step_N.pt` of its run that were there). `_by_other_names` adds
seven more.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor

from model_check.config.ranks import sequences_of_step
from model_check.config.schema import Settings, Threads
from model_check.config.shape import Geometry
from model_check.engine.busy import moment
from model_check.engine.checkpoint import MOMENTS, SCHEMA, Weights, packed
from model_check.engine.rng import rng_states, set_rng_states
from model_check.engine.run_context import RunContext
from model_check.engine.sharded.parts import like
from model_check.engine.sharded.shards import own_sums
from model_check.events import Phase, PhaseName, Scalar
from model_check.forensics.fingerprint import fingerprint_for
from model_check.forensics.shard import fill, is_shared
from model_check.hooks.hook import RunObserver
from model_check.model import Llama
from model_check.optim import AdamW

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


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


class Counts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far a run is."""

    step: Count
    sequences: Count
    tokens: Count

    def after(self, step: int, num_sequences: int, context_length: int) -> "Counts":
        """The counts after `step` steps, if each step from here on reads `num_sequences`."""
        read = (step - self.step) * num_sequences
        return Counts(step, self.sequences + read, self.tokens + read * context_length)


NO_STEPS = Counts(0, 0, 0)


class _Loader(msgspec.Struct):
    sequences: Count | None = None
    position: Count | None = None
    """An older checkpoint counts batches."""

    def __post_init__(self) -> None:
        if self.sequences is None and self.position is None:
            raise ValueError("how far it has read is missing")


class Resumable(Weights):
    """The types of what a checkpoint must hold to be resumed, as `capture` gives it. Whether the
    values fit each other and a run, `saving.fit` decides."""

    step: Count
    optimizer: _Optimizer
    rng: dict[str, Any]
    loader: _Loader
    val_loss: dict[str, float]
    best_split: str | None
    best_val_loss: float | None
    best_step: Count | None
    total_tokens: Count
    data: dict[str, Scalar]
    logging: dict[str, Scalar]
    model_cfg: Geometry | None = None
    loss: float | None = None
    tokenizer: Tensor | None = None
    chat: dict[str, str | None] | None = None
    end_token: str | None = None
    kept: list[str] = msgspec.field(default_factory=list)
    """An alarm's checkpoint names no others."""
    num_threads: Threads | None = None
    """Older checkpoints lack this field and the next ones."""
    since: Counts | None = None
    num_ranks: Annotated[int, msgspec.Meta(ge=1)] = 1
    rng_of_ranks: list[dict[str, Any]] = msgspec.field(default_factory=list)
    run_id: str = ""
    attempt: Count = 0
    launch: str | None = None


@dataclass
class RunProgress:
    """How far a run is, beside weights and moments."""

    step: int = 0
    """Optimizer steps done before this process's first."""
    sequences: int = 0
    """Sequences consumed before it."""
    since: Counts = NO_STEPS
    """The counts from which on each step reads as many tokens as now: zeros, unless a resume
    changed that."""
    validation: Validation = field(default_factory=Validation)
    resumed: Path | None = None
    """The checkpoint that it goes on from."""
    resumed_content: str = ""
    """What is in it (`utils.checkpoint_names.content_of`)."""
    run_id: str = field(default_factory=lambda: os.urandom(8).hex())
    resumed_at: tuple[int, int] = (0, 0)
    """The number of the attempt that wrote that checkpoint, and its step."""


@dataclass(frozen=True)
class TrainingState:
    """The parts of a run that a checkpoint is made of."""

    settings: Settings
    shape: Geometry
    context: RunContext
    model: Llama
    optimizer: AdamW
    observers: Sequence[RunObserver]
    progress: RunProgress = field(default_factory=RunProgress)

    @property
    def num_steps(self) -> int:
        """Optimizer steps after which training ends."""
        return self.context.num_steps(self.settings.training)

    @contextmanager
    def phase(self, name: PhaseName) -> Iterator[None]:
        """Work that is not training: its time counts for no step."""
        context = self.context
        context.channels.sink.emit(Phase(name=name))
        for observer in self.observers:
            observer.pause(True)
        yield
        for observer in self.observers:
            observer.pause(False)
        context.channels.sink.emit(Phase(name="train"))
        context.meter.start(moment(context.device))

    def capture(
        self, step: int, loss: float | None, rng_of_ranks: Sequence[dict[str, Any]] = ()
    ) -> dict[str, Any]:
        """The state after `step` steps. Its tensors are the live ones; those that are sharded are
        left out (`sharded`). `rng_of_ranks`: the random states of each rank; none: those of this
        process."""
        progress, num_ranks = self.progress, self.context.world.size
        counts = self._counts(progress.since, step)
        state: dict[str, Any] = {
            "schema": SCHEMA,
            "step": step,
            "model": {} if self.sharded else dict(self.model.state_dict()),
            "optimizer": self._optimizer_state(),
            "rng": rng_of_ranks[0] if rng_of_ranks else rng_states(),
            "num_ranks": num_ranks,
            "rng_of_ranks": list(rng_of_ranks) if num_ranks > 1 else [],
            "num_threads": torch.get_num_threads(),
            "loader": {"sequences": counts.sequences},
            "since": msgspec.to_builtins(progress.since),
            "loss": loss,
            **asdict(progress.validation),
            "total_tokens": counts.tokens,
            "settings": msgspec.to_builtins(self.settings),
            "model_cfg": msgspec.to_builtins(self.shape),
            "data": dict(self.context.identity.data),
            "launch": self.context.identity.run_name,
            "run_id": progress.run_id,
            "tokenizer": self._tokenizer,
            "end_token": self.context.end_token,
            "chat": self.context.chat,
            "logging": {name: value for o in self.observers for name, value in o.kept().items()},
        }
        return state | _by_other_names(state)

    def _counts(self, since: Counts, step: int) -> Counts:
        training = self.settings.training
        num_sequences = sequences_of_step(msgspec.to_builtins(training), self.context.world.size)
        return since.after(step, num_sequences, training.context_length)

    @cached_property
    def sharded(self) -> dict[str, Tensor]:
        """Returns weights and moments, the live ones, by their names in a sharded checkpoint, where
        ranks share them: DTensors of the parameters' whole shapes; empty: each has all of them."""
        tensors = self.weights_and_moments()
        return tensors if any(map(is_shared, tensors.values())) else {}

    def _optimizer_state(self) -> dict[str, Any]:
        state = self.optimizer.state_dict()
        return state | {"state": {}, "step": self.optimizer.num_steps} if self.sharded else state

    def weights_and_moments(self) -> dict[str, Tensor]:
        """Returns the live ones by their names in a sharded checkpoint: kind by kind, in the order
        of the model, each in the shape of its parameter, and placed as it is."""
        kinds = {"weights": self.optimizer.weights} | self.optimizer.moments
        return {
            f"{kind}/{name}": like(parameter, values)
            for kind, tensors in kinds.items()
            for (name, parameter), values in zip(self.optimizer.named.items(), tensors, strict=True)
        }

    @cached_property
    def _tokenizer(self) -> Tensor | None:
        """Packed once, for the first checkpoint."""
        return None if self.context.tokenizer is None else packed(self.context.tokenizer)

    def restore(self, state: dict[str, Any]) -> None:
        """Put back what `capture` gave, in place. `saving.fit` has checked it."""
        self._put_tensors(state)
        world, num_ranks = self.context.world, state.get("num_ranks", 1)
        is_same = world.size == num_ranks
        before = state.get("num_threads")
        if self.settings.system.num_threads is None and before and is_same:
            # The order of sums on a CPU depends on it.
            torch.set_num_threads(before)
        progress = self.progress
        now, since = counts_of(state)
        progress.step, progress.sequences = now.step, now.sequences
        progress.since = since if self._counts(since, now.step) == now else now
        progress.validation = self._validation(state)
        for observer in self.observers:
            observer.restore(state["logging"])
        of_ranks = state.get("rng_of_ranks") or []  # evidence holds those of its own rank alone
        own = of_ranks[world.rank] if is_same and of_ranks else state["rng"]
        set_rng_states(own)  # last: nothing above may draw from it

    def _validation(self, state: Mapping[str, Any]) -> Validation:
        """The losses of splits that this run has, where it evaluates any."""
        known = self.context.splits or state["val_loss"]
        val_loss = {name: loss for name, loss in state["val_loss"].items() if name in known}
        best = [f.name for f in fields(Validation)][1:] if state["best_split"] in val_loss else []
        return Validation(val_loss, **{name: state[name] for name in best})

    def _put_tensors(self, state: dict[str, Any]) -> None:
        optimizer = state["optimizer"]
        if (shards := state.get("shards")) is not None:
            tensors = self.weights_and_moments()
            shards.load(tensors)
            kernel = fingerprint_for(self.optimizer.weights[0].device)
            own = own_sums(tensors, kernel)
            shards.refuse_other_bits(self.context.world.gathered(own))
            optimizer = optimizer | {"state": {}}
            self.optimizer.num_steps.copy_(optimizer["step"])
        elif self.sharded:
            self._put_rows(state)
            optimizer = optimizer | {"state": {}}
            self.optimizer.num_steps.copy_(state["optimizer"]["state"][0]["step"])
        else:
            self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(optimizer)

    @torch.no_grad()
    def _put_rows(self, state: dict[str, Any]) -> None:
        """What this rank has of tensors that the checkpoint has whole."""
        for number, name in enumerate(self.optimizer.named):
            moments = state["optimizer"]["state"][number]
            fill(self.sharded[f"weights/{name}"], state["model"][name])
            for kind in MOMENTS:
                fill(self.sharded[f"{kind}/{name}"], moments[kind])


def _by_other_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a script for checkpoints of a nanoGPT-like trainer asks for. Nothing here
    reads them; they are no copies, so a file holds each once."""
    logging = state["logging"]
    return {
        "iter_num": state["step"],
        "train_loss": state["loss"],
        "run_config": state["settings"],
        "tokenizer_desc": state["data"].get("tokenizer"),
        "wandb": logging.get("wandb"),
        "wandb_id": logging.get("wandb_id"),
        "piano_tasks_config": None,
    }


def counts_of(state: Mapping[str, Any]) -> tuple[Counts, Counts]:
    """How far the run of a checkpoint was, and the counts from which on its steps were equal."""
    loader = state["loader"]
    sequences = loader.get("sequences")
    if sequences is None:
        sequences = loader["position"] * state["settings"]["training"]["batch_size"]
    since = Counts(**state["since"]) if state.get("since") else NO_STEPS
    return Counts(state["step"], sequences, state["total_tokens"]), since
