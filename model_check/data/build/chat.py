"""The chat template of a run: data.chat_template, or what lies beside the tokenizer."""

from pathlib import Path
from typing import Any

import msgspec

from model_check.config.schema import Settings
from model_check.data.sources.chat import ChatTemplate
from model_check.data.tokenizers.tokenizer import GivenTokenizer, TokenizerChoice
from model_check.errors import DataError
from model_check.utils.files import SETTINGS_BYTES, read_whole

TEMPLATE, CONFIG = "chat_template.jinja", "tokenizer_config.json"
"""Where transformers keeps a template; older models have it in the second."""


class _Named(msgspec.Struct):
    """One of several templates."""

    name: str
    template: str


class _Token(msgspec.Struct):
    content: str


class _Config(msgspec.Struct):
    """What a tokenizer_config.json says of chats."""

    chat_template: str | list[_Named] | None = None
    bos_token: str | _Token | None = None
    eos_token: str | _Token | None = None

    @property
    def template(self) -> str | None:
        """The one that is called default, where there are several."""
        if not isinstance(self.chat_template, list):
            return self.chat_template
        return next((t.template for t in self.chat_template if t.name == "default"), None)


def chat_template(settings: Settings, tokenizer: TokenizerChoice) -> ChatTemplate | None:
    """None: there is none, which only matters for messages. Raises DataError."""
    directory = tokenizer.directory if isinstance(tokenizer, GivenTokenizer) else None
    config = _Config() if directory is None else _config_in(directory / CONFIG)
    if (given := settings.data.chat_template) is not None:
        text: str | None = _text(Path(given).expanduser(), "data.chat_template")
    elif directory is not None and (directory / TEMPLATE).is_file():
        text = _text(directory / TEMPLATE, "the tokenizer's chat template")
    else:
        text = config.template
    if text is None:
        return None
    return ChatTemplate(text, _spelling(config.bos_token), _spelling(config.eos_token))


def _config_in(path: Path) -> _Config:
    if not path.is_file():
        return _Config()
    try:
        return msgspec.json.decode(read_whole(path, SETTINGS_BYTES), type=_Config)
    except (OSError, msgspec.MsgspecError) as error:
        raise DataError(f"{path}: not the configuration of a tokenizer: {error}") from error


def _text(path: Path, what: str) -> str:
    try:
        return read_whole(path, SETTINGS_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        why: Any = getattr(error, "strerror", None) or error
        raise DataError(f"{what} = {path}: cannot be read: {why}") from error


def _spelling(token: str | _Token | None) -> str | None:
    return token.content if isinstance(token, _Token) else token
