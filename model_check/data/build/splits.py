"""A store's documents divided among training and validation, and the view that records it.

The hash of a document's tokens decides its split, so equal documents are never on both sides, and
the order of a text does not matter. A document that is equal to one of a validation text is not
trained on either. Nothing is copied: a split is runs of the store's tokens.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from model_check.data.build.request import CacheRequest
from model_check.data.build.rows import examples_of
from model_check.data.cache.publish import write_synced
from model_check.data.read.manifest import (
    TOKEN_STORES,
    TRAIN,
    SplitManifest,
    TokensManifest,
    ViewManifest,
    hash_of,
    read_view,
    rows_name,
    runs_name,
)
from model_check.data.read.token_store import TokenStore
from model_check.data.read.windows import Layout, Windows
from model_check.errors import DataError
from model_check.utils.held import HeldDirectory

_LEAST_TOKENS = 2
"""An input and a label."""
_MANY_DOCUMENTS = 100
_FEW_EXAMPLES = 10
"""Without being asked nobody takes one of them from training."""
CHUNK_TOKENS = 1 << 20
"""Tokens that are hashed at a time: 40 MiB, however long a document is."""
_CHUNK_DOCUMENTS = 1 << 20
# Odd numbers: multiplying by them loses no bit.
_OF_TOKEN = np.uint64(0x9E3779B97F4A7C15)
_OF_PLACE = np.uint64(0xD1342543DE82EF95)


@dataclass(frozen=True)
class Part:
    """Some documents of a store, in their order."""

    counts: SplitManifest
    runs: NDArray[np.int64]
    """See Split."""


def view_of(
    request: CacheRequest, tokens: TokensManifest, directory: HeldDirectory
) -> ViewManifest:
    """The view's manifest. Writes the files of its splits to `directory`. Raises DataError where a
    split has too little text, StorageError."""
    texts = {name: _TextSplit.of(other) for name, other in request.validation_texts.items()}
    if request.layout is not None:
        return _examples_view(request, tokens, directory, request.layout, texts)
    parts = _parts(request, tokens, texts.values())
    num_train_tokens = parts[TRAIN].counts.num_tokens if parts else None
    splits = {name: part.counts for name, part in parts.items()}
    splits |= {name: text.counts for name, text in texts.items()}
    available = _num_train_sequences(request, tokens, num_train_tokens or tokens.num_tokens)
    return ViewManifest(
        hash=hash_of(request.view_key),
        key=request.view_key,
        tokens=f"{TOKEN_STORES}/{request.store_name}",
        tokens_hash=tokens.hash,
        context_length=request.context_length,
        num_sequences=min(available, request.num_samples or available),
        num_tokens=tokens.num_tokens,
        vocab_size=tokens.vocab_size,
        dataset=request.source.name,
        tokenizer=request.tokenizer.name,
        stride=request.stride,
        tail=request.tail,
        num_train_tokens=num_train_tokens,
        num_train_documents=parts[TRAIN].counts.num_documents if parts else None,
        splits={name: splits[name] for name in request.validation if name in splits},
        files={
            runs_name(name): write_synced(directory, runs_name(name), part.runs.tobytes())
            for name, part in parts.items()
        },
    )


def _examples_view(
    request: CacheRequest,
    tokens: TokensManifest,
    directory: HeldDirectory,
    layout: Layout,
    texts: Mapping[str, "_TextSplit"],
) -> ViewManifest:
    """As `view_of`, of examples."""
    store = TokenStore(request.store, tokens)
    masks = _masks(request, tokens, store, texts.values())
    masks = masks or {TRAIN: np.ones(tokens.num_documents, np.bool_)}
    parts = {name: examples_of(store, mask, layout) for name, mask in masks.items()}
    for name, part in parts.items():
        if not part.counts.num_sequences:
            raise _no_example(tokens.dataset, name, part.counts, layout)
    train = parts[TRAIN].counts
    splits = {name: part.counts for name, part in parts.items()}
    splits |= {name: text.counts for name, text in texts.items()}
    return ViewManifest(
        hash=hash_of(request.view_key),
        key=request.view_key,
        tokens=f"{TOKEN_STORES}/{request.store_name}",
        tokens_hash=tokens.hash,
        context_length=request.context_length,
        num_sequences=min(train.num_sequences, request.num_samples or train.num_sequences),
        num_tokens=tokens.num_tokens,
        vocab_size=tokens.vocab_size,
        dataset=request.source.name,
        tokenizer=request.tokenizer.name,
        num_train_documents=train.num_documents,
        splits={name: splits[name] for name in request.validation if name in splits},
        examples=layout.packing,
        train=train,
        files={
            rows_name(name): write_synced(directory, rows_name(name), part.rows.tobytes())
            for name, part in parts.items()
        },
    )


def _no_example(dataset: str, split: str, counts: SplitManifest, layout: Layout) -> DataError:
    where = "" if split == TRAIN else f"data.validation: {split}: "
    return DataError(
        f"{where}{dataset}: none of {counts.num_documents:,} examples has a target within a "
        f"sequence of training.context_length = {layout.context_length}; take a longer context"
        + ("" if layout.truncation == "keep_end" else ", or data.truncation=keep_end")
    )


def divide(hashes: NDArray[np.uint64], shares: Mapping[str, float]) -> dict[str, NDArray[np.bool_]]:
    """Which documents each split has: about its share, at least one, equal hashes together. TRAIN
    has the rest. Raises DataError when nothing is left to train on."""
    left = np.ones(hashes.size, np.bool_)
    found: dict[str, NDArray[np.bool_]] = {}
    for name, share in shares.items():
        candidates = hashes[left]
        count = max(1, round(share * hashes.size))
        if count >= candidates.size:
            raise DataError(
                f"data.validation: {name}: the text has {hashes.size} documents, too few for "
                f"{share:g} of them and some to train on; give a file of its own instead"
            )
        candidates.partition(count - 1)
        found[name] = left & (hashes <= candidates[count - 1])
        left &= ~found[name]
    if not left.any():
        raise DataError("data.validation: all documents are equal, so none is left to train on")
    return {TRAIN: left, **found}


@dataclass(frozen=True)
class _TextSplit:
    """A validation split that is a text of its own."""

    counts: SplitManifest
    store: TokenStore

    @classmethod
    def of(cls, request: CacheRequest) -> "_TextSplit":
        # It was made and verified a moment ago.
        view, tokens = read_view(request.view, "off")
        counts = SplitManifest(
            num_sequences=view.num_sequences,
            num_tokens=tokens.num_tokens,
            num_documents=tokens.num_documents,
            num_cut=0 if view.train is None else view.train.num_cut,
            num_unfit=0 if view.train is None else view.train.num_unfit,
            num_dropped=0 if view.train is None else view.train.num_dropped,
            view=request.view.name,
        )
        return cls(counts, TokenStore(request.store, tokens))


def _parts(
    request: CacheRequest, tokens: TokensManifest, texts: Iterable[_TextSplit]
) -> dict[str, Part]:
    """The documents of the store divided among TRAIN and the shares of `request`, and those of
    `texts` taken from TRAIN; empty where TRAIN has them all."""
    store = TokenStore(request.store, tokens)
    if request.or_tail and tokens.num_documents < _MANY_DOCUMENTS:
        return _cut(request, store)
    masks = _masks(request, tokens, store, texts)
    if not masks:
        return {}
    ends = store.document_ends.read().view("<i8")
    windows = replace(request.windows, tail="pad")
    parts = {name: _part_of(mask, ends, windows) for name, mask in masks.items()}
    for name in request.fractions:
        if (counts := parts[name].counts).num_tokens < _LEAST_TOKENS:
            raise DataError(
                f"data.validation: {name}: its {counts.num_documents} documents have no token to "
                "predict; take a larger share, or a file of its own"
            )
    return parts


def _cut(request: CacheRequest, store: TokenStore) -> dict[str, Part]:
    """The last hundredth of the tokens validates, but at least one sequence and at most a tenth of
    them; empty where the text is too short for that. A document counts where it begins."""
    ((name, share),) = request.fractions.items()
    total, windows = store.manifest.num_tokens, request.windows
    held = min(max(round(share * total), windows.context_length + 1), total // 10)
    if held < _LEAST_TOKENS or not windows.num_sequences(total - held):
        return {}
    begins = np.append(0, store.document_ends.read().view("<i8")[:-1])

    def part(first: int, end: int) -> Part:
        counts = SplitManifest(
            num_sequences=replace(windows, tail="pad").num_sequences(end - first),
            num_tokens=end - first,
            num_documents=int(((first <= begins) & (begins < end)).sum()),
        )
        return Part(counts, np.array([0, first], "<i8"))

    return {TRAIN: part(0, total - held), name: part(total - held, total)}


def _masks(
    request: CacheRequest, tokens: TokensManifest, store: TokenStore, texts: Iterable[_TextSplit]
) -> dict[str, NDArray[np.bool_]]:
    """Which documents TRAIN and the shares of `request` have; empty where TRAIN has them all."""
    validating = [document_hashes(text.store) for text in texts]
    if not (validating or request.fractions):
        return {}
    if request.or_tail and tokens.num_documents < _FEW_EXAMPLES:
        return {}
    hashes = document_hashes(store)
    masks = divide(hashes, request.fractions)
    for others in validating:
        for first in range(0, hashes.size, _CHUNK_DOCUMENTS):
            some = slice(first, first + _CHUNK_DOCUMENTS)
            masks[TRAIN][some] &= ~np.isin(hashes[some], others)
    if masks[TRAIN].all():
        return {}
    if not masks[TRAIN].any():
        raise DataError(
            f"data.validation: each document of {tokens.dataset} validates, or is equal to one "
            "that does, so none is left to train on"
        )
    return masks


def _part_of(mask: NDArray[np.bool_], ends: NDArray[np.int64], windows: Windows) -> Part:
    """The documents of `mask`. Neighbours become one run."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    firsts, lasts = edges[0::2], edges[1::2]
    places = np.where(firsts > 0, ends[firsts - 1], 0)
    sizes = ends[lasts - 1] - places
    num_tokens = int(sizes.sum())
    counts = SplitManifest(
        num_sequences=windows.num_sequences(num_tokens),
        num_tokens=num_tokens,
        num_documents=int(mask.sum()),
    )
    return Part(counts, np.stack([np.cumsum(sizes) - sizes, places]).astype("<i8"))


def _num_train_sequences(request: CacheRequest, tokens: TokensManifest, num_tokens: int) -> int:
    available = request.windows.num_sequences(num_tokens)
    if available == 0:
        raise DataError(
            f"{tokens.dataset}: {num_tokens:,} tokens are too few for one sequence of "
            f"training.context_length = {request.context_length} (it needs one more); take more "
            "text or a shorter context, or data.tail=pad"
        )
    return available


def document_hashes(store: TokenStore, chunk_tokens: int = CHUNK_TOKENS) -> NDArray[np.uint64]:
    """uint64 [documents]: the sum, modulo 2^64, of a mix of each token and its place in the
    document. Equal documents have equal hashes. Among n different ones two hashes are equal with a
    probability of about n^2 / 2^65."""
    ends = store.document_ends.read()
    hashes = np.zeros(ends.size, np.uint64)
    for begin in range(0, store.manifest.num_tokens, chunk_tokens):
        positions = np.arange(begin, min(begin + chunk_tokens, store.manifest.num_tokens))
        ids = np.empty(positions.size, np.int64)
        store.read(begin, ids)
        first, last = np.searchsorted(ends, positions[[0, -1]].astype(np.uint64), "right")
        documents = slice(first, last + 1)
        starts = np.append(ends[first - 1] if first else np.uint64(0), ends[first:last])
        # Where the part of each document in this chunk begins.
        borders = np.maximum(starts.astype(np.int64), begin) - begin
        sizes = np.diff(np.append(borders, positions.size))
        places = positions.view(np.uint64) - np.repeat(starts, sizes)
        mixed = _mix13(ids.view(np.uint64) * _OF_TOKEN + places * _OF_PLACE)
        hashes[documents] += np.add.reduceat(mixed, borders)
    return hashes


def _mix13(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Stafford's variant 13, the finalizer of SplitMix64: each bit of the input changes about half
    of the bits of the output. In place."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values
