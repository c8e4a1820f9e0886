"""Texts that spell their tokens, and caches of them in shards of seven tokens."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from model_check.data.build.build import build_tokens
from model_check.data.build.request import CacheRequest
from model_check.data.build.splits import view_of
from model_check.data.read.manifest import MANIFEST, to_bytes
from model_check.data.read.token_cache import TokenCache
from model_check.data.read.windows import Tail
from model_check.data.sources.source import Source
from model_check.data.sources.text import Repairs
from model_check.data.tokenizers.tokenizer import TextTokenizer
from model_check.utils.held import hold

END_ID = 999


class NumberText:
    """Documents that spell their tokens: `0 1 2`."""

    name = label = "numbers"
    size_bytes = None
    endless = False

    def __init__(self, *documents: range) -> None:
        self._documents = documents

    def identity(self) -> dict[str, Any]:
        return {"kind": "numbers"}

    def documents(self, repairs: Repairs) -> Iterator[str]:
        for numbers in self._documents:
            yield " ".join(map(str, numbers))


class NumberTokenizer(TextTokenizer):
    def __init__(self, vocab_size: int = 1000) -> None:
        self.name, self.end_token = "numbers", "end"
        self.end_id, self.vocab_size = END_ID, vocab_size

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [[int(word) for word in text.split()] for text in texts]

    def to_json(self) -> str:
        return "{}"


class NumberChoice:
    name = label = "numbers"

    def identity(self) -> dict[str, Any]:
        return {"kind": "numbers"}

    def load(self, source: Source) -> TextTokenizer:
        return NumberTokenizer()


def number_cache(
    root: Path,
    source: NumberText,
    context_length: int,
    max_tokens: int | None = None,
    *,
    stride: int | None = None,
    tail: Tail = "drop",
    fractions: Mapping[str, float] | None = None,
) -> TokenCache:
    """A cache as `make` lays it out."""
    wanted = CacheRequest(
        root=root,
        source=source,
        tokenizer=NumberChoice(),
        context_length=context_length,
        num_samples=None,
        stride=stride,
        tail=tail,
        fractions=fractions or {},
        validation=tuple(fractions or ()),
    )
    wanted.store.mkdir(parents=True)
    wanted.view.mkdir()
    with hold(wanted.store) as store, hold(wanted.view) as directory:
        tokens = build_tokens(
            store,
            source,
            NumberTokenizer(),
            wanted.tokens_key,
            max_tokens,
            lambda line: None,
            shard_tokens=7,
        )
        view = view_of(wanted, tokens, directory)
    (wanted.view / MANIFEST).write_bytes(to_bytes(view))
    return TokenCache.open(wanted.view, "full")
