"""What follows from the settings: counts, sizes, what a device can do. The settings stay as they
were given."""

from collections.abc import Mapping

from model_check.config.fields import given_by
from model_check.config.schema import (
    EVERY_FAILING,
    Failing,
    LaunchSettings,
    Settings,
    TrainingSettings,
)
from model_check.errors import ConfigError

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def precision(training: TrainingSettings) -> str:
    """The dtype of matrix products: `bf16`, `fp16` or `fp32`. It is training.precision, else what
    training.use_amp means."""
    name = training.precision or ("bf16" if training.use_amp else "fp32")
    return _SHORT.get(name, name)


def failing_severities(launch: LaunchSettings) -> tuple[Failing, ...]:
    """The severities of launch.fail_on, or of its older name."""
    return EVERY_FAILING if launch.fail_on_health else launch.fail_on


def num_micro_batches(settings: Settings) -> int:
    """Micro-batches of one optimizer step."""
    training = settings.training
    if training.global_batch_size is None:
        return training.grad_accum_nums
    return training.global_batch_size // training.batch_size


def loss_chunk_rows(settings: Settings, vocab_size: int, device: str) -> int:
    """Rows of logits that exist at once, on `cuda` or `cpu`.

    Each chunk adds a [vocabulary, hidden] product to the gradient of the head: on a GPU that
    traffic would dominate below 2048 rows. On a CPU a chunk of about 8 MiB stays in the cache, and
    needs no fresh pages (one thread, 1024 tokens, vocabulary 8192, hidden 256: the head takes 164
    ms in chunks of 256 rows, 182 in one of 1024, 278 in chunks of 64).
    """
    if settings.training.loss_chunk_rows is not None:
        return settings.training.loss_chunk_rows
    if device != "cpu":
        return 2048
    return max(128, min(2048, 2**21 // vocab_size))


_VARYING = {
    "cudnn": "cudnn's backward pass is not deterministic",
    "flash_attn_3": "flash_attn_3 is not known to be deterministic",
    "flash_attn_4": "flash_attn_4 is not known to be deterministic",
}
"""Attention kernels that may give other bits each time: a healthy GPU would be a suspect.
FlashAttention 3 and 4 have accepted `deterministic=True` and ignored it (flash-attention #1596: a
Hopper build with the flag compiled out; #2510: grouped heads, fixed 2026-04), so a parameter of
that name proves nothing."""


def backend_conflict(
    name: str, device: str, *, half: bool, deterministic: bool, documents: bool
) -> str | None:
    """Why the attention backend `name` cannot act on `device` (`cuda`, `cpu`) with the other
    settings; None: it can, if its package is installed. `half`: products in a 16-bit dtype."""
    if name in ("auto", "eager", "sdpa"):
        return None
    if device != "cuda":
        return f"{name} needs a CUDA GPU, not {device}"
    if not half:
        return f"{name} needs bfloat16 or float16, not float32 (training.use_amp=true)"
    if documents:
        return f"{name} takes no mask (data.document_masking=true); sdpa and eager do"
    if deterministic and name in _VARYING:
        return f"{_VARYING[name]} (system.deterministic=false allows it)"
    return None


def check_on_device(settings: Settings, sources: Mapping[str, str], device: str) -> None:
    """Refuse a backend that cannot act on `cuda` or `cpu`, before a run starts. Raises
    ConfigError."""
    name = settings.model.attention_backend
    conflict = backend_conflict(
        name,
        device,
        half=precision(settings.training) != "fp32",
        deterministic=settings.system.deterministic,
        documents=settings.data.document_masking,
    )
    if conflict:
        setting = "model.attention_backend"
        source = given_by(sources.get(setting, "settings"), setting)
        raise ConfigError(f"{source}{backend_refusal(name, conflict)}")


def backend_refusal(name: str, obstacle: str) -> str:
    """The message that refuses the attention backend `name`."""
    return (
        f"model.attention_backend = {name!r}: {obstacle}; set model.attention_backend=auto to take "
        "it only where it can be had"
    )
