"""What all tokenizers have in common, and those that a tokenizer.json gives."""

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from model_check.data.cache.memo import Memo
from model_check.data.read.manifest import LONGEST, TOKENIZER, hash_of
from model_check.data.sources.declared import declared_in
from model_check.data.sources.source import Source
from model_check.errors import DataError, ModelCheckError
from model_check.utils.files import read_whole
from model_check.utils.first_bytes import LONGEST_HEAD, what_begins
from model_check.utils.words import first_line

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
"""What ends a document in known tokenizers. Where nothing is declared, the first that is a special
token is used, so that of pretraining comes before that of a chat."""
BEGIN_TOKENS = (
    "<|begin_of_text|>",
    "<｜begin▁of▁sentence｜>",
    "<|startoftext|>",
    "<s>",
    "<bos>",
    "[CLS]",
)
"""What begins a document in known tokenizers that put nothing before a text by themselves."""

# Letters, numbers, indentation, scripts, an emoji, line ends: on these tokenizers disagree.
PROBE = (
    "The quick brown fox can't jump over 12,345.678 lazy dogs; don't ask why.\n\n"
    "\tdef f(x):\n        return x ** 2  # comment\n    \n\n\n"
    "Ünïcödé naïve façade, Ελληνικά, Русский, עברית, العربية, हिन्दी, 中文字符, 日本語かな, 한국어 "
    "\U0001f600 e\u0301 \u200b \xa0 ﬁ Ⅷ <|endoftext|> </s> [SEP] aaaaaaaa !!!???...\n"
)


class TextTokenizer:
    """Texts to ids, and the end token of documents. Text that spells a special token is text."""

    words: frozenset[str] | None = None
    """All that its texts may be made of; None: it takes every text."""

    def __init__(self, raw: "Tokenizer", name: str, end_token: str | None = None) -> None:
        """`end_token`: what ends a document; None: a known name. Raises DataError when the
        vocabulary has no such token."""
        self.name = name
        vocabulary = raw.get_vocab(with_added_tokens=True)
        end_token = end_token or _known_end(raw, name)
        if end_token not in vocabulary:
            raise DataError(
                f"{name}: {end_token!r}, which is to end each document, is no token of its "
                "vocabulary: data.document_end=TOKEN names one that is; where transformers adds it "
                "(added_tokens_decoder, added_tokens.json), save_pretrained writes it into the "
                "tokenizer.json"
            )
        self.end_token: str = end_token
        self.end_id: int = vocabulary[end_token]
        self.vocab_size: int = max(vocabulary.values()) + 1
        own = Counter(raw.get_vocab(with_added_tokens=False).values())
        if twice := [number for number, times in own.items() if times > 1]:
            raise DataError(f"{name}: two tokens of its vocabulary have the id {twice[0]}")
        if self.vocab_size > _MOST_IDS:
            raise DataError(
                f"{name}: a token has the id {self.vocab_size - 1:,}: a model would have a row for "
                "each id up to it, and the largest vocabularies have 300,000"
            )
        self.num_of_text: int = raw.get_vocab_size(with_added_tokens=False)
        """Without the tokens that were added later, which a model need not know."""
        self._raw = _for_text(raw, end_token, name)
        self.words = _words(self._raw)
        self.begin_token = _begin_token(
            self._raw, end_token, next(iter(self.words or ("a",))), name
        )
        """None: it has none."""
        self.begin_id = vocabulary.get(self.begin_token or "")

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without any special token. None may have an `unknown_in`."""
        return self._ids(self._raw, texts)

    def encode_rendered(self, texts: Sequence[str]) -> list[list[int]]:
        """As `encode`; but here the spelling of a special token is that token, as a chat template
        writes it."""
        return self._ids(self._with_special, texts)

    def _ids(self, raw: "Tokenizer", texts: Sequence[str]) -> list[list[int]]:
        """Raises DataError."""
        with library_failures(f"{self.name}: fails on a text"):
            batch = raw.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in batch]

    def special_ids(self, text: str) -> list[int]:
        """The special tokens that a rendered text spells, in order."""
        return [number for number in self.encode_rendered([text])[0] if number in self._special]

    def unknown_in(self, texts: Iterable[str]) -> str | None:
        """The first word of them that is no token; None: there is none."""
        words = self.words
        if words is None:
            return None
        split = self._raw.pre_tokenizer.pre_tokenize_str
        found = (word for text in texts for word, _ in split(text) if word not in words)
        return next(found, None)

    def special_in(self, texts: Sequence[str]) -> str | None:
        """The first special token that one of them would spell in a rendered text, in whatever
        form the tokenizer's normalizer makes one; None: none would."""
        ids = chain.from_iterable(self.encode_rendered(texts))
        return next((self._special[number] for number in ids if number in self._special), None)

    def spelling(self, token: int) -> str:
        return self._raw.id_to_token(token) or str(token)

    def ends(self, text: str) -> bool:
        """Whether a rendered text ends with a special token, white space aside."""
        return text.rstrip().endswith(tuple(self._special.values()))

    def decoder(self) -> Callable[[int], str]:
        """Takes the ids of one text in turn, and gives what each adds: nothing until a character is
        whole, and nothing for a special token."""
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=True)
        return lambda token: stream.step(self._raw, token) or ""

    def rendered(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens spelled out: what `encode_rendered` takes."""
        return self._raw.decode(ids, skip_special_tokens=False)

    def to_json(self) -> str:
        return self._raw.to_str(pretty=False)

    @cached_property
    def _special(self) -> dict[int, str]:
        added = self._raw.get_added_tokens_decoder().items()
        return {number: token.content for number, token in added if token.special}

    @cached_property
    def _with_special(self) -> "Tokenizer":
        from tokenizers import Tokenizer

        # It does not keep encode_special_tokens.
        return Tokenizer.from_str(self.to_json())


class TokenizerChoice(Protocol):
    """A tokenizer that is chosen. It is loaded only to build: not where a cache exists."""

    name: str
    label: str
    """Its part of the cache directory's name."""

    def identity(self) -> dict[str, Any]:
        """Its part of the cache key. Raises DataError."""

    def load(self, source: Source) -> TextTokenizer:
        """The tokenizer for `source`. Raises DataError."""


class GivenTokenizer:
    """A tokenizer.json that exists."""

    def __init__(self, path: Path, name: str, memo: Memo, end_token: str | None = None) -> None:
        """`end_token`: data.document_end; None: what the files beside it declare."""
        self._path = path / TOKENIZER if path.is_dir() else path
        self._given_end = end_token
        self.directory = self._path.parent
        """What belongs to it lies there, too."""
        self.name = name
        self.label = name.rpartition("/")[2].removesuffix(".json")
        self._memo = memo

    def identity(self) -> dict[str, Any]:
        """Its content, and the ids that the installed library gives for a probe: a version that
        tokenizes differently makes a new key, one that does not keeps it."""
        content, end = self._content_hash, self._end_token
        ended = {} if end is None else {"end_token": end}
        return {"kind": "tokenizer.json", "content": content, "probe": self._probe(content)} | ended

    def load(self, source: Source) -> TextTokenizer:
        return self._loaded()

    @property
    def is_end_guessed(self) -> bool:
        """Whether nothing names what ends a document, so that a known name counts. Raises
        DataError."""
        return self._end_token is None

    def _loaded(self) -> TextTokenizer:
        return TextTokenizer(parse(self._document, self._path), self.name, self._end_token)

    @cached_property
    def _end_token(self) -> str | None:
        return self._given_end or self._declared_end()

    def _declared_end(self) -> str | None:
        """Raises DataError."""
        return declared_in(self.directory).end

    @cached_property
    def _content_hash(self) -> str:
        with _read_errors(self._path):
            return self._memo.of_file("tokenizer", self._path, lambda: hash_of(self._document))

    @cached_property
    def _document(self) -> dict[str, Any]:
        with _read_errors(self._path):
            return document_in(self._content(), self._path)

    def _content(self) -> bytes:
        """Raises OSError, DataError."""
        return read_whole(self._path, LONGEST)

    def _probe(self, content: str) -> str:
        import tokenizers

        def compute() -> str:
            tokenizer = self._loaded()
            text = PROBE if tokenizer.words is None else " ".join(sorted(tokenizer.words))
            return hash_of(tokenizer.encode([text])[0])

        end = "" if self._end_token is None else f" {hash_of(self._end_token)}"
        return self._memo.remember(f"probe {content}{end} {tokenizers.__version__}", compute)


def use_threads(count: int | None) -> None:
    """How many threads tokenize in this process; None: one a core. To be called before the first
    use."""
    if count is not None:
        os.environ["RAYON_NUM_THREADS"] = str(count)
    # Set explicitly: without it a later fork prints a warning and turns the threads off.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


def _for_text(raw: "Tokenizer", end_token: str, name: str) -> "Tokenizer":
    """`raw` for plain text: the spelling of a special token in a text does not become that token.
    The end token is special, even where the file does not say so. Raises DataError."""
    document = json.loads(raw.to_str())
    for added in document.get("added_tokens", []):
        if added["content"] == end_token:
            added["special"] = True
    tokenizer = parse(document, name)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    return tokenizer


def _known_end(raw: "Tokenizer", name: str) -> str:
    """Special, or a text could spell it. Raises DataError."""
    special = {t.content for t in raw.get_added_tokens_decoder().values() if t.special}
    if (found := next((token for token in END_TOKENS if token in special), None)) is None:
        raise DataError(
            f"{name}: no token that ends a document: no eos_token is declared beside it, and none "
            f"of {', '.join(END_TOKENS)} is a special token of its; data.document_end=TOKEN names "
            "one"
        )
    return found


def _words(raw: "Tokenizer") -> frozenset[str] | None:
    """Of a vocabulary of words without a token for all others, as that of music."""
    model = json.loads(raw.to_str())
    if model["model"]["type"] != "WordLevel" or model["normalizer"] or not model["pre_tokenizer"]:
        return None
    vocabulary = model["model"]["vocab"]
    return None if model["model"]["unk_token"] in vocabulary else frozenset(vocabulary)


def _begin_token(raw: "Tokenizer", end_token: str, word: str, name: str) -> str | None:
    """What `raw` itself puts before a text of `word`, else a known name. Special, so that no text
    forges it; GPT-2's end token is no begin token, although its template could name it."""
    added = raw.get_added_tokens_decoder().values()
    special = {token.content for token in added if token.special} - {end_token}
    with library_failures(f"{name}: fails on a text"):
        text = raw.encode(word)
    own = text.tokens[:1] if text.special_tokens_mask[:1] == [1] else []
    return next((token for token in (*own, *BEGIN_TOKENS) if token in special), None)


_MOST_IDS = 1 << 24
_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")
"""Of a pair that spells one character, or a lone surrogate, which is none."""


def document_in(content: bytes, path: Path) -> dict[str, Any]:
    """The tokenizer.json at `path` without padding and truncation, which each use sets for itself.
    Raises DataError, for one whose ids depend on chance, too."""
    try:
        text = content.decode("utf-8-sig")
        document = json.loads(text)
        if _HALF_CHARACTER.search(text):
            json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise DataError(f"{path}: {half} in it is half a character, which no text holds") from error
    except (ValueError, RecursionError) as error:
        what = what_begins(content[:LONGEST_HEAD])
        raise DataError(f"{path}: {f'it is {what}' if what else f'not JSON: {error}'}") from error
    if not isinstance(document, dict) or "model" not in document:
        raise DataError(f"{path}: not a tokenizer.json: it has no model")
    if isinstance(model := document["model"], dict) and (dropout := model.get("dropout")):
        raise DataError(
            f"{path}: its BPE has a dropout of {dropout}, so that a text gives other tokens each "
            "time; set model.dropout to null there, or take another tokenizer"
        )
    return {**document, "padding": None, "truncation": None}


def parse(document: dict[str, Any], path: Path | str) -> "Tokenizer":
    """Raises DataError."""
    from tokenizers import Tokenizer

    with library_failures(f"{path}: not a tokenizer.json that `tokenizers` reads"):
        return Tokenizer.from_str(json.dumps(document))


@contextmanager
def library_failures(what: str) -> Iterator[None]:
    """Those of a tokenizing library become a DataError. They raise nothing more precise than
    Exception, and where they fail by themselves (Rust panics), a BaseException."""
    try:
        yield
    except ModelCheckError:
        raise
    except BaseException as error:
        if is_of_library(error):
            raise DataError(f"{what}: {first_line(error)}") from error
        raise


def is_of_library(error: BaseException) -> bool:
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def byte_letters() -> list[str]:
    """The letter that ByteLevel has for each byte: printable ones for themselves, the others from
    U+0100 on."""
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printed else next(others)) for byte in range(256)]


@contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be read as a tokenizer: {error.strerror}") from error
