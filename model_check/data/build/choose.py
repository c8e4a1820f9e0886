"""The settings' words -> a source and a tokenizer, both decided but not yet read."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

from model_check.config.fields import nearest
from model_check.config.schema import Settings
from model_check.config.validation import parse_validation
from model_check.data.cache.memo import Memo
from model_check.data.sources.embedded import EmbeddedSource
from model_check.data.sources.file_piece import SUFFIXES
from model_check.data.sources.hub import Hub
from model_check.data.sources.hub_text import KNOWN, PIP_HINT, HubSource
from model_check.data.sources.local_text import LocalSource
from model_check.data.sources.rows import own_paths, rows_to_train
from model_check.data.sources.source import Source
from model_check.data.tokenizers.tiktoken_tokenizer import DEFAULT_ENCODING, TiktokenTokenizer
from model_check.data.tokenizers.tokenizer import GivenTokenizer, TokenizerChoice, TrainedTokenizer
from model_check.data.tokenizers.trained import TrainedWordPiece
from model_check.errors import DataError

Say = Callable[[str], None]


def choose(settings: Settings, memo: Memo, say: Say) -> tuple[Source, TokenizerChoice]:
    """What `data.dataset` and `data.tokenizer` mean here and now. Raises DataError.

    Only `auto` decides between things, and says in one line what it could not have.
    """
    hub = Hub(settings.data.hub_timeout_s, settings.data.offline, memo)
    match settings.data.dataset:
        case "auto":
            return _wikitext_or_embedded(settings, hub, memo, say)
        case "embedded":
            return EmbeddedSource(), _tokenizer_or_trained(settings, hub, memo, say, embedded=True)
        case name:
            source = _named(name, settings, hub, memo)
            return source, _tokenizer_or_trained(settings, hub, memo, say, embedded=False)


def _wikitext_or_embedded(
    settings: Settings, hub: Hub, memo: Memo, say: Say
) -> tuple[Source, TokenizerChoice]:
    try:
        if importlib.util.find_spec("datasets") is None:
            raise DataError(PIP_HINT)
        if hub.why_offline is not None:
            raise DataError(hub.why_offline)
        tokenizer = _tokenizer(settings, hub, memo)
        source = _hub_source("wikitext", settings, hub)
        source.identity()  # asks for the commit: a refusal must come before the choice
        return source, tokenizer
    except DataError as error:
        say(f"data: embedded text (this Python's own documentation and source): {error}")
        return EmbeddedSource(), _tokenizer_or_trained(settings, hub, memo, say, embedded=True)


def _named(name: str, settings: Settings, hub: Hub, memo: Memo) -> Source:
    path = Path(name).expanduser()
    if name in KNOWN:
        return _hub_source(name, settings, hub)
    if path.exists():
        validation = parse_validation(settings.data.validation)
        rows, without = rows_to_train(validation), own_paths(validation)
        return LocalSource(path, settings.data.text_column, memo, rows, without)
    if (
        name.lower().endswith(SUFFIXES)
        or name.startswith(("/", "./", "../", "~"))
        or name.count("/") > 1
    ):
        raise DataError(f"data.dataset = {name!r}: no such file or directory ({path.absolute()})")
    return _maybe_misspelt(_hub_source(name, settings, hub), name)


def _maybe_misspelt(source: HubSource, name: str) -> HubSource:
    """Raises DataError for what the hub does not give and is nearly a word of ours."""
    if "/" not in name and (near := nearest(name, ["auto", "embedded", *KNOWN])):
        try:
            source.identity()
        except DataError as error:
            raise DataError(f"{error}; did you mean data.dataset={near}?") from error
    return source


def _hub_source(name: str, settings: Settings, hub: Hub) -> HubSource:
    data = settings.data
    bounded = data.num_samples is not None
    return HubSource(name, data.dataset_config, data.split, data.text_column, hub, bounded)


def _tokenizer_or_trained(
    settings: Settings, hub: Hub, memo: Memo, say: Say, *, embedded: bool
) -> TokenizerChoice:
    if settings.data.tokenizer == "auto" and embedded:
        return TrainedTokenizer(settings.data.bpe_vocab_size)
    try:
        return _tokenizer(settings, hub, memo)
    except DataError as error:
        if settings.data.tokenizer != "auto":
            raise
        say(f"data: a tokenizer trained on the text: {error}")
        return TrainedTokenizer(settings.data.bpe_vocab_size)


def _tokenizer(settings: Settings, hub: Hub, memo: Memo) -> TokenizerChoice:
    match settings.data.tokenizer:
        case "bpe":
            return TrainedTokenizer(settings.data.bpe_vocab_size)
        case "wordpiece":
            return TrainedWordPiece(settings.data.bpe_vocab_size)
        case name if name.partition(":")[0] == "tiktoken":
            return TiktokenTokenizer(name.partition(":")[2] or DEFAULT_ENCODING, memo)
        case "auto" | "model":
            return _model_tokenizer(settings.model.model_path, hub, memo)
        case name:
            path = Path(name).expanduser()
            if not path.exists():
                raise DataError(
                    f"data.tokenizer = {name!r}: no such file ({path.absolute()}); it is auto, "
                    "model, bpe, wordpiece, tiktoken or the path of a tokenizer.json"
                )
            label = path.name if path.is_dir() else path.absolute().parent.name
            return GivenTokenizer(path, label or path.name, memo)


def _model_tokenizer(model_path: str, hub: Hub, memo: Memo) -> GivenTokenizer:
    path = Path(model_path).expanduser()
    if path.exists():
        return GivenTokenizer(path, path.absolute().name, memo)
    return GivenTokenizer(hub.tokenizer_file(model_path), model_path, memo)
