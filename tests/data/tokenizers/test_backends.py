"""Faster libraries give the same ids or are not used."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from model_check.data.sources.text import Repairs
from model_check.data.tokenizers import backends
from model_check.data.tokenizers.backends import (
    Backend,
    CheckedEncoder,
    Encode,
    choose_backend,
    plain,
)
from model_check.data.tokenizers.patterns import WINDOW
from model_check.data.tokenizers.tokenizer import TextTokenizer
from model_check.data.tokenizers.trained import TrainedWordPiece
from model_check.errors import DataError
from tests.data.lab import WORDS, Lab, write_tokenizer
from tests.data.odd_text import PATTERNS, odd_texts, pre_tokenizer

ODD = [
    "before <|endoftext|> after </s>",
    "CRLF\r\n tabs\t\t and   runs \n\n\n of space  ",
    "\ufffd lone, \U0001f469\u200d\U0001f467, e\u0301, ½ ١٢٣, 12345678901234567890",
    "x" * 3000,
    "a\nb\r\n" * 50,
]
BACKENDS = ["tokenizers", "gigatoken", "tiktoken"]


def byte_level(path: Path) -> TextTokenizer:
    return TextTokenizer(Tokenizer.from_file(str(write_tokenizer(path, vocab_size=400))), "tiny")


def wordpiece() -> TextTokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=["[UNK]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator([WORDS * 5], trainer)
    return TextTokenizer(tokenizer, "pieces")


def shaped(
    pre: pre_tokenizers.PreTokenizer | None = None,
    pattern: str | None = None,
    normalizer: normalizers.Normalizer | None = None,
    dropout: float | None = None,
    added: str | None = None,
) -> TextTokenizer:
    """A byte-level BPE without merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*letters, "</s>"])}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[], dropout=dropout))
    pre = pre_tokenizer(pattern) if pattern else pre
    if pre is not None:
        raw.pre_tokenizer = pre
    if normalizer is not None:
        raw.normalizer = normalizer
    raw.add_special_tokens(["</s>"])
    if added is not None:
        raw.add_tokens([added])
    return TextTokenizer(raw, "shaped")


@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_gives_the_same_ids_and_they_are_the_text(tmp_path: Path, name: str) -> None:
    if name != "tokenizers":
        pytest.importorskip(name)
    tokenizer = byte_level(tmp_path / "t.json")
    backend = choose_backend(name, tokenizer)  # type: ignore[arg-type]
    assert backend.name == name
    each = CheckedEncoder(backend, tokenizer).encode(ODD)
    decoder = Tokenizer.from_str(tokenizer.to_json())
    from tokenizers.decoders import ByteLevel

    decoder.decoder = ByteLevel()
    for text, ids, expected in zip(ODD, each, plain(tokenizer)(ODD), strict=True):
        assert np.array_equal(ids, expected)
        assert decoder.decode(ids.tolist(), skip_special_tokens=False) == text


def test_what_is_not_installed_is_said_and_tokenizers_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    for name in ("gigatoken", "tiktoken"):
        monkeypatch.setitem(sys.modules, name, None)
    tokenizer = byte_level(tmp_path / "t.json")
    backend = choose_backend("auto", tokenizer)
    assert backend.name == "tokenizers"
    assert "gigatoken is not installed; tiktoken is not installed" in backend.why
    with pytest.raises(DataError, match=r"tokenizer_backend = 'gigatoken': is not installed"):
        choose_backend("gigatoken", tokenizer)


def test_a_vocabulary_of_word_pieces_is_for_tokenizers_alone() -> None:
    assert choose_backend("auto", wordpiece()).name == "tokenizers"


def test_our_own_word_pieces_are_for_tokenizers_alone_also_in_windows() -> None:
    tokenizer = TrainedWordPiece(1100).load(OddText())
    backend = choose_backend("auto", tokenizer)
    assert backend.name == "tokenizers"
    texts = [*odd_texts(3, 10), "long word " + "x" * 1000, WORDS * (WINDOW // len(WORDS) + 2)]
    found = CheckedEncoder(backend, tokenizer).encode(texts)
    assert [ids.tolist() for ids in found] == tokenizer.encode(texts)


@pytest.mark.parametrize("name", PATTERNS)
def test_tokenizers_gets_a_long_text_in_windows(tmp_path: Path, name: str) -> None:
    """125 bytes of memory a character is what it takes."""
    shape = shaped(pattern=PATTERNS[name])
    slow = Listening(Tokenizer.from_str(shape.to_json()), "slow")
    text = WORDS * (2 * WINDOW // len(WORDS) + 2)
    (ids,) = choose_backend("tokenizers", slow).encode([text])
    assert max(map(len, slow.asked)) < 2 * WINDOW
    assert [ids.tolist()] == shape.encode([text])


class OddText:
    name = label = "odd"
    size_bytes = None
    endless = False

    def identity(self) -> dict[str, Any]:
        return {}

    def documents(self, repairs: Repairs) -> Iterator[str]:
        yield from [" ".join(ODD), *odd_texts(99, 5)]


STRANGE = {
    "a space before the text": {"pre": pre_tokenizers.ByteLevel(add_prefix_space=True)},
    "no pre-tokenizer": {"pre": None},
    "a normalizer": {"normalizer": normalizers.NFC()},
    "dropout": {"dropout": 0.1},
    "an added token": {"added": "user"},
}


@pytest.mark.parametrize("what", STRANGE)
def test_a_tokenizer_of_another_shape_is_not_for_tiktoken(what: str) -> None:
    pytest.importorskip("tiktoken")
    tokenizer = shaped(**STRANGE[what])
    with pytest.raises(DataError, match="tokenizer_backend = 'tiktoken'"):
        choose_backend("tiktoken", tokenizer)
    if what != "dropout":
        same = zip(
            choose_backend("auto", tokenizer).encode(ODD), tokenizer.encode(ODD), strict=True
        )
        assert all(ids.tolist() == expected for ids, expected in same)


@pytest.mark.parametrize("name", PATTERNS)
def test_tiktoken_gives_the_ids_of_odd_texts(name: str) -> None:
    tokenizer = trained(PATTERNS[name])
    texts = ["", *odd_texts(7, 10), "before <|endoftext|> after"]
    found = choose_backend("tiktoken", tokenizer).encode(texts)
    assert [ids.tolist() for ids in found] == tokenizer.encode(texts)
    assert {ids.dtype for ids in found} == {np.dtype(np.uint32)}


def trained(pattern: str) -> TextTokenizer:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizer(pattern)
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    raw.train_from_iterator(OddText().documents(Repairs()), trainer)
    return TextTokenizer(raw, "odd")


class Listening(TextTokenizer):
    """Remembers the texts that it was given."""

    def __init__(self, raw: Tokenizer, name: str) -> None:
        super().__init__(raw, name)
        self.asked: list[str] = []

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        self.asked += texts
        return super().encode(texts)


def test_of_a_long_document_only_the_beginning_is_compared(tmp_path: Path) -> None:
    """125 bytes of memory a character is what `tokenizers` takes."""
    path = tmp_path / "tokenizer.json"
    fast = plain(byte_level(path))
    slow = Listening(Tokenizer.from_file(str(path)), "slow")
    encode = CheckedEncoder(Backend("gigatoken", "", fast), slow).encode
    assert len(encode(["short", WORDS * 3000])) == 2
    assert max(map(len, slow.asked)) == (1 << 16) - len("short")


class PanicException(BaseException):
    """As Rust's: tiktoken has one for a byte that a vocabulary lacks, and no probe text has."""


@pytest.mark.parametrize("failure", [PanicException, ValueError])
def test_a_library_that_fails_on_a_text_is_one_message(
    tmp_path: Path, failure: type[BaseException]
) -> None:
    tokenizer = TextTokenizer(Tokenizer.from_file(str(write_tokenizer(tmp_path / "t.json"))), "t")

    def fails(texts: Sequence[str]) -> list[np.ndarray]:  # type: ignore[type-arg]
        raise failure("no entry found for key")

    encode = CheckedEncoder(Backend("tiktoken", "", fails), tokenizer).encode
    with pytest.raises(
        DataError, match=r"tiktoken fails on a text \(set data.tokenizer_back.*: no"
    ):
        encode(["a text"])


def test_a_backend_that_disagrees_about_the_text_stops_the_build(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path / "t.json")

    def wrong(texts: Sequence[str]) -> list[np.ndarray]:  # type: ignore[type-arg]
        return [np.zeros(3, np.uint32) for _ in texts]

    encode = CheckedEncoder(Backend("gigatoken", "", wrong), tokenizer).encode
    with pytest.raises(
        DataError, match=r"gigatoken gives other ids .*tokenizer_backend=tokenizers"
    ):
        encode([WORDS])


def test_a_backend_that_disagrees_late_in_the_text_stops_the_build(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gigatoken")

    def wrong_about_zebras(tokenizer: TextTokenizer) -> Encode:
        right = plain(tokenizer)
        return lambda texts: [
            ids["zebra" in t :] for t, ids in zip(texts, right(texts), strict=True)
        ]

    monkeypatch.setitem(backends._FASTER, "gigatoken", wrong_about_zebras)
    documents = [WORDS * 20] * 1000 + ["a zebra " * 50] * 3000
    text = lab.text("".join(json.dumps({"text": each}) + "\n" for each in documents), "d.jsonl")
    with pytest.raises(DataError, match=r"gigatoken gives other ids .* begins .*zebra"):
        lab.prepare(text, "data.tokenizer_backend=gigatoken")


def test_of_each_later_batch_a_little_is_checked_at_a_place_that_follows_from_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tokenizer.json"
    fast = plain(byte_level(path))
    asked = []
    for _ in range(2):
        slow = Listening(Tokenizer.from_file(str(path)), "slow")
        encode = CheckedEncoder(Backend("gigatoken", "", fast), slow).encode
        for size in (3000, 3001, 3002):
            encode([WORDS * size], is_first=False)
            encode([f"{number} {WORDS}" for number in range(size)], is_first=False)
        asked.append(slow.asked)
    assert asked[0] == asked[1]
    assert sum(map(len, asked[0])) == 6 * 256
    assert len(set(asked[0])) > 6


def test_the_key_does_not_know_the_backend(lab: Lab) -> None:
    pytest.importorskip("gigatoken")
    text = lab.text(WORDS * 50)
    first = lab.prepare(text, "data.tokenizer_backend=tokenizers")
    assert lab.prepare(text, "data.tokenizer_backend=gigatoken").hit
    (store,) = lab.stores()
    manifest = json.loads((store / "manifest.json").read_text())
    assert "gigatoken" not in json.dumps(manifest["key"])
    assert first.path.is_dir()


def test_a_backend_that_is_not_one_is_refused_with_the_choices(lab: Lab) -> None:
    from model_check.errors import ConfigError

    with pytest.raises(ConfigError, match="tokenizer_backend"):
        lab.prepare(lab.text(), "data.tokenizer_backend=fast")
