"""What follows from the settings: counts and sizes. The settings stay as they were given."""

from model_check.config.attention import KINDS
from model_check.config.schema import (
    EVERY_FAILING,
    Failing,
    LaunchSettings,
    Settings,
    TrainingSettings,
)

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def precision(training: TrainingSettings) -> str:
    """The dtype of matrix products: `bf16`, `fp16` or `fp32`. It is training.precision, else what
    training.use_amp means."""
    name = training.precision or ("bf16" if training.use_amp else "fp32")
    return _SHORT.get(name, name)


def failing_severities(launch: LaunchSettings) -> tuple[Failing, ...]:
    """The severities of launch.fail_on, or of its older name."""
    return EVERY_FAILING if launch.fail_on_health else launch.fail_on


def num_micro_batches(settings: Settings, num_ranks: int = 1) -> int:
    """Micro-batches of one optimizer step, of each of so many ranks."""
    training = settings.training
    if training.global_batch_size is not None:
        return training.global_batch_size // (training.batch_size * num_ranks)
    if training.global_grad_accum_nums is not None:
        return training.global_grad_accum_nums // num_ranks
    return training.grad_accum_nums


def attention_span(settings: Settings) -> int:
    """Tokens that attention reads at once."""
    return KINDS[settings.model.attention].span(settings)


CHECK_STEPS = 200


def is_check(settings: Settings) -> bool:
    """A run so short that its fingerprints may take all of each step on a GPU, too: on an H100 that
    costs 8 % of a step (docs/log.md), seconds in all."""
    return settings.training.max_steps <= CHECK_STEPS


EAGER_CHUNK_ROWS = 2048
"""On a GPU."""
COMPILED_CHUNK_ROWS = 8192


def loss_chunk_rows(settings: Settings, vocab_size: int, device: str) -> int:
    """Rows of logits that exist at once, on `cuda` or `cpu`.

    Each chunk adds a [vocabulary, hidden] product to the gradient of the head: on a GPU that
    traffic would dominate below 2048 rows. Compiled code of 16 bits keeps nothing but the logits
    of a chunk, and affords four times as many. On a CPU a chunk of about 8 MiB stays in the cache,
    and needs no fresh pages (one thread, 1024 tokens, vocabulary 8192, hidden 256: the head takes
    164 ms in chunks of 256 rows, 182 in one of 1024, 278 in chunks of 64).
    """
    training = settings.training
    if training.loss_chunk_rows is not None:
        return training.loss_chunk_rows
    if device != "cpu":
        is_lean = training.compile and precision(training) != "fp32"
        return COMPILED_CHUNK_ROWS if is_lean else EAGER_CHUNK_ROWS
    return max(128, min(2048, 2**21 // vocab_size))


def in_short(settings: Settings, num_ranks: int = 1) -> str:
    """What a person wants to see of all settings before a training starts, in one line."""
    model, training = settings.model, settings.training
    batch = training.batch_size * num_micro_batches(settings, num_ranks) * num_ranks
    return (
        f"{training.max_steps:,} steps of {batch:,} x {training.context_length:,} tokens; "
        f"data {settings.data.dataset}; learning rate {training.learning_rate:g}, "
        f"{training.lr_schedule}; {model.num_layers} layers of {model.hidden_size:,}"
    )
