"""Faster libraries give the same ids or are not used."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from model_check.data.backends import Backend, checked, choose_backend, plain
from model_check.data.tokenizer import TextTokenizer
from model_check.errors import DataError
from tests.data.lab import WORDS, Lab, write_tokenizer

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


@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_gives_the_same_ids_and_they_are_the_text(tmp_path: Path, name: str) -> None:
    if name != "tokenizers":
        pytest.importorskip(name)
    tokenizer = byte_level(tmp_path / "t.json")
    backend = choose_backend(name, tokenizer)  # type: ignore[arg-type]
    assert backend.name == name
    each = checked(backend, tokenizer)(ODD)
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


def test_a_backend_that_disagrees_about_the_text_stops_the_build(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path / "t.json")

    def wrong(texts: Sequence[str]) -> list[np.ndarray]:  # type: ignore[type-arg]
        return [np.zeros(3, np.uint32) for _ in texts]

    encode = checked(Backend("gigatoken", "", wrong), tokenizer)
    with pytest.raises(
        DataError, match=r"gigatoken gives other ids .*tokenizer_backend=tokenizers"
    ):
        encode([WORDS])


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
