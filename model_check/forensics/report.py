"""The block that is printed when a loss or a gradient is NaN or infinite. Pure.

Its form is a contract (seed format): scripts and people search for its lines. Inf has the same
block with `Inf` for `NaN`; where both occur each has its list.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from model_check.forensics.scan import NUM_SHOWN, BadTensor

_WIDE = "=" * 80
_NARROW = "=" * 40


@dataclass(frozen=True)
class Finding:
    """A non-finite step, as far as it is known."""

    worker: str
    """`GPU6`"""
    step: int
    loss: float
    grad_norm: float
    gradients: Sequence[BadTensor]
    parameters: Sequence[BadTensor]
    repeated: bool = False
    """Whether the gradients are those of a second computation of the same step."""


def block(finding: Finding) -> str:
    """The lines from the first `=` to the last."""
    return "\n".join(
        [
            _WIDE,
            f"{_title(finding)} DETECTED [{_spaced(finding.worker)}]",
            _WIDE,
            f"Step: {finding.step}",
            f"Loss: {finding.loss:.4f}",
            f"Gradient Norm: {finding.grad_norm:.4f}",
            "",
            _NARROW,
            "PROBLEMATIC TENSORS:",
            _NARROW,
            *_problems(finding),
            _NARROW,
        ]
    )


def summary(finding: Finding) -> str:
    """One sentence."""
    place = f"step {finding.step}, {finding.worker}"
    if finding.gradients:
        names = [tensor.name for tensor in finding.gradients]
        return (
            f"{place}: {len(names)} gradient(s) not finite, first in model order {names[0]}; loss "
            f"{finding.loss:.4f}"
        )
    return f"{place}: loss {finding.loss:.4f}, gradient norm {finding.grad_norm:.4f}"


def _title(finding: Finding) -> str:
    if finding.gradients:
        num_nan = sum(tensor.num_nan for tensor in finding.gradients)
        num_inf = sum(tensor.num_inf for tensor in finding.gradients)
        kinds = [kind for kind, count in (("NaN", num_nan), ("Inf", num_inf)) if count]
        return f"{'/'.join(kinds)} GRADIENT"
    if not math.isfinite(finding.loss):
        return f"{_kind(finding.loss)} LOSS"
    return f"{_kind(finding.grad_norm)} GRADIENT NORM"


def _problems(finding: Finding) -> list[str]:
    lines = [
        *_section(finding.gradients, "Gradients", "Grad", "gradients"),
        *_section(finding.parameters, "Parameters", "Param", "parameters"),
    ]
    if not finding.gradients:
        lines.append(_why_no_gradient(finding))
    return lines


def _why_no_gradient(finding: Finding) -> str:
    if finding.repeated:
        return "All gradients are finite when the step is computed again: the fault was transient"
    if math.isfinite(finding.loss):
        return "All gradients are finite: the sum of their squares exceeds float32"
    return "All gradients are finite"


def _section(tensors: Sequence[BadTensor], plural: str, short: str, lower: str) -> list[str]:
    lines = []
    for kind, count in (("NaN", _num_nan), ("Inf", _num_inf)):
        affected = [tensor for tensor in tensors if count(tensor)]
        if affected:
            lines += _list(kind, affected, count, plural, short, lower)
    return lines


def _list(
    kind: str,
    tensors: Sequence[BadTensor],
    count: Callable[[BadTensor], int],
    plural: str,
    short: str,
    lower: str,
) -> list[str]:
    lines = [f"⚠️  {plural} with {kind} ({len(tensors)} layers):"]
    for tensor in tensors:
        lines += [
            f"  • {tensor.name} (shape: torch.Size({list(tensor.shape)}))",
            f"    {short} values: {_values(tensor)}",
            f"    {kind} count: {count(tensor)}/{tensor.numel}",
        ]
    return [
        *lines,
        "",
        f"Total layers with {kind} {lower}: {len(tensors)}",
        f"Affected layers: {[tensor.name for tensor in tensors]}",
    ]


def _num_nan(tensor: BadTensor) -> int:
    return tensor.num_nan


def _num_inf(tensor: BadTensor) -> int:
    return tensor.num_inf


def _values(tensor: BadTensor) -> str:
    shown = ", ".join(repr(_value(value)) for value in tensor.first_values)
    return f"[{shown}, ...]" if tensor.numel > NUM_SHOWN else f"[{shown}]"


def _value(value: float) -> str:
    return f"{value:.4e}" if math.isfinite(value) else _kind(value)


def _kind(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Inf" if value > 0 else "-Inf"


def _spaced(worker: str) -> str:
    """`GPU6` -> `GPU 6`."""
    return re.sub(r"(?<=\D)(?=\d)", " ", worker, count=1)
