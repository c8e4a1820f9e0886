"""The token cache's format on disk: two kinds of entry, their manifests, and whether they are
whole. No numpy: finding a prepared cache must be quick.

A token store `tokens/<hash>/` holds `tokens-00000.bin` ... (little-endian uint16, or uint32 above
65,536 ids; every shard except the last has `shard_tokens` tokens), `documents.bin` (uint64: where
each document ends, what marks it included), `tokenizer.json` and `manifest.json`. A store of
examples (training.stage=prompt_target) also has `targets-00000.bin` ...: a byte a token, 1 where it
is to be learned.

A view `<readable name>__<hash>/` holds a `manifest.json`: sequence i consists of the tokens
[i*S, i*S + T + 1) of a split, where T is the context length and S the stride. With S = T, the
default, each token except the very first is a label exactly once (with data.document_masking each
except the first of its document). Tokens behind the last whole sequence are dropped, or padded to
one. A split is the whole store, or documents of it, listed in `<split>.runs.bin`, or another view,
of another text.

Sequences of examples are no windows: each holds whole examples, one or several (data.packing), but
for those that are longer than a sequence. `<split>.rows.bin` lists them.
"""

import hashlib
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from model_check.data.read.sharing import hold_cache
from model_check.data.read.windows import Packing, Tail, Windows
from model_check.errors import DataError
from model_check.utils.held import HeldDirectory, NotPlainError, user_name

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
DOCUMENTS = "documents.bin"
TRAIN = "train"
"""The split of a view that has no others."""
TOKEN_STORES = "tokens"
"""The directory of the token stores in the cache directory."""
SCHEMA = 1
"""Of the manifests. It is a part of each key, so that versions that share a cache make entries of
their own."""
LONGEST = 256 << 20
"""Bytes of a manifest, or of a tokenizer: a larger one would only fill our memory."""
ITEM_BYTES = {"uint16": 2, "uint32": 4}
_RUN_BYTES = 2 * 8
MAX_UINT16_VOCAB = 1 << 16
"""The largest vocabulary whose ids fit 16 bits."""

Verify = Literal["full", "size", "off"]
Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]


class CorruptEntryError(DataError):
    """An entry differs from its manifest: it must be set aside and built again."""


class OtherSchemaError(DataError):
    """An entry of another version of Model Check: it is not ours to judge, or to set aside."""


class FileEntry(msgspec.Struct, frozen=True):
    """One file of an entry."""

    size: Count
    """Bytes."""
    sha256: str


class TokensManifest(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="tokens"):
    """Describes a token store."""

    schema: Literal[1] = 1
    hash: str
    """sha256 of `key`."""
    key: dict[str, Any]
    """All that the tokens depend on."""
    dtype: Literal["uint16", "uint32"]
    shard_tokens: Positive
    num_tokens: Count
    num_documents: Count
    vocab_size: Positive
    end_token: str
    end_id: Count
    dataset: str
    """The text's name, for people; not part of the key."""
    tokenizer: str
    repairs: dict[str, int]
    """How often each kind of repair was made in the text."""
    repair_places: dict[str, str] = {}
    """Where each kind was made first."""
    has_targets: bool = False
    """Its documents are examples."""
    chat: dict[str, str | None] | None = None
    """The chat template that made text of them (sources.chat.ChatTemplate); None: none did."""
    files: dict[str, FileEntry]
    built_with: dict[str, str]
    """Versions, for people; not part of the key."""

    def shard_names(self) -> list[str]:
        return [shard_name(number) for number in range(self._num_shards())]

    def targets_names(self) -> list[str]:
        return [targets_name(number) for number in range(self._num_shards())]

    def is_consistent(self) -> bool:
        """Whether the sizes of the files agree with the numbers."""
        if self._num_shards() > len(self.files):
            return False
        sizes = {DOCUMENTS: 8 * self.num_documents}
        for number, name in enumerate(self.shard_names()):
            num_items = min(self.num_tokens - number * self.shard_tokens, self.shard_tokens)
            sizes[name] = num_items * ITEM_BYTES[self.dtype]
            if self.has_targets:
                sizes[targets_name(number)] = num_items
        return all(name in self.files and self.files[name].size == sizes[name] for name in sizes)

    def _num_shards(self) -> int:
        return -(-self.num_tokens // self.shard_tokens)


class SplitManifest(msgspec.Struct, frozen=True, kw_only=True):
    """A split of a view."""

    num_sequences: Count
    num_tokens: Count
    num_documents: Count
    num_trained_on: Count = 0
    """Of an older version: documents that are also in the train split, word for word."""
    num_cut: Count = 0
    """Examples of which a sequence holds only a part."""
    num_unfit: Count = 0
    """Examples that are left out: longer than a sequence, or without a target in it."""
    num_dropped: Count = 0
    """Tokens of examples that no sequence holds."""
    view: str | None = None
    """The view of the same cache that holds it; None: it is documents of this view's store."""


class ViewManifest(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="view"):
    """Describes a view."""

    schema: Literal[1] = 1
    hash: str
    """sha256 of `key`."""
    key: dict[str, Any]
    tokens: str
    """Its store: `tokens/<name>`, relative to the cache directory."""
    tokens_hash: str
    context_length: Positive
    num_sequences: Count
    num_tokens: Count
    """Tokens in the store, those that no window uses included."""
    vocab_size: Positive
    dataset: str
    tokenizer: str
    stride: Positive | None = None
    """Tokens between the starts of windows; None: context_length."""
    tail: Tail = "drop"
    num_train_tokens: Count | None = None
    """Tokens of the documents to train on; None: of all documents."""
    num_train_documents: Count | None = None
    """How many these are; None: all that are in no split of the store."""
    splits: dict[str, SplitManifest] = {}
    """The validation splits, by name."""
    examples: Packing | None = None
    """How its sequences hold examples; None: they are windows."""
    train: SplitManifest | None = None
    """The train split, of examples."""
    files: dict[str, FileEntry] = {}
    """The view's own files, for splits that are documents of the store. `<split>.runs.bin`, int64
    [2, n]: where each run of tokens begins in the split, and where in the store. Of examples
    `<split>.rows.bin`, int64 [R + 1], [P], [P]: the first of its pieces that each of R sequences
    has, and of each of P pieces where it begins in the store and its number of tokens."""

    @property
    def windows(self) -> Windows:
        """Of the train split. Those of the others are padded."""
        return Windows(self.context_length, self.stride or self.context_length, self.tail)

    def inner_splits(self) -> list[SplitManifest]:
        """Those that are documents of the view's own store."""
        return [split for split in self.splits.values() if split.view is None]

    def is_consistent(self) -> bool:
        """Whether there are tokens for every sequence, and its files hold whole runs."""
        if self.examples is not None:
            return self._has_whole_rows()
        padded = replace(self.windows, tail="pad")
        num_tokens = self.num_train_tokens or self.num_tokens
        inner = self.inner_splits()
        return (
            num_tokens + sum(split.num_tokens for split in inner) <= self.num_tokens
            and self.num_sequences <= self.windows.num_sequences(num_tokens)
            and all(s.num_sequences <= padded.num_sequences(s.num_tokens) for s in inner)
            and not any(entry.size % _RUN_BYTES for entry in self.files.values())
        )

    def _has_whole_rows(self) -> bool:
        inner = {n: split for n, split in self.splits.items() if split.view is None}
        if self.train is None or self.train.num_sequences < self.num_sequences:
            return False
        return all(
            _holds_rows(self.files.get(rows_name(name)), split.num_sequences)
            for name, split in {TRAIN: self.train, **inner}.items()
        )


def _holds_rows(entry: FileEntry | None, num_rows: int) -> bool:
    """Whether a file of that size can hold so many sequences of a piece or more."""
    if entry is None:
        return False
    of_pieces = entry.size - (num_rows + 1) * 8
    return of_pieces >= num_rows * _RUN_BYTES and not of_pieces % _RUN_BYTES


def shard_name(number: int) -> str:
    return f"tokens-{number:05d}.bin"


def targets_name(number: int) -> str:
    return f"targets-{number:05d}.bin"


def runs_name(split: str) -> str:
    return f"{split}.runs.bin"


def rows_name(split: str) -> str:
    return f"{split}.rows.bin"


def hash_of(key: Any) -> str:
    """sha256 of a key's canonical JSON."""
    return hashlib.sha256(msgspec.json.encode(key, order="sorted")).hexdigest()


def content_of(view: ViewManifest, tokens: TokensManifest) -> str:
    """Equal where the same tokens are trained on in the same order, and evaluated. Keys name a
    recipe, from which another version of a library may have made other tokens."""
    windows = view.windows
    return hash_of(
        [
            {name: entry.sha256 for name, entry in tokens.files.items() if name != TOKENIZER},
            {name: entry.sha256 for name, entry in view.files.items()},
            [windows.context_length, windows.stride, windows.tail, view.num_sequences],
            _contents_of_splits(view),
        ]
    )


def _contents_of_splits(view: ViewManifest) -> dict[str, Any]:
    """Without what older versions did not know, where it says nothing."""
    return {
        name: {
            field: value
            for field, value in msgspec.structs.asdict(split).items()
            if value or field not in ("num_cut", "num_unfit", "num_dropped")
        }
        for name, split in view.splits.items()
    }


def short(full_hash: str) -> str:
    """The part of a hash that is used in names. The manifest has the whole hash."""
    return full_hash[:16]


def to_bytes(document: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def hold_view(path: Path) -> HeldDirectory:
    """Raises FileNotFoundError where there is no such view, CorruptEntryError where it is not a
    directory, DataError."""
    return _hold(path.parent, path)


def hold_store(path: Path) -> HeldDirectory:
    """See `hold_view`."""
    return _hold(path.parents[1], path)


def _hold(root: Path, entry: Path) -> HeldDirectory:
    try:
        with hold_cache(root) as cache:
            return cache.directory(*entry.relative_to(root).parts)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(entry) from error
    except OSError as error:
        raise _unreadable(entry, "", error) from error


def read_view(directory: Path, verify: Verify) -> tuple[ViewManifest, TokensManifest]:
    """A view and its store, verified, with the views of its splits. Raises FileNotFoundError when
    there is no such view, CorruptEntryError when one of them is not whole, DataError."""
    view, tokens = _read_one_view(directory, verify)
    for name, split in view.splits.items():
        if split.view is None:
            continue
        other = neighbour_view(directory, split.view)
        try:
            _read_one_view(other, verify)
        except FileNotFoundError as error:
            raise CorruptEntryError(f"{directory}: {other}, its split {name}, is gone") from error
    return view, tokens


def _read_one_view(directory: Path, verify: Verify) -> tuple[ViewManifest, TokensManifest]:
    with hold_view(directory) as held:
        view = read_manifest(held, ViewManifest)
        store = store_of(directory, view)
        try:
            tokens = read_tokens(store, verify)
        except FileNotFoundError as error:
            raise CorruptEntryError(f"{directory}: its token store {store} is gone") from error
        if tokens.hash != view.tokens_hash or tokens.num_tokens != view.num_tokens:
            raise CorruptEntryError(f"{directory}: was made from other tokens than {store} holds")
        verify_files(held, view.files, verify)
    return view, tokens


def strangers_of(directory: Path, view: ViewManifest) -> list[str]:
    """The users other than us and root to whom something of a view, its store or the views of its
    splits belongs: they chose the tokens, whatever the checksums say. Raises DataError."""
    try:
        uids = _owners_of(directory, view)
    except OSError as error:
        raise _unreadable(directory, "", error) from error
    return [user_name(uid) for uid in sorted(uids - {0, os.geteuid()})]


def _owners_of(directory: Path, view: ViewManifest) -> set[int]:
    neighbours = (split.view for split in view.splits.values() if split.view is not None)
    uids: set[int] = set()
    for path in (directory, *(neighbour_view(directory, name) for name in neighbours)):
        with hold_view(path) as held:
            store = store_of(path, read_manifest(held, ViewManifest))
            uids |= held.owners()
        with hold_store(store) as held:
            uids |= held.owners()
    return uids


def neighbour_view(directory: Path, name: str) -> Path:
    """Another view of the same cache; a manifest cannot name a path outside it."""
    return directory.parent / Path(name).name


def store_of(directory: Path, view: ViewManifest) -> Path:
    return directory.parent / TOKEN_STORES / Path(view.tokens).name


def read_tokens(directory: Path, verify: Verify) -> TokensManifest:
    """A token store's manifest, its files verified. Raises like `read_view`."""
    with hold_store(directory) as held:
        manifest = read_manifest(held, TokensManifest)
        verify_files(held, manifest.files, verify)
    return manifest


def read_tokenizer(store: Path) -> bytes:
    """The tokenizer.json of a token store. Raises DataError."""
    try:
        with hold_store(store) as held:
            return held.read(TOKENIZER, LONGEST)
    except OSError as error:
        raise _unreadable(store, TOKENIZER, error) from error


M = TypeVar("M", TokensManifest, ViewManifest)


def read_manifest(directory: HeldDirectory, kind: type[M]) -> M:
    """Raises CorruptEntryError, DataError."""
    path = directory.path / MANIFEST
    try:
        manifest = msgspec.json.decode(directory.read(MANIFEST, LONGEST), type=kind)
    except FileNotFoundError as error:
        raise CorruptEntryError(f"{directory.path}: has no {MANIFEST}") from error
    except OSError as error:
        raise _unreadable(directory.path, MANIFEST, error) from error
    except (ValueError, RecursionError) as error:
        if (schema := _schema_of(directory)) not in (None, SCHEMA):
            raise OtherSchemaError(
                f"{path}: made by another version of Model Check (schema {schema}, this one reads "
                f"{SCHEMA}); another data.cache_dir keeps both"
            ) from error
        raise CorruptEntryError(f"{path}: not a manifest of this version: {error}") from error
    if hash_of(manifest.key) != manifest.hash:
        raise CorruptEntryError(f"{path}: its key does not have its hash: it was edited")
    if short(manifest.hash) != directory.path.name.rpartition("__")[2]:
        raise CorruptEntryError(f"{path}: is of another entry: its hash is not in the name")
    if not manifest.is_consistent():
        raise CorruptEntryError(f"{path}: its numbers contradict each other: it was edited")
    return manifest


class _AnySchema(msgspec.Struct):
    schema: int


def _schema_of(directory: HeldDirectory) -> int | None:
    """None: it does not say."""
    with suppress(OSError, ValueError, RecursionError):
        return msgspec.json.decode(directory.read(MANIFEST, LONGEST), type=_AnySchema).schema
    return None


def verify_files(directory: HeldDirectory, files: dict[str, FileEntry], verify: Verify) -> None:
    """Raises CorruptEntryError for the first file that differs from its manifest."""
    if verify != "off":
        for name, entry in files.items():
            _verify_file(directory, name, entry, whole=verify == "full")


def _verify_file(directory: HeldDirectory, name: str, entry: FileEntry, *, whole: bool) -> None:
    path = directory.path / name
    try:
        size = directory.plain(name).st_size
        if size != entry.size:
            raise CorruptEntryError(f"{path}: has {size:,} bytes instead of {entry.size:,}")
        if whole:
            with directory.open(name) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != entry.sha256:
                raise CorruptEntryError(f"{path}: its content changed (sha256 differs)")
    except FileNotFoundError as error:
        raise CorruptEntryError(f"{path}: is missing") from error
    except OSError as error:
        raise _unreadable(directory.path, name, error) from error


def _unreadable(entry: Path, name: str, error: OSError) -> DataError:
    problem = f"{entry / name}: cannot be read: {error.strerror or 'it is gone'}"
    if isinstance(error, NotPlainError):
        return CorruptEntryError(problem)
    if isinstance(error, PermissionError):
        root = entry.parents[1] if entry.parent.name == TOKEN_STORES else entry.parent
        problem += f"; its owner shares the cache with: chmod -R a+rX {root}"
    return DataError(problem)
