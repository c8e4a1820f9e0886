"""Which characters two libraries disagree about, and which documents go where for it."""

import itertools
import unicodedata
from collections.abc import Sequence

import numpy as np
import pytest
from tokenizers import Regex, pre_tokenizers

from model_check.data.tokenizers.characters import _CONTEXTS, Characters, Divided, Encode, Ids
from model_check.data.tokenizers.patterns import WINDOW, has_windows, windows
from tests.data import kinds

PATTERNS = (kinds.GPT_2, kinds.LLAMA_3, kinds.QWEN_2, kinds.O200K)
OF_EACH_CLASS = sorted({unicodedata.category(chr(c)): chr(c) for c in range(0x80, 0xD800)}.values())
"""The last of each general category."""


def test_the_contexts_tell_apart_what_any_context_does() -> None:
    """Classes of Unicode, by the cuts that a pattern makes beside a character of each."""
    ends = ["", "a", "A", "1", " ", "!", "'", "'s", "\n", "  ", "Aa", "/", "'l"]
    contexts = [f"{left}{{}}{right}" for left in ends for right in ends]
    contexts += [f"{left}{{}}{{}}{right}" for left in ends for right in ends]
    for pattern in PATTERNS:
        cut = pre_tokenizers.Split(Regex(pattern), "isolated").pre_tokenize_str

        def cuts(character: str, of: Sequence[str]) -> list[list[tuple[int, int]]]:
            texts = [context.replace("{}", character) for context in of]
            return [[place for _, place in cut(text)] for text in texts]  # noqa: B023

        found = [(one, cuts(one, contexts), cuts(one, _CONTEXTS)) for one in OF_EACH_CLASS]
        for (one, ours, told), (other, theirs, told_too) in itertools.combinations(found, 2):
            if ours != theirs:
                assert told != told_too, (pattern, one, other)


def test_a_character_in_dispute_sends_its_document_to_tokenizers_and_no_other() -> None:
    sent: dict[str, list[str]] = {"fast": [], "exact": []}
    divided = Divided(spelling(sent["fast"]), spelling(sent["exact"]), disputing("é"), windows)
    texts = ["one", "café", "twö", "", "é"]
    assert spelt(divided.encode(texts)) == texts
    assert sent == {"fast": ["one", "twö", ""], "exact": ["café", "é"]}


def test_of_a_long_document_only_the_window_with_it_goes_to_tokenizers() -> None:
    sent: dict[str, list[str]] = {"fast": [], "exact": []}
    divided = Divided(spelling(sent["fast"]), spelling(sent["exact"]), disputing("é"), windows)
    text = "some words " * (WINDOW // 4) + "café"
    assert spelt(divided.encode(["short", text])) == ["short", text]
    (window,) = sent["exact"]
    assert window.endswith("café")
    assert len(window) < len(text) / 2
    assert len(sent["fast"]) == 3


def test_a_block_is_tried_once() -> None:
    tried: list[str] = []

    def agree(texts: Sequence[str]) -> list[bool]:
        tried.extend(texts)
        return [True] * len(texts)

    characters = Characters(agree)
    assert characters.in_dispute("plain") == ""
    assert tried == []
    for text in ("é", "naïve é", "ÿ"):
        assert characters.in_dispute(text) == ""
    (block,) = tried
    assert all(chr(code) in block for code in range(0x80, 0x100))


def test_surrogates_are_left_to_tokenizers() -> None:
    assert disputing("").in_dispute("a\ud800b") == "\ud800"


def disputing(some: str) -> Characters:
    return Characters(lambda texts: [not set(some) & set(text) for text in texts])


def spelling(asked: list[str]) -> Encode:
    """A tokenizer whose ids are the code points, and what it was asked for."""

    def encode(texts: Sequence[str]) -> list[Ids]:
        asked.extend(texts)
        return [np.array(list(map(ord, text)), np.uint32) for text in texts]

    return encode


def spelt(ids: Sequence[Ids]) -> list[str]:
    return ["".join(map(chr, each)) for each in ids]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_window_ends_where_the_pattern_cuts(pattern: str) -> None:
    assert has_windows(pattern)
    cut = pre_tokenizers.Split(Regex(pattern), "isolated").pre_tokenize_str
    for before, after in itertools.product([*OF_EACH_CLASS, *"aA1!'/"], ["a", "1", "!", " ", "\n"]):
        if before.isspace():
            continue
        text = f"x{before}"
        assert (0, 1) in [place for _, place in cut(text)] or len(cut(text)) == 1
        ends = [end for _, (_, end) in cut(f"{text} {after}")]
        assert len(text) in ends, (before, after)
