"""A store's documents divided among training and validation, and the view that says so.

A document goes where the hash of its tokens sends it: equal documents never stand on both sides,
and the order of a text does not matter. Nothing is copied: a split is runs of the store's tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model_check.data.build.wanted import Wanted
from model_check.data.cache.publish import write_synced
from model_check.data.read.document_hashes import document_hashes
from model_check.data.read.manifest import (
    TOKEN_STORES,
    TRAIN,
    FileEntry,
    SplitManifest,
    TokensManifest,
    ViewManifest,
    hash_of,
    read_view,
    runs_name,
)
from model_check.data.read.token_store import TokenStore
from model_check.errors import DataError
from model_check.utils.held import HeldDirectory

_LEAST_TOKENS = 2
"""An input and a label."""


@dataclass(frozen=True)
class Part:
    """Some documents of a store, in their order."""

    num_documents: int
    num_tokens: int
    runs: NDArray[np.int64]
    """See StoreSplit."""


def view_of(wanted: Wanted, tokens: TokensManifest, directory: HeldDirectory) -> ViewManifest:
    """The view's manifest; the files of its splits are written to `directory`. Raises DataError
    where a split has too little text, StorageError."""
    parts = _parts(wanted, tokens) if wanted.fractions else {}
    num_train_tokens = parts[TRAIN].num_tokens if parts else None
    splits = _inner_splits(wanted, parts) | _splits_beside(wanted, tokens)
    available = _num_train_sequences(wanted, tokens, num_train_tokens or tokens.num_tokens)
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
        stride=wanted.stride,
        tail=wanted.tail,
        num_train_tokens=num_train_tokens,
        splits={name: splits[name] for name in wanted.validation},
        files={runs_name(name): _write_runs(directory, name, parts[name]) for name in parts},
    )


def divide(hashes: NDArray[np.uint64], shares: Mapping[str, float]) -> dict[str, NDArray[np.bool_]]:
    """Which documents each split has, TRAIN's being the rest: about its share of them, at least
    one, equal hashes together. Raises DataError when nothing is left to train on."""
    left = np.ones(hashes.size, np.bool_)
    found: dict[str, NDArray[np.bool_]] = {}
    for name, share in shares.items():
        candidates = np.sort(hashes[left])
        count = max(1, round(share * hashes.size))
        if count >= candidates.size:
            raise DataError(
                f"data.validation: {name}: the text has {hashes.size} documents, too few for "
                f"{share:g} of them and some to train on; give a file of its own instead"
            )
        found[name] = left & (hashes <= candidates[count - 1])
        left &= ~found[name]
    if not left.any():
        raise DataError("data.validation: all documents are equal, so none is left to train on")
    return {TRAIN: left, **found}


def part_of(mask: NDArray[np.bool_], ends: NDArray[np.uint64]) -> Part:
    """The documents of `mask`; neighbours become one run."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    firsts, lasts = edges[0::2], edges[1::2]
    all_ends = np.asarray(ends, np.int64)
    places = np.concatenate([[0], all_ends])[firsts]
    sizes = all_ends[lasts - 1] - places
    runs = np.stack([np.cumsum(sizes) - sizes, places])
    return Part(int(mask.sum()), int(sizes.sum()), runs)


def _parts(wanted: Wanted, tokens: TokensManifest) -> dict[str, Part]:
    store = TokenStore(wanted.store, tokens)
    masks = divide(document_hashes(store), wanted.fractions)
    return {name: part_of(mask, store.document_ends) for name, mask in masks.items()}


def _num_train_sequences(wanted: Wanted, tokens: TokensManifest, num_tokens: int) -> int:
    available = wanted.windows.num_sequences(num_tokens)
    if available == 0:
        raise DataError(
            f"{tokens.dataset}: {num_tokens:,} tokens are too few for one sequence of "
            f"training.context_length = {wanted.context_length} (it needs one more); take more "
            "text or a shorter context, or data.tail=pad"
        )
    return available


def _inner_splits(wanted: Wanted, parts: Mapping[str, Part]) -> dict[str, SplitManifest]:
    windows = replace(wanted.windows, tail="pad")
    for name in wanted.fractions:
        if parts[name].num_tokens < _LEAST_TOKENS:
            raise DataError(
                f"data.validation: {name}: its {parts[name].num_documents} documents have no token "
                "to predict; take a larger share, or a file of its own"
            )
    return {
        name: SplitManifest(
            num_sequences=windows.num_sequences(parts[name].num_tokens),
            num_tokens=parts[name].num_tokens,
            num_documents=parts[name].num_documents,
        )
        for name in wanted.fractions
    }


def _splits_beside(wanted: Wanted, tokens: TokensManifest) -> dict[str, SplitManifest]:
    if not wanted.beside:
        return {}
    trained_on = document_hashes(TokenStore(wanted.store, tokens))
    found = {}
    for name, other in wanted.beside.items():
        view, own = read_view(other.view, "off")  # made, and verified, a moment ago
        hashes = document_hashes(TokenStore(other.store, own))
        found[name] = SplitManifest(
            num_sequences=view.num_sequences,
            num_tokens=own.num_tokens,
            num_documents=own.num_documents,
            num_trained_on=int(np.isin(hashes, trained_on).sum()),
            view=other.view.name,
        )
    return found


def _write_runs(directory: HeldDirectory, name: str, part: Part) -> FileEntry:
    runs: NDArray[Any] = part.runs.astype("<i8")
    return write_synced(directory, runs_name(name), runs.tobytes())
