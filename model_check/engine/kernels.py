"""The kernels that a run computes with, each tried at the start: attention, and AdamW's update."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from model_check.config.derived import segment_length
from model_check.config.schema import Settings
from model_check.config.shape import Geometry
from model_check.engine.adamw_trial import FUSED, PLAIN, Update, choose_update
from model_check.engine.rng import kept_rng
from model_check.engine.run_context import RunContext
from model_check.errors import ConfigError
from model_check.events import Scalar
from model_check.models.attention_trial import AttentionShape, answers
from model_check.models.backends import (
    Attention,
    DeviceLost,
    NoKernel,
    choose_attention,
    described_candidates,
    needs_of,
)
from model_check.utils.trials import PASSED, TRIAL_OF, trial_of
from model_check.utils.words import listed

Told = tuple[str, tuple[str, ...]]
"""Kernels, and what trials showed of those that failed."""


@dataclass(frozen=True)
class Kernels:
    attention: Attention
    candidates: str
    """The attention backends that it might have taken, with their packages."""
    update: Update
    """Of AdamW."""
    trials: Mapping[str, str]
    """As a worker tells them."""

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
        """A line for each kernel that was to be taken and failed its trial."""
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


def choose_kernels(
    settings: Settings, shape: Geometry, dtype: torch.dtype, context: RunContext
) -> Kernels:
    """The first ones that pass their trials on the run's shapes. Raises NoKernel and DeviceLost,
    which have all trials, ConfigError, torch.OutOfMemoryError."""
    of_state = device_of_state(context)
    update, obstacle = choose_update(of_state)
    trials = {trial_of("fused AdamW"): obstacle or PASSED}
    if obstacle is not None and not answers(of_state):
        raise DeviceLost(of_state, trials)
    needs = needs_of(context.device, dtype, documents=settings.data.document_masking)
    time = segment_length(settings) or settings.training.context_length
    tried = AttentionShape(shape.num_heads, shape.num_kv_heads, shape.head_dim, time)
    name = settings.model.attention_backend
    candidates = described_candidates(name, needs)
    try:
        with kept_rng():
            attention = choose_attention(name, needs, tried)
    except NoKernel as error:
        trials |= {"attention_candidates": candidates, **error.trials}
        raise NoKernel(str(error), trials) from error
    except DeviceLost as error:
        trials |= {"attention_candidates": candidates, **error.trials}
        raise DeviceLost(context.device, trials) from error
    return Kernels(attention, candidates, update, trials | dict(attention.trials))


def device_of_state(context: RunContext) -> torch.device:
    """Where weights, gradients and moments lie, and the update is computed."""
    return torch.device("cpu") if context.world.is_offloaded else context.device


def refuse_different(own: Kernels, context: RunContext) -> None:
    """Ranks of a job train one model, and are compared bit for bit: all by the same kernels. Raises
    ConfigError, on all of them; a launcher has heard by then what each trial showed, and judges by
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
    """Those that take the same, and what a trial showed on the first of them."""
    kernels, failures = told
    why = f" ({'; '.join(failures)})" if failures else ""
    return f"rank{'s'[: len(ranks) > 1]} {listed([str(rank) for rank in ranks])}: {kernels}{why}"
