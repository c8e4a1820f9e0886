"""How a stream of tokens is cut into sequences, and how examples lie in them. Pure, no numpy.

N tokens of a split, T tokens in a sequence, S the stride. Sequence i consists of the tokens
[i*S, i*S + T + 1): T inputs, T labels. With S = T neighbours overlap by one token, so each token
except the very first is a label exactly once.
"""

from dataclasses import dataclass
from typing import Literal

from model_check.config.schema import Truncation

Tail = Literal["drop", "pad"]
Packing = Literal["one", "several"]
"""Examples in a sequence."""


@dataclass(frozen=True)
class Layout:
    """How examples lie in sequences."""

    context_length: int
    packing: Packing
    truncation: Truncation

    @property
    def room(self) -> int:
        """Tokens of a sequence: its last one is only a label."""
        return self.context_length + 1


@dataclass(frozen=True)
class Windows:
    context_length: int
    stride: int
    tail: Tail

    def num_sequences(self, num_tokens: int) -> int:
        """All whole windows; with `pad` one more for the labels behind the last whole one."""
        labels = num_tokens - 1
        whole = max(0, (labels - self.context_length) // self.stride + 1)
        return whole + (self.tail == "pad" and labels > self._num_labels(whole))

    def num_used(self, num_sequences: int, num_tokens: int) -> int:
        """Tokens that the first `num_sequences` windows hold."""
        if num_sequences == 0:
            return 0
        return min(num_tokens, self._num_labels(num_sequences) + 1)

    def _num_labels(self, num_sequences: int) -> int:
        if num_sequences == 0:
            return 0
        return (num_sequences - 1) * self.stride + self.context_length
