"""What the settings ask of the token cache, as content hashes and as directories. No writing."""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from model_check.data.manifest import TOKEN_STORES, hash_of, short
from model_check.data.sources import Source
from model_check.data.tokenizer import TokenizerChoice

_LONGEST_LABEL = 40
_PACKING = "windows of context_length + 1 tokens that overlap by 1; tail dropped"
_POLICY = "document, end token; no begin token; special tokens in text are text"
_KEY_VERSION = 1


@dataclass(frozen=True)
class Wanted:
    """One view, and the token store under it."""

    root: Path
    source: Source
    tokenizer: TokenizerChoice
    context_length: int
    num_samples: int | None
    """At most so many sequences; None: all that the text has."""

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
        }

    @property
    def max_tokens(self) -> int | None:
        return None if self.num_samples is None else self.num_samples * self.context_length + 1

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
