"""The token cache's format on disk: two kinds of entry, their manifests, and whether they are
whole. No numpy: finding a prepared cache must be quick.

A token store `tokens/<hash>/` holds `tokens-00000.bin` ... (little-endian uint16, or uint32 above
65,536 ids; every shard but the last has `shard_tokens` tokens), `documents.bin` (uint64: where each
document ends, its end token included), `tokenizer.json` and `manifest.json`.

A view `<readable name>__<hash>/` holds a `manifest.json`: sequence i is the tokens
[i*S, i*S + T + 1) of a split, T being the context length, S the stride (T, unless asked otherwise:
then each token but the very first is a label exactly once). What is behind the last whole sequence
is dropped or padded. A split is the store; or documents of it, listed in `<split>.runs.bin`; or
another view, of another text.
"""

import hashlib
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from model_check.errors import DataError

SCHEMA = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
DOCUMENTS = "documents.bin"
TRAIN = "train"
"""The split that a view is when it has no other."""
TOKEN_STORES = "tokens"
"""Directory of the token stores inside the cache directory."""
MAX_UINT16_VOCAB = 1 << 16
"""Largest vocabulary whose ids fit 16 bits."""

Verify = Literal["full", "size", "off"]


class CorruptEntryError(DataError):
    """An entry is not what its manifest says: it must be set aside and built again."""


class FileEntry(msgspec.Struct, frozen=True):
    """One file of an entry."""

    size: int
    """Bytes."""
    sha256: str


class TokensManifest(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="tokens"):
    """What a token store is."""

    schema: Literal[1] = 1
    hash: str
    """sha256 of `key`."""
    key: dict[str, Any]
    """Everything that the tokens depend on."""
    dtype: Literal["uint16", "uint32"]
    shard_tokens: int
    num_tokens: int
    num_documents: int
    vocab_size: int
    end_token: str
    end_id: int
    dataset: str
    """The text's name, for people: never part of the key."""
    tokenizer: str
    repairs: dict[str, int]
    """What was repaired or skipped in the text, and how often."""
    repair_places: dict[str, str] = {}
    """Where each of those came first."""
    files: dict[str, FileEntry]
    built_with: dict[str, str]
    """Versions, for people: never part of the key."""

    def shard_names(self) -> list[str]:
        num_shards = -(-self.num_tokens // self.shard_tokens)
        return [shard_name(number) for number in range(num_shards)]


class SplitManifest(msgspec.Struct, frozen=True, kw_only=True):
    """A validation split of a view."""

    num_sequences: int
    num_tokens: int
    num_documents: int
    num_trained_on: int = 0
    """Documents that the train split has too, word for word."""
    view: str | None = None
    """The entry beside this one that holds it; None: documents of the view's own store."""


class ViewManifest(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="view"):
    """What a view is."""

    schema: Literal[1] = 1
    hash: str
    """sha256 of `key`."""
    key: dict[str, Any]
    tokens: str
    """Its store, relative to the view's own directory."""
    tokens_hash: str
    context_length: int
    num_sequences: int
    num_tokens: int
    """Tokens in the store; which of them the view uses says `windows`."""
    vocab_size: int
    dataset: str
    tokenizer: str
    stride: int | None = None
    """Tokens between the starts of windows; None: context_length."""
    tail: Literal["drop", "pad"] = "drop"
    num_train_tokens: int | None = None
    """Tokens of the documents to train on; None: all of the store."""
    splits: dict[str, SplitManifest] = {}
    """The validation splits, by name."""
    files: dict[str, FileEntry] = {}
    """Files of the view itself: `<split>.runs.bin` (int64 [2, n]: where each run of tokens begins
    in the split, and where in the store), for splits that are documents of the store."""


def shard_name(number: int) -> str:
    return f"tokens-{number:05d}.bin"


def runs_name(split: str) -> str:
    return f"{split}.runs.bin"


def hash_of(key: Any) -> str:
    """sha256 of a key's canonical JSON."""
    return hashlib.sha256(msgspec.json.encode(key, order="sorted")).hexdigest()


def short(full_hash: str) -> str:
    """The part of a hash that stands in names; the whole one stands in the manifest."""
    return full_hash[:16]


def to_bytes(manifest: TokensManifest | ViewManifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


def read_view(directory: Path, verify: Verify) -> tuple[ViewManifest, TokensManifest]:
    """A view and its store, verified. Raises FileNotFoundError when there is no such view,
    CorruptEntryError when one of the two is not whole."""
    view = _read(directory, ViewManifest)
    store = store_of(directory, view)
    try:
        tokens = read_tokens(store, verify)
    except FileNotFoundError as error:
        raise CorruptEntryError(f"{directory}: its token store {store} is gone") from error
    if tokens.hash != view.tokens_hash or tokens.num_tokens != view.num_tokens:
        raise CorruptEntryError(f"{directory}: was made from other tokens than {store} holds")
    _verify_splits(directory, view, verify)
    return view, tokens


def _verify_splits(directory: Path, view: ViewManifest, verify: Verify) -> None:
    """Raises CorruptEntryError when a split's file, or the entry that a split is, is not whole."""
    verify_files(directory, view.files, verify)
    for name, split in view.splits.items():
        if split.view is None:
            continue
        beside = view_beside(directory, split.view)
        try:
            read_view(beside, verify)
        except FileNotFoundError as error:
            raise CorruptEntryError(f"{directory}: {beside}, its split {name}, is gone") from error


def view_beside(directory: Path, name: str) -> Path:
    """Another view of the same cache: a manifest leads nowhere else."""
    return directory.parent / Path(name).name


def store_of(directory: Path, view: ViewManifest) -> Path:
    return directory.parent / TOKEN_STORES / Path(view.tokens).name


def read_tokens(directory: Path, verify: Verify) -> TokensManifest:
    """A token store's manifest, its files verified. Raises like `read_view`."""
    manifest = _read(directory, TokensManifest)
    verify_files(directory, manifest.files, verify)
    return manifest


M = TypeVar("M", TokensManifest, ViewManifest)


def _read(directory: Path, kind: type[M]) -> M:
    path = directory / MANIFEST
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        if directory.is_dir():
            raise CorruptEntryError(f"{directory}: has no {MANIFEST}") from error
        raise FileNotFoundError(directory) from error
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        manifest = msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        raise CorruptEntryError(f"{path}: not a manifest of this version: {error}") from error
    if hash_of(manifest.key) != manifest.hash:
        raise CorruptEntryError(f"{path}: its key does not have its hash: it was edited")
    return manifest


def verify_files(directory: Path, files: dict[str, FileEntry], verify: Verify) -> None:
    """Raises CorruptEntryError for the first that is not what its manifest says."""
    if verify != "off":
        for name, entry in files.items():
            _verify_file(directory / name, entry, whole=verify == "full")


def _verify_file(path: Path, entry: FileEntry, *, whole: bool) -> None:
    try:
        size = path.stat().st_size
        if size != entry.size:
            raise CorruptEntryError(f"{path}: has {size:,} bytes instead of {entry.size:,}")
        if whole:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != entry.sha256:
                raise CorruptEntryError(f"{path}: its content changed (sha256 differs)")
    except FileNotFoundError as error:
        raise CorruptEntryError(f"{path}: is missing") from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> DataError:
    cure = ""
    if isinstance(error, PermissionError):
        entry = path.parent
        root = entry.parents[1] if entry.parent.name == TOKEN_STORES else entry.parent
        cure = f"; its owner shares the cache with: chmod -R a+rX {root}"
    return DataError(f"{path}: cannot be read: {error.strerror}{cure}")
