"""What a dossier's `manifest.json` says, and where its tensors lie in the file. No torch: the
launcher reads dossiers, too."""

import hashlib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from model_check.errors import UsageError
from model_check.events import Natural
from model_check.utils.files import read_whole

SCHEMA = 1
MANIFEST, TENSORS, DIFFERENCE = "manifest.json", "tensors.safetensors", "difference.json"
COMPARED_KINDS = ("difference", "break")
"""Dossiers that hold a worker's state: an equal one holds the same bits after as many steps."""
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
"""The names of safetensors, and the bytes of one value."""
ALIGNMENT = 8
_LARGEST_JSON = 64 << 20
_HASHED_BYTES = 1 << 24
_LENGTH_BYTES = 8
"""The file begins with the length of its header, little-endian."""

Length = Annotated[int, Meta(ge=0, lt=2**62)]
Shape = Annotated[list[Length], Meta(max_length=64)]


class DossierError(UsageError):
    """There is no dossier, or none that can be understood."""


class DamagedError(DossierError):
    """A dossier whose tensors are not those that were written."""


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """Of all values of a tensor. None: there are none."""

    num_nan: Natural
    num_inf: Natural
    first_nonfinite: Shape | None = None
    """Its index."""
    norm: float | None = None
    """L2, of the finite values; low and high are their smallest and largest."""
    low: float | None = None
    high: float | None = None


class _Tensor(msgspec.Struct, frozen=True, kw_only=True):
    dtype: str
    """A name of safetensors where it has one, else torch's."""
    shape: Shape
    guilty: bool = False
    """Whether the fault is in it, or it is part of what made the fault."""
    statistics: Statistics | None = None
    """None: it could not be read, or torch does not count this type."""

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)


class Kept(_Tensor, frozen=True, kw_only=True):
    """A tensor of the file; one that is cut lies there as a vector."""

    slice: tuple[Length, Length]
    """Its values from the first to before the second of these, counted row by row."""

    @property
    def is_whole(self) -> bool:
        return self.slice == (0, self.num_values)


class LeftOut(_Tensor, frozen=True, kw_only=True):
    why: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Written last: a dossier without it is not whole."""

    schema: int
    worker: str
    kind: str
    """`nonfinite`, `difference`, `break`"""
    run: str | None = None
    step: Natural | None = None
    """Of the finding."""
    state_after: Natural | None = None
    """Optimizer steps that made the weights and moments."""
    event: dict[str, Any] = {}
    """What the worker told of it."""
    file: str | None
    """Beside the manifest; None: no tensor is kept."""
    bytes: Length
    sha256: str | None
    """Of the file."""
    tensors: dict[str, Kept]
    left_out: dict[str, LeftOut]
    absent: list[str] = []
    """Guilty by name, but the worker has no such tensor."""
    shortened: str | None = None
    """Why less is kept than the setting allows."""


class Place(NamedTuple):
    """Where the values of a tensor lie in the file."""

    first_byte: int
    end_byte: int


def read_manifest(directory: Path) -> Manifest:
    """Raises DossierError."""
    path = directory / MANIFEST
    try:
        manifest = msgspec.json.decode(read_whole(path, _LARGEST_JSON), type=Manifest)
    except FileNotFoundError as error:
        raise DossierError(
            f"{directory}: no dossier: it has no {MANIFEST}, which is written last"
        ) from error
    except OSError as error:
        raise DossierError(f"{path}: cannot be read: {error.strerror or error}") from error
    # A thousand lists within each other.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DossierError(f"{path}: not a manifest of Model Check: {error}") from error
    if manifest.schema != SCHEMA:
        raise DossierError(
            f"{path}: written by another version (schema {manifest.schema}, this one reads "
            f"{SCHEMA})"
        )
    return manifest


def tensors_path(directory: Path, manifest: Manifest) -> Path | None:
    """None: it keeps no tensor. Raises DamagedError for a name that leads elsewhere."""
    if manifest.file is None:
        return None
    if manifest.file != Path(manifest.file).name or "\0" in manifest.file:
        raise DamagedError(f"{directory / MANIFEST}: names a file that is not beside it")
    return directory / manifest.file


def verify(directory: Path, manifest: Manifest) -> None:
    """Reads the whole file. Raises DamagedError: gone, another length, another checksum."""
    if (path := tensors_path(directory, manifest)) is None:
        return
    try:
        # Another user's pipe in its place would block.
        if not path.is_file():
            raise DamagedError(f"{path}: is missing, or is no plain file")
        if (size := path.stat().st_size) != manifest.bytes:
            raise DamagedError(f"{path}: {size:,} bytes, the manifest says {manifest.bytes:,}")
        if sha256_of(path) != manifest.sha256:
            raise DamagedError(f"{path}: its SHA-256 is not the manifest's")
    except OSError as error:
        raise DamagedError(f"{path}: cannot be read: {error.strerror or error}") from error


def sha256_of(path: Path) -> str:
    """Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_HASHED_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def header_of(places: Mapping[str, tuple[str, list[int], Place]], length: int = 0) -> bytes:
    """The beginning of a safetensors file: name -> type, shape, place among the values. At least
    `length` bytes, filled up with blanks, as the format allows."""
    entries = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": list(place)}
        for name, (dtype, shape, place) in places.items()
    }
    text = msgspec.json.encode(entries)
    size = max(length - _LENGTH_BYTES, -(-len(text) // ALIGNMENT) * ALIGNMENT)
    return size.to_bytes(_LENGTH_BYTES, "little") + text.ljust(size)


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: Shape
    data_offsets: tuple[Length, Length]


def places(path: Path, manifest: Manifest) -> dict[str, Place]:
    """Where each kept tensor lies, in bytes from the start of the file. Raises DamagedError unless
    header and manifest agree and all lies within the file."""
    try:
        begin, entries = _header(path)
        size = path.stat().st_size
    except OSError as error:
        raise DamagedError(f"{path}: cannot be read: {error.strerror or error}") from error
    found = {}
    for name, kept in manifest.tensors.items():
        entry = entries.get(name)
        if entry is None or not _agree(entry, kept):
            raise DamagedError(f"{path}: its header and the manifest differ about {name}")
        place = Place(*(begin + offset for offset in entry.data_offsets))
        if place.end_byte > size:
            raise DamagedError(f"{path}: ends before the last value of {name}")
        found[name] = place
    _refuse_overlap(path, found)
    return found


def _refuse_overlap(path: Path, found: Mapping[str, Place]) -> None:
    end = 0
    for name, place in sorted(found.items(), key=lambda item: item[1]):
        if place.first_byte < end and place.end_byte > place.first_byte:
            raise DamagedError(f"{path}: the values of {name} lie over another tensor's")
        end = max(end, place.end_byte)


def _header(path: Path) -> tuple[int, dict[str, _Entry]]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        text = file.read(length) if length <= _LARGEST_JSON else b""
    if len(text) != length:
        raise DamagedError(f"{path}: its header of {length:,} bytes is not whole")
    try:
        return _LENGTH_BYTES + length, msgspec.json.decode(text, type=dict[str, _Entry])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedError(f"{path}: its header is damaged: {error}") from error


def _agree(entry: _Entry, kept: Kept) -> bool:
    (first, end), (first_byte, end_byte) = kept.slice, entry.data_offsets
    item_bytes = ITEM_BYTES.get(kept.dtype, 0)
    return (
        entry.dtype == kept.dtype
        and 0 <= first <= end <= kept.num_values
        and math.prod(entry.shape) == end - first
        and item_bytes > 0
        and end_byte - first_byte == (end - first) * item_bytes
    )


def unraveled(place: int, shape: Iterable[int]) -> tuple[int, ...]:
    """The index of element number `place`, counted row by row."""
    index = []
    for size in reversed(tuple(shape)):
        place, within = divmod(place, size)
        index.append(within)
    return tuple(reversed(index))
