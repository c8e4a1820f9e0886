"""Libraries with tables of Unicode of different years: the ids are those of `tokenizers`."""

import itertools
import json
import random
from collections.abc import Callable, Iterator
from functools import cache

import pytest
from tokenizers import Tokenizer

pytest.importorskip("gigatoken")
pytest.importorskip("tiktoken")

from model_check.data.tokenizers.backends import (
    Backend,
    BackendName,
    Encode,
    _characters,
    choose_backend,
    plain,
)
from model_check.data.tokenizers.tokenizer import TextTokenizer, byte_letters
from model_check.errors import DataError
from tests.data.kinds import KINDS, tokenizer_of
from tests.data.unicode_ages import VERSIONS, added_in, some_added_in

BYTE_LEVEL = {k for k in KINDS if k.startswith(("gpt2", "llama3", "qwen", "o200k", "tiktoken"))}
BYTE_LEVEL -= {"gpt2, NFC", "qwen, NFC", "gpt2, a second split"}
TAKEN: dict[BackendName, set[str]] = {
    "gigatoken": BYTE_LEVEL | {"sentencepiece"},
    "tiktoken": BYTE_LEVEL - {"gpt2, a space before the text"},
}


def assert_same(kind: str, texts: list[str]) -> None:
    """Whichever backend is chosen. All in one batch, so that the documents are divided."""
    expected = [ids.tobytes() for ids in plain(tokenizer_of(kind))(texts)]
    for backend in chosen_for(kind):
        found = [ids.tobytes() for ids in backend.encode(texts)]
        differ = [t for t, one, other in zip(texts, found, expected, strict=True) if one != other]
        assert not differ, f"{backend.name}: {len(differ)} of {len(texts)}: {differ[:5]!r}"


@cache
def chosen_for(kind: str) -> list[Backend]:
    """Each is tried on thousands of characters before it is chosen: 0.4 s."""
    return list(chosen(tokenizer_of(kind)))


def chosen(tokenizer: TextTokenizer) -> Iterator[Backend]:
    """By `auto`, and by each name that it does not mean anyway."""
    auto = choose_backend("auto", tokenizer)
    assert auto.name == ("gigatoken" if tokenizer.name in TAKEN["gigatoken"] else "tokenizers")
    yield auto
    for name, kinds in TAKEN.items():
        if tokenizer.name not in kinds:
            with pytest.raises(DataError, match=f"tokenizer_backend = '{name}'"):
                choose_backend(name, tokenizer)
        elif name != auto.name:
            yield choose_backend(name, tokenizer)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", [some_added_in, pytest.param(added_in, marks=pytest.mark.slow)])
def test_what_unicode_added_since_14_is_tokenized_alike(
    kind: str, which: Callable[[str], Iterator[str]]
) -> None:
    """Of 18.0, which no library has yet, see the next test."""
    added = itertools.chain.from_iterable(map(which, VERSIONS[:-1]))
    assert_same(kind, [f"{c}(a\n {c}'s" for c in added])


@pytest.mark.parametrize("kind", sorted(TAKEN["gigatoken"]))
def test_new_characters_among_others_are_tokenized_alike(kind: str) -> None:
    rng = random.Random(kind)
    new = [
        *added_in("17.0"),
        *rng.sample([*added_in("18.0")], 100),
        "\U000323b0",
        "\u088f",
        "\ua7ce",
    ]
    others = [*"asA1.!'(/- \n\t\u0301é中", "'s", "'LL", "  ", "\r\n", "\u017f", "don't"]
    texts = []
    for _ in range(400):
        pool = rng.choices(new, k=2) + rng.choices(others, k=4)
        texts.append("".join(rng.choices(pool, k=rng.randrange(1, 30))))
    assert_same(kind, texts)


def test_what_cannot_be_tried_is_left_to_tokenizers() -> None:
    def refuse(tokenizer: TextTokenizer) -> Encode:
        raise ValueError("not this one")

    characters = _characters(refuse, tokenizer_of("llama3"))
    assert characters.in_dispute("plain naïve text") == "ï"


def test_an_old_letter_of_another_case_is_tokenized_alike() -> None:
    """U+0295 is a small letter in Unicode 16, behind which o200k cuts before a capital; in 17 it
    has no case. A vocabulary that was trained with 17 can have a token across."""
    document = json.loads(tokenizer_of("o200k").to_json())
    last_byte = byte_letters()[0x95]
    document["model"]["merges"].insert(0, [last_byte, "S"])
    document["model"]["vocab"][last_byte + "S"] = len(document["model"]["vocab"])
    tokenizer = TextTokenizer(Tokenizer.from_str(json.dumps(document)), "o200k")
    texts = ["\u0295Se", "plain", "\u0295•ᴥ•\u0295Selected"]
    for backend in chosen(tokenizer):
        found = [ids.tolist() for ids in backend.encode(texts)]
        assert found == tokenizer.encode(texts), backend.name
