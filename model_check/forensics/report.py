"""The block that is printed when a loss or a gradient is NaN or infinite. Pure.

Its form is a contract (seed format): scripts and people search for its lines. Inf has the same
block with `Inf` for `NaN`; where both occur, each has its list.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from model_check.events import Origin, again
from model_check.forensics.scan import NUM_SHOWN, BadTensor
from model_check.utils.words import few

_WIDE = "=" * 80
_NARROW = "=" * 40
_COUNTS: dict[str, Callable[[BadTensor], int]] = {
    "NaN": attrgetter("num_nan"),
    "Inf": attrgetter("num_inf"),
}


@dataclass(frozen=True)
class BadStep:
    """What is known of a non-finite step."""

    worker: str
    """`GPU6`"""
    step: int
    loss: float
    grad_norm: float
    gradients: Sequence[BadTensor]
    parameters: Sequence[BadTensor]
    recomputed: bool = False
    """Whether the gradients come from a second computation of the same step, where there was one
    (`repeated`); those of the first are overwritten."""
    origin: Origin | None = None
    repeated: bool | None = None
    """Whether it came again when the step was computed again; None: not tried."""
    elsewhere: Sequence[str] = ()
    """Parameters whose gradients are not finite in the shards of other ranks alone."""

    @property
    def where(self) -> Literal["loss", "gradient", "weight"]:
        if not math.isfinite(self.loss):
            return "loss"
        return "weight" if math.isfinite(self.grad_norm) else "gradient"


def block(bad: BadStep) -> str:
    """The lines from the first `=` to the last."""
    return "\n".join(
        [
            _WIDE,
            f"{_title(bad)} DETECTED [{_spaced(bad.worker)}]",
            _WIDE,
            f"Step: {bad.step}",
            f"Loss: {bad.loss:.4f}",
            f"Gradient Norm: {bad.grad_norm:.4f}",
            "",
            _NARROW,
            "PROBLEMATIC TENSORS:",
            _NARROW,
            *_problems(bad),
            _NARROW,
        ]
    )


def module_line(bad: BadStep) -> str:
    """What stands below the block: where it was born, as far as that is known."""
    if bad.origin is None:
        return f"Where it was born is not known{again(bad.repeated)}"
    return f"Born in {bad.origin.place}: {bad.origin.counts}{again(bad.repeated)}"


def summary(bad: BadStep) -> str:
    """One sentence."""
    place = f"step {bad.step}, {bad.worker}"
    if bad.origin is not None and bad.where != "weight":
        born = f"born in {bad.origin.place}{again(bad.repeated)}"
        return f"{place}: {bad.where} not finite, {born}; loss {bad.loss:.4f}"
    if bad.where == "weight":
        names = [*dict.fromkeys(tensor.name for tensor in bad.parameters)]
        return (
            f"{place}: {len(names)} weight(s) or moments not finite after the update, first in "
            f"model order {names[0]}; not saved"
        )
    return f"{place}: loss {bad.loss:.4f}, gradient norm {bad.grad_norm:.4f}"


def _title(bad: BadStep) -> str:
    if bad.gradients:
        return f"{_kinds(bad.gradients)} GRADIENT"
    if bad.where == "weight":
        return f"{_kinds(bad.parameters)} PARAMETER"
    if not math.isfinite(bad.loss):
        return f"{_kind(bad.loss)} LOSS"
    return f"{_kind(bad.grad_norm)} GRADIENT NORM"


def _kinds(tensors: Sequence[BadTensor]) -> str:
    return "/".join(kind for kind, count in _COUNTS.items() if any(map(count, tensors)))


def _problems(bad: BadStep) -> list[str]:
    return [
        *_section(bad.gradients, "Gradient", "Grad"),
        *_section(bad.parameters, "Parameter", "Param"),
        *([_in_other_shards(bad.elsewhere)] if bad.elsewhere else []),
        *([] if bad.gradients or bad.elsewhere else [_why_no_gradient(bad)]),
    ]


def _in_other_shards(names: Sequence[str]) -> str:
    return f"Gradients not finite in the shards of other ranks alone: {few(names)}"


def _why_no_gradient(bad: BadStep) -> str:
    if bad.recomputed and bad.repeated is None:
        return "The gradients are not known: a later step has overwritten them"
    if bad.recomputed and not bad.repeated:
        return "All gradients are finite when the step is computed again: the fault was transient"
    if bad.where == "gradient":
        return "All gradients are finite: the sum of their squares exceeds float32"
    return "All gradients are finite"


def _section(tensors: Sequence[BadTensor], what: str, short: str) -> list[str]:
    """First the tensors with NaN, then those with Inf; a tensor may be in both lists."""
    lines = []
    for kind, count in _COUNTS.items():
        if affected := [(tensor, count(tensor)) for tensor in tensors if count(tensor)]:
            lines += _list(kind, affected, what, short)
    return lines


def _list(kind: str, affected: Sequence[tuple[BadTensor, int]], what: str, short: str) -> list[str]:
    lines = [f"⚠️  {what}s with {kind} ({len(affected)} layers):"]
    for tensor, count in affected:
        lines += [
            f"  • {tensor.name} (shape: torch.Size({list(tensor.shape)}))",
            f"    {short} values: {_values(tensor)}",
            f"    {kind} count: {count}/{tensor.numel}",
        ]
    return [
        *lines,
        "",
        f"Total layers with {kind} {what.lower()}s: {len(affected)}",
        f"Affected layers: {[tensor.name for tensor, _ in affected]}",
    ]


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
