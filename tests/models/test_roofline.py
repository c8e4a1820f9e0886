"""The bytes that a plan counts, held against those that operators move."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model_check import model as model_module
from model_check.attention import sdpa
from model_check.config.gpu_models import gpu_model
from model_check.config.roofline import plan_step
from model_check.config.schema import ModelSettings, Settings, TrainingSettings
from model_check.config.shape import geometry
from model_check.init import build_model

PRODUCTS = ("aten::mm", "aten::bmm", "aten::_scaled_dot_product")
NORM_BYTES = 40
"""Of a fused norm on a GPU; a CPU has none, so the count leaves norms out."""


class Moved(TorchDispatchMode):
    """Counts the bytes of inputs and outputs. Views move nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        inputs, outputs = _tensors((args, kwargs)), _tensors(result)
        places = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        is_view = all(tensor.untyped_storage().data_ptr() in places for tensor in outputs)
        if not is_view or op.name().partition(".")[0].endswith("_"):
            self.bytes[op.name()] += sum(t.numel() * t.element_size() for t in inputs + outputs)
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def moved(sizes: dict[str, int], num_layers: int, time: int) -> int:
    model = ModelSettings(num_layers=num_layers, vocab_size=64, **sizes)  # type: ignore[arg-type]
    settings = Settings(model=model, training=TrainingSettings(context_length=time))
    built = build_model(settings, geometry(model, 64), sdpa, torch.device("cpu"))
    tokens = torch.zeros(1, time, dtype=torch.long)
    with Moved() as count, torch.autocast("cpu", dtype=torch.bfloat16):
        loss = built.summed_loss(tokens, tokens)
        with torch.autocast("cpu", enabled=False):
            loss.backward()
    return sum(n for name, n in count.bytes.items() if not name.startswith(PRODUCTS))


@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden_size": 64, "intermediate_size": 192, "num_heads": 4, "num_kv_heads": 2},
        {"hidden_size": 128, "intermediate_size": 320, "num_heads": 8, "num_kv_heads": 8},
        {"hidden_size": 96, "intermediate_size": 256, "num_heads": 3, "num_kv_heads": 1},
    ],
    ids=str,
)
def test_a_block_moves_what_its_plan_counts_within_five_percent(
    monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int]
) -> None:
    monkeypatch.setattr(model_module, "RMSNorm", lambda *_, **__: nn.Identity())
    counts = {(n, t): moved(sizes, n, t) for n in (1, 2) for t in (64, 128)}
    of_a_token = (counts[2, 128] - counts[1, 128] - counts[2, 64] + counts[1, 64]) / 64
    of_weights = counts[2, 64] - counts[1, 64] - 64 * of_a_token
    model = ModelSettings(num_layers=1, vocab_size=64, **sizes)  # type: ignore[arg-type]
    settings = Settings(model=model, training=TrainingSettings(context_length=64))
    shape = geometry(model, 64)
    plan = plan_step(settings, shape, gpu_model("H100"))
    assert plan is not None
    rows = {row.name: row for row in plan.operators}
    between = rows["norms, rope, SwiGLU, residual"].bytes / 64 - NORM_BYTES * shape.hidden_size
    assert between == pytest.approx(of_a_token, rel=0.05)
    assert rows["casts of weights and gradients"].bytes == pytest.approx(of_weights, rel=0.05)
