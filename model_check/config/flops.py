"""Floating point operations of the model's own arithmetic.

They count the matrix products of forward and backward pass, 6 a parameter and token (Kaplan et al.
2020, section 2.1), without the embedding, which is a lookup, and the two products of attention.
Work that is done twice (checkpointing) counts once. There are two conventions, always named:

- full: attention as if every token saw every other, 12 L H D T a token (Chowdhery et al. 2022,
  PaLM, appendix B); what most published figures use. Of local and Infini-attention T is a segment.
- causal: half of that; what a causal kernel has to do.
"""

from msgspec import Struct

from model_check.config.attention import KINDS
from model_check.config.derived import attention_span
from model_check.config.schema import Settings
from model_check.config.shape import Geometry


class FlopsPerToken(Struct, frozen=True):
    """Of one training step's forward and backward pass."""

    full: float
    causal: float


def flops_per_token(settings: Settings, shape: Geometry) -> FlopsPerToken:
    """9.997e9 and 9.192e9 for the default geometry and context."""
    products = 6 * shape.num_multiplied + KINDS[shape.attention].flops(settings, shape)
    span = attention_span(settings)
    attention = 12 * shape.num_layers * shape.query_width * span
    return FlopsPerToken(full=products + attention, causal=products + attention / 2)
