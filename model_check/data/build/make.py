"""Build what a view lacks: its token store, then the view itself. One builder at a time."""

from collections.abc import Callable

from model_check.data.build.build import AS_IT_COMES, build_tokens
from model_check.data.build.filling import How
from model_check.data.build.splits import view_of
from model_check.data.build.wanted import Wanted
from model_check.data.cache.lock import build_lock
from model_check.data.cache.publish import (
    beside,
    check_room,
    forget,
    going_on,
    publish,
    set_aside,
    storage_errors,
    sweep,
    unfinished_bytes,
    write_synced,
)
from model_check.data.read.manifest import (
    MANIFEST,
    MAX_UINT16_VOCAB,
    TOKEN_STORES,
    CorruptEntryError,
    TokensManifest,
    Verify,
    ViewManifest,
    read_tokens,
    read_view,
    to_bytes,
)
from model_check.data.read.sharing import shared_directory
from model_check.data.sources.progress import Progress
from model_check.data.tokenizers.tokenizer import TextTokenizer

_BYTES_A_TOKEN = 3.5  # English and source text; only to ask for room in time
_ROOM = 1.2

Say = Callable[[str], None]


def make(
    wanted: Wanted, verify: Verify, say: Say, how: How = AS_IT_COMES, bar: Say | None = None
) -> tuple[ViewManifest, bool]:
    """(the view, whether somebody else had made it meanwhile). `bar` draws over what it drew.

    Raises DataError, StorageError, InternalError (a tokenizing worker died).
    """
    root = wanted.root
    with storage_errors(root):
        shared_directory(root, TOKEN_STORES).close()
        sweep(root)
    if wanted.beside:
        _make_beside(wanted, verify, say, how, bar)
    with build_lock(root, wanted.store_name, say) as tell:
        try:
            return read_view(wanted.view, verify)[0], True
        except (FileNotFoundError, CorruptEntryError):
            size = wanted.source.size_bytes
            progress = Progress(size, wanted.max_tokens, say, bar, tell)
            tokens = _sound_store(wanted, verify, say, how, progress)
            return _sound_view(wanted, tokens, verify, say), False


def _make_beside(wanted: Wanted, verify: Verify, say: Say, how: How, bar: Say | None) -> None:
    """The validation texts, one lock at a time: two builders never wait for each other. The
    training text comes first, whose tokenizer the others may need."""
    with build_lock(wanted.root, wanted.store_name, say) as tell:
        size = wanted.source.size_bytes
        progress = Progress(size, wanted.max_tokens, say, bar, tell)
        _sound_store(wanted, verify, say, how, progress)
    for other in wanted.beside.values():
        make(other, verify, say, how, bar)


def _sound_store(
    wanted: Wanted, verify: Verify, say: Say, how: How, progress: Progress
) -> TokensManifest:
    try:
        return read_tokens(wanted.store, verify)
    except FileNotFoundError:
        pass
    except CorruptEntryError as error:
        say(f"data: {error}; set aside as {set_aside(wanted.root, wanted.store)}")
    say(f"data: preparing {wanted.source.name} with tokenizer {wanted.tokenizer.name}")
    tokenizer = wanted.tokenizer.load(wanted.source)
    _check_room(wanted, tokenizer)
    with going_on(wanted.root, wanted.store_name) as directory:
        tokens = build_tokens(
            directory,
            wanted.source,
            tokenizer,
            wanted.tokens_key,
            wanted.max_tokens,
            say,
            how=how,
            progress=progress,
        )
        if publish(directory, wanted.store):
            forget(wanted.root, wanted.store_name)
            return tokens
    return read_tokens(wanted.store, verify)  # somebody without our lock was faster


def _sound_view(wanted: Wanted, tokens: TokensManifest, verify: Verify, say: Say) -> ViewManifest:
    try:
        return read_view(wanted.view, verify)[0]
    except FileNotFoundError:
        pass
    except CorruptEntryError as error:
        say(f"data: {error}; set aside as {set_aside(wanted.root, wanted.view)}")
    with beside(wanted.root, wanted.store_name) as directory:
        view = view_of(wanted, tokens, directory)
        write_synced(directory, MANIFEST, to_bytes(view))
        if publish(directory, wanted.view):
            return view
    return read_view(wanted.view, verify)[0]


def _check_room(wanted: Wanted, tokenizer: TextTokenizer) -> None:
    """Refuse now what would fill the disk later, as far as the size can be known."""
    sizes = [wanted.max_tokens]
    if wanted.source.size_bytes is not None:
        sizes.append(int(wanted.source.size_bytes / _BYTES_A_TOKEN))
    item_bytes = 2 if tokenizer.vocab_size <= MAX_UINT16_VOCAB else 4
    if known := [size for size in sizes if size is not None]:
        there = unfinished_bytes(wanted.root, wanted.store_name)
        check_room(wanted.root, int(min(known) * item_bytes * _ROOM) - there)
