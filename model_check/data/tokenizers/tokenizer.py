"""Tokenizers: taken from a tokenizer.json, or trained on the data. Their part of the cache key."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from model_check.data.cache.memo import Memo, settled, stat_signature
from model_check.data.read.manifest import TOKENIZER, hash_of
from model_check.data.sources.source import Source
from model_check.data.sources.text import Repairs
from model_check.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
END_TOKENS = (
    END_OF_TEXT,
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",
    "</s>",
    "<eos>",
    "<|im_end|>",
    "<|eot_id|>",
    "[SEP]",
)
"""What ends a document in the tokenizers of this world; the first that a vocabulary has is used:
the pretraining one comes before a chat's."""

TRAINING_CHARACTERS = 16 << 20
"""A tokenizer is trained on the first documents, up to so many characters: bounded memory."""
_RECIPE = 3
"""Counts changes of what is trained on, and how, that change the result."""
_ENDLESS_WORD = re.compile(r"\S{1000}(?=\S)")

# Letters, numbers, indentation, scripts, an emoji, line ends: what tokenizers disagree about.
PROBE = (
    "The quick brown fox can't jump over 12,345.678 lazy dogs; don't ask why.\n\n"
    "\tdef f(x):\n        return x ** 2  # comment\n    \n\n\n"
    "Ünïcödé naïve façade, Ελληνικά, Русский, עברית, العربية, हिन्दी, 中文字符, 日本語かな, 한국어 "
    "\U0001f600 e\u0301 \u200b \xa0 ﬁ Ⅷ <|endoftext|> </s> [SEP] aaaaaaaa !!!???...\n"
)


class TextTokenizer:
    """Documents to ids, the end token after each; text that spells a special token is text."""

    def __init__(self, raw: "Tokenizer", name: str) -> None:
        """Raises DataError when the vocabulary has no token that ends a document."""
        self.name = name
        vocabulary = raw.get_vocab(with_added_tokens=True)
        end_token = next((token for token in END_TOKENS if token in vocabulary), None)
        if end_token is None:
            raise DataError(
                f"{name}: no token that ends a document (looked for {', '.join(END_TOKENS)})"
            )
        self.end_token: str = end_token
        self.end_id: int = vocabulary[end_token]
        self.vocab_size: int = max(vocabulary.values()) + 1
        self._raw = _for_text(raw, end_token)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without any special token."""
        batch = self._raw.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in batch]

    def to_json(self) -> str:
        return self._raw.to_str(pretty=False)


class TokenizerChoice(Protocol):
    """A tokenizer that is decided and, on a cache hit, never loaded."""

    @property
    def name(self) -> str: ...

    @property
    def label(self) -> str:
        """Its part of the cache directory's name."""

    def identity(self) -> dict[str, Any]:
        """Its part of the cache key. Raises DataError."""

    def load(self, source: Source) -> TextTokenizer:
        """Ready to encode `source`. Raises DataError."""


class TrainedTokenizer:
    """A byte-level BPE trained on the source itself: what it is follows from the source's identity,
    so its key names the recipe alone."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.name = self.label = f"bpe{vocab_size}"

    def identity(self) -> dict[str, Any]:
        return {
            "kind": "bpe",
            "vocab_size": self._vocab_size,
            "training_characters": TRAINING_CHARACTERS,
            "recipe": _RECIPE,
        }

    def load(self, source: Source) -> TextTokenizer:
        sample = first_characters(source.documents(Repairs()), TRAINING_CHARACTERS)
        return TextTokenizer(_train(sample, self._vocab_size), self.name)


class GivenTokenizer:
    """A tokenizer.json that exists."""

    def __init__(self, path: Path, name: str, memo: Memo) -> None:
        self._path = path / TOKENIZER if path.is_dir() else path
        self.name = name
        self.label = name.rpartition("/")[2].removesuffix(".json")
        self._memo = memo

    def identity(self) -> dict[str, Any]:
        """Its content, and how the installed library acts on it: a library that starts to tokenize
        differently makes a new key, one that does not keeps it."""
        content = self._content_hash
        return {"kind": "tokenizer.json", "content": content, "probe": self._probe(content)}

    def load(self, source: Source) -> TextTokenizer:
        return TextTokenizer(parse(self._document, self._path), self.name)

    @cached_property
    def _content_hash(self) -> str:
        try:
            before = stat_signature(self._path)
            if known := self._memo.get(f"tokenizer {before}"):
                return known
            content = hash_of(self._document)
            if settled(self._path) and stat_signature(self._path) == before:
                self._memo.put(f"tokenizer {before}", content)
        except OSError as error:
            raise _unreadable(self._path, error) from error
        return content

    @cached_property
    def _document(self) -> dict[str, Any]:
        try:
            return document_in(self._path.read_bytes(), self._path)
        except OSError as error:
            raise _unreadable(self._path, error) from error

    def _probe(self, content: str) -> str:
        import tokenizers

        signature = f"probe {content} {tokenizers.__version__}"
        if known := self._memo.get(signature):
            return known
        tokenizer = TextTokenizer(parse(self._document, self._path), self.name)
        probe = hash_of(tokenizer.encode([PROBE])[0])
        self._memo.put(signature, probe)
        return probe


def use_threads(count: int | None) -> None:
    """How many threads tokenize in this process; None: one a core. Before the first use."""
    if count is not None:
        os.environ["RAYON_NUM_THREADS"] = str(count)
    # Said explicitly, since a later fork would else print a warning and turn threads off.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


def _train(texts: Iterable[str], vocab_size: int) -> "Tokenizer":
    """Deterministic: the same texts give the same tokenizer, byte for byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((without_endless_words(text) for text in texts), trainer)
    return tokenizer


def without_endless_words(text: str) -> str:
    """Training takes time quadratic in the longest word (240,000 characters without a blank: 22 s),
    and one such word is no sample of a language. Encoding is not touched."""
    return _ENDLESS_WORD.sub(r"\g<0> ", text)


def _for_text(raw: "Tokenizer", end_token: str) -> "Tokenizer":
    """`raw`, reading plain text: a special token's spelling in it does not become that token, the
    end token is special even where the file forgot to say so."""
    from tokenizers import Tokenizer

    document = json.loads(raw.to_str())
    for added in document.get("added_tokens", []):
        if added["content"] == end_token:
            added["special"] = True
    tokenizer = Tokenizer.from_str(json.dumps(document))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    return tokenizer


def document_in(content: bytes, path: Path) -> dict[str, Any]:
    """The file at `path` without what a caller sets for a moment: padding and truncation. Raises
    DataError."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON: {error}") from error
    if not isinstance(document, dict) or "model" not in document:
        raise DataError(f"{path}: not a tokenizer.json: it has no model")
    return {**document, "padding": None, "truncation": None}


def parse(document: dict[str, Any], path: Path) -> "Tokenizer":
    """Raises DataError."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(json.dumps(document))
    except Exception as error:  # the package raises nothing more precise
        raise DataError(f"{path}: not a tokenizer.json that `tokenizers` reads: {error}") from error


def first_characters(documents: Iterable[str], limit: int) -> Iterator[str]:
    """The first documents, the last of them cut: one alone may be longer than all that memory
    takes."""
    left = limit
    for text in documents:
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path}: cannot be read as a tokenizer: {error.strerror}")
