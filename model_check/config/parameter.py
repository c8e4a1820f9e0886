"""One parameter of the model: its name and sizes, how it begins, how the optimizer treats it."""

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # it imports the kinds of attention, whose parameters these are
    from model_check.config.schema import ModelSettings


class Group(Enum):
    """How the optimizer treats a parameter."""

    MATRIX = "matrix"
    """Decayed by training.weight_decay."""
    VECTOR = "vector"
    GATE = "gate"
    """At model.infini.gate_lr."""


class Parameter(NamedTuple):
    """One row of the table of parameters. A block's row has its names within the block;
    `in_block` completes them."""

    name: str
    sizes: tuple[str, ...]
    """Rows and columns, or the length of a vector: names of attributes of Geometry."""
    hf_name: str | None
    """What transformers calls it; None: its LLaMA has no such parameter. Nothing else differs: our
    rotary layout is theirs."""
    group: Group = Group.MATRIX

    def in_block(self, number: int) -> "Parameter":
        hf_name = self.hf_name and f"model.layers.{number}.{self.hf_name}"
        return self._replace(name=f"layers.{number}.{self.name}", hf_name=hf_name)

    def initial(self, model: "ModelSettings") -> float | None:
        """The first value of every element; None: normal, with the deviation model.init_std."""
        return {Group.MATRIX: None, Group.VECTOR: 1.0, Group.GATE: model.infini.gate_init}[
            self.group
        ]
