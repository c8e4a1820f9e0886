"""The table of the model's parameters: names, sizes, first values, decay, transformers' names.

Counts, bytes, FLOPs, first weights, the optimizer's groups, and import and export follow from it; a
test holds it against the real module. No torch: the launcher reads it, too.
"""

import math
import re

from msgspec import Struct

from model_check.config.attention import KINDS, AttentionName
from model_check.config.parameter import Group, Parameter
from model_check.config.schema import ModelSettings

_BLOCK_PREFIX = re.compile(r"layers\.(\d+)\.")


def _matrix(name: str, rows: str, columns: str, hf_name: str) -> Parameter:
    return Parameter(f"{name}.weight", (rows, columns), f"{hf_name}.weight")


def _norm(name: str, hf_name: str) -> Parameter:
    sizes = ("hidden_size",)
    return Parameter(f"{name}.weight", sizes, f"{hf_name}.weight", Group.VECTOR)


EMBEDDING = _matrix("tok_embed", "vocab_size", "hidden_size", "model.embed_tokens")
BLOCK = (
    _norm("attention_norm", "input_layernorm"),
    _matrix("attention.wq", "query_width", "hidden_size", "self_attn.q_proj"),
    _matrix("attention.wk", "key_width", "hidden_size", "self_attn.k_proj"),
    _matrix("attention.wv", "key_width", "hidden_size", "self_attn.v_proj"),
    _matrix("attention.wo", "hidden_size", "query_width", "self_attn.o_proj"),
    _norm("ffn_norm", "post_attention_layernorm"),
    _matrix("feed_forward.w1", "intermediate_size", "hidden_size", "mlp.gate_proj"),
    _matrix("feed_forward.w2", "hidden_size", "intermediate_size", "mlp.down_proj"),
    _matrix("feed_forward.w3", "intermediate_size", "hidden_size", "mlp.up_proj"),
)
NORM = _norm("norm", "model.norm")
HEAD = _matrix("output", "vocab_size", "hidden_size", "lm_head")
"""Not there where the head is tied: it then multiplies by the embedding."""

_OF_KINDS = (row for kind in KINDS.values() for row in kind.parameters)
_ROWS = {row.name: row for row in (EMBEDDING, *BLOCK, *_OF_KINDS, NORM, HEAD)}


def parameters(model: "ModelSettings | Geometry") -> list[Parameter]:
    """All of a model's, in the order of its `named_parameters()`."""
    norm, *others = BLOCK
    of_block = (norm, *KINDS[model.attention].parameters, *others)
    blocks = [row.in_block(number) for number in range(model.num_layers) for row in of_block]
    return [EMBEDDING, *blocks, NORM, *([] if model.tie_word_embeddings else [HEAD])]


def parameter(name: str) -> Parameter:
    """The row of `layers.3.attention.wq.weight`. Raises KeyError."""
    block = _BLOCK_PREFIX.match(name)
    return _ROWS[name[block.end() :]].in_block(int(block[1])) if block else _ROWS[name]


def hf_name(name: str) -> str | None:
    """`layers.3.attention.wq.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    return parameter(name).hf_name


class Geometry(Struct, frozen=True):
    """The model's sizes, all known."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    attention: AttentionName = "full"

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def key_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    def sizes(self, row: Parameter) -> tuple[int, ...]:
        return tuple(getattr(self, name) for name in row.sizes)

    @property
    def num_parameters(self) -> int:
        """Every parameter once; 1,923,125,248 for the defaults."""
        return sum(math.prod(self.sizes(row)) for row in self._parameters())

    @property
    def num_multiplied(self) -> int:
        """Elements of the matrices that activations are multiplied by: not the norms, and the
        embedding, which is a lookup, only where it is the head as well."""
        matrices = [row for row in self._parameters() if len(row.sizes) == 2]
        return sum(
            math.prod(self.sizes(row))
            for row in matrices
            if row != EMBEDDING or self.tie_word_embeddings
        )

    @property
    def state_bytes(self) -> int:
        """float32 weights, gradients and two AdamW moments."""
        return 16 * self.num_parameters

    def _parameters(self) -> list[Parameter]:
        return parameters(self)


def swiglu_width(hidden_size: int) -> int:
    """The usual one: two thirds of 4 x hidden, rounded up to a multiple of 64. With 4 x hidden
    models would be a third larger than their names say."""
    return -(-hidden_size * 8 // (3 * 64)) * 64


def geometry(model: ModelSettings, tokenizer_vocab_size: int) -> Geometry:
    """The geometry, with what a null stands for: the tokenizer's vocabulary, `swiglu_width`, as
    many key/value heads as heads, hidden_size / num_heads."""
    return Geometry(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size or swiglu_width(model.hidden_size),
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads or model.num_heads,
        head_dim=model.head_dim or model.hidden_size // model.num_heads,
        vocab_size=model.vocab_size or tokenizer_vocab_size,
        tie_word_embeddings=model.tie_word_embeddings,
        attention=model.attention,
    )
