"""Writes a dossier: the tensors of a faulty worker, guilty ones first, up to a size; statistics of
all of them; and what was left out. `manifest` says what is in the files."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedWriter
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from model_check.forensics.manifest import (
    DIFFERENCE,
    MANIFEST,
    SCHEMA,
    TENSORS,
    Kept,
    LeftOut,
    Place,
    Statistics,
    header_of,
    sha256_of,
)
from model_check.forensics.scan import counted
from model_check.utils.files import replacing, write_atomic
from model_check.utils.held import hold_unlinked
from model_check.utils.words import first_line

LEFT_FREE_BYTES = 64 << 20
"""Of the disk, for the logs and reports of all workers."""
_COPIED_VALUES = 1 << 22
"""That pass through host memory at once."""
_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
}


def write_dossier(
    directory: Path,
    about: Mapping[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    guilty: Sequence[str],
    most_bytes: int,
) -> Path:
    """Write `tensors.safetensors`, then `manifest.json`, whose path is returned. Raises OSError.

    `about`: `worker`, `kind` and what else `Manifest` has of the finding. `tensors`: names such as
    `weights/norm.weight`, each once, of any shape, dtype and device. `guilty`: some of these names,
    in the order of computation.

    The guilty ones are kept first, then the others that fit, as long as their values take at most
    `most_bytes`; of a guilty one that does not fit, its first values. Which values these are
    follows from names, sizes and `most_bytes` alone: a peer keeps the same. A full disk leaves room
    for less or for none, a GPU that fails ends the copying; the manifest says so. An earlier
    dossier is moved into `earlier1`, or the next number, with all its files.
    """
    named = {_text(name): tensor.detach() for name, tensor in tensors}
    order = [_text(name) for name in guilty]
    path, device = directory / TENSORS, _Device()
    room, shortened = min(most_bytes, free := _prepare(directory)), None
    if _num_bytes(_chosen(named, order, most_bytes)) > room:
        shortened = f"disk: room for {free >> 20:,} MiB, {LEFT_FREE_BYTES >> 20} MiB left free"
    parts = _chosen(named, order, room)
    kept: dict[str, Kept] = {}
    try:
        if parts:
            kept = _write_tensors(path, parts, device)
    except OSError as error:
        parts, shortened = [], f"disk: {TENSORS} not written: {error.strerror or error}"
    document = {
        "schema": SCHEMA,
        **about,
        **_contents(path),
        "tensors": kept,
        "left_out": _left_out(named, order, kept, device),
        "absent": [name for name in order if name not in named],
        "shortened": device.failure or shortened,
    }
    write_atomic(directory / MANIFEST, msgspec.json.format(msgspec.json.encode(document)) + b"\n")
    return directory / MANIFEST


@dataclass(frozen=True)
class _Part:
    """What is kept of a tensor."""

    name: str
    tensor: Tensor
    num_values: int
    """From its first; a guilty one may be cut."""
    is_guilty: bool
    first_byte: int
    """Among the values of the file."""

    @property
    def end_byte(self) -> int:
        return self.first_byte + self.num_values * self.tensor.element_size()

    @property
    def shape(self) -> list[int]:
        is_cut = self.num_values < self.tensor.numel()
        return [self.num_values] if is_cut else list(self.tensor.shape)


@dataclass
class _Device:
    """A GPU that has failed once fails each call, and may hang in one: it is left alone."""

    failure: str | None = None

    def statistics(self, tensor: Tensor) -> Statistics | None:
        if self.failure is not None:
            return None
        try:
            return _statistics(tensor)
        except torch.AcceleratorError as error:
            self.failure = f"the GPU failed: {first_line(error)}"
        except (RuntimeError, MemoryError):  # what torch cannot count, or has no memory for
            pass
        return None


def _text(name: str) -> str:
    """What UTF-8 cannot hold is escaped: no reader of JSON would take it."""
    return name.encode(errors="backslashreplace").decode()


def _prepare(directory: Path) -> int:
    """Make the directory, set aside what is in it; how much of the disk a dossier may take."""
    with hold_unlinked(directory, make=True) as held:
        names = held.names()
        for name in names:
            if name.startswith(f".{TENSORS}.") and name.endswith(".tmp"):  # of a killed worker
                held.unlink(name)
        if earlier := [n for n in (MANIFEST, TENSORS, DIFFERENCE) if n in names]:
            place = next(n for n in map("earlier{}".format, count(1)) if n not in names)
            held.make_directory(place)
            with held.directory(place) as aside:
                for name in earlier:
                    held.rename(name, aside, name)
        disk = os.fstatvfs(held.descriptor)
    return max(0, disk.f_bavail * disk.f_frsize - LEFT_FREE_BYTES)


def _chosen(named: Mapping[str, Tensor], guilty: Sequence[str], room: int) -> list[_Part]:
    """What is kept, in the order of the file. `room`: bytes."""
    parts: list[_Part] = []
    for name in dict.fromkeys((*guilty, *named)):
        tensor, is_guilty = named.get(name), name in guilty
        if tensor is None or not _can_be_kept(tensor):
            continue
        fitting = min(tensor.numel(), room // tensor.element_size())
        if room and (fitting == tensor.numel() or (is_guilty and fitting)):
            # A view of the file needs values at multiples of their size.
            start = _aligned(_num_bytes(parts), tensor.element_size())
            parts.append(_Part(name, tensor, fitting, is_guilty, start))
            room -= fitting * tensor.element_size()
    return parts


def _can_be_kept(tensor: Tensor) -> bool:
    is_plain = tensor.layout is torch.strided and not tensor.is_meta
    return is_plain and tensor.dtype in _DTYPES


def _aligned(offset: int, item_bytes: int) -> int:
    return -(-offset // item_bytes) * item_bytes


def _num_bytes(parts: Sequence[_Part]) -> int:
    return parts[-1].end_byte if parts else 0


def _write_tensors(path: Path, parts: Sequence[_Part], device: _Device) -> dict[str, Kept]:
    """safetensors' own `save` needs all tensors in host memory, and its bytes once more; this one
    needs a piece of one tensor."""
    kept: dict[str, Kept] = {}
    with replacing(path) as file:
        header = _header(parts)
        file.write(header)
        for part in parts:
            try:
                _copy(part, file, len(header))
            except (RuntimeError, MemoryError) as error:
                device.failure = f"{part.name} could not be copied: {first_line(error)}"
                break
            kept[part.name] = _kept(part, device)
        if len(kept) < len(parts):
            _shorten(file, parts[: len(kept)], len(header))
    return kept


def _shorten(file: BufferedWriter, parts: Sequence[_Part], header_bytes: int) -> None:
    """Leave the file with these alone."""
    file.seek(0)
    file.write(_header(parts, header_bytes))
    file.truncate(header_bytes + _num_bytes(parts))


def _header(parts: Sequence[_Part], length: int = 0) -> bytes:
    """The format allows no gaps: each is a tensor of its own."""
    entries: dict[str, tuple[str, list[int], Place]] = {}
    end = 0
    for number, part in enumerate(parts):
        if gap := part.first_byte - end:
            entries[f"padding/{number}"] = ("U8", [gap], Place(end, part.first_byte))
        end = part.end_byte
        dtype = _DTYPES[part.tensor.dtype]
        entries[part.name] = (dtype, part.shape, Place(part.first_byte, end))
    return header_of(entries, length)


def _copy(part: _Part, file: BufferedWriter, header_bytes: int) -> None:
    file.seek(header_bytes + part.first_byte)
    values = part.tensor.reshape(-1)[: part.num_values]
    for piece in torch.split(values, _COPIED_VALUES):
        file.write(piece.cpu().contiguous().view(torch.uint8).numpy().data)  # sync


def _kept(part: _Part, device: _Device) -> Kept:
    return Kept(
        dtype=_DTYPES[part.tensor.dtype],
        shape=list(part.tensor.shape),
        guilty=part.is_guilty,
        statistics=device.statistics(part.tensor),
        slice=(0, part.num_values),
    )


def _left_out(
    named: Mapping[str, Tensor], guilty: Sequence[str], kept: Mapping[str, Kept], device: _Device
) -> dict[str, LeftOut]:
    return {
        name: LeftOut(
            dtype=_DTYPES.get(tensor.dtype, str(tensor.dtype)),
            shape=list(tensor.shape),
            guilty=name in guilty,
            statistics=device.statistics(tensor),
            why=_why(tensor, device),
        )
        for name, tensor in named.items()
        if name not in kept
    }


def _why(tensor: Tensor, device: _Device) -> str:
    if not _can_be_kept(tensor):
        return "safetensors has no such type"
    return device.failure or "no room"


def _contents(path: Path) -> dict[str, Any]:
    """Of the file of tensors, if there is one."""
    if not path.exists():
        return {"file": None, "bytes": 0, "sha256": None}
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256_of(path)}


def _statistics(tensor: Tensor) -> Statistics:
    told = counted("", tensor)
    low, high = told.finite_range or (None, None)
    is_bad = told.num_nan + told.num_inf > 0
    return Statistics(
        num_nan=told.num_nan,
        num_inf=told.num_inf,
        first_nonfinite=list(told.first_index) if is_bad else None,
        norm=told.norm,
        low=low,
        high=high,
    )
