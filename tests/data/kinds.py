"""Tokenizers of every kind that can be made here, trained on the text of the standard library."""

import argparse
import inspect
import itertools
import json
import pydoc_data.topics
import subprocess
import typing
from collections.abc import Callable
from functools import cache

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from model_check.data.tokenizers.tiktoken_tokenizer import converted
from model_check.data.tokenizers.tokenizer import END_OF_TEXT, TextTokenizer, byte_letters

# As published in the tokenizer.json of GPT-2's and Llama 3's followers, Qwen 2, and tiktoken.
GPT_2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_VOCABULARY = 2000
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_SPECIAL = ["<unk>", "</s>"]


@cache
def text() -> list[str]:
    """The documentation, and source with `(a` often enough that it becomes a token."""
    sources = [inspect.getsource(module) for module in (argparse, inspect, typing, subprocess)]
    topics = itertools.islice(pydoc_data.topics.topics.values(), 30)
    return [*topics, *sources, "it's (a " * 500]


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), letters])


def byte_level(
    pre: pre_tokenizers.PreTokenizer,
    normalizer: normalizers.Normalizer | None = None,
    ignore_merges: bool = False,
) -> Tokenizer:
    raw = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    raw.pre_tokenizer = pre
    if normalizer is not None:
        raw.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    raw.train_from_iterator(text(), trainer)
    return raw


def sentencepiece() -> Tokenizer:
    """As Llama 2's and Mistral's: what is not in the vocabulary is spelt in bytes."""
    raw = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY, special_tokens=[*_SPECIAL, *_BYTES], show_progress=False
    )
    raw.train_from_iterator(text(), trainer)
    document = json.loads(raw.to_str())
    added = document["added_tokens"]
    document["added_tokens"] = [token for token in added if token["content"] not in _BYTES]
    document["pre_tokenizer"] = None
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prepend = {"type": "Prepend", "prepend": "▁"}
    document["normalizer"] = {"type": "Sequence", "normalizers": [prepend, replace]}
    return Tokenizer.from_str(json.dumps(document))


def pieces(
    normalizer: normalizers.Normalizer | None, pre: pre_tokenizers.PreTokenizer
) -> Tokenizer:
    raw = Tokenizer(models.WordPiece(unk_token="<unk>"))
    if normalizer is not None:
        raw.normalizer = normalizer
    raw.pre_tokenizer = pre
    trainer = trainers.WordPieceTrainer(
        vocab_size=_VOCABULARY, special_tokens=_SPECIAL, show_progress=False
    )
    raw.train_from_iterator(text(), trainer)
    return raw


def unigram(normalizer: normalizers.Normalizer | None) -> Tokenizer:
    raw = Tokenizer(models.Unigram())
    if normalizer is not None:
        raw.normalizer = normalizer
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=500, special_tokens=_SPECIAL, unk_token="<unk>", show_progress=False
    )
    raw.train_from_iterator(text()[:10], trainer)
    return raw


def words() -> Tokenizer:
    raw = Tokenizer(models.WordLevel(unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=_SPECIAL, show_progress=False)
    raw.train_from_iterator(text(), trainer)
    return raw


def of_tiktoken(pattern: str) -> Tokenizer:
    """An encoding of tiktoken itself, as `data.tokenizer=tiktoken:NAME` takes it."""
    trained = json.loads(byte_level(split(pattern)).to_str())["model"]
    letters = {letter: bytes([n]) for n, letter in enumerate(byte_letters())}
    spelt = [b"".join(letters[c] for c in t) for t in trained["vocab"] if t != END_OF_TEXT]
    ranks = {token: rank for rank, token in enumerate(sorted(spelt, key=_by_merge(trained)))}
    special = {END_OF_TEXT: len(ranks)}
    tiktoken = pytest.importorskip("tiktoken")
    return converted(
        tiktoken.Encoding("own", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    )


def _by_merge(trained: dict[str, list[list[str]]]) -> Callable[[bytes], tuple[int, bytes]]:
    letters = {letter: bytes([n]) for n, letter in enumerate(byte_letters())}
    order = {
        b"".join(letters[c] for c in left + right): number
        for number, (left, right) in enumerate(trained["merges"])
    }
    return lambda token: (order.get(token, -1), token)


def _gpt2(prefix: bool = False) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=prefix)


def _second_split() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([_gpt2(), pre_tokenizers.Split(Regex(".{1,8}"), "isolated")])


_MADE: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": lambda: byte_level(_gpt2()),
    "gpt2, a space before the text": lambda: byte_level(_gpt2(prefix=True)),
    "gpt2, ignore_merges": lambda: byte_level(_gpt2(), ignore_merges=True),
    "gpt2, a second split": lambda: byte_level(_second_split()),
    "gpt2, spelt out": lambda: byte_level(split(GPT_2)),
    "gpt2, NFC": lambda: byte_level(_gpt2(), normalizers.NFC()),
    "llama3": lambda: byte_level(split(LLAMA_3)),
    "llama3, ignore_merges": lambda: byte_level(split(LLAMA_3), ignore_merges=True),
    "qwen": lambda: byte_level(split(QWEN_2)),
    "qwen, NFC": lambda: byte_level(split(QWEN_2), normalizers.NFC()),
    "o200k": lambda: byte_level(split(O200K)),
    "tiktoken, llama3": lambda: of_tiktoken(LLAMA_3),
    "tiktoken, o200k": lambda: of_tiktoken(O200K),
    "sentencepiece": sentencepiece,
    "word pieces, bert": lambda: pieces(
        normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    ),
    "word pieces": lambda: pieces(None, _gpt2()),
    "unigram": lambda: unigram(None),
    "unigram, NFKC": lambda: unigram(normalizers.NFKC()),
    "words": words,
}
KINDS = tuple(_MADE)


@cache
def tokenizer_of(kind: str) -> TextTokenizer:
    return TextTokenizer(_MADE[kind](), kind)
