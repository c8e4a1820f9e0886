"""What a word memo gives, asks for, keeps and forgets."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from model_check.data.tokenizers.chunks import GPT_2, WINDOW
from model_check.data.tokenizers.tokenizer import TextTokenizer
from model_check.data.tokenizers.word_memo import WordMemo
from tests.data.odd_text import ODD, PATTERNS, odd_texts, our_cut, pre_tokenizer


class Spelling:
    """A tokenizer whose ids are the code points, and what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        self.asked += texts
        return [list(map(ord, text)) for text in texts]

    def asked_since(self) -> list[str]:
        asked, self.asked = self.asked, []
        return sorted(asked)


def spelt(ids: Sequence[NDArray[Any]]) -> list[str]:
    return ["".join(map(chr, each)) for each in ids]


def trained(pattern: str) -> TextTokenizer:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizer(pattern)
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    raw.train_from_iterator([" ".join(ODD), *odd_texts(99, 5)], trainer)
    return TextTokenizer(raw, "odd")


@pytest.mark.parametrize("name", PATTERNS)
def test_its_ids_are_those_of_the_tokenizer_the_first_time_and_the_second(name: str) -> None:
    tokenizer = trained(PATTERNS[name])
    memo = WordMemo(our_cut(PATTERNS[name]), tokenizer.encode, max_new=1.0)
    texts = ["", *odd_texts(7, 40), "before <|endoftext|> after"]
    for _ in range(2):
        found = memo.encode(texts)
        assert [ids.tolist() for ids in found] == tokenizer.encode(texts)
        assert {ids.dtype for ids in found} == {np.dtype(np.uint32)}


def test_a_chunk_is_tokenized_once() -> None:
    spelling = Spelling()
    memo = WordMemo(our_cut(GPT_2), spelling, max_new=1.0)
    texts = ["one two one", " two, two"]
    assert spelt(memo.encode(texts)) == texts
    assert spelling.asked_since() == [" one", " two", ",", "one"]
    assert spelt(memo.encode(["one two three"])) == ["one two three"]
    assert spelling.asked_since() == [" three"]


def test_a_text_of_new_words_is_tokenized_as_it_is() -> None:
    spelling = Spelling()
    memo = WordMemo(our_cut(GPT_2), spelling)
    assert spelt(memo.encode(["all of this is new"])) == ["all of this is new"]
    assert spelling.asked == ["all of this is new"]


def test_long_chunks_are_not_kept() -> None:
    spelling = Spelling()
    memo = WordMemo(our_cut(GPT_2), spelling, max_new=1.0)
    for _ in range(2):
        memo.encode(["word " + "x" * 500])
    assert spelling.asked_since() == [" " + "x" * 500] * 2 + ["word"]


def test_it_begins_anew_when_it_has_grown_too_large() -> None:
    spelling = Spelling()
    memo = WordMemo(our_cut(GPT_2), spelling, max_new=1.0, max_characters=10)
    memo.encode(["one two"])
    memo.encode(["one two three"])
    assert spelling.asked_since() == [" three", " two", "one"]
    assert spelt(memo.encode(["one two"])) == ["one two"]
    assert spelling.asked_since() == [" two", "one"]


def test_a_text_longer_than_a_window_is_tokenized_in_parts() -> None:
    spelling = Spelling()
    memo = WordMemo(our_cut(GPT_2), spelling)
    texts = ["some words " * (WINDOW // 4), "a short one", ""]
    assert spelt(memo.encode(texts)) == texts
    assert max(map(len, spelling.asked)) < 20


def test_no_texts_give_no_ids() -> None:
    assert WordMemo(our_cut(GPT_2), Spelling()).encode([]) == []
