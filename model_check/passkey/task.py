"""The passkey task: among noise stands a mark with three digits behind it; the text ends with a
question mark, and the digits are to follow it. Only they count in the loss. A small model is
trained on it from nothing, and then tested."""

import statistics
import time
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch
from msgspec.structs import replace
from torch import Tensor

from model_check.config.attention import KINDS, AttentionName
from model_check.config.fields import full_name
from model_check.config.inert import nobody_gave
from model_check.config.load import Request, load
from model_check.config.schema import Settings
from model_check.data.read.loader import Batch
from model_check.engine.assembly import build_trainer
from model_check.engine.metrics import Meter
from model_check.engine.rng import seed_everything
from model_check.engine.run_context import Channels, Claim, Identity, RunContext
from model_check.engine.stop import StopSignal
from model_check.errors import ConfigError
from model_check.events import EventSink
from model_check.model import IGNORED, Llama

NUM_DIGITS = 3
"""Of a key."""
NUM_NOISE = 35
MARK, QUESTION = 10 + NUM_NOISE, 11 + NUM_NOISE
VOCABULARY = 12 + NUM_NOISE
"""Ten digits, the noise, the mark before the key, and the question mark."""
SHORTEST = 2 * NUM_DIGITS + 2
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""0: the key is the first thing; 1: it stands right before the question mark."""


class Kind(NamedTuple):
    """Of attention."""

    attention: AttentionName
    update: Literal["linear", "delta"] | None = None
    """None: that of the settings."""


ARMS: Mapping[str, Kind] = {
    **{name: Kind(name) for name in get_args(AttentionName)},
    "infini-delta": Kind("infini", "delta"),
}
SETTINGS = (
    *("model.num_layers=2", "model.hidden_size=64", "model.num_heads=4", "model.num_kv_heads=4"),
    *("model.intermediate_size=null", f"model.vocab_size={VOCABULARY}", "model.rope_scaling=null"),
    *("model.rope_theta=10000", "model.infini.segment_length=16", "model.infini.gate_lr=0.03"),
    *("training.context_length=64", "training.batch_size=32", "training.max_steps=1800"),
    *("training.learning_rate=2e-3", "training.lr_schedule=cosine"),
    *("training.use_amp=false", "debug.fingerprints=off", "logging.log_interval=100"),
)
"""Below those of the command line."""
DECIDED_BY = {"model.attention": "--arms", "system.seed": "--seeds"}


class Question(NamedTuple):
    """Rows of the task."""

    tokens: Tensor
    """int64 [B, T + 1]: what is read, and what is to follow."""

    @property
    def inputs(self) -> Tensor:
        """Returns what is read, int64 [B, T], a view."""
        return self.tokens[:, :-1]

    @property
    def targets(self) -> Tensor:
        """Returns the digits after the question mark, otherwise IGNORED, int64 [B, T]."""
        targets = torch.full_like(self.tokens[:, 1:], IGNORED)
        targets[:, -NUM_DIGITS:] = self.tokens[:, -NUM_DIGITS:]
        return targets


def ask(places: Tensor, context_length: int, generator: torch.Generator) -> Question:
    """Returns a row of T = `context_length` for each of `places`, int64 [B]: the position of its
    mark, from 0 to `last_place`."""
    shape = (len(places), context_length + 1)
    tokens = torch.randint(10, 10 + NUM_NOISE, shape, generator=generator)
    digits = torch.randint(10, (len(places), NUM_DIGITS), generator=generator)
    rows = torch.arange(len(places))
    tokens[rows, places] = MARK
    for number in range(NUM_DIGITS):
        tokens[rows, places + 1 + number] = digits[:, number]
    tokens[:, -NUM_DIGITS - 1] = QUESTION
    tokens[:, -NUM_DIGITS:] = digits
    return Question(tokens)


def last_place(context_length: int) -> int:
    """Of a mark: its digits end right before the question mark."""
    return context_length - 2 * NUM_DIGITS - 1


@dataclass(frozen=True)
class Questions:
    """Endless batches: the same ones for equal seeds, whatever the model is."""

    settings: Settings

    def batches(self, start: int = 0) -> Generator[Batch, None, None]:
        training, seed = self.settings.training, self.settings.system.seed
        number = start // training.batch_size
        while True:
            generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
            last = last_place(training.context_length)
            places = torch.randint(last + 1, (training.batch_size,), generator=generator)
            question = ask(places, training.context_length, generator)
            yield Batch(question.inputs.contiguous(), question.targets)
            number += 1


@dataclass(frozen=True)
class Result:
    """One model, trained and tested."""

    arm: str
    seed: int
    loss: float
    """Of the last step."""
    by_depth: dict[float, float]
    by_segments: dict[int, float]
    """Segments between a digit and its question -> accuracy."""
    seconds: float


def train_and_test(arm: str, seed: int, overrides: Sequence[str], num_rows: int) -> Result:
    """Raises ConfigError for settings that cannot act, and what training raises."""
    began = time.monotonic()
    settings = settings_of(arm, seed, overrides)
    torch.set_num_threads(1)
    seed_everything(seed)
    sink, meter = EventSink(None), Meter()
    context = RunContext(
        identity=Identity(arm),
        channels=Channels(lambda _: None, sink),
        device=torch.device("cpu"),
        claim=Claim(Path(settings.system.checkpoint_dir)),
        meter=meter,
        stop=StopSignal(),
    )
    trainer = build_trainer(settings, Questions(settings), VOCABULARY, context)
    trainer.run()
    grid = accuracies(trainer.state.model, settings, num_rows)
    seconds = time.monotonic() - began
    loss = float("nan") if meter.loss_last is None else meter.loss_last
    crossed = by_segments(grid, settings.training.context_length, KINDS["local"].span(settings))
    return Result(arm, seed, loss, by_depth(grid), crossed, round(seconds, 1))


def settings_of(arm: str, seed: int, overrides: Sequence[str]) -> Settings:
    """Raises ConfigError."""
    _refuse_decided(overrides)
    given = (*SETTINGS, *overrides, "model.attention=infini", f"system.seed={seed}")
    loaded = load(Request(preset="cpu", overrides=given), lambda: False)
    settings = loaded.settings
    if nobody_gave(loaded.sources["training.warmup_steps"]):
        warmup_steps = min(100, settings.training.max_steps // 4)
        settings = replace(settings, training=replace(settings.training, warmup_steps=warmup_steps))
    model, kind = settings.model, ARMS[arm]
    infini = replace(model.infini, update=kind.update or model.infini.update)
    settings = replace(settings, model=replace(model, attention=kind.attention, infini=infini))
    if settings.training.context_length < SHORTEST:
        raise ConfigError(
            f"training.context_length = {settings.training.context_length}: a question takes "
            f"{SHORTEST} tokens"
        )
    return settings


def _refuse_decided(overrides: Sequence[str]) -> None:
    """Raises ConfigError."""
    for text in overrides:
        if option := DECIDED_BY.get(full_name(text.partition("=")[0])):
            raise ConfigError(f"{text}: passkey takes {option} for it")


@torch.no_grad()
def accuracies(model: Llama, settings: Settings, num_rows: int) -> Tensor:
    """Returns the share of right answers, float64 [places, digits], in `num_rows` rows a place;
    other rows than those of the training."""
    length = settings.training.context_length
    generator = torch.Generator().manual_seed(-1 - settings.system.seed)
    shares = []
    for place in range(last_place(length) + 1):
        question = ask(torch.full((num_rows,), place), length, generator)
        answers = model.eval()(question.inputs)[:, -NUM_DIGITS:].argmax(-1)
        shares.append((answers == question.tokens[:, -NUM_DIGITS:]).double().mean(0))
    return torch.stack(shares)


def by_depth(grid: Tensor) -> dict[float, float]:
    """Returns depth -> the mean share of right answers there, of `grid`, [places, digits]."""
    last = len(grid) - 1
    return {depth: float(grid[round(depth * last)].mean()) for depth in DEPTHS}


def by_segments(grid: Tensor, context_length: int, length: int) -> dict[int, float]:
    """Returns the segments between a digit and its question -> the mean share of right answers, of
    `grid`, [places, digits]. `length`: tokens of a segment."""
    found: defaultdict[int, list[float]] = defaultdict(list)
    for place, shares in enumerate(grid.tolist()):
        for number, share in enumerate(shares):
            asked = context_length - NUM_DIGITS + number
            found[asked // length - (place + 1 + number) // length].append(share)
    return {crossed: statistics.fmean(found[crossed]) for crossed in sorted(found)}
