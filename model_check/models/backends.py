"""Chooses the attention backend, and says why. The backends themselves are in `attention`."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from model_check.config.backends import (
    FLASH,
    FLASH_MODULES,
    backend_conflict,
    backend_refusal,
    not_installed,
)
from model_check.errors import ConfigError
from model_check.models.attention import flash_function
from model_check.utils.words import first_line

_UNKNOWN, _AMPERE, _HOPPER, _BLACKWELL = (0, 0), (8, 0), (9, 0), (10, 0)
"""Compute capabilities."""


@dataclass(frozen=True)
class KernelNeeds:
    """What a kernel must be able to do."""

    device: torch.device
    dtype: torch.dtype
    deterministic: bool
    documents: bool
    """Attention stays within documents."""

    @property
    def capability(self) -> tuple[int, int]:
        """Of the GPU; _UNKNOWN where there is none."""
        usable = self.device.type == "cuda" and torch.cuda.is_available()
        return torch.cuda.get_device_capability(self.device) if usable else _UNKNOWN


def resolve_backend(
    name: str, device: torch.device, dtype: torch.dtype, *, documents: bool = False
) -> tuple[str, str]:
    """(a key of BACKENDS, reason) for queries of `dtype` on `device`.

    `auto` and `flash_attn` never fail. Another name that cannot act here raises ConfigError, which
    says what to do.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    needs = KernelNeeds(device, dtype, deterministic, documents)
    if name == "auto":
        return _best(needs)
    if name == FLASH:
        return _newest_flash(needs)
    if obstacle := _obstacle(name, needs):
        raise ConfigError(backend_refusal(name, obstacle))
    return name, "as configured"


def _best(needs: KernelNeeds) -> tuple[str, str]:
    """By speed on an H100, causal, head 128, forward at 8192 tokens: FlashAttention-3 602 TFLOP/s,
    cuDNN 529, FlashAttention-2 333 (flash-attention's own chart). Where bits are compared it is
    sdpa, which contains a FlashAttention-2."""
    if needs.device.type != "cuda":
        return "sdpa", f"flash_attn and cudnn need a CUDA GPU, not {needs.device.type}"
    if needs.deterministic:
        return "sdpa", "bits are compared, and torch refuses the kernels of its own that vary"
    if name := _first_usable(("flash_attn_4", "flash_attn_3", "cudnn", "flash_attn_2"), needs):
        return name, "the fastest that can be had here"
    return "sdpa", str(_obstacle("flash_attn_2", needs))


def _newest_flash(needs: KernelNeeds) -> tuple[str, str]:
    if name := _first_usable(FLASH_MODULES, needs):
        newest = "the newest that is deterministic" if needs.deterministic else "the newest"
        return name, f"as configured, {newest} and can be had here"
    return "sdpa", f"instead of flash_attn: {_obstacle('flash_attn_2', needs)}"


def _first_usable(names: Iterable[str], needs: KernelNeeds) -> str | None:
    return next((name for name in names if _obstacle(name, needs) is None), None)


def _obstacle(name: str, needs: KernelNeeds) -> str | None:
    """Why `name` cannot be used here; None when it can."""
    conflict = backend_conflict(
        name,
        needs.device.type,
        half=needs.dtype in (torch.bfloat16, torch.float16),
        deterministic=needs.deterministic,
        documents=needs.documents,
    )
    if conflict or name in ("eager", "sdpa"):
        return conflict
    if obstacle := _generation_obstacle(name, needs.capability):
        return obstacle
    if name != "cudnn":
        return _package_obstacle(name, needs)
    available = torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
    return None if available else f"torch {torch.__version__} has no cuDNN here"


def _generation_obstacle(name: str, capability: tuple[int, int]) -> str | None:
    major_minor = ".".join(map(str, capability))
    if name in ("cudnn", "flash_attn_2") and _UNKNOWN < capability < _AMPERE:
        return f"{name} needs compute capability 8.0 or newer, not {major_minor}"
    if name == "flash_attn_3" and not _HOPPER <= capability < _BLACKWELL:
        return f"flash_attn_3 needs a Hopper GPU (9.0), not compute capability {major_minor}"
    if name == "flash_attn_4" and capability < _HOPPER:
        return f"flash_attn_4 needs compute capability 9.0 or newer, not {major_minor}"
    return None


def _package_obstacle(name: str, needs: KernelNeeds) -> str | None:
    package = FLASH_MODULES[name]
    try:
        _, can_be_deterministic = flash_function(name)
    except ModuleNotFoundError:
        return not_installed(name)
    except (ImportError, AttributeError, OSError) as error:  # built for another torch or CUDA
        return f"{package} is installed but broken: {first_line(error)}"
    if needs.deterministic and not can_be_deterministic:
        return f"this {package} cannot be deterministic (system.deterministic=false allows it)"
    return None
