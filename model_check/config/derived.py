"""What follows from the settings: sizes, counts, and whether they fit together. The settings stay
as given."""

from collections.abc import Mapping

from msgspec import Struct

from model_check.config.precision import check_precision, precision
from model_check.config.profile import parse_steps
from model_check.config.schema import ModelSettings, Settings
from model_check.config.validation import parse_validation
from model_check.errors import ConfigError


class Geometry(Struct, frozen=True):
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


def loss_chunk_rows(settings: Settings, vocab_size: int, device: str) -> int:
    """Rows of logits that exist at once, on `cuda` or `cpu`.

    Each chunk adds a [vocabulary, hidden] product to the head's gradient: on a GPU fewer than 2048
    rows would make that traffic dominate. On a CPU a chunk of about 8 MiB stays in its cache, and
    needs no fresh pages (one thread, 1024 tokens, vocabulary 8192, hidden 256: the head takes
    164 ms in chunks of 256 rows, 182 in one of 1024, 278 in chunks of 64).
    """
    if settings.training.loss_chunk_rows is not None:
        return settings.training.loss_chunk_rows
    if device != "cpu":
        return 2048
    return max(128, min(2048, 2**21 // vocab_size))


def backend_conflict(
    name: str, device: str, *, half: bool, deterministic: bool, documents: bool
) -> str | None:
    """Why the attention backend `name` cannot act on `device` (`cuda`, `cpu`) beside the other
    settings; None: it can, if its package is there. `half`: products in a 16-bit dtype."""
    if name in ("auto", "eager", "sdpa"):
        return None
    if device != "cuda":
        return f"{name} needs a CUDA GPU, not {device}"
    if not half:
        return f"{name} needs bfloat16 or float16, not float32 (training.use_amp=true)"
    if documents:
        return f"{name} takes no mask (data.document_masking=true); sdpa and eager do"
    if name == "cudnn" and deterministic:
        return "cudnn's backward pass is not deterministic (system.deterministic=false allows it)"
    return None


def check_on_device(settings: Settings, sources: Mapping[str, str], device: str) -> None:
    """Refuse what cannot act on `cuda` or `cpu`, before anything starts. Raises ConfigError."""
    name = settings.model.attention_backend
    conflict = backend_conflict(
        name,
        device,
        half=precision(settings.training) != "fp32",
        deterministic=settings.system.deterministic,
        documents=settings.data.document_masking,
    )
    if conflict:
        source = sources.get("model.attention_backend", "settings")
        raise ConfigError(
            f"{source}: model.attention_backend = {name!r}: {conflict}; "
            "set model.attention_backend=auto to take it only where it can be had"
        )


def check_together(settings: Settings, sources: Mapping[str, str]) -> None:
    """Refuse settings that are fine alone and impossible together. Raises ConfigError."""
    model, training = settings.model, settings.training
    check_precision(training, sources)
    if settings.debug.profile_steps is not None:
        parse_steps(settings.debug.profile_steps, training.max_steps)

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
    if settings.data.stride is not None and settings.data.stride > training.context_length:
        refuse(
            "data.stride",
            f"= {settings.data.stride} is more than context_length = {training.context_length}: "
            "tokens between the sequences would never be read",
            "training.context_length",
        )
    parse_validation(settings.data.validation)
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
