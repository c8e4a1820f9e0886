"""The kinds of attention: what settings, plans, checkpoints and exports must know of each, without
torch. A new kind is a class and its row in KINDS here, and the module that its `implementation`
names: a subclass of model_check.model.Attention."""

from typing import TYPE_CHECKING, Literal

from model_check.config.parameter import Group, Parameter

if TYPE_CHECKING:  # they import this file
    from model_check.config.schema import Settings
    from model_check.config.shape import Geometry

AttentionName = Literal["full", "local", "infini"]
_FLOAT32 = 4


class AttentionKind:
    """Full attention, as every LLaMA has it; another kind overrides what differs."""

    implementation = "model_check.model:Attention"
    sees = "every earlier token"
    """What a token sees, for the page of settings."""
    is_llama = True
    """Whether transformers' LLaMA computes the same with these weights."""
    has_end = True
    """Whether a text is at most as long as training.context_length."""
    settings: tuple[str, ...] = ()
    """The settings that act with this kind of attention, of those that not every kind has."""
    parameters: tuple[Parameter, ...] = ()
    """What a block has beside the four matrices, by names within the block."""

    def span(self, settings: "Settings") -> int:
        """Returns T where attention computes [T, T] scores at once, and each token sees itself and
        the tokens before it: the plan counts half of their products."""
        return settings.training.context_length

    def flops(self, settings: "Settings", shape: "Geometry") -> int:
        """Of a token, forward and backward pass of all blocks, beside projections and scores."""
        return 0

    def kept_bytes(self, settings: "Settings", shape: "Geometry", product_bytes: int) -> int:
        """Of a token and block, what autograd keeps beside what full attention keeps of a span.
        `product_bytes`: of one element of a matrix product."""
        return 0

    def same_as_full(self, settings: "Settings") -> str | None:
        """Why these settings are full attention by another name; None: they are not."""
        return None


class _Local(AttentionKind):
    implementation = "model_check.infini:ChunkedAttention"
    sees = "those of its own segment"
    is_llama = False
    has_end = False  # each segment begins its positions anew
    settings: tuple[str, ...] = ("model.infini.segment_length",)

    def span(self, settings: "Settings") -> int:
        return settings.model.infini.segment_length or -(-settings.training.context_length // 4)

    def same_as_full(self, settings: "Settings") -> str | None:
        length, context_length = self.span(settings), settings.training.context_length
        if length < context_length:
            return None
        return f"model.infini.segment_length = {length}: {context_length} tokens are one segment"


class _Infini(_Local):
    implementation = "model_check.infini:InfiniAttention"
    sees = (
        "those, and through a gate a memory of fixed size of the earlier segments "
        "(arXiv 2404.07143)"
    )
    settings = tuple(
        f"model.infini.{name}" for name in ("segment_length", "update", "gate_init", "gate_lr")
    )
    parameters = (Parameter("attention.gate", ("num_heads",), None, Group.GATE),)

    def flops(self, settings: "Settings", shape: "Geometry") -> int:
        """Each query reads a [D, D] matrix, each key is written to one, and by the delta rule reads
        it before. Not counted: divisors and the sums over segments."""
        times = 2 if settings.model.infini.update == "delta" else 1
        width = shape.query_width + times * shape.key_width
        return 6 * shape.num_layers * shape.head_dim * width

    def kept_bytes(self, settings: "Settings", shape: "Geometry", product_bytes: int) -> int:
        """Features of queries and keys, what was found before and after its divisor, values, and
        the output of the segment. The matrices that a segment found are kept once a query head."""
        times = 6 if settings.model.infini.update == "delta" else 3
        matrices = shape.query_width * (shape.head_dim + 1) // self.span(settings)
        numbers = 3 * shape.query_width + times * shape.key_width + 3 * shape.num_heads + matrices
        return numbers * _FLOAT32 + shape.query_width * product_bytes


KINDS: dict[str, AttentionKind] = {
    "full": AttentionKind(),
    "local": _Local(),
    "infini": _Infini(),
}
"""By model.attention."""
OF_KINDS = tuple(dict.fromkeys(name for kind in KINDS.values() for name in kind.settings))
"""The settings that act with some kinds alone."""


def names_with(setting: str) -> list[str]:
    """The values of model.attention with which a setting of OF_KINDS acts."""
    return [name for name, kind in KINDS.items() if setting in kind.settings]
