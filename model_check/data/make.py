"""Build what a view lacks: its token store, then the view itself. One builder at a time."""

from collections.abc import Callable

from model_check.data.build import build_tokens, write_synced
from model_check.data.build_lock import build_lock
from model_check.data.manifest import (
    MANIFEST,
    MAX_UINT16_VOCAB,
    TOKEN_STORES,
    CorruptEntryError,
    TokensManifest,
    Verify,
    ViewManifest,
    hash_of,
    num_sequences_in,
    read_tokens,
    read_view,
    to_bytes,
)
from model_check.data.publish import (
    beside,
    check_room,
    publish,
    set_aside,
    storage_errors,
    sweep,
)
from model_check.data.tokenizer import TextTokenizer
from model_check.data.wanted import Wanted
from model_check.errors import DataError

_BYTES_A_TOKEN = 3.5  # English and source text; only to ask for room in time
_ROOM = 1.2

Say = Callable[[str], None]


def make(wanted: Wanted, verify: Verify, say: Say) -> tuple[ViewManifest, bool]:
    """(the view, whether somebody else had made it meanwhile). Raises DataError, StorageError."""
    root = wanted.root
    with storage_errors(root):
        (root / TOKEN_STORES).mkdir(parents=True, exist_ok=True)
        sweep(root)
    with build_lock(root, wanted.store_name, say):
        try:
            return read_view(wanted.view, verify)[0], True
        except (FileNotFoundError, CorruptEntryError):
            tokens = _sound_store(wanted, verify, say)
            return _sound_view(wanted, tokens, verify, say), False


def _sound_store(wanted: Wanted, verify: Verify, say: Say) -> TokensManifest:
    try:
        return read_tokens(wanted.store, verify)
    except FileNotFoundError:
        pass
    except CorruptEntryError as error:
        say(f"data: {error}; set aside as {set_aside(wanted.root, wanted.store)}")
    say(f"data: preparing {wanted.source.name} with tokenizer {wanted.tokenizer.name}")
    tokenizer = wanted.tokenizer.load(wanted.source)
    _check_room(wanted, tokenizer)
    with beside(wanted.root, wanted.store_name) as directory:
        tokens = build_tokens(
            directory, wanted.source, tokenizer, wanted.tokens_key, wanted.max_tokens, say
        )
        if publish(directory, wanted.store):
            return tokens
    return read_tokens(wanted.store, verify)  # somebody without our lock was faster


def _sound_view(wanted: Wanted, tokens: TokensManifest, verify: Verify, say: Say) -> ViewManifest:
    try:
        return read_view(wanted.view, verify)[0]
    except FileNotFoundError:
        pass
    except CorruptEntryError as error:
        say(f"data: {error}; set aside as {set_aside(wanted.root, wanted.view)}")
    view = _view_of(wanted, tokens)
    with beside(wanted.root, wanted.store_name) as directory:
        write_synced(directory / MANIFEST, to_bytes(view))
        if publish(directory, wanted.view):
            return view
    return read_view(wanted.view, verify)[0]


def _view_of(wanted: Wanted, tokens: TokensManifest) -> ViewManifest:
    available = num_sequences_in(tokens.num_tokens, wanted.context_length)
    if available == 0:
        raise DataError(
            f"{tokens.dataset}: {tokens.num_tokens:,} tokens are too few for one sequence of "
            f"training.context_length = {wanted.context_length} (it needs one more); take more "
            "text or a shorter context"
        )
    return ViewManifest(
        hash=hash_of(wanted.view_key),
        key=wanted.view_key,
        tokens=f"{TOKEN_STORES}/{wanted.store_name}",
        tokens_hash=tokens.hash,
        context_length=wanted.context_length,
        num_sequences=min(available, wanted.num_samples or available),
        num_tokens=tokens.num_tokens,
        vocab_size=tokens.vocab_size,
        dataset=wanted.source.name,
        tokenizer=wanted.tokenizer.name,
    )


def _check_room(wanted: Wanted, tokenizer: TextTokenizer) -> None:
    """Refuse now what would fill the disk later, as far as the size can be known."""
    sizes = [wanted.max_tokens]
    if wanted.source.size_bytes is not None:
        sizes.append(int(wanted.source.size_bytes / _BYTES_A_TOKEN))
    item_bytes = 2 if tokenizer.vocab_size <= MAX_UINT16_VOCAB else 4
    if known := [size for size in sizes if size is not None]:
        check_room(wanted.root, int(min(known) * item_bytes * _ROOM))
