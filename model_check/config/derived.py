"""What follows from the settings: sizes, counts, and whether they fit together. The settings stay
as given."""

from collections.abc import Mapping
from dataclasses import dataclass

from model_check.config.schema import ModelSettings, Settings
from model_check.errors import ConfigError


@dataclass(frozen=True)
class Geometry:
    """The model's sizes, all known."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool

    @property
    def num_parameters(self) -> int:
        """Every parameter once; 1,923,125,248 for the defaults."""
        query = 2 * self.hidden_size * self.num_heads * self.head_dim  # wq and wo
        key_value = 2 * self.hidden_size * self.num_kv_heads * self.head_dim
        feed_forward = 3 * self.hidden_size * self.intermediate_size
        norms = 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        blocks = self.num_layers * (query + key_value + feed_forward + norms)
        return embeddings + blocks + self.hidden_size

    @property
    def state_bytes(self) -> int:
        """float32 weights, gradients and two AdamW moments."""
        return 16 * self.num_parameters


def geometry(model: ModelSettings, tokenizer_vocab_size: int) -> Geometry:
    """The geometry, with the tokenizer's vocabulary where `model.vocab_size` is null."""
    return Geometry(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim or model.hidden_size // model.num_heads,
        vocab_size=model.vocab_size or tokenizer_vocab_size,
        tied=model.tie_word_embeddings,
    )


def num_micro_batches(settings: Settings) -> int:
    """Micro-batches of one optimizer step."""
    training = settings.training
    if training.global_batch_size is None:
        return training.grad_accum_nums
    return training.global_batch_size // training.batch_size


def tokens_per_step(settings: Settings) -> int:
    """Tokens that one worker trains on in an optimizer step."""
    training = settings.training
    return num_micro_batches(settings) * training.batch_size * training.context_length


def check_together(settings: Settings, sources: Mapping[str, str]) -> None:
    """Refuse settings that are fine alone and impossible together. Raises ConfigError."""
    model, training = settings.model, settings.training

    def refuse(name: str, text: str, *others: str) -> None:
        """Blame the setting that a person touched: presets and defaults fit together."""
        given = {n: sources.get(n, "settings") for n in (name, *others)}
        own = [s for s in given.values() if not s.startswith(("default", "preset"))]
        raise ConfigError(f"{own[0] if own else given[name]}: {name} {text}")

    if model.num_heads % model.num_kv_heads:
        refuse(
            "model.num_kv_heads",
            f"= {model.num_kv_heads} must divide num_heads = {model.num_heads}",
            "model.num_heads",
        )
    if model.head_dim is None and model.hidden_size % model.num_heads:
        refuse(
            "model.num_heads",
            f"= {model.num_heads} must divide hidden_size = {model.hidden_size} (or set head_dim)",
            "model.hidden_size",
        )
    if (model.head_dim or model.hidden_size // model.num_heads) % 2:
        refuse("model.head_dim", "must be even: rotary embedding turns pairs")
    if (
        model.rope_scaling
        and model.rope_scaling.high_freq_factor <= model.rope_scaling.low_freq_factor
    ):
        refuse("model.rope_scaling.high_freq_factor", "must be above low_freq_factor")
    if training.min_lr > training.learning_rate:
        refuse(
            "training.min_lr",
            f"= {training.min_lr} is above learning_rate = {training.learning_rate}",
            "training.learning_rate",
        )
    if training.warmup_steps > training.max_steps:
        refuse(
            "training.warmup_steps",
            f"= {training.warmup_steps} is more than max_steps = {training.max_steps}",
            "training.max_steps",
        )
    if training.global_batch_size is not None:
        if sources.get("training.grad_accum_nums", "default") != "default" and (
            training.global_batch_size != training.batch_size * training.grad_accum_nums
        ):
            refuse(
                "training.global_batch_size",
                "excludes training.grad_accum_nums: give one of the two",
            )
        if training.global_batch_size % training.batch_size:
            refuse(
                "training.global_batch_size",
                f"= {training.global_batch_size} is not a multiple of batch_size = "
                f"{training.batch_size}",
            )
