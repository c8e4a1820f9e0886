"""Which attention kernels can act here: by device, dtype and package. Imports none of them, so that
the launcher knows before any data is prepared; `models.backends` asks the GPU."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from model_check.config.derived import precision
from model_check.config.fields import given_by
from model_check.config.schema import Settings
from model_check.errors import ConfigError

FLASH_MODULES = {
    "flash_attn_4": "flash_attn.cute",
    "flash_attn_3": "flash_attn_interface",
    "flash_attn_2": "flash_attn",
}
"""Where each generation of FlashAttention keeps its `flash_attn_func`, the newest first."""
_INSTALL = {
    "flash_attn_2": "pip install flash-attn --no-build-isolation",
    "flash_attn_3": "build hopper/ of github.com/Dao-AILab/flash-attention, or take PyTorch's "
    "wheel of flash-attn-3",
    "flash_attn_4": "pip install --pre flash-attn-4",
}
FLASH = "flash_attn"
"""The newest of them that can be had, else sdpa."""

UNKNOWN, AMPERE, HOPPER, BLACKWELL = (0, 0), (8, 0), (9, 0), (10, 0)
"""Compute capabilities."""
_VARYING = {"cudnn": "cudnn's backward pass is not deterministic"}
"""Attention kernels that torch itself refuses where determinism is asked for. Of others a trial at
the start decides (`models.attention_trial`)."""


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


def generation_obstacle(name: str, capability: tuple[int, int]) -> str | None:
    """Why the attention backend `name` cannot act on a GPU of that compute capability; None: it
    can."""
    major_minor = ".".join(map(str, capability))
    if name in ("cudnn", "flash_attn_2") and UNKNOWN < capability < AMPERE:
        return f"{name} needs compute capability 8.0 or newer, not {major_minor}"
    if name == "flash_attn_3" and not HOPPER <= capability < BLACKWELL:
        return f"flash_attn_3 needs a Hopper GPU (9.0), not compute capability {major_minor}"
    if name == "flash_attn_4" and capability < HOPPER:
        return f"flash_attn_4 needs compute capability 9.0 or newer, not {major_minor}"
    return None


def check_on_device(settings: Settings, sources: Mapping[str, str], device: str) -> None:
    """Refuse a backend that cannot act on `cuda` or `cpu`, before a run starts. Raises
    ConfigError."""
    name = settings.model.attention_backend
    conflict = _conflict(name, settings, device)
    if conflict and name != FLASH:
        setting = "model.attention_backend"
        source = given_by(sources.get(setting, "settings"), setting)
        raise ConfigError(f"{source}{backend_refusal(name, conflict)}")


def check_package(settings: Settings) -> None:
    """Raises ConfigError where a FlashAttention is named that is not installed."""
    name = settings.model.attention_backend
    if name in FLASH_MODULES and not is_installed(name):
        raise ConfigError(backend_refusal(name, not_installed(name)))


def flash_fallback(settings: Settings, device: str) -> str | None:
    """Why model.attention_backend=flash_attn is sdpa on `cuda` or `cpu`; None: it is not asked for,
    or can be had, as far as is known without the GPU."""
    if settings.model.attention_backend != FLASH:
        return None
    if conflict := _conflict(FLASH, settings, device):
        return conflict
    usable = [n for n in FLASH_MODULES if not _conflict(n, settings, device) and is_installed(n)]
    return None if usable else not_installed("flash_attn_2")


def is_installed(name: str) -> bool:
    """Whether the package of that generation is there; it may be broken."""
    package, _, part = FLASH_MODULES[name].partition(".")
    found = importlib.util.find_spec(package)
    if found is None or not part:
        return found is not None
    # Not find_spec of the part: that imports the package, and torch with it.
    return any((Path(place) / part).exists() for place in found.submodule_search_locations or ())


def not_installed(name: str) -> str:
    return f"{name} is not installed ({_INSTALL[name]})"


def _conflict(name: str, settings: Settings, device: str) -> str | None:
    return backend_conflict(
        name,
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
