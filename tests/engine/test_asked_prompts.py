"""What a worker asks its model (training.sample_interval), by its settings and its data."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from model_check.errors import ConfigError
from pretrain_main import asked_prompts
from tests.engine.conftest import make_settings
from tests.generate.test_generate import bytes_tokenizer

EVERY = {"training__sample_interval": 2}
TEXTS = {"train": [b"once upon a time", b"def main(args): "], "held": [b"a b c d e f g h "]}


def data(texts: dict[str, list[bytes]]) -> Any:
    """As much of a TokenCache as is asked for."""

    def split(name: str) -> Any:
        rows = np.array([list(text) for text in texts[name]])
        return SimpleNamespace(
            num_sequences=len(rows),
            gather=lambda numbers: rows[numbers],
            targets=lambda numbers: None,
        )

    store = SimpleNamespace(path=Path("store"))
    tokens = SimpleNamespace(chat=None, end_token="<|endoftext|>")
    return SimpleNamespace(
        store=store,
        tokens=tokens,
        path=Path("view"),
        vocab_size=257,
        splits=tuple(texts),
        split=split,
    )


def asked(
    texts: dict[str, list[bytes]], say: Callable[[str], None], tokenizer: str = "", **settings: Any
) -> list[str] | None:
    content = (tokenizer or bytes_tokenizer()).encode()
    found = asked_prompts(data(texts), make_settings(**settings), content, say)
    return None if found is None else list(found.prompts)


def test_it_is_how_sequences_of_the_first_validation_split_begin_or_of_the_data() -> None:
    said: list[str] = []
    assert asked(TEXTS, said.append, **EVERY) == ["a b c d "]
    train = {"train": TEXTS["train"]}
    assert asked(train, said.append, **EVERY) == ["once upo", "def main"]
    assert asked(TEXTS, said.append) is None
    assert said == []


def test_a_file_names_other_prompts(tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("one\n\n two\n")
    named = {"training__sample_prompts": str(tmp_path / "prompts")}
    assert asked(TEXTS, print, **EVERY, **named) == ["one", " two"]
    (tmp_path / "prompts").write_text("longer than the context\n")
    with pytest.raises(ConfigError, match="context is 16: shorten it"):
        asked(TEXTS, print, **EVERY, **named)
    (tmp_path / "prompts").write_text("\n")
    with pytest.raises(ConfigError, match=r"sample_prompts = .*prompts: has no line with a prompt"):
        asked(TEXTS, print, **EVERY, **named)


def test_data_without_text_are_trained_on_without_samples_which_is_said() -> None:
    said: list[str] = []
    assert asked(TEXTS, said.append, tokenizer="{}", **EVERY) is None
    assert said == [
        "No samples, for the tokens stand for no text: store/tokenizer.json: not a tokenizer.json: "
        "it has no model"
    ]
    blank = {"train": [b" " * 16]}
    assert asked(blank, said.append, **EVERY) is None
    assert said[1].startswith("No samples: the data have no prompts for them")
