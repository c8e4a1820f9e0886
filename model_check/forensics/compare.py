"""Two dossiers of the same state, bit by bit: which values differ, where, and in which bits.

Bits are compared as integers, so every type is compared alike, NaNs too. numpy, never torch: the
launcher imports this when workers differ.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from msgspec.structs import replace

from model_check.forensics.manifest import (
    DIFFERENCE,
    ITEM_BYTES,
    SCHEMA,
    DamagedError,
    DossierError,
    Kept,
    Manifest,
    places,
    read_manifest,
    tensors_path,
    unraveled,
    verify,
)
from model_check.utils.files import write_atomic
from model_check.utils.words import listed

NUM_SHOWN = 16
_READ_BYTES = 4 << 20
"""Of each file at once. Where all values differ, numpy takes 20 times as much."""
_NUMPY = {
    "BOOL": "u1",
    **{f"{kind.upper()}{8 * size}": f"<{kind}{size}" for kind in "ui" for size in (1, 2, 4, 8)},
    **{f"F{8 * size}": f"<f{size}" for size in (2, 4, 8)},
}
"""Types whose values numpy can tell."""

Bits = np.ndarray[Any, np.dtype[np.unsignedinteger[Any]]]


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """One value that differs."""

    index: list[int]
    odd: str
    """Its bits in the odd worker, hex."""
    peer: str
    xor: str
    bits: str
    """`bit 9`, `bits 3 and 17`: those that differ, from the lowest, 0."""
    odd_value: float | None = None
    """What these bits mean; None: no finite number, or a type without numbers of its own."""
    peer_value: float | None = None


class TensorDifference(msgspec.Struct, frozen=True, kw_only=True):
    dtype: str
    shape: list[int]
    guilty: bool
    num_compared: int
    """Values, from the first: one that was cut has more."""
    num_differing: int
    first: list[Value]
    """The first NUM_SHOWN, counted row by row."""
    largest: Value | None
    """Of the finite ones, the value that is farthest from the peer's."""
    histogram: dict[int, int]
    """Bit -> how many values differ in it."""


class Difference(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="difference"):
    """The content of `difference.json`."""

    schema: int = SCHEMA
    odd: str
    """Workers."""
    peer: str | None = None
    state_after: int | None = None
    not_comparable: str | None = None
    """Why nothing was compared."""
    num_equal: int = 0
    """Tensors without a difference."""
    tensors: dict[str, TensorDifference] = {}
    """Those with one, guilty ones first."""
    not_compared: dict[str, str] = {}
    """Tensor -> why, of those that only one has, or not the same."""


def write_difference(odd: Path, peer: Path) -> Path | None:
    """Compare two directories of dossiers, and write `difference.json` into `odd`.

    None: they cannot be compared; the file says why, if `odd` holds a dossier at all. Raises
    OSError: it cannot be written.
    """
    try:
        manifest = read_manifest(odd)
    except DossierError:
        return None
    difference = compared(odd, peer, manifest)
    content = msgspec.json.format(msgspec.json.encode(difference)) + b"\n"
    write_atomic(odd / DIFFERENCE, content)
    return odd / DIFFERENCE if difference.not_comparable is None else None


def compared(odd: Path, peer: Path, manifest: Manifest) -> Difference:
    """`manifest`: that of `odd`. Damage and what else forbids it is said in `not_comparable`."""
    try:
        other = read_manifest(peer)
        verify(odd, manifest)
        verify(peer, other)
        return _compared(odd, manifest, peer, other)
    except (DossierError, OSError) as error:
        return Difference(odd=manifest.worker, not_comparable=str(error))


def _compared(odd: Path, ours: Manifest, peer: Path, theirs: Manifest) -> Difference:
    told = Difference(odd=ours.worker, peer=theirs.worker, state_after=ours.state_after)
    if ours.state_after is None or ours.state_after != theirs.state_after:
        return replace(
            told,
            not_comparable=f"{ours.worker} holds the state after {_steps(ours)}, "
            f"{theirs.worker} that after {_steps(theirs)}",
        )
    common = {n: t for n, t in ours.tensors.items() if _is_comparable(t, theirs.tensors.get(n))}
    found: dict[str, TensorDifference] = {}
    with ExitStack() as stack:
        files = [_Opened(*pair, stack) for pair in ((odd, ours), (peer, theirs))] if common else []
        for name, kept in common.items():
            num_values = min(kept.slice[1], theirs.tensors[name].slice[1])
            found[name] = _tensor_difference(files, name, kept, num_values)
    differing = {name: tensor for name, tensor in found.items() if tensor.num_differing}
    names = dict.fromkeys((*ours.tensors, *theirs.tensors))
    return replace(
        told,
        num_equal=len(found) - len(differing),
        tensors=dict(sorted(differing.items(), key=lambda item: not item[1].guilty)),
        not_compared={n: _why_not(n, ours, theirs) for n in names if n not in common},
    )


def _tensor_difference(
    files: "list[_Opened]", name: str, kept: Kept, num_values: int
) -> TensorDifference:
    search = _Search(kept)
    for first, (odd, peer) in _pieces(files, name, kept, num_values):
        search.look(first, odd, peer)
    return search.told(num_values)


def _steps(manifest: Manifest) -> str:
    return "?" if manifest.state_after is None else f"{manifest.state_after} steps"


def _is_comparable(kept: Kept, theirs: Kept | None) -> bool:
    is_same = theirs is not None and (kept.dtype, kept.shape) == (theirs.dtype, theirs.shape)
    return is_same and kept.slice[0] == theirs.slice[0] == 0  # type: ignore[union-attr]


def _why_not(name: str, ours: Manifest, theirs: Manifest) -> str:
    for manifest in (ours, theirs):
        if name not in manifest.tensors:
            return f"{manifest.worker} has not kept it"
    return "another type, shape or part"


class _Opened:
    """The file of tensors of one dossier."""

    def __init__(self, directory: Path, manifest: Manifest, stack: ExitStack) -> None:
        path = tensors_path(directory, manifest)
        if path is None:
            raise DamagedError(f"{directory}: its manifest names tensors, but no file")
        self._places = places(path, manifest)
        self._path = path
        self._file: BinaryIO = stack.enter_context(path.open("rb"))

    def read(self, name: str, first_byte: int, num_bytes: int) -> bytes:
        self._file.seek(self._places[name].first_byte + first_byte)
        content = self._file.read(num_bytes)
        if len(content) != num_bytes:
            raise DamagedError(f"{self._path}: became shorter while it was read")
        return content


def _pieces(
    files: list[_Opened], name: str, kept: Kept, num_values: int
) -> Iterator[tuple[int, list[Bits]]]:
    """(number of the first value, its bits and those behind it in each file)"""
    item_bytes = ITEM_BYTES[kept.dtype]
    for begin in range(0, num_values * item_bytes, _READ_BYTES):
        size = min(_READ_BYTES, num_values * item_bytes - begin)
        contents = [file.read(name, begin, size) for file in files]
        yield begin // item_bytes, [np.frombuffer(c, f"<u{item_bytes}") for c in contents]


@dataclass
class _Search:
    """Counts what differs in one tensor, piece by piece."""

    kept: Kept
    num_differing: int = 0
    first: list[Value] = field(default_factory=list)
    largest: Value | None = None
    deviation: float = -1.0
    histogram: dict[int, int] = field(default_factory=dict)

    def look(self, first: int, odd: Bits, peer: Bits) -> None:
        places = np.flatnonzero(odd != peer)
        if not len(places):
            return
        odd, peer = odd[places], peer[places]
        self.num_differing += len(places)
        for at in range(min(len(places), NUM_SHOWN - len(self.first))):
            self.first.append(self._value(first + int(places[at]), odd[at], peer[at]))
        for bit, count in _bits_of(odd ^ peer):
            self.histogram[bit] = self.histogram.get(bit, 0) + count
        deviations = _deviations(odd, peer, self.kept.dtype)
        if deviations is not None and deviations.max() > self.deviation:
            at = int(deviations.argmax())
            self.deviation = float(deviations[at])
            self.largest = self._value(first + int(places[at]), odd[at], peer[at])

    def told(self, num_compared: int) -> TensorDifference:
        return TensorDifference(
            dtype=self.kept.dtype,
            shape=self.kept.shape,
            guilty=self.kept.guilty,
            num_compared=num_compared,
            num_differing=self.num_differing,
            first=self.first,
            largest=self.largest,
            histogram=dict(sorted(self.histogram.items())),
        )

    def _value(self, place: int, odd: Any, peer: Any) -> Value:
        width = 2 * ITEM_BYTES[self.kept.dtype]
        bits = [f"{bit}" for bit, _ in _bits_of(np.array([odd ^ peer]))]
        numbers = [_numbers(np.array([value]), self.kept.dtype) for value in (odd, peer)]
        values = [None if n is None or not np.isfinite(n[0]) else float(n[0]) for n in numbers]
        return Value(
            index=list(unraveled(place, self.kept.shape)),
            odd=f"{int(odd):0{width}x}",
            peer=f"{int(peer):0{width}x}",
            xor=f"{int(odd ^ peer):0{width}x}",
            bits=f"{'bit' if len(bits) == 1 else 'bits'} {listed(bits)}",
            odd_value=values[0],
            peer_value=values[1],
        )


def _bits_of(xor: Bits) -> Iterator[tuple[int, int]]:
    """(bit, how many values have it)"""
    for bit in range(8 * xor.itemsize):
        if count := int(np.count_nonzero(xor & xor.dtype.type(1 << bit))):
            yield bit, count


def _deviations(odd: Bits, peer: Bits, dtype: str) -> np.ndarray[Any, np.dtype[np.float64]] | None:
    """-1 where one of the two is not finite."""
    ours, theirs = _numbers(odd, dtype), _numbers(peer, dtype)
    if ours is None or theirs is None:
        return None
    with np.errstate(all="ignore"):
        is_finite = np.isfinite(ours) & np.isfinite(theirs)
        return np.where(is_finite, np.abs(ours - theirs), -1.0)


def _numbers(bits: Bits, dtype: str) -> np.ndarray[Any, np.dtype[np.float64]] | None:
    """None: numpy has no such numbers."""
    if dtype == "BF16":  # the upper half of a float32
        bits, dtype = bits.astype("<u4") << np.uint32(16), "F32"
    if dtype not in _NUMPY:
        return None
    with np.errstate(all="ignore"):  # a signaling NaN
        return bits.view(_NUMPY[dtype]).astype(np.float64)
