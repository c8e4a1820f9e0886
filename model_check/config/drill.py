"""What fault a drill injects, when, in which worker: the grammar of `debug.drill`. Pure."""

import re
from collections.abc import Collection

from msgspec import Struct

from model_check.config.fields import all_fields, did_you_mean
from model_check.config.shape import parameters
from model_check.errors import ConfigError

GRADIENT_KINDS = ("nan", "inf")
PARAMETER_KINDS = (*GRADIENT_KINDS, "flip")
KINDS = (*PARAMETER_KINDS, "loss_nan", "raise", "exit7", "kill", "hang")
DEFAULT_PARAMETER = "layers.0.feed_forward.w2.weight"
# A flip of its first value changed loss or norm in the same step, in float32 and under autocast, at
# two sizes; a flip in attention.wq took 2 to 6 steps to show.
_GRAMMAR = re.compile(
    r"(?P<kind>\w+)@(?P<step>\d+)(?::(?P<worker>[A-Za-z]+\d+(?:\.\d+)?)(?::(?P<parameter>[\w.]+))?)?"
)


class Drill(Struct, frozen=True):
    kind: str
    step: int
    worker: str | None
    """None: every worker."""
    parameter: str | None
    """None: DEFAULT_PARAMETER."""


def parse_drill(text: str, max_steps: int) -> Drill:
    """Read `KIND@STEP[:WORKER[:PARAMETER]]`. Raises ConfigError for other text and for a drill that
    cannot act."""
    match = _GRAMMAR.fullmatch(text.strip())
    if match is None or match["kind"] not in KINDS:
        explanation = all_fields()["debug.drill"].doc
        raise ConfigError(f"debug.drill = {text!r}: not a drill. {explanation}")
    kind, step = match["kind"], int(match["step"])
    if step >= max_steps:
        raise ConfigError(
            f"debug.drill = {text!r}: step {step} is never reached (training.max_steps = "
            f"{max_steps}, steps count from 0)"
        )
    if match["parameter"] and kind not in PARAMETER_KINDS:
        raise ConfigError(
            f"debug.drill = {text!r}: {kind} takes no parameter ({', '.join(PARAMETER_KINDS)} do)"
        )
    worker = match["worker"].upper() if match["worker"] else None
    return Drill(kind, step, worker, match["parameter"])


def check_parameter(drill: Drill, num_layers: int, *, tied: bool) -> None:
    """Refuse a parameter that the model will not have. Raises ConfigError."""
    check_name(drill, [row.name for row in parameters(num_layers, tied=tied)])


def check_name(drill: Drill, names: Collection[str]) -> None:
    """As check_parameter, for a model with parameters of these names."""
    if drill.parameter is None or drill.parameter in names:
        return
    hint = did_you_mean(drill.parameter, names) or f" (there is {DEFAULT_PARAMETER})"
    raise ConfigError(f"debug.drill: the model has no parameter {drill.parameter!r}{hint}")
