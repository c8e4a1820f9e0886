"""What fault a drill injects, when, in which worker: the grammar of `debug.drill`. Pure."""

import re
from collections.abc import Iterable

from msgspec import Struct

from model_check.config.fields import did_you_mean
from model_check.config.shape import HEAD
from model_check.errors import ConfigError

GRADIENT_KINDS = ("nan", "inf", "flip_gradient")
WEIGHT_KINDS = ("nan_weight", "inf_weight", "flip", "burst")
MOMENT_KINDS = ("nan_moment", "inf_moment", "flip_moment")
FORWARD_KINDS = ("nan_forward", "inf_forward", "flip_activation")
BACKWARD_KINDS = ("nan_backward", "inf_backward")
PARAMETER_KINDS = (*GRADIENT_KINDS, *WEIGHT_KINDS, *MOMENT_KINDS)
MODULE_KINDS = (*FORWARD_KINDS, *BACKWARD_KINDS)
BIT_KINDS = ("flip", "flip_gradient", "flip_moment", "flip_activation")
FLIP_KINDS = (*BIT_KINDS, "burst")
NAMED_KINDS = (*PARAMETER_KINDS, *MODULE_KINDS)
PROCESS_KINDS = ("raise", "exit7", "kill", "hang", "slow")
KINDS = (*NAMED_KINDS, "loss_nan", *PROCESS_KINDS)
DEFAULT_PARAMETER = "layers.0.feed_forward.w2.weight"
# A flip of its first value changed loss or norm in the same step, in float32 and under autocast, at
# two sizes; a flip in attention.wq took 2 to 6 steps to show.
DEFAULT_MODULE = "layers.0.feed_forward"
DEFAULT_BIT = 16
"""The lowest bit of a float32 weight that its bfloat16 copy still has: 2^-7 of the value."""
SIZES_OF_BURST = range(2, 65)
WARP = 32
"""Neighbours that a GPU's warp handles together: many a real error hits several of one warp (arXiv
2605.04213)."""
DEFAULT_FACTOR, MAX_FACTOR = 1.5, 100.0
MOMENTS = ("exp_avg", "exp_avg_sq")
_HEAD_MODULE = HEAD.name.removesuffix(".weight")
BUFFERS = ("rope_cos", "rope_sin")
_GRAMMAR = re.compile(
    r"(?P<kind>\w+)@(?P<step>\d+)"
    r"(?::(?P<worker>(?i:all)|[A-Za-z]+\d+(?:\.\d+)?)(?::(?P<name>(?!always$)[A-Za-z_][\w.]*)(?::(?P<number>\d+))?"
    r"|:(?P<factor>\d+(?:\.\d+)?)x)?)?"
    r"(?P<always>:always)?"
)


class Drill(Struct, frozen=True):
    kind: str
    step: int
    worker: str | None = None
    """None: every worker."""
    name: str | None = None
    """Of a parameter, a buffer or a module; None: the default of its kind. Of a moment: with
    `exp_avg_sq.` before the parameter's, the second."""
    number: int | None = None
    """What follows the name."""
    factor: float = DEFAULT_FACTOR
    """How many times as long `slow` makes a step."""
    always: bool = False
    """It acts each time that the step is computed; else once, the first time."""

    @property
    def default(self) -> str:
        return DEFAULT_MODULE if self.kind in MODULE_KINDS else DEFAULT_PARAMETER

    @property
    def target(self) -> str:
        """The parameter, buffer or module."""
        return self._split_name[1]

    @property
    def moment(self) -> str:
        """`exp_avg` or `exp_avg_sq`, for the kinds that act on one."""
        return self._split_name[0]

    @property
    def _split_name(self) -> tuple[str, str]:
        first, _, rest = (self.name or self.default).partition(".")
        if self.kind in MOMENT_KINDS and first in MOMENTS:
            return first, rest
        return MOMENTS[0], self.name or self.default

    def bit(self, width: int) -> int:
        """The bit that is turned over in values of `width` bits. May be more than they have."""
        if self.number is None or self.kind not in BIT_KINDS:
            return DEFAULT_BIT - 32 + width
        return self.number

    @property
    def num_values(self) -> int:
        """How many neighbours it hits, from the first value on."""
        if self.kind != "burst":
            return 1
        return WARP if self.number is None else self.number

    @property
    def value(self) -> float:
        """What `nan_...` and `inf_...` put into a tensor."""
        return float("inf" if self.kind.startswith("inf") else "nan")


def parse_drill(text: str, max_steps: int) -> Drill:
    """Read `KIND@STEP[:WORKER[:NAME[:NUMBER]]][:always]`, or `slow@STEP[:WORKER[:1.3x]]`. Raises
    ConfigError for other text and for a drill that cannot act."""
    match = _GRAMMAR.fullmatch(text.strip())
    if match is None or match["kind"] not in KINDS:
        kind = text.strip().partition("@")[0]
        hint = did_you_mean(kind, KINDS) if kind not in KINDS else ""
        raise ConfigError(
            f"debug.drill = {text!r}: not a drill, KIND@STEP[:WORKER[:NAME[:NUMBER]]][:always]"
            f"{hint} (KIND: {', '.join(KINDS)})"
        )
    drill = _drill(match)
    if problem := _problem(drill, max_steps) or _wrong_number(drill, match["factor"]):
        raise ConfigError(f"debug.drill = {text!r}: {problem}")
    return drill


def check_name(drill: Drill, parameters: Iterable[str]) -> None:
    """Refuse the name of a parameter, buffer or module that a model with these parameters does not
    have, or on which this kind cannot act. Raises ConfigError."""
    rows = list(parameters)
    what, names = "parameter", rows
    if drill.kind in MODULE_KINDS:
        what, names = "module", _modules(rows)
    elif drill.kind in WEIGHT_KINDS:
        names = [*rows, *BUFFERS]
    if drill.name is None or drill.target in names:
        return
    hint = did_you_mean(drill.target, names) or f" (there is {drill.default})"
    raise ConfigError(f"debug.drill: the model has no {what} {drill.target!r}{hint}")


def _drill(match: "re.Match[str]") -> Drill:
    worker = match["worker"].upper() if match["worker"] else None
    return Drill(
        kind=match["kind"],
        step=int(match["step"]),
        worker=None if worker == "ALL" else worker,
        name=match["name"],
        number=None if match["number"] is None else int(match["number"]),
        factor=DEFAULT_FACTOR if match["factor"] is None else float(match["factor"]),
        always=match["always"] is not None,
    )


def _problem(drill: Drill, max_steps: int) -> str | None:
    """Why it cannot act."""
    if drill.step >= max_steps:
        return (
            f"step {drill.step} is never reached (training.max_steps = {max_steps}, steps count "
            "from 0)"
        )
    if drill.name and drill.kind not in NAMED_KINDS:
        return f"{drill.kind} takes no name ({', '.join(NAMED_KINDS)} do)"
    return None


def _wrong_number(drill: Drill, factor: str | None) -> str | None:
    """What is wrong with its number or its factor."""
    if factor is not None and (drill.kind != "slow" or not 1 < drill.factor <= MAX_FACTOR):
        return f"only slow takes a factor, above 1x and at most {MAX_FACTOR:g}x"
    if drill.kind == "burst" and drill.num_values not in SIZES_OF_BURST:
        return f"burst takes {SIZES_OF_BURST[0]} to {SIZES_OF_BURST[-1]} values"
    if drill.number is None or drill.kind == "burst":
        return None
    if drill.kind not in BIT_KINDS or drill.number > 31:
        return f"only {', '.join(BIT_KINDS)} take a bit, from 0 to 31"
    return None


def _modules(parameters: Iterable[str]) -> list[str]:
    """Those that are called: of `layers.0.attention.wq.weight` also `layers.0.attention` and
    `layers.0`. The head is not, the loss reads its weight."""
    found = ["loss"]
    for name in parameters:
        parts = name.split(".")[:-1]
        found += [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return [name for name in dict.fromkeys(found) if name not in ("layers", _HEAD_MODULE)]
