"""Windows of a text have, in a row, the pre-tokens that the text has."""

import itertools
import re
import sys

import pytest

from model_check.data.tokenizers.patterns import GPT_2, SURELY_NO_BLANK, WINDOW, windows
from tests.data.odd_text import PATTERNS, pre_tokenizer

ALL = [chr(c) for c in range(sys.maxunicode + 1) if not 0xD800 <= c <= 0xDFFF]


class Cutter:
    """What a pre-tokenizer makes of a text."""

    def __init__(self, pattern: str) -> None:
        self._real = pre_tokenizer(pattern)

    def words(self, text: str) -> list[str]:
        return [word for word, _ in self._real.pre_tokenize_str(text)]


@pytest.fixture(params=PATTERNS)
def cutter(request: pytest.FixtureRequest) -> Cutter:
    return Cutter(PATTERNS[request.param])


def test_what_is_surely_no_blank_is_none_to_the_pre_tokenizer() -> None:
    """A blank would be one word with the line end before it."""
    gpt2 = Cutter(GPT_2)
    surely_none = [c for c in ALL if re.match(SURELY_NO_BLANK, c)]
    assert len(surely_none) > len(ALL) - 100
    some = [c for c in surely_none if ord(c) < 0x10000 or ord(c) % 16 == 0]
    # Its offsets make the pre-tokenizer slow for long texts.
    for part in (some[start : start + 1000] for start in range(0, len(some), 1000)):
        assert len(gpt2.words("".join(f" \n{c}" for c in part))) == 3 * len(part)


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
