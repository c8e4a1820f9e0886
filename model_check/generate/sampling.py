"""Which token comes next, given its scores; and where a text stops. Pure but for its generator."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model_check.errors import NonFiniteError


@dataclass(frozen=True)
class Sampling:
    temperature: float = 0.8
    """What scores are divided by; 0: always the likeliest token."""
    top_k: int = 0
    """Only so many of the likeliest; 0: all."""
    top_p: float = 1.0
    """Only the likeliest that together have this probability, one at least (nucleus sampling,
    Holtzman et al., arXiv 1904.09751, section 3.1)."""
    seed: int = 0


class Sampler:
    """Draws from a generator of its own: equal seeds give equal texts."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._generator = torch.Generator().manual_seed(sampling.seed)

    def pick(self, scores_V: Tensor) -> int:
        """[V] -> a token. Raises NonFiniteError."""
        if not math.isfinite(scores_V.max()):  # sync
            raise NonFiniteError("the model's scores for the next token are not finite")
        if self._sampling.temperature == 0:
            return int(scores_V.argmax())
        shares_V = self.shares(scores_V)
        return int(torch.multinomial(shares_V, 1, generator=self._generator))

    def shares(self, scores_V: Tensor) -> Tensor:
        """[V], float32 on the CPU: how probable each token is, those that are left out 0."""
        asked = self._sampling
        scores_V = scores_V.float().cpu() / asked.temperature
        if 0 < asked.top_k < len(scores_V):
            least = scores_V.topk(asked.top_k).values[-1]
            scores_V = scores_V.masked_fill(scores_V < least, float("-inf"))
        shares_V = scores_V.softmax(0)
        if asked.top_p < 1:
            ranked, order = shares_V.sort(descending=True)
            before = ranked.cumsum(0) - ranked
            shares_V = shares_V.index_fill(0, order[before >= asked.top_p], 0.0)
        return shares_V


class StopText:
    """Cuts a text that comes in pieces at the first of some texts, wherever pieces end."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.found: str | None = None
        """The stop that came."""

    def feed(self, piece: str) -> str:
        """What can be shown now: not what may be the beginning of a stop."""
        text = self._held + piece
        if found := [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]:
            self._held = ""
            at, self.found = min(found)
            return text[:at]
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def rest(self) -> str:
        """What was held back, once nothing more comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The longest end of `text` that `stop` begins with."""
    lengths: Iterator[int] = (
        length
        for length in range(min(len(text), len(stop) - 1), 0, -1)
        if stop.startswith(text[-length:])
    )
    return next(lengths, 0)
