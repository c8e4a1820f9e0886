"""`data.dataset` and `data.tokenizer` -> a source and a tokenizer, which are not read yet."""

import importlib.util
from pathlib import Path
from typing import NamedTuple

from model_check.config.dataset import KNOWN, WORDS, check_path
from model_check.config.fields import nearest
from model_check.config.schema import ModelSettings, Settings
from model_check.config.validation import parse_validation
from model_check.data.cache.memo import Memo
from model_check.data.read.manifest import TOKENIZER
from model_check.data.sources.chat import TEMPLATE, ChatTemplate, template_of
from model_check.data.sources.chatml import CHATML, CHATML_NAME
from model_check.data.sources.declared import CONFIG as TOKENIZER_CONFIG
from model_check.data.sources.declared import SPECIAL_TOKENS
from model_check.data.sources.documents import RowForm, TextColumn
from model_check.data.sources.embedded import EmbeddedSource
from model_check.data.sources.examples import ExampleForm
from model_check.data.sources.hub import Hub
from model_check.data.sources.hub_text import PIP_HINT, HubSource
from model_check.data.sources.local_text import LocalSource
from model_check.data.sources.midi_files import MidiSource, is_music
from model_check.data.sources.rows import RowRule, own_paths, rows_to_train
from model_check.data.sources.source import Source
from model_check.data.sources.weights import SAFETENSORS
from model_check.data.tokenizers.midi_tokenizer import MidiTokenizer
from model_check.data.tokenizers.saved import CheckpointTokenizer
from model_check.data.tokenizers.tiktoken_tokenizer import DEFAULT_ENCODING, TiktokenTokenizer
from model_check.data.tokenizers.tokenizer import GivenTokenizer, TokenizerChoice
from model_check.data.tokenizers.trained import TrainedTokenizer, TrainedWordPiece
from model_check.errors import ConfigError, DataError
from model_check.utils.checkpoint_names import is_sharded
from model_check.utils.words import Say

_NO_EXAMPLES = (
    'is running text: name a .jsonl or .parquet file with {"prompt", "completion"} or '
    '{"messages"}, or such a dataset of the hub'
)


class Choice(NamedTuple):
    """What is prepared."""

    source: Source
    tokenizer: TokenizerChoice
    form: RowForm
    """Also of the rows that validate."""


def choose(settings: Settings, memo: Memo, say: Say) -> Choice:
    """What the settings name on this machine. Raises DataError.

    Only `auto` chooses, and says in one line what it could not take.
    """
    hub = Hub(settings.data)
    name = settings.data.dataset
    source: Source
    if settings.training.stage == "prompt_target":
        if name in WORDS:
            raise ConfigError(
                f"training.stage = prompt_target: data.dataset = {name} {_NO_EXAMPLES}"
            )
        tokenizer = _tokenizer_or_trained(settings, hub, memo, say)
        examples = ExampleForm(_chat_template(settings, tokenizer))
        source = _named(name, settings, hub, memo, examples)
        check_music(source, tokenizer, settings)
        return Choice(source, tokenizer, examples)
    form = TextColumn(settings.data.text_column)
    match name:
        case "auto":
            try:
                return Choice(*_wikitext(settings, hub, memo, form), form)
            except DataError as error:
                say(f"data: embedded text (this Python's own documentation and source): {error}")
            source = EmbeddedSource()
        case "embedded":
            source = EmbeddedSource()
        case _:
            source = _named(name, settings, hub, memo, form)
    own = isinstance(source, EmbeddedSource) and settings.model.init_from is None
    if own and settings.data.tokenizer == "auto":
        return Choice(source, TrainedTokenizer(settings.data.bpe_vocab_size), form)
    if isinstance(source, MidiSource) and settings.data.tokenizer == "auto":
        return Choice(source, MidiTokenizer(memo), form)
    tokenizer = _tokenizer_or_trained(settings, hub, memo, say)
    check_music(source, tokenizer, settings)
    return Choice(source, tokenizer, form)


def check_music(source: Source, tokenizer: TokenizerChoice, settings: Settings) -> None:
    """Raises ConfigError for pieces where nothing can read them."""
    if not isinstance(source, MidiSource):
        return
    if settings.training.stage == "prompt_target":
        raise ConfigError(
            f"training.stage = prompt_target: {source.path}: a piece has no prompt and target; "
            "examples/midi/make_tasks.py makes examples of pieces, as JSONL"
        )
    if not isinstance(tokenizer, MidiTokenizer):
        raise ConfigError(
            f"{source.path}: MIDI, which data.tokenizer=midi alone reads, and it is "
            f"{settings.data.tokenizer}"
        )


def _chat_template(settings: Settings, tokenizer: TokenizerChoice) -> ChatTemplate:
    """What data.chat_template names, otherwise what belongs to the tokenizer, otherwise ChatML."""
    given = settings.data.chat_template
    if given == CHATML_NAME:
        return CHATML
    file = None if given is None else Path(given)
    if isinstance(tokenizer, CheckpointTokenizer):
        return template_of(None, file) or tokenizer.chat() or CHATML
    directory = tokenizer.directory if isinstance(tokenizer, GivenTokenizer) else None
    return template_of(directory, file) or CHATML


def _tokenizer_or_trained(settings: Settings, hub: Hub, memo: Memo, say: Say) -> TokenizerChoice:
    """`auto` trains one where none can be had."""
    try:
        return _tokenizer(settings, hub, memo)
    except DataError as error:
        if settings.data.tokenizer != "auto":
            raise
        say(f"data: a tokenizer trained on the text: {error}")
        return TrainedTokenizer(settings.data.bpe_vocab_size)


def _wikitext(
    settings: Settings, hub: Hub, memo: Memo, form: RowForm
) -> tuple[Source, TokenizerChoice]:
    """Raises DataError where it, or the tokenizer, cannot be had."""
    if importlib.util.find_spec("datasets") is None:
        raise DataError(PIP_HINT)
    if hub.why_offline is not None:
        raise DataError(hub.why_offline)
    tokenizer = _tokenizer(settings, hub, memo)
    source = HubSource("wikitext", settings.data, hub, form)
    # Asks for the commit: a refusal must come before the choice.
    source.identity()
    return source, tokenizer


def _named(name: str, settings: Settings, hub: Hub, memo: Memo, form: RowForm) -> Source:
    path = Path(name)
    if name in KNOWN:
        return HubSource(name, settings.data, hub, form)
    if path.exists():
        validation = parse_validation(settings.data.validation)
        rows, without = rows_to_train(validation), own_paths(validation)
        return local_source(path, settings, form, memo, rows, without)
    check_path(name)
    return _found_on_hub(HubSource(name, settings.data, hub, form), name)


def local_source(
    path: Path,
    settings: Settings,
    form: RowForm,
    memo: Memo,
    rows: RowRule,
    without: tuple[Path, ...],
) -> LocalSource | MidiSource:
    """What `path` holds. Raises DataError."""
    if is_music(path, without, beside_text=settings.data.tokenizer == "midi"):
        return MidiSource(path, memo, rows, without)
    return LocalSource(path, form, memo, rows, without)


def _found_on_hub(source: HubSource, name: str) -> HubSource:
    """Raises DataError for a name that the hub refuses: it may be a path, or a word of ours, with a
    typing error."""
    try:
        source.identity()
    except DataError as error:
        near = "" if "/" in name else nearest(name, list(WORDS))
        hint = f"; did you mean data.dataset={near}?" if near else ""
        raise DataError(
            f"data.dataset = {name!r}: no such file or directory here; on the hub: {error}{hint}"
        ) from error
    return source


def _tokenizer(settings: Settings, hub: Hub, memo: Memo) -> TokenizerChoice:
    of_chats = settings.training.stage == "prompt_target"
    end_token = settings.data.document_end
    match settings.data.tokenizer:
        case "bpe":
            return TrainedTokenizer(settings.data.bpe_vocab_size)
        case "wordpiece":
            return TrainedWordPiece(settings.data.bpe_vocab_size)
        case "midi":
            return MidiTokenizer(memo)
        case name if name.partition(":")[0] == "tiktoken":
            return TiktokenTokenizer(name.partition(":")[2] or DEFAULT_ENCODING, memo)
        case "auto" if settings.model.init_from is not None:
            return _initial_tokenizer(settings.model, hub, memo, end_token, of_chats=of_chats)
        case "auto" | "model":
            named = settings.model.model_path
            return _model_tokenizer(named, hub, memo, end_token, of_chats=of_chats)
        case name:
            path = Path(name)
            if not path.exists():
                raise DataError(
                    f"data.tokenizer = {name!r}: no such file ({path.absolute()}); it is auto, "
                    "model, bpe, wordpiece, tiktoken, midi or the path of a tokenizer.json"
                )
            label = path.name if path.is_dir() else path.absolute().parent.name
            return GivenTokenizer(path, label or path.name, memo, end_token)


def _initial_tokenizer(
    model: ModelSettings, hub: Hub, memo: Memo, end_token: str | None, *, of_chats: bool
) -> TokenizerChoice:
    """That of the first weights: they know no other. A directory without one has the model's."""
    path = Path(model.init_from or "")
    try:
        path.stat()
    except PermissionError as error:
        raise ConfigError(f"model.init_from = {path}: {error.strerror}") from error
    except OSError:  # a model of the hub
        pass
    if path.is_file() and path.suffix == SAFETENSORS:
        path = path.parent
    if path.is_file() or is_sharded(path):
        return CheckpointTokenizer(path, memo, end_token)
    if path.is_dir() and not (path / TOKENIZER).is_file():
        return _model_tokenizer(model.model_path, hub, memo, end_token, of_chats=of_chats)
    return _model_tokenizer(str(path), hub, memo, end_token, of_chats=of_chats)


def _model_tokenizer(
    model_path: str, hub: Hub, memo: Memo, end_token: str | None, *, of_chats: bool = False
) -> GivenTokenizer:
    """`of_chats`: with what gives its chat template."""
    path = Path(model_path)
    if path.exists():
        return GivenTokenizer(path, path.absolute().name, memo, end_token)
    instead = "take data.tokenizer=bpe or a local tokenizer.json"
    # Fetched together: which of them the hub's cache happens to hold must not decide.
    names = (TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS, *((TEMPLATE,) if of_chats else ()))
    return GivenTokenizer(hub.model_file(model_path, instead, *names), model_path, memo, end_token)
