"""What the settings ask of the token cache, as content hashes and as directories. No writing."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from model_check.data.read.manifest import TOKEN_STORES, hash_of, short
from model_check.data.read.windows import Tail, Windows
from model_check.data.sources.source import Source
from model_check.data.tokenizers.tokenizer import TokenizerChoice

_LONGEST_LABEL = 40
_PACKING = "windows of context_length + 1 tokens that overlap by 1; tail dropped"
_POLICY = "document, end token; no begin token; special tokens in text are text"
_KEY_VERSION = 1
_SELECTION = "documents by the hash of their tokens, equal documents on one side"
_ROOM_FOR_VALIDATION = 1.05
"""A share of the documents is only about that share of the tokens."""


@dataclass(frozen=True)
class Wanted:
    """One view, and the token store under it."""

    root: Path
    source: Source
    tokenizer: TokenizerChoice
    context_length: int
    num_samples: int | None
    """At most so many sequences to train on; None: all that the text has."""
    stride: int | None = None
    """Tokens between the starts of sequences; None: context_length."""
    tail: Tail = "drop"
    fractions: Mapping[str, float] = field(default_factory=dict)
    """Validation splits that are a share of the documents, by name."""
    beside: Mapping[str, "Wanted"] = field(default_factory=dict)
    """Validation splits of texts of their own, by name."""
    validation: tuple[str, ...] = ()
    """The names of all of them, in the order that was asked for."""

    @property
    def windows(self) -> Windows:
        return Windows(self.context_length, self.stride or self.context_length, self.tail)

    @cached_property
    def tokens_key(self) -> dict[str, Any]:
        """All that the tokens depend on. Not the context length, unless a count bounds them."""
        return {
            "version": _KEY_VERSION,
            "source": self.source.identity(),
            "tokenizer": self.tokenizer.identity(),
            "policy": _POLICY,
            "max_tokens": self.max_tokens,
        }

    @cached_property
    def tokens_hash(self) -> str:
        return hash_of(self.tokens_key)

    @cached_property
    def view_key(self) -> dict[str, Any]:
        return {
            "version": _KEY_VERSION,
            "tokens": self.tokens_hash,
            "context_length": self.context_length,
            "num_samples": self.num_samples,
            "packing": _PACKING,
            **self._special_packing(),
        }

    def _special_packing(self) -> dict[str, Any]:
        """What is only in the key where it is asked for."""
        key: dict[str, Any] = {}
        if self.stride is not None and self.stride != self.context_length:
            key["stride"] = self.stride
        if self.tail != "drop":
            key["tail"] = self.tail
        if self.fractions:
            key["selection"] = _SELECTION
            key["fractions"] = [[name, share] for name, share in self.fractions.items()]
        if self.beside:
            key["validation"] = list(self.validation)
            key["beside"] = [[name, hash_of(w.view_key)] for name, w in self.beside.items()]
        return key

    @property
    def max_tokens(self) -> int | None:
        """Enough for `num_samples` sequences, and for what validation takes of the documents."""
        if self.num_samples is None:
            return None
        needed = (self.num_samples - 1) * self.windows.stride + self.context_length + 1
        if not self.fractions:
            return needed
        left = 1 - sum(self.fractions.values())
        return math.ceil(needed / left * _ROOM_FOR_VALIDATION)

    @property
    def store_name(self) -> str:
        return short(self.tokens_hash)

    @property
    def store(self) -> Path:
        return self.root / TOKEN_STORES / self.store_name

    @cached_property
    def view(self) -> Path:
        count = "all" if self.num_samples is None else f"n{self.num_samples}"
        labels = [self.source.label, self.tokenizer.label, f"ctx{self.context_length}", count]
        readable = "__".join(_slug(label) for label in labels)
        return self.root / f"{readable}__{short(hash_of(self.view_key))}"


def _slug(label: str) -> str:
    """Fit for the name of a directory, and without the separator of its parts."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", label).strip("-.")[:_LONGEST_LABEL] or "unnamed"
