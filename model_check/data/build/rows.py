"""Examples in sequences: one in each, or several that do not see each other. Longer ones are cut or
left out. Pure, but for the store that it reads."""

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model_check.data.read.manifest import SplitManifest
from model_check.data.read.token_store import TokenStore
from model_check.data.read.windows import Layout

_LEAST_TOKENS = 2
"""An input and a label."""


@dataclass(frozen=True)
class ExamplePart:
    """Some examples of a store in sequences."""

    counts: SplitManifest
    rows: NDArray[np.int64]
    """See ViewManifest.files."""


@dataclass(frozen=True)
class _Pieces:
    """What sequences hold of examples, an item an example."""

    positions: NDArray[np.int64]
    """Where each begins in the store."""
    sizes: NDArray[np.int64]
    num_cut: int


def examples_of(store: TokenStore, mask: NDArray[np.bool_], layout: Layout) -> ExamplePart:
    """The documents of `mask` in sequences. Raises DataError."""
    ends = store.document_ends.read().astype(np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])[mask]
    sizes = ends[mask] - starts
    pieces = _fitted(store, starts, sizes, layout)
    if layout.packing == "one":
        order = np.arange(len(pieces.sizes))
        firsts = np.arange(len(pieces.sizes) + 1)
    else:
        # In the order of the text: data.num_samples takes the first ones.
        rows = sorted(map(sorted, best_fit(pieces.sizes, layout.room)))
        order = np.array([piece for row in rows for piece in row], np.int64)
        firsts = np.cumsum([0, *map(len, rows)])
    counts = SplitManifest(
        num_sequences=len(firsts) - 1,
        num_tokens=int(sizes.sum()),
        num_documents=int(mask.sum()),
        num_cut=pieces.num_cut,
        num_unfit=len(sizes) - len(pieces.sizes),
        num_dropped=int(sizes.sum() - pieces.sizes.sum()),
    )
    laid = [firsts, pieces.positions[order], pieces.sizes[order]]
    return ExamplePart(counts, np.concatenate(laid).astype("<i8"))


def _fitted(
    store: TokenStore, starts: NDArray[np.int64], sizes: NDArray[np.int64], layout: Layout
) -> _Pieces:
    """Those that have a target in a sequence, cut where they are longer."""
    is_long = sizes > layout.room
    kept = sizes >= _LEAST_TOKENS
    positions, lengths = starts.copy(), np.minimum(sizes, layout.room)
    if layout.truncation == "keep_end":
        positions += sizes - lengths
    for number in np.flatnonzero(is_long):
        is_cut = layout.truncation != "drop"
        kept[number] = is_cut and _has_target(store, positions[number], lengths[number])
    return _Pieces(positions[kept], lengths[kept], int((is_long & kept).sum()))


def _has_target(store: TokenStore, position: int, size: int) -> bool:
    """Its first token is no label: nothing that could predict it is seen."""
    targets = np.empty(size, np.bool_)
    store.read_targets(int(position), targets)
    return bool(targets[1:].any())


def best_fit(sizes: NDArray[np.int64], room: int) -> list[list[int]]:
    """Bins of `room`, each with the numbers of its items: the largest first, each into the fullest
    bin that has room for it (best fit decreasing: Johnson, Near-optimal bin packing algorithms,
    MIT 1973, chapter 2). No item is larger than `room`."""
    bins: list[list[int]] = []
    with_room: dict[int, list[int]] = defaultdict(list)
    """Room that is left -> the bins that have it."""
    rooms: list[int] = []
    """Its keys that have a bin, ascending."""
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        if (place := bisect_left(rooms, size)) < len(rooms):
            left = rooms[place]
            chosen = with_room[left].pop()
            if not with_room[left]:
                del rooms[place]
        else:
            left, chosen = room, len(bins)
            bins.append([])
        bins[chosen].append(item)
        if not with_room[left - size]:
            insort(rooms, left - size)
        with_room[left - size].append(chosen)
    return bins
