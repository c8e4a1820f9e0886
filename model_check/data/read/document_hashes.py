"""A number for each document of a token store that follows from its tokens alone."""

import numpy as np
from numpy.typing import NDArray

from model_check.data.read.token_store import TokenStore

CHUNK_TOKENS = 1 << 20
"""So many at a time: 40 MiB, however long a document is."""
# Odd, so that multiplying by them loses nothing.
_OF_TOKEN = np.uint64(0x9E3779B97F4A7C15)
_OF_PLACE = np.uint64(0xD1342543DE82EF95)


def document_hashes(store: TokenStore, chunk_tokens: int = CHUNK_TOKENS) -> NDArray[np.uint64]:
    """The sum, modulo 2^64, of a mix of each token and its place in the document. Equal documents
    have equal numbers; of n different ones two are equal with a chance of about n^2 / 2^65."""
    ends = store.document_ends
    hashes = np.zeros(ends.size, np.uint64)
    for begin in range(0, store.manifest.num_tokens, chunk_tokens):
        end = min(begin + chunk_tokens, store.manifest.num_tokens)
        first = int(np.searchsorted(ends, np.uint64(begin), "right"))
        last = int(np.searchsorted(ends, np.uint64(end - 1), "right"))
        inner = np.asarray(ends[first:last])
        borders = np.concatenate([[np.uint64(begin)], inner])
        # The first one may have begun long before.
        begun = ends[first - 1] if first else np.uint64(0)
        starts = np.concatenate([[begun], inner])
        mixed = _mixed(store, begin, end, starts, borders)
        hashes[first : last + 1] += np.add.reduceat(mixed, (borders - np.uint64(begin)).astype(int))
    return hashes


def _mixed(
    store: TokenStore,
    begin: int,
    end: int,
    starts: NDArray[np.uint64],
    borders: NDArray[np.uint64],
) -> NDArray[np.uint64]:
    """Of each token in [begin, end); `starts`: where the documents in it begin, `borders`: where
    what lies in it of them does."""
    ids = np.empty(end - begin, np.int64)
    store.read(begin, ids)
    sizes = np.diff(np.append(borders, np.uint64(end))).astype(int)
    places = np.arange(begin, end, dtype=np.uint64) - np.repeat(starts, sizes)
    return _mix13(ids.view(np.uint64) * _OF_TOKEN + places * _OF_PLACE)


def _mix13(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Stafford's thirteenth variant, the finalizer of SplitMix64: each bit of the input changes
    about half of the output's. In place."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values
