"""What the files beside a tokenizer.json declare of it: its end token, its chat template."""

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from model_check.errors import DataError
from model_check.utils.files import read_text

CONFIG, SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"
_LONGEST = 64 << 20
"""Bytes. Gemma 3's has more than a MiB: it lists each added token."""


Kind = TypeVar("Kind", bound="_Named")


class _Token(msgspec.Struct):
    content: str


class _Named(msgspec.Struct):
    """What either file names."""

    bos_token: str | _Token | None = None
    eos_token: str | _Token | None = None


class _Config(_Named):
    chat_template: Any = None
    added_tokens_decoder: Any = None
    """Where it is there, transformers reads no special_tokens_map.json."""


class Declared(msgspec.Struct, frozen=True):
    begin: str | None = None
    end: str | None = None
    chat_template: Any = None
    """As the file has it: a text, or several with names."""


def declared_in(directory: Path) -> Declared:
    """As transformers 5 takes it (PreTrainedTokenizerBase._from_pretrained): the older file counts
    for more, where it counts. Raises DataError."""
    config = _read(directory / CONFIG, _Config)
    named = _Named() if config.added_tokens_decoder else _read(directory / SPECIAL_TOKENS, _Named)
    return Declared(
        _spelling(named.bos_token or config.bos_token),
        _spelling(named.eos_token or config.eos_token),
        config.chat_template,
    )


def _read(path: Path, kind: type[Kind]) -> Kind:
    if not path.is_file():
        return kind()
    try:
        return msgspec.json.decode(read_text(path, _LONGEST), type=kind)
    # What is not UTF-8 is a ValueError, as is every error of msgspec.
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: not the configuration of a tokenizer: {error}") from error


def _spelling(token: str | _Token | None) -> str | None:
    return token.content if isinstance(token, _Token) else token
