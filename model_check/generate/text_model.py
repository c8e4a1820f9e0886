"""A model and its tokenizer: from a checkpoint of ours, or from a directory that transformers would
load."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
import torch

from model_check.attention import sdpa
from model_check.config.attention import KINDS
from model_check.config.geometry import geometry_values
from model_check.config.schema import Settings
from model_check.config.shape import geometry
from model_check.data.read.manifest import LONGEST, TOKENIZER
from model_check.data.sources.chat import ChatTemplate, chat_of, template_of
from model_check.data.sources.declared import declared_in
from model_check.data.tokenizers.marks import end_of_answers, marks_of
from model_check.data.tokenizers.tokenizer import TextTokenizer, document_in, parse
from model_check.engine.checkpoint import read_checkpoint, settings_of, tokenizer_of
from model_check.engine.saving.lineage import newest_in
from model_check.errors import ConfigError
from model_check.init import empty_model
from model_check.library import model_of
from model_check.model import Llama
from model_check.utils.files import read_text, read_whole

_CONFIG, _GENERATION = "config.json", "generation_config.json"


class _Config(msgspec.Struct):
    """What a config.json says of texts, and transformers takes where it does not."""

    max_position_embeddings: Annotated[int, msgspec.Meta(ge=1)] = 2048
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    @property
    def end_ids(self) -> list[int]:
        found = self.eos_token_id
        return found if isinstance(found, list) else [] if found is None else [found]


@dataclass(frozen=True)
class TextForm:
    """How a model knows texts."""

    tokenizer: TextTokenizer
    begin_id: int | None
    """What stood before each text in training; None: nothing."""
    end_ids: frozenset[int]
    """Each of them ends a text."""
    end_texts: tuple[str, ...]
    """Each of them ends a text, too: marks of a chat template that are no tokens."""
    context_length: int | None
    """The longest text in tokens; None: there is no limit."""
    chat: ChatTemplate | None = None
    """A prompt is a question, which the model was taught to answer; None: it goes on with it."""
    num_tokens: int | None = None
    """That the model knows; None: all of the tokenizer's."""

    def of(self, model: Llama) -> "TextModel":
        return TextModel(**vars(self), model=model)


@dataclass(frozen=True, kw_only=True)
class TextModel(TextForm):
    model: Llama
    """Its weights are in float32."""


def read_text_model(source: Path, device: torch.device, tokenizer: Path | None) -> TextModel:
    """`source`: a checkpoint, a directory of checkpoints (the newest), or one with config.json.
    `tokenizer`: a tokenizer.json; None: the one there. Raises ConfigError, CheckpointError,
    DataError."""
    if os.path.isfile(source / _CONFIG):
        return _of_directory(source, device, tokenizer)
    try:
        source = newest_in(source)
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read: {error.strerror}") from error
    return _of_checkpoint(source, device, tokenizer)


def _of_checkpoint(path: Path, device: torch.device, given: Path | None) -> TextModel:
    state = read_checkpoint(path)
    settings = settings_of(state, path)
    content = tokenizer_of(state, path, LONGEST) if given is None else _content(given)
    if content is None:
        raise ConfigError(f"{path}: holds no tokenizer: give it with --tokenizer FILE")
    num_embedded = len(state["model"]["tok_embed.weight"])
    end_token = state.get("end_token") if given is None else declared_in(given.parent).end
    tokenizer = read_text_tokenizer(content, given or path, num_embedded, end_token)
    form = trained_form(tokenizer, settings, chat_of(state.get("chat"), path))
    return replace(form, num_tokens=num_embedded).of(model_of(state, path, device))


def trained_form(
    tokenizer: TextTokenizer, settings: Settings, chat: ChatTemplate | None = None
) -> TextForm:
    """Of a model that is trained with these settings; `chat`: the template of its messages."""
    marks, end = marks_of(tokenizer, settings), end_of_answers(tokenizer, chat)
    return TextForm(
        tokenizer,
        begin_id=marks.begin and marks.begin.id,
        end_ids=frozenset({tokenizer.end_id, *end.ids}),
        end_texts=tuple(end.texts),
        context_length=_limit(settings),
        chat=chat,
    )


def _of_directory(directory: Path, device: torch.device, given: Path | None) -> TextModel:
    # safetensors, for these alone
    from model_check.hf import load_weights

    values = geometry_values(str(directory), offline=True)
    config = _read_config(directory / _CONFIG)
    tree = {"model": values, "training": {"context_length": config.max_position_embeddings}}
    settings = msgspec.convert(tree, Settings)
    shape = geometry(settings.model, values["vocab_size"])
    model = empty_model(settings, shape, sdpa, device)
    load_weights(model, settings.model, directory)
    place = given or directory / TOKENIZER
    end_token = declared_in(place.parent).end
    tokenizer = read_text_tokenizer(_content(place), place, shape.vocab_size, end_token)
    ends = {tokenizer.end_id, *config.end_ids}
    if os.path.isfile(directory / _GENERATION):
        ends.update(_read_config(directory / _GENERATION).end_ids)
    chat = template_of(directory)
    end = end_of_answers(tokenizer, chat)
    return TextModel(
        tokenizer,
        begin_id=config.bos_token_id,
        end_ids=frozenset([*ends, *end.ids]),
        end_texts=tuple(end.texts),
        context_length=config.max_position_embeddings,
        chat=chat,
        num_tokens=shape.vocab_size,
        model=model.eval(),
    )


def _read_config(path: Path) -> _Config:
    """Raises ConfigError."""
    try:
        return msgspec.json.decode(read_text(path), type=_Config)
    # What is not UTF-8 is a ValueError, as is every error of msgspec.
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not the {path.name} of a model: {error}") from error


def _limit(settings: Settings) -> int | None:
    has_end = KINDS[settings.model.attention].has_end
    return settings.training.context_length if has_end else None


def _content(path: Path) -> bytes:
    try:
        return read_whole(path, LONGEST)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read as a tokenizer: {error.strerror} (--tokenizer FILE gives one)"
        ) from error


def read_text_tokenizer(
    content: bytes, path: Path, vocab_size: int, end_token: str | None = None
) -> TextTokenizer:
    """`path`: where `content` was read, for messages. `end_token`: what ends a text; None: a known
    name. Raises ConfigError and DataError."""
    tokenizer = TextTokenizer(parse(document_in(content, path), path), str(path), end_token)
    if tokenizer.num_of_text > vocab_size:
        raise ConfigError(
            f"{path}: a tokenizer of {tokenizer.num_of_text:,} tokens, and the model knows "
            f"{vocab_size:,}: it is another model's"
        )
    return tokenizer
