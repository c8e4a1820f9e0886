"""The attention backends: one row for each, with what it can do and the function that makes it.
Imports none of their packages, so that the launcher knows before any data is prepared;
`engine.kernels` asks the GPU and checks what the kernel computes."""

import importlib.util
from collections.abc import Mapping

from msgspec import Struct

from model_check.config.derived import precision
from model_check.config.fields import given_by
from model_check.config.schema import Settings
from model_check.errors import ConfigError

FLASH, FLASH_MODULE = "flash_attn", "flash_attn"
"""The backend that sdpa replaces, with a line, where it cannot be had; its package."""
UNKNOWN, AMPERE, HOPPER = (0, 0), (8, 0), (9, 0)
"""Compute capabilities."""
NOT_INSTALLED = "flash_attn is not installed (pip install flash-attn --no-build-isolation)"


class Backend(Struct, frozen=True, kw_only=True):
    """A row: what one way to compute attention can do. What a row allows, a check at the start
    still has to confirm."""

    make: str
    """The function of `model_check.attention` that makes it: (deterministic) -> AttentionFn."""
    only_on: str | None = None
    """`cuda`; None: any device."""
    least_capability: tuple[int, int] = UNKNOWN
    is_half_only: bool = False
    """It takes bfloat16 and float16 alone."""
    widest_head: int | None = None
    takes_documents: bool = True
    varying: str | None = None
    """Why torch itself refuses it where determinism is asked for."""
    operator: str | None = None
    """`NAMESPACE::NAME`: what its package must register, or torch.compile cannot keep a block as
    one graph; None: its operators are torch's own."""


BACKENDS: dict[str, Backend] = {
    "cudnn": Backend(
        make="make_cudnn",
        only_on="cuda",
        least_capability=AMPERE,
        is_half_only=True,
        widest_head=256,
        takes_documents=False,
        varying="cudnn's backward pass is not deterministic",
    ),
    FLASH: Backend(
        make="make_flash_attn",
        only_on="cuda",
        least_capability=AMPERE,
        is_half_only=True,
        widest_head=256,
        takes_documents=False,
        operator="flash_attn::_flash_attn_forward",  # since flash-attn 2.7
    ),
    "sdpa": Backend(make="make_sdpa"),
    "eager": Backend(make="make_eager"),
}
"""The fastest first. On an H100, causal, head 128, forward at 8192 tokens: cuDNN 529 TFLOP/s,
FlashAttention 2 333 (flash-attention's own chart); sdpa contains a FlashAttention 2."""


def backend_conflict(
    name: str,
    device: str,
    *,
    half: bool,
    deterministic: bool,
    documents: bool,
    capability: tuple[int, int] = UNKNOWN,
) -> str | None:
    """Why the attention backend `name` cannot act on `device` (`cuda`, `cpu`) with the other
    settings; None: it can, if its package is installed. `half`: products in a 16-bit dtype.
    `capability`: the GPU's compute capability."""
    if (row := BACKENDS.get(name)) is None:
        return None
    if row.only_on not in (None, device):
        return f"{name} needs a CUDA GPU, not {device}"
    if row.is_half_only and not half:
        return f"{name} needs bfloat16 or float16, not float32 (training.use_amp=true)"
    if documents and not row.takes_documents:
        return f"{name} takes no mask (data.document_masking=true); sdpa and eager do"
    if deterministic and row.varying:
        return f"{row.varying} (system.deterministic=false allows it)"
    if UNKNOWN < capability < row.least_capability:
        least, found = (".".join(map(str, each)) for each in (row.least_capability, capability))
        return f"{name} needs compute capability {least} or newer, not {found}"
    return None


def check_on_device(settings: Settings, sources: Mapping[str, str], device: str) -> None:
    """Refuse a backend that cannot act on `cuda` or `cpu`, before a run starts. Raises
    ConfigError."""
    name = settings.model.attention_backend
    conflict = _conflict(settings, device)
    if conflict and name != FLASH:
        setting = "model.attention_backend"
        source = given_by(sources.get(setting, "settings"), setting)
        raise ConfigError(f"{source}{backend_refusal(name, conflict)}")


def flash_fallback(settings: Settings, device: str) -> str | None:
    """Why model.attention_backend=flash_attn is sdpa on `cuda` or `cpu`; None: it is not asked for,
    or can be had, as far as is known without the GPU."""
    if settings.model.attention_backend != FLASH:
        return None
    is_installed = importlib.util.find_spec(FLASH_MODULE) is not None
    return _conflict(settings, device) or (None if is_installed else NOT_INSTALLED)


def _conflict(settings: Settings, device: str) -> str | None:
    return backend_conflict(
        settings.model.attention_backend,
        device,
        half=precision(settings.training) != "fp32",
        deterministic=settings.system.deterministic,
        documents=settings.data.document_masking,
    )


def backend_refusal(name: str, obstacle: str) -> str:
    """The message that refuses the attention backend `name`."""
    return (
        f"model.attention_backend = {name!r}: {obstacle}; set model.attention_backend=auto to take "
        "it only where it can be had"
    )
