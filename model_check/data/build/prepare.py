"""Find or build the token cache that the settings ask for. No torch: one process prepares for all
workers, and a cache that exists is found within a fraction of a second."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from model_check.config.prepared_dir import SplitCount
from model_check.config.schema import Settings
from model_check.data.build.request import CacheRequest, cache_request
from model_check.data.cache.prepared import (
    check_output,
    check_same,
    counts_of,
    find_prepared,
    write_prepared,
)
from model_check.data.cache.publish import PlaceError
from model_check.data.read.manifest import (
    TRAIN,
    CorruptEntryError,
    TokensManifest,
    ViewManifest,
    read_view,
    strangers_of,
)
from model_check.data.sources.chatml import CHATML
from model_check.data.sources.text import Repairs
from model_check.data.tokenizers.midi_tokenizer import MidiTokenizer
from model_check.data.tokenizers.tokenizer import use_threads
from model_check.errors import ConfigError, DataError, StorageError
from model_check.utils.words import Say

Speaks = Literal["text", "chat", "music"]


@dataclass(frozen=True)
class Prepared:
    """A token cache that is whole."""

    path: Path
    hit: bool
    """It existed: this process tokenized nothing."""
    view: ViewManifest
    splits: dict[str, SplitCount]
    """What each split holds and drops, `train` first."""
    seconds: float
    speaks: Speaks = "text"
    """What a model that was trained on it is asked with."""


def prepare(settings: Settings, say: Say, bar: Say | None = None) -> Prepared:
    """The cache for `settings`, built unless it exists. `say` gets lines for people; `bar` draws
    over what it drew before.

    Raises DataError (the text or the tokenizer cannot be had, the text is too short), StorageError
    (the cache directory), ConfigError (the tokenizer has more ids than the model has rows).
    """
    started = time.monotonic()
    use_threads(settings.data.num_proc)
    hit = True
    if (ready := find_prepared(settings)) is not None:
        _check_unused_settings(settings, say)
        path, view, tokens = ready
    elif settings.data.output_dir is None:
        request = cache_request(settings, say)
        path = request.view
        view, tokens, hit = _found_or_made(request, settings, say, bar)
    else:
        path, view, tokens, hit = _output_dir_filled(settings, say, bar)
    if strangers := strangers_of(path, view):
        say(
            f"data: {path} belongs in part to {' and '.join(strangers)}, who can put any tokens "
            "there; for a cache of your own set data.cache_dir (SECURITY.md)"
        )
    splits = counts_of(view, tokens)
    for line in _lines_of_long_examples(splits, settings):
        say(f"data: {line}")
    if num_left_out := splits[TRAIN].num_left_out:
        say(
            f"data: {num_left_out:,} documents of {view.dataset} are equal to one that validates: "
            "not trained on"
        )
    seconds = time.monotonic() - started
    return Prepared(path.absolute(), hit, view, splits, seconds, _speaks(tokens))


def _speaks(tokens: TokensManifest) -> Speaks:
    if tokens.tokenizer == MidiTokenizer.name:
        return "music"
    return "text" if tokens.chat is None else "chat"


def _lines_of_long_examples(splits: dict[str, SplitCount], settings: Settings) -> Iterator[str]:
    room = settings.training.context_length + 1
    for name, count in splits.items():
        if number := count.num_cut + count.num_unfit:
            yield (
                f"{name}: {number:,} of {count.num_documents:,} examples have more than {room:,} "
                f"tokens, or nothing to learn within them: {count.num_cut:,} cut "
                f"(data.truncation={settings.data.truncation}), {count.num_unfit:,} left out"
            )


def _output_dir_filled(
    settings: Settings, say: Say, bar: Say | None
) -> tuple[Path, ViewManifest, TokensManifest, bool]:
    """(path of the view, the view, its store, whether they existed) in a prepared directory."""
    output_dir = Path(settings.data.output_dir or "")
    force = settings.data.force_preprocess
    check_output(output_dir, force=force)
    request = cache_request(settings, say)
    if not force:
        check_same(output_dir, request.view)
    try:
        view, tokens, hit = _found_or_made(request, settings, say, bar)
        write_prepared(output_dir, request.view, view, tokens, settings)
    except PlaceError as error:
        raise StorageError(error.with_cure("--output-dir (data.output_dir)")) from error
    return request.view, view, tokens, hit


def _check_unused_settings(settings: Settings, say: Say) -> None:
    """Settings for preparing do not apply to a prepared directory. Raises ConfigError."""
    data = settings.data
    if data.force_preprocess:
        raise ConfigError(
            f"data.force_preprocess: {data.dataset} is prepared, and the text that it was made "
            "from is not in it; give that as data.dataset and the directory as data.output_dir"
        )
    if data.chat_template is not None:
        raise ConfigError(
            f"data.chat_template: {data.dataset} is prepared: its messages are text already; give "
            "their rows as data.dataset"
        )
    if data.num_samples is not None:
        say(f"data: {data.dataset} is used whole: data.num_samples is for preparing")


def _found_or_made(
    request: CacheRequest, settings: Settings, say: Say, bar: Say | None
) -> tuple[ViewManifest, TokensManifest, bool]:
    """(view, its store, whether they existed)"""
    verify = settings.data.verify
    if settings.data.force_preprocess:
        from model_check.data.build.make import discard

        discard(request)
    try:
        view, tokens = read_view(request.view, verify)
        hit = True
        for line in Repairs(tokens.repairs, tokens.repair_places).lines():
            say(f"data: {line}")
    except (FileNotFoundError, CorruptEntryError):
        # Imports numpy, which only a build pays for.
        from model_check.data.build.build import BuildOptions
        from model_check.data.build.make import make

        options = BuildOptions(settings.data.tokenizer_backend, settings.data.num_proc)
        try:
            hit = not make(request, verify, say, options, bar)
            view, tokens = read_view(request.view, "off")
        except FileNotFoundError as error:
            raise DataError(
                f"{error}: was removed meanwhile (by --gc --older-than 0?); prepare again"
            ) from error
    _check_vocabulary(settings, view)
    if tokens.chat is not None and request.chat is CHATML and settings.data.chat_template is None:
        say(
            "data: the tokenizer has no chat template: ChatML is used "
            "(data.chat_template=FILE for another)"
        )
    if request.num_samples is not None and view.num_sequences < request.num_samples:
        except_for = f" beside {', '.join(view.splits)}" if view.splits else ""
        part = "what was read of " if tokens.num_tokens == request.max_tokens else ""
        say(f"data: {view.num_sequences:,} sequences: {part}{view.dataset} has no more{except_for}")
    return view, tokens, hit


def _check_vocabulary(settings: Settings, view: ViewManifest) -> None:
    rows = settings.model.vocab_size
    if rows is not None and rows < view.vocab_size:
        raise ConfigError(
            f"model.vocab_size = {rows} is too small for the tokenizer {view.tokenizer}, which has "
            f"{view.vocab_size} ids; make it larger, or null to follow the tokenizer"
        )
