"""The block to the letter."""

import math

from model_check.events import Origin
from model_check.forensics.report import BadStep, block, module_line, summary
from model_check.forensics.scan import BadTensor

NAN, INF = math.nan, math.inf

GOLDEN = """\
================================================================================
NaN GRADIENT DETECTED [GPU 6]
================================================================================
Step: 0
Loss: 12.6087
Gradient Norm: nan

========================================
PROBLEMATIC TENSORS:
========================================
\u26a0\ufe0f  Gradients with NaN (2 layers):
  \u2022 tok_embed.weight (shape: torch.Size([128256, 4096]))
    Grad values: ['NaN', 'NaN', 'NaN', 'NaN', 'NaN', ...]
    NaN count: 525336576/525336576
  \u2022 layers.0.attention.wq.weight (shape: torch.Size([4096, 4096]))
    Grad values: ['NaN', 'NaN', 'NaN', 'NaN', 'NaN', ...]
    NaN count: 16777216/16777216

Total layers with NaN gradients: 2
Affected layers: ['tok_embed.weight', 'layers.0.attention.wq.weight']
========================================"""

GOLDEN_MIXED = """\
================================================================================
NaN/Inf GRADIENT DETECTED [CPU 0]
================================================================================
Step: 41
Loss: 2.0000
Gradient Norm: nan

========================================
PROBLEMATIC TENSORS:
========================================
\u26a0\ufe0f  Gradients with NaN (1 layers):
  \u2022 output.weight (shape: torch.Size([3, 2]))
    Grad values: ['1.5000e+00', 'NaN', 'Inf', '-Inf', '-2.5000e-08', ...]
    NaN count: 1/6

Total layers with NaN gradients: 1
Affected layers: ['output.weight']
\u26a0\ufe0f  Gradients with Inf (2 layers):
  \u2022 norm.weight (shape: torch.Size([2]))
    Grad values: ['Inf', '0.0000e+00']
    Inf count: 1/2
  \u2022 output.weight (shape: torch.Size([3, 2]))
    Grad values: ['1.5000e+00', 'NaN', 'Inf', '-Inf', '-2.5000e-08', ...]
    Inf count: 2/6

Total layers with Inf gradients: 2
Affected layers: ['norm.weight', 'output.weight']
========================================"""


def all_nan(name: str, *shape: int) -> BadTensor:
    return BadTensor(name, shape, math.prod(shape), 0, (NAN,) * 5)


def finding(**changes: object) -> BadStep:
    values: dict[str, object] = {
        "worker": "GPU6",
        "step": 0,
        "loss": 12.6087,
        "grad_norm": NAN,
        "gradients": [],
        "parameters": [],
    }
    return BadStep(**(values | changes))  # type: ignore[arg-type]


def test_the_documented_block_to_the_letter() -> None:
    tensors = [
        all_nan("tok_embed.weight", 128256, 4096),
        all_nan("layers.0.attention.wq.weight", 4096, 4096),
    ]
    assert block(finding(gradients=tensors)) == GOLDEN


def test_nan_and_inf_each_have_their_list() -> None:
    tensors = [
        BadTensor("norm.weight", (2,), 0, 1, (INF, 0.0)),
        BadTensor("output.weight", (3, 2), 1, 2, (1.5, NAN, INF, -INF, -2.5e-8)),
    ]
    found = finding(worker="CPU0", step=41, loss=2.0, gradients=tensors)
    assert block(found) == GOLDEN_MIXED


def test_inf_alone_says_inf_throughout() -> None:
    text = block(finding(grad_norm=INF, gradients=[BadTensor("w", (8,), 0, 1, (INF,) * 5)]))
    assert "\nInf GRADIENT DETECTED [GPU 6]\n" in text
    assert "\nGradient Norm: inf\n" in text
    assert "    Inf count: 1/8\n\nTotal layers with Inf gradients: 1\n" in text
    assert "NaN" not in text


def test_a_bad_loss_with_finite_gradients_is_called_so() -> None:
    text = block(finding(loss=-INF, grad_norm=1.0))
    assert "\n-Inf LOSS DETECTED [GPU 6]\n" in text
    assert text.endswith(f"All gradients are finite\n{'=' * 40}")


def test_a_norm_that_overflows_is_told_from_a_bad_gradient() -> None:
    text = block(finding(grad_norm=INF))
    assert "\nInf GRADIENT NORM DETECTED [GPU 6]\n" in text
    assert "exceeds float32" in text


def test_a_fault_that_does_not_come_back_is_called_transient() -> None:
    assert "transient" in block(finding(recomputed=True, repeated=False))


def test_bad_weights_are_listed_too() -> None:
    text = block(finding(gradients=[all_nan("a", 2)], parameters=[all_nan("b", 2)]))
    assert (
        "Parameters with NaN (1 layers):\n  \u2022 b (shape: torch.Size([2]))\n    Param values:"
        in text
    )
    assert "Total layers with NaN parameters: 1" in text


def test_the_summary_names_step_worker_and_where_it_was_born() -> None:
    origin = Origin(
        direction="forward",
        module="layers.0.attention.wq",
        tensor="output",
        shape=[2, 3],
        num_nan=1,
        num_inf=0,
        first=[1, 2],
        low=(-1.5).hex(),
        high=(2.0).hex(),
    )
    bad = finding(gradients=[all_nan("tok_embed.weight", 2)], origin=origin, repeated=True)
    place = "born in layers.0.attention.wq (forward: its output)"
    assert summary(bad) == (
        f"step 0, GPU6: gradient not finite, {place}; it came again; loss 12.6087"
    )
    assert module_line(bad) == (
        "Born in layers.0.attention.wq (forward: its output): 1 NaN of 6 values, first at [1, 2], "
        "others -1.5e+00 to 2.0e+00; it came again"
    )
