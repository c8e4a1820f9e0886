"""Chunks of a text have, in a row, the pre-tokens that the text has."""

import itertools
import re
import sys

import pytest

from model_check.data.tokenizers import chunks
from model_check.data.tokenizers.chunks import GPT_2, LLAMA_3, WINDOW, windows
from tests.data.odd_text import FEW, PATTERNS, odd_texts, our_cut, pre_tokenizer

ALL = [chr(c) for c in range(sys.maxunicode + 1) if not 0xD800 <= c <= 0xDFFF]


class Cutter:
    """Our cut of a text, and the pre-tokenizer's."""

    def __init__(self, pattern: str) -> None:
        self._real = pre_tokenizer(pattern)
        self._cut = our_cut(pattern)
        self._known: dict[str, list[str]] = {}

    def words(self, text: str) -> list[str]:
        return [word for word, _ in self._real.pre_tokenize_str(text)]

    def assert_same(self, text: str) -> None:
        cut = self._cut.findall(text)
        assert "".join(cut) == text
        found = [word for chunk in cut for word in self._words_of(chunk)]
        assert found == self.words(text), f"{text[:300]!r}: {cut[:100]}"

    def _words_of(self, chunk: str) -> list[str]:
        if chunk not in self._known:
            self._known[chunk] = self.words(chunk)
        return self._known[chunk]


@pytest.fixture(params=PATTERNS)
def cutter(request: pytest.FixtureRequest) -> Cutter:
    return Cutter(PATTERNS[request.param])


def members(characters: str) -> list[str]:
    one_of_them = re.compile(characters)
    return [c for c in ALL if one_of_them.match(c)]


def slices(characters: list[str], size: int = 1000) -> list[list[str]]:
    """Its offsets make the pre-tokenizer slow for long texts."""
    return [characters[start : start + size] for start in range(0, len(characters), size)]


@pytest.mark.parametrize("seed", range(4))
def test_the_pre_tokens_of_an_odd_text_are_those_of_its_chunks(cutter: Cutter, seed: int) -> None:
    for text in odd_texts(seed, 60):
        cutter.assert_same(text)


def test_all_short_texts_of_some_characters_are_cut_soundly(cutter: Cutter) -> None:
    for length in (1, 2, 3):
        for parts in itertools.product(FEW, repeat=length):
            cutter.assert_same("".join(parts))


def test_sure_letters_digits_signs_and_blanks_are_that_to_the_pre_tokenizer() -> None:
    gpt2 = Cutter(GPT_2)
    for name in (chunks._L, chunks._N, chunks._O, chunks._S):
        for run in slices(members(f"[{name}]")):
            assert len(gpt2.words("".join(run))) == 1
    for kinds in itertools.permutations(("a", "0", "!"), 2):
        assert gpt2.words("".join(kinds)) == list(kinds)


def test_what_is_surely_no_blank_is_none_to_the_pre_tokenizer() -> None:
    """A blank would be one word with the line end before it."""
    gpt2 = Cutter(GPT_2)
    surely_none = members(chunks._B)
    assert len(surely_none) > len(ALL) - 100
    for some in slices([c for c in surely_none if ord(c) < 0x10000 or ord(c) % 16 == 0]):
        assert len(gpt2.words("".join(f" \n{c}" for c in some))) == 3 * len(some)


def test_no_sure_letter_but_those_of_ascii_makes_a_contraction() -> None:
    """Upper and lower case are one to Llama 3's, so U+017F is an s, and no sure letter."""
    llama3 = Cutter(LLAMA_3)
    assert len(llama3.words("'\u017fx")) == 2
    for letter in members(f"[{chunks._L}]"):
        if letter.isascii() or letter.lower() == letter.upper():
            continue
        for start in (f"'{letter}", f"'l{letter}", f"'{letter}l", f"'{letter}e", f"'r{letter}"):
            assert len(llama3.words(f"{start}x")) == 1


def test_windows_of_a_long_text_are_cut_between_words(cutter: Cutter) -> None:
    word = "some words, 中文 and\n\n  signs... "
    text = word * (5 * WINDOW // 2 // len(word))
    parts = list(windows(text))
    assert "".join(parts) == text
    assert [len(part) > WINDOW for part in parts] == [True, True, False]
    for before, after in itertools.pairwise(parts):
        around = before[-200:] + after[:200]
        words = cutter.words(before[-200:]) + cutter.words(after[:200])
        assert cutter.words(around) == words


def test_a_long_text_without_words_is_one_window() -> None:
    text = "\u4e00" * (2 * WINDOW)
    assert list(windows(text)) == [text]


@pytest.mark.parametrize("text", ["", "x"])
def test_a_short_text_is_one_window(text: str) -> None:
    assert list(windows(text)) == [text]
