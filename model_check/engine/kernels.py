"""The kernels that a run computes with, each checked at the start: attention, and AdamW's update.
What is known of the attention backends is in `config.backends`, the check in `kernels`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import packages_distributions, version

import torch

from model_check.attention import HALF, AttentionFn, backend
from model_check.config.backends import (
    BACKENDS,
    FLASH,
    FLASH_MODULE,
    NOT_INSTALLED,
    UNKNOWN,
    backend_conflict,
    backend_refusal,
)
from model_check.config.derived import attention_span
from model_check.config.schema import Settings
from model_check.config.shape import Geometry
from model_check.engine.rng import kept_rng
from model_check.engine.run_context import RunContext
from model_check.errors import ConfigError, ModelCheckError
from model_check.events import Scalar
from model_check.kernels import (
    AttentionShape,
    Tried,
    Update,
    answers,
    check_update,
    plain_adamw_,
    raised,
    try_attention,
)
from model_check.utils.trials import PASSED, TRIAL_OF, trial_of
from model_check.utils.words import first_line, listed

FUSED, PLAIN = "fused", "plain"
_LEAST_CUDNN = 91501
"""torch's own gate: from 9.15.1 on it prefers cuDNN on Hopper and Blackwell, and before that
switched it off where it was wrong (pytorch #169849, sdp_utils.cpp)."""

Told = tuple[str, tuple[str, ...]]
"""Kernels, and what the checks showed of those that failed."""


@dataclass(frozen=True)
class KernelNeeds:
    """What a kernel must be able to do."""

    device: torch.device
    dtype: torch.dtype
    deterministic: bool
    documents: bool = False
    """Attention stays within documents."""
    compiled: bool = False
    """Blocks are compiled, each as one graph."""
    head_dim: int = 1

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
    """A row of config.backends."""
    attend: AttentionFn
    reason: str
    kernel: str | None = None
    """That ran in its check: see Tried."""
    package: str | None = None
    """`flash-attn 2.8.3`; None: it is torch's own."""
    trials: Mapping[str, str] = field(default_factory=dict)
    """As a worker reports them: the backends that were to be taken before it, and this one."""


@dataclass(frozen=True)
class Kernels:
    attention: Attention
    candidates: str
    """The attention backends that it might have taken, with their packages."""
    update: Update
    """AdamW's."""
    trials: Mapping[str, str]
    """As a worker reports them."""

    @property
    def detail(self) -> dict[str, Scalar]:
        """For the `build` phase."""
        return {
            "attention_candidates": self.candidates,
            "attention_backend": self.attention.name,
            "attention_reason": self.attention.reason,
            "attention_kernel": self.attention.kernel,
            "attention_package": self.attention.package,
            "optimizer": self.optimizer,
            **self.trials,
        }

    @property
    def failures(self) -> tuple[str, ...]:
        """A line for each kernel that was to be taken and failed its check."""
        return tuple(
            f"{trial.removeprefix(TRIAL_OF)} failed its trial: it {shown}"
            for trial, shown in self.trials.items()
            if shown != PASSED
        )

    @property
    def optimizer(self) -> str:
        """The name of the update."""
        return FUSED if self.update is torch._fused_adamw_ else PLAIN

    @property
    def named(self) -> str:
        """`attention sdpa (ScaledDotProductFlashAttentionForCpu), AdamW fused`"""
        taken = self.attention
        by = [each for each in (taken.kernel, taken.package) if each and each != taken.name]
        return f"attention {taken.name}{f' ({listed(by)})' if by else ''}, AdamW {self.optimizer}"


class NoKernel(ConfigError):
    """No backend that may be taken passed its check."""

    def __init__(self, message: str, trials: Mapping[str, str]) -> None:
        super().__init__(message)
        self.trials = trials
        """See Attention."""


class DeviceLost(ModelCheckError):
    """The device computes no more since a check: no other kernel can be tried."""

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


def choose_kernels(
    settings: Settings, shape: Geometry, dtype: torch.dtype, context: RunContext
) -> Kernels:
    """The first ones that pass their checks on the run's shapes. Raises NoKernel and DeviceLost,
    which have all that the checks showed, ConfigError, torch.OutOfMemoryError."""
    of_state = device_of_state(context)
    update, obstacle = choose_update(of_state)
    trials = {trial_of("fused AdamW"): obstacle or PASSED}
    if obstacle is not None and not answers(of_state):
        raise DeviceLost(of_state, trials)
    needs = KernelNeeds(
        context.device,
        dtype,
        torch.are_deterministic_algorithms_enabled(),
        settings.data.document_masking,
        settings.training.compile,
        shape.head_dim,
    )
    time = attention_span(settings)
    tried = AttentionShape(shape.num_heads, shape.num_kv_heads, shape.head_dim, time)
    name = settings.model.attention_backend
    candidates = described_candidates(name, needs)
    with kept_rng():
        before = {**trials, "attention_candidates": candidates}
        attention = choose_attention(name, needs, tried, before)
    return Kernels(attention, candidates, update, {**trials, **attention.trials})


def choose_update(device: torch.device) -> tuple[Update, str | None]:
    """(the update to use on `device`, what the fused one did wrong; None: nothing, it is taken)."""
    obstacle = check_update(lambda *args, **options: torch._fused_adamw_(*args, **options), device)
    return (torch._fused_adamw_, None) if obstacle is None else (plain_adamw_, obstacle)


def choose_attention(
    name: str, needs: KernelNeeds, shape: AttentionShape, before: Mapping[str, str]
) -> Attention:
    """The first backend for `name` that passes its check. Raises NoKernel where a name allows one
    backend alone and it fails, or where none passes; DeviceLost; ConfigError where a named one
    cannot act here; torch.OutOfMemoryError. Each says what to do; the first two have `before`, what
    was shown so far, and what these checks showed."""
    candidates, reason = candidates_for(name, needs)
    trials: dict[str, str] = {}
    for candidate in candidates:
        attend, tried = _tried(candidate, needs, shape)
        trials[trial_of(f"attention kernel {candidate}")] = tried.obstacle or PASSED
        if attend is not None and tried.obstacle is None:
            return _taken(candidate, attend, tried, reason, trials)
        if not answers(needs.device):
            raise DeviceLost(needs.device, {**before, **trials})
        if candidates == [name]:
            obstacle = f"in its trial at the start it {tried.obstacle}"
            raise NoKernel(backend_refusal(name, obstacle), {**before, **trials})
        if candidate == "cudnn":  # nor may torch take it for sdpa
            torch.backends.cuda.enable_cudnn_sdp(False)
    shown = (f"{trial.removeprefix(TRIAL_OF)} {what}" for trial, what in trials.items())
    raise NoKernel(
        f"model.attention_backend = {name!r}: no kernel computes attention as it must here: "
        f"{'; '.join(shown)}; where even eager fails, suspect the device or its driver",
        {**before, **trials},
    )


def described_candidates(name: str, needs: KernelNeeds) -> str:
    """`flash_attn of flash-attn 2.8.3, sdpa, eager`. Raises as `candidates_for`."""
    named = candidates_for(name, needs)[0]
    return ", ".join(f"{n} of {_package()}" if n == FLASH else n for n in named)


def candidates_for(name: str, needs: KernelNeeds) -> tuple[list[str], str]:
    """(the backends to try for `name`, the best first; why the first one). Raises ConfigError where
    a named one cannot act here."""
    if name == "auto":
        return _best(needs)
    obstacle = _obstacle(name, needs)
    if name == FLASH:
        reason = f"instead of flash_attn: {obstacle}" if obstacle else "as configured"
        return [*([] if obstacle else [FLASH]), "sdpa", "eager"], reason
    if obstacle:
        raise ConfigError(backend_refusal(name, obstacle))
    return [name], "as configured"


def _best(needs: KernelNeeds) -> tuple[list[str], str]:
    usable = [name for name in BACKENDS if _obstacle(name, needs) is None]
    if needs.kind != "cuda":
        return usable, f"flash_attn and cudnn need a CUDA GPU, not {needs.kind}"
    if usable[0] == "sdpa":
        return usable, str(_obstacle(FLASH, needs))
    same = ", with the same bits each time in its trial" if needs.deterministic else ""
    return usable, f"the fastest that can be had here{same}"


def _tried(
    name: str, needs: KernelNeeds, shape: AttentionShape
) -> tuple[AttentionFn | None, Tried]:
    if needs.documents:  # with a mask it gives NaN in dq (pytorch #196678: 2.11 to 2.13, Hopper)
        torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        attend = backend(name, deterministic=needs.deterministic)
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
    return Attention(name, attend, reason, kernel, _package() if name == FLASH else None, trials)


def _package() -> str:
    """`flash-attn 2.8.3`: the installed package that the module is of."""
    names = packages_distributions().get(FLASH_MODULE, [])
    return ", ".join(f"{each} {version(each)}" for each in sorted(set(names))) or FLASH_MODULE


def _obstacle(name: str, needs: KernelNeeds) -> str | None:
    """Why `name` cannot be used here; None when it can, as far as is known without a check."""
    row = BACKENDS[name]
    conflict = backend_conflict(
        name,
        needs.kind,
        half=needs.dtype in HALF,
        deterministic=needs.deterministic,
        documents=needs.documents,
        capability=needs.capability,
    )
    if conflict:
        return conflict
    if row.widest_head and needs.head_dim > row.widest_head:
        return f"{name} takes heads of at most {row.widest_head} numbers, not {needs.head_dim}"
    if name == "cudnn":
        return _cudnn_obstacle()
    return _flash_obstacle(needs) if name == FLASH else None


def _cudnn_obstacle() -> str | None:
    if not torch.backends.cudnn.is_available():  # type: ignore[no-untyped-call]
        return f"torch {torch.__version__} has no cuDNN here"
    found = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    if found < _LEAST_CUDNN:
        return f"torch trusts cuDNN's attention from version {_LEAST_CUDNN} on, and this is {found}"
    return None


def _flash_obstacle(needs: KernelNeeds) -> str | None:
    try:
        backend(FLASH)
    except ModuleNotFoundError:
        return NOT_INSTALLED
    except (ImportError, AttributeError, OSError) as error:  # built for another torch or CUDA
        return f"flash_attn is installed but broken: {first_line(error)}"
    space, _, name = str(BACKENDS[FLASH].operator).partition("::")
    if needs.compiled and not hasattr(getattr(torch.ops, space), name):
        return (
            f"torch.compile cannot keep this {_package()} within a block: it registers no operator "
            "(pip install -U flash-attn: 2.7 and newer do; training.compile=false takes this one)"
        )
    return None


def device_of_state(context: RunContext) -> torch.device:
    """Where weights, gradients and moments lie, and the update is computed."""
    return torch.device("cpu") if context.world.is_offloaded else context.device


def refuse_different(own: Kernels, context: RunContext) -> None:
    """Ranks of a job train one model, and are compared bit for bit: all by the same kernels. Raises
    ConfigError, on all of them; a launcher has heard by then what each check showed, and judges by
    that."""
    told: list[Told] = context.world.gathered((own.named, own.failures))
    ranks_of: dict[str, list[int]] = {}
    for rank, (kernels, _) in enumerate(told):
        ranks_of.setdefault(kernels, []).append(rank)
    if len(ranks_of) > 1:
        each = [_of_ranks(ranks, told[ranks[0]]) for ranks in ranks_of.values()]
        raise ConfigError(
            "the ranks of a job compute with the same kernels, and these would not: "
            f"{'; '.join(each)}. Where devices and software are equal, suspect the device whose "
            "trial failed; model.attention_backend names one attention for all"
        )


def _of_ranks(ranks: Sequence[int], told: Told) -> str:
    """Those that take the same, and what a check showed on the first of them."""
    kernels, failures = told
    why = f" ({'; '.join(failures)})" if failures else ""
    return f"rank{'s'[: len(ranks) > 1]} {listed([str(rank) for rank in ranks])}: {kernels}{why}"
