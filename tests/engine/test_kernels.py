"""What workers and ranks do with the kernels that they tried."""

from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest
import torch

from model_check.config.memory import expected_geometry
from model_check.engine.kernels import DeviceLost, Kernels, choose_kernels, refuse_different
from model_check.engine.run_context import RunContext
from model_check.errors import ConfigError
from model_check.utils.trials import trial_of
from tests.engine.conftest import Kept, bare_context, make_settings


def test_ranks_that_take_other_kernels_are_refused_and_say_which_and_why() -> None:
    told = [
        ("attention sdpa (ScaledDotProductFlashAttentionForCpu), AdamW fused", ()),
        ("attention eager, AdamW plain", ("fused AdamW failed its trial: it changed weights",)),
    ]
    own = SimpleNamespace(named=told[0][0], failures=told[0][1])
    world = SimpleNamespace(gathered=lambda _: told)
    context = cast(RunContext, SimpleNamespace(world=world))
    with pytest.raises(ConfigError) as raised:
        refuse_different(cast(Kernels, own), context)
    text = str(raised.value)
    assert "rank 0: attention sdpa (ScaledDotProductFlashAttentionForCpu), AdamW fused; " in text
    assert "rank 1: attention eager, AdamW plain (fused AdamW failed its trial: it " in text


def illegal_access(*_: Any, **__: Any) -> NoReturn:
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def test_a_device_that_is_lost_in_a_trial_ends_the_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that it would show of the next kernels would be theirs."""

    def lose(*_: Any, **__: Any) -> NoReturn:
        monkeypatch.setattr(torch, "ones", illegal_access)
        illegal_access()

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lose)
    settings, context = make_settings(), bare_context(Kept())
    shape = expected_geometry(settings)
    with pytest.raises(DeviceLost) as raised:
        choose_kernels(settings, shape, torch.float32, context)
    lost = "raised AcceleratorError: CUDA error: an illegal memory access was encountered"
    said = f"cpu computes no more since the trial of attention kernel sdpa, which {lost}; where a"
    assert str(raised.value).startswith(said)
    tried = [trial_of(name) for name in ("fused AdamW", "attention kernel sdpa")]
    assert [key for key in raised.value.trials if key.startswith("trial of")] == tried
