"""What fault a drill injects, when, in which worker: the grammar of `debug.drill`. Pure."""

import re

from msgspec import Struct

from model_check.config.fields import all_fields, nearest
from model_check.errors import ConfigError

GRADIENT_KINDS = ("nan", "inf")
PARAMETER_KINDS = (*GRADIENT_KINDS, "flip")
KINDS = (*PARAMETER_KINDS, "loss_nan", "raise", "exit7", "kill", "hang")
_GRAMMAR = re.compile(
    r"(?P<kind>\w+)@(?P<step>\d+)(?::(?P<worker>[A-Za-z]+\d+(?:\.\d+)?)(?::(?P<parameter>[\w.]+))?)?"
)


class Drill(Struct, frozen=True):
    kind: str
    step: int
    worker: str | None
    """None: every worker."""
    parameter: str | None
    """None: a matrix of the first block."""


def parse_drill(text: str, max_steps: int) -> Drill:
    """Read `KIND@STEP[:WORKER[:PARAMETER]]`; raises ConfigError for what is not one or cannot
    act."""
    match = _GRAMMAR.fullmatch(text.strip())
    if match is None or match["kind"] not in KINDS:
        raise ConfigError(f"debug.drill = {text!r}: not a drill. {_explain()}")
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
    names = parameter_names(num_layers, tied=tied)
    if drill.parameter is None or drill.parameter in names:
        return
    near = nearest(drill.parameter, names)
    hint = f"; did you mean {near!r}?" if near else f" (there is {names[1]})"
    raise ConfigError(f"debug.drill: the model has no parameter {drill.parameter!r}{hint}")


def parameter_names(num_layers: int, *, tied: bool) -> list[str]:
    """The model's parameters by name. A test holds them against the model itself."""
    block = [
        *(f"attention.{name}" for name in ("wq", "wk", "wv", "wo")),
        *(f"feed_forward.{name}" for name in ("w1", "w2", "w3")),
        *("attention_norm", "ffn_norm"),
    ]
    blocks = [f"layers.{index}.{name}" for index in range(num_layers) for name in block]
    outside = ["tok_embed", "norm"] + ([] if tied else ["output"])
    return [f"{name}.weight" for name in (*outside, *blocks)]


def _explain() -> str:
    return all_fields()["debug.drill"].doc
