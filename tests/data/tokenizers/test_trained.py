"""Tokenizers that the tool makes: the same bytes each time, and no text lost."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from model_check.data.cache.memo import Memo
from model_check.data.sources.text import Repairs
from model_check.data.tokenizers.tiktoken_tokenizer import TiktokenTokenizer
from model_check.data.tokenizers.tokenizer import TextTokenizer
from model_check.data.tokenizers.trained import TrainedTokenizer, TrainedWordPiece
from model_check.errors import ConfigError, DataError
from tests.data.lab import ROOT, WORDS, Lab

needs_tiktoken = pytest.mark.skipif(
    importlib.util.find_spec("tiktoken") is None, reason="tiktoken is not installed"
)

ODD = [
    WORDS,
    "Ünïcödé \u200b\xa0 中文 \U0001f600 • ## ##x a•b",
    "  leading,\ttabs\n\n\nand lines  \n",
    "x" * 1000,
    "".join(chr(code) for code in range(1, 0x250)),
    "<|endoftext|> is text here",
]


class Sample:
    name = label = "sample"
    size_bytes = None
    endless = False

    def identity(self) -> dict[str, str]:
        return {"kind": "sample"}

    def documents(self, repairs: Repairs) -> Iterator[str]:
        yield from [f"{WORDS} {number} ünïcödé" for number in range(50)]


def decoded(tokenizer: TextTokenizer, ids: list[int]) -> str:
    from tokenizers import Tokenizer

    raw = Tokenizer.from_str(tokenizer.to_json())
    return str(raw.decode(ids, skip_special_tokens=False))


@pytest.mark.parametrize("choice", [TrainedTokenizer(1024), TrainedWordPiece(1024)])
def test_decoded_tokens_are_the_text(choice: TrainedTokenizer) -> None:
    tokenizer = choice.load(Sample())
    for text, ids in zip(ODD, tokenizer.encode(ODD), strict=True):
        assert decoded(tokenizer, ids) == text
        assert tokenizer.end_id not in ids


def test_wordpiece_keeps_to_the_vocabulary_that_was_asked_for() -> None:
    tokenizer = TrainedWordPiece(1024).load(Sample())
    assert 512 < tokenizer.vocab_size <= 1024
    assert len(tokenizer.encode([WORDS])[0]) < len(WORDS) / 2


def test_wordpiece_needs_room_for_every_byte() -> None:
    with pytest.raises(ConfigError, match="wordpiece needs 1024 or more"):
        TrainedWordPiece(600)


@pytest.mark.parametrize("kind", ["TrainedTokenizer", "TrainedWordPiece"])
def test_training_twice_gives_the_same_file(kind: str) -> None:
    code = (
        "from tests.data.tokenizers.test_trained import *; import hashlib;"
        f"print(hashlib.sha256({kind}(1100).load(Sample()).to_json().encode()).hexdigest())"
    )
    found = set()
    for threads, seed in (("1", "1"), ("2", "2"), ("3", "3")):
        env = {**os.environ, "PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads}
        found.add(subprocess.check_output([sys.executable, "-c", code], env=env, cwd=ROOT))
    assert len(found) == 1


@needs_tiktoken
def test_a_tiktoken_encoding_gives_its_own_ids(lab: Lab) -> None:
    code = (
        "from tests.data.tokenizers.test_trained import *; import tiktoken;"
        "choice = TiktokenTokenizer('toy', Memo(Path('memo')));"
        "tokenizer = choice.load(Sample());"
        "assert tokenizer.encode(ODD) == [tiktoken.get_encoding('toy').encode_ordinary(t) for t in"
        " ODD]; assert [decoded(tokenizer, i) for i in tokenizer.encode(ODD)] == ODD;"
        "print(tokenizer.end_id, tokenizer.vocab_size, choice.identity()['content'])"
    )
    assert run_with_toy(lab.dir, code).split()[:2] == ["300", "305"]


@needs_tiktoken
def test_an_unknown_encoding_is_named_with_those_that_are(lab: Lab) -> None:
    with pytest.raises(DataError, match=r"tiktoken-nope: no such encoding \(there are .*gpt2"):
        TiktokenTokenizer("nope", Memo(lab.dir)).identity()


TOY = r"""
def toy():
    ranks = {bytes([byte]): byte for byte in range(256)}
    words = [b"th", b"the", b" the", b"in", b"er", b" c", b"ch", b"eck", b"ec", b"  ", b"11", b"xx",
             b"xxxx", b" m", b" mo", b"de", b" mode", b" model", b"ou"]
    known = dict(ranks)
    for word in words:
        for end in range(2, len(word) + 1):
            known.setdefault(word[:end], len(known))
    pattern = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+|"
               r" ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s")
    return {"name": "toy", "pat_str": pattern, "mergeable_ranks": known,
            "special_tokens": {"<|endoftext|>": 300, "<|later|>": 304}}

ENCODING_CONSTRUCTORS = {"toy": toy}
"""


def run_with_toy(directory: Path, code: str) -> str:
    """tiktoken finds encodings in the modules of the namespace package tiktoken_ext."""
    (directory / "tiktoken_ext").mkdir()
    (directory / "tiktoken_ext" / "toy.py").write_text(TOY)
    env = {**os.environ, "PYTHONPATH": f"{directory}{os.pathsep}{ROOT}"}
    return subprocess.check_output([sys.executable, "-c", code], env=env, text=True, cwd=directory)
