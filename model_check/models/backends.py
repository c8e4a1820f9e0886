"""Chooses the attention backend by what is known and by a trial, and says why. The backends
themselves are in `attention`, the trial in `attention_trial`."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import packages_distributions, version

import torch

from model_check.config.backends import (
    FLASH,
    FLASH_MODULES,
    UNKNOWN,
    backend_conflict,
    backend_refusal,
    generation_obstacle,
    not_installed,
)
from model_check.errors import ConfigError, ModelCheckError
from model_check.models.attention import HALF, AttentionFn, bound, flash_function
from model_check.models.attention_trial import (
    AttentionShape,
    Tried,
    answers,
    raised,
    try_attention,
)
from model_check.utils.trials import PASSED, TRIAL_OF, trial_of
from model_check.utils.words import first_line

_LEAST_CUDNN = 91501
"""torch's own gate: from 9.15.1 on it prefers cuDNN on Hopper and Blackwell, and before that
switched it off where it was wrong (pytorch #169849, sdp_utils.cpp)."""


@dataclass(frozen=True)
class KernelNeeds:
    """What a kernel must be able to do."""

    device: torch.device
    dtype: torch.dtype
    deterministic: bool
    documents: bool
    """Attention stays within documents."""

    @property
    def kind(self) -> str:
        """`cuda` or `cpu`"""
        return self.device.type

    @property
    def capability(self) -> tuple[int, int]:
        """Of the GPU; UNKNOWN where there is none."""
        usable = self.device.type == "cuda" and torch.cuda.is_available()
        return torch.cuda.get_device_capability(self.device) if usable else UNKNOWN


@dataclass(frozen=True)
class Attention:
    """The backend that a run takes."""

    name: str
    """A value of model.attention_backend."""
    attend: AttentionFn
    reason: str
    kernel: str | None = None
    """That ran in its trial: see Tried."""
    package: str | None = None
    """`flash-attn 2.8.3`; None: it is torch's own."""
    trials: Mapping[str, str] = field(default_factory=dict)
    """As a worker tells them: of the backends that were to be taken before it, and of this one."""


class NoKernel(ConfigError):
    """No backend that may be taken passed its trial."""

    def __init__(self, message: str, trials: Mapping[str, str]) -> None:
        super().__init__(message)
        self.trials = trials
        """See Attention."""


class DeviceLost(ModelCheckError):
    """The device computes no more since a trial: no other kernel can be tried."""

    exit_code = 1

    def __init__(self, device: torch.device, trials: Mapping[str, str]) -> None:
        """`trials`: see Attention; the last one is that."""
        trial, shown = list(trials.items())[-1]
        super().__init__(
            f"{device} computes no more since the trial of {trial.removeprefix(TRIAL_OF)}, which "
            f"{shown}; where a run with another kernel (model.attention_backend=sdpa) goes well, "
            "this one is at fault, else suspect the device"
        )
        self.trials = trials


def needs_of(device: torch.device, dtype: torch.dtype, *, documents: bool = False) -> KernelNeeds:
    """For queries of `dtype` on `device`; deterministic where the process is."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    return KernelNeeds(device, dtype, deterministic, documents)


def choose_attention(name: str, needs: KernelNeeds, shape: AttentionShape) -> Attention:
    """The first backend for `name` that passes its trial. Raises NoKernel where a name allows one
    backend alone and it fails, or where none passes; DeviceLost; ConfigError where a named one
    cannot act here; torch.OutOfMemoryError. Each says what to do."""
    candidates, reason = candidates_for(name, needs)
    trials: dict[str, str] = {}
    for candidate in candidates:
        with_cudnn = _trial("cudnn") not in trials
        attend, tried = _tried(candidate, needs, shape, with_cudnn=with_cudnn)
        trials[_trial(candidate)] = tried.obstacle or PASSED
        if attend is not None and tried.obstacle is None:
            return _taken(candidate, attend, tried, reason, trials)
        if not answers(needs.device):
            raise DeviceLost(needs.device, trials)
        if candidate == name:
            obstacle = f"in its trial at the start it {tried.obstacle}"
            raise NoKernel(backend_refusal(name, obstacle), trials)
    shown = (f"{trial.removeprefix(TRIAL_OF)} {what}" for trial, what in trials.items())
    raise NoKernel(
        f"model.attention_backend = {name!r}: no kernel computes attention as it must here: "
        f"{'; '.join(shown)}; where even eager fails, suspect the device or its driver",
        trials,
    )


def described_candidates(name: str, needs: KernelNeeds) -> str:
    """`flash_attn_3 of flash-attn-3 3.0.0, sdpa, eager`. Raises as `candidates_for`."""
    named = candidates_for(name, needs)[0]
    return ", ".join(f"{n} of {_package_of(n)}" if n in FLASH_MODULES else n for n in named)


def _trial(candidate: str) -> str:
    return trial_of(f"attention kernel {candidate}")


def candidates_for(name: str, needs: KernelNeeds) -> tuple[list[str], str]:
    """(the backends to try for `name`, the best first; why the first one). Raises ConfigError where
    a named one cannot act here."""
    if name == "auto":
        first, reason = _best(needs)
    elif name == FLASH:
        first, reason = _newest_flash(needs)
    elif obstacle := _obstacle(name, needs):
        raise ConfigError(backend_refusal(name, obstacle))
    else:
        return [name], "as configured"
    return list(dict.fromkeys([*first, "sdpa", "eager"])), reason


def _best(needs: KernelNeeds) -> tuple[list[str], str]:
    """By speed on an H100, causal, head 128, forward at 8192 tokens: FlashAttention-3 602 TFLOP/s,
    cuDNN 529, FlashAttention-2 333 (flash-attention's own chart); sdpa contains a
    FlashAttention-2."""
    if needs.kind != "cuda":
        return ["sdpa"], f"flash_attn and cudnn need a CUDA GPU, not {needs.kind}"
    names = ("flash_attn_4", "flash_attn_3", "cudnn", "flash_attn_2")
    if usable := list(_usable(names, needs)):
        same = ", with the same bits each time in its trial" if needs.deterministic else ""
        return usable, f"the fastest that can be had here{same}"
    return ["sdpa"], str(_obstacle("flash_attn_2", needs))


def _newest_flash(needs: KernelNeeds) -> tuple[list[str], str]:
    if usable := list(_usable(FLASH_MODULES, needs)):
        return usable, "as configured, the newest that can be had here"
    return ["sdpa"], f"instead of flash_attn: {_obstacle('flash_attn_2', needs)}"


def _usable(names: Iterable[str], needs: KernelNeeds) -> Iterator[str]:
    return (name for name in names if _obstacle(name, needs) is None)


def _tried(
    name: str, needs: KernelNeeds, shape: AttentionShape, *, with_cudnn: bool
) -> tuple[AttentionFn | None, Tried]:
    with_cudnn = with_cudnn and not needs.documents
    try:
        attend = bound(name, deterministic=needs.deterministic, with_cudnn=with_cudnn)
    except torch.OutOfMemoryError:
        raise
    # A package or a private call of torch may raise anything.
    except Exception as error:
        return None, Tried(None, raised(error))
    tried = try_attention(
        attend,
        shape,
        needs.device,
        needs.dtype,
        deterministic=needs.deterministic,
        documents=needs.documents,
    )
    if name == "cudnn" and tried.obstacle is None and "Cudnn" not in str(tried.kernel):
        return attend, tried._replace(obstacle=f"was left out: torch took {tried.kernel}")
    return attend, tried


def _taken(
    name: str, attend: AttentionFn, tried: Tried, reason: str, trials: Mapping[str, str]
) -> Attention:
    if len(trials) > 1:
        reason = "the next one that passed its trial"
    kernel = tried.kernel or ("math" if name == "sdpa" else name)
    if kernel == "math":
        reason += ", which is torch's math kernel here: it keeps T x T scores as eager does"
    package = _package_of(name) if name in FLASH_MODULES else None
    return Attention(name, attend, reason, kernel, package, trials)


def _package_of(name: str) -> str:
    """`flash-attn 2.8.3`: the installed package that the module is of."""
    module = FLASH_MODULES[name]
    names = packages_distributions().get(module.partition(".")[0], [])
    return ", ".join(f"{each} {version(each)}" for each in sorted(set(names))) or module


def _obstacle(name: str, needs: KernelNeeds) -> str | None:
    """Why `name` cannot be used here; None when it can, as far as is known without a trial."""
    conflict = backend_conflict(
        name,
        needs.kind,
        half=needs.dtype in HALF,
        deterministic=needs.deterministic,
        documents=needs.documents,
    )
    if conflict or name in ("eager", "sdpa"):
        return conflict
    if obstacle := generation_obstacle(name, needs.capability):
        return obstacle
    return _cudnn_obstacle() if name == "cudnn" else _package_obstacle(name, needs)


def _cudnn_obstacle() -> str | None:
    if not torch.backends.cudnn.is_available():  # type: ignore[no-untyped-call]
        return f"torch {torch.__version__} has no cuDNN here"
    found = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    if found < _LEAST_CUDNN:
        return f"torch trusts cuDNN's attention from version {_LEAST_CUDNN} on, and this is {found}"
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
