"""Build what a view lacks: its token store, then the view itself. One builder at a time."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from model_check.data.build.build import IN_THIS_PROCESS, BuildOptions, build_tokens
from model_check.data.build.progress import BuildProgress
from model_check.data.build.request import CacheRequest
from model_check.data.build.splits import view_of
from model_check.data.cache.lock import build_lock
from model_check.data.cache.publish import (
    forget,
    publish,
    set_aside,
    staging,
    storage_errors,
    sweep,
    take_away,
    write_synced,
)
from model_check.data.read.manifest import (
    MANIFEST,
    TOKEN_STORES,
    CorruptEntryError,
    TokensManifest,
    Verify,
    read_tokens,
    read_view,
    to_bytes,
)
from model_check.data.read.sharing import shared_directory
from model_check.data.sources.declared import CONFIG, SPECIAL_TOKENS
from model_check.data.sources.source import nothing_usable
from model_check.data.sources.text import Repairs
from model_check.data.tokenizers.tokenizer import GivenTokenizer
from model_check.data.tokenizers.trained import TrainedTokenizer
from model_check.utils.words import Say


def make(
    request: CacheRequest,
    verify: Verify,
    say: Say,
    options: BuildOptions = IN_THIS_PROCESS,
    bar: Say | None = None,
) -> bool:
    """Build a view and all that it needs. False: another process had built it meanwhile. `bar`
    draws over what it drew before.

    Raises DataError, StorageError, InternalError (a tokenizing worker died).
    """
    with storage_errors(request.root):
        shared_directory(request.root, TOKEN_STORES).close()
        sweep(request.root)
    if request.validation_texts:
        _refuse_empty(request)
        # One lock at a time, so that two builders never wait for each other. The training text
        # comes first: the others may need its tokenizer.
        with build_lock(request.root, request.store_name, say) as report:
            _whole_store(request, verify, say, options, _progress(request, say, bar, report))
        for text in request.validation_texts.values():
            make(text, verify, say, options, bar)
    with build_lock(request.root, request.store_name, say) as report:
        try:
            read_view(request.view, verify)
            return False
        except (FileNotFoundError, CorruptEntryError):
            progress = _progress(request, say, bar, report)
            tokens = _whole_store(request, verify, say, options, progress)
            _make_view(request, tokens, verify, say)
            return True


def _refuse_empty(request: CacheRequest) -> None:
    """Tokenizing the training text takes long: first each validation text must have a document.
    Raises DataError."""
    for name, text in request.validation_texts.items():
        repairs = Repairs()
        if next(text.source.documents(repairs), None) is None:
            raise nothing_usable(f"data.validation: {name}: {text.source.name}", repairs)


def discard(request: CacheRequest) -> None:
    """Remove what the cache holds of a request. A process that has opened its files keeps them.
    Raises StorageError."""
    for part in (request, *request.validation_texts.values()):
        for entry in (part.view, part.store):
            if os.path.lexists(entry):
                take_away(part.root, part.store_name, entry)
        # Else a build would be continued from its finished shards.
        forget(part.root, part.store_name)


def _progress(request: CacheRequest, say: Say, bar: Say | None, report: Say) -> BuildProgress:
    return BuildProgress(request.source.size_bytes, request.max_tokens, say, bar, report)


def _whole_store(
    request: CacheRequest, verify: Verify, say: Say, options: BuildOptions, progress: BuildProgress
) -> TokensManifest:
    with _absent_or_set_aside(request.root, request.store, say):
        return read_tokens(request.store, verify)
    say(f"data: preparing {request.source.name} with tokenizer {request.tokenizer.name}")
    if isinstance(request.tokenizer, TrainedTokenizer):
        say(f"data: training tokenizer {request.tokenizer.name} on the beginning of the text ...")
    tokenizer = request.tokenizer.load(request.source)
    if isinstance(request.tokenizer, GivenTokenizer) and request.tokenizer.is_end_guessed:
        say(
            f"data: documents end with {tokenizer.end_token}, by its name: no {CONFIG} or "
            f"{SPECIAL_TOKENS} beside the tokenizer.json declares what ends one "
            "(data.document_end=TOKEN names another)"
        )
    begin_id = request.begin_id_of(tokenizer)
    with staging(request.root, request.store_name, resume=True) as directory:
        tokens = build_tokens(
            directory,
            request.source,
            tokenizer,
            request.tokens_key,
            request.max_tokens,
            say,
            options=options,
            progress=progress,
            begin_id=begin_id,
            layout=request.layout,
            chat=request.chat,
        )
        if publish(directory, request.store):
            forget(request.root, request.store_name)
            return tokens
    # A builder without our lock was faster.
    return read_tokens(request.store, verify)


def _make_view(request: CacheRequest, tokens: TokensManifest, verify: Verify, say: Say) -> None:
    with _absent_or_set_aside(request.root, request.view, say):
        read_view(request.view, verify)
        return
    with staging(request.root, request.store_name) as directory:
        view = view_of(request, tokens, directory)
        write_synced(directory, MANIFEST, to_bytes(view))
        publish(directory, request.view)


@contextmanager
def _absent_or_set_aside(root: Path, entry: Path, say: Say) -> Iterator[None]:
    """For a read of `entry`: goes on behind it where there is none, or none that is whole."""
    try:
        yield
    except FileNotFoundError:
        pass
    except CorruptEntryError as error:
        say(f"data: {error}; set aside as {set_aside(root, entry)}")
