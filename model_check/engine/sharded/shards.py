"""Reads a sharded checkpoint: verified file by file, then into tensors that are cut in any way."""

import hashlib
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model_check.engine.sharded.manifest import Chunk, Manifest, TensorEntry, read_manifest
from model_check.engine.sharded.parts import first_value, part_of
from model_check.engine.sharded.sums import Part, sums_of
from model_check.errors import CheckpointError
from model_check.forensics.fingerprint import Fingerprint, fingerprint_for
from model_check.forensics.scan import is_finite
from model_check.utils.checkpoint_names import COMMON
from model_check.utils.fingerprint import describe_flip, flipped
from model_check.utils.held import HeldDirectory, hold_unlinked
from model_check.utils.words import few, first_line

_PLACES = "DCP_SHARDING_INFO"
"""torch's name, in the header of a shard."""
Sums = dict[tuple[str, int], int]
"""(tensor, place of the first value) -> fingerprint of what a rank has of it."""


class _Place(msgspec.Struct):
    """As torch writes it into a shard's header, for each tensor of it."""

    saved_offsets: list[int]


@cache
def _kernel() -> Fingerprint:
    """Compiled once."""
    return fingerprint_for(torch.device("cpu"))


@dataclass(frozen=True)
class Shards:
    """The tensors of one sharded checkpoint."""

    path: Path
    manifest: Manifest

    @classmethod
    def at(cls, path: Path) -> "Shards":
        """Raises CheckpointError."""
        return cls(path, read_manifest(path))

    @property
    def directory(self) -> Path:
        """Where the files lie."""
        return self.path / self.manifest.directory

    def problems(self, rank: int = 0, size: int = 1) -> list[str]:
        """What is wrong with the files; empty: nothing. Each of `size` ranks reads a share of
        the shards, and the file that all of them load."""
        try:
            with self._held() as held:
                shards = sorted(self.manifest.files.keys() - {COMMON})
                found = [self._problem(held, file) for file in (COMMON, *shards[rank::size])]
                return [*self._strangers(held), *filter(None, found)]
        except OSError as error:
            return [f"{self.directory}: {error.strerror or error}"]

    def load(self, targets: Mapping[str, Tensor]) -> None:
        """Fills these tensors, by their names in the manifest, in place: sharded or not, on any
        device. Raises CheckpointError where the manifest lacks one or has another shape or dtype
        for it, and where a file cannot be read. What was read is not compared with what was saved:
        see `refuse_other_bits`."""
        # Imported for these alone: it takes a second.
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.checkpoint.state_dict_loader import load

        self._refuse_misfits(targets)
        try:
            with self._held() as held, warnings.catch_warnings():
                # torch warns of a process without others, which is meant.
                warnings.simplefilter("ignore", UserWarning)
                reader = HuggingFaceStorageReader(path_of(held))
                load(dict(targets), storage_reader=reader, no_dist=True)
        except (OSError, SafetensorError, CheckpointException) as error:
            raise CheckpointError(f"{self.path}: cannot be read: {_reason(error)}") from error

    def whole(self, quantities: Sequence[str]) -> dict[str, dict[str, Tensor]]:
        """Returns quantity (`weights`, ...) -> name -> the whole tensor, on the CPU, in the shape
        and dtype in which it was saved. Raises CheckpointError, also where bits differ from what
        was saved."""
        tensors = {
            name: torch.zeros(entry.shape, dtype=getattr(torch, entry.dtype))
            for name, entry in self.manifest.tensors.items()
            if name.partition("/")[0] in quantities
        }
        self.load(tensors)
        self.refuse_other_bits([own_sums(tensors, _kernel())])
        return _by_quantity(tensors)

    def hollow(self) -> dict[str, dict[str, Tensor]]:
        """Returns the same for all quantities without values: the shapes and dtypes, on device
        `meta`."""
        tensors = {
            name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta")
            for name, entry in self.manifest.tensors.items()
        }
        return _by_quantity(tensors)

    def refuse_other_bits(self, of_ranks: Sequence[Sums]) -> None:
        """Compare what all ranks together have loaded with what was saved. Raises
        CheckpointError."""
        found: dict[str, int] = {}
        merged = dict(chain.from_iterable(sums.items() for sums in of_ranks))
        for (name, _), value in merged.items():
            found[name] = (found.get(name, 0) + value) % (1 << 64)
        if others := [n for n, value in found.items() if value != self.manifest.tensors[n].sum]:
            raise CheckpointError(
                f"{self.path}: what was loaded is not what was saved: {few(others)}"
            )

    def _held(self) -> HeldDirectory:
        return hold_unlinked(self.directory)

    def fits(self, targets: Mapping[str, Tensor]) -> bool:
        """Returns whether the manifest has all of them, in these shapes and dtypes, for `load`."""
        try:
            self._refuse_misfits(targets)
        except CheckpointError:
            return False
        return True

    def _refuse_misfits(self, targets: Mapping[str, Tensor]) -> None:
        """torch reads into a tensor of another dtype, and leaves values that no file holds."""
        known = self.manifest.tensors
        for name, target in targets.items():
            if name not in known:
                raise CheckpointError(f"{self.path}: holds no {name}")
            theirs = known[name].dtype, known[name].shape
            ours = str(target.dtype).removeprefix("torch."), list(target.shape)
            if theirs != ours:
                raise CheckpointError(f"{self.path}: {name} is {theirs}, here {ours}")

    def _strangers(self, held: HeldDirectory) -> list[str]:
        names = sorted(set(held.names()) - self.manifest.files.keys())
        return [f"{name}: is not of this checkpoint" for name in names]

    def _problem(self, held: HeldDirectory, file: str) -> str | None:
        wanted = self.manifest.files[file]
        try:
            with held.open(file) as content:
                if (size := os.fstat(content.fileno()).st_size) != wanted.size:
                    return f"{file}: cut off: {size:,} of {wanted.size:,} bytes"
                is_same = hashlib.file_digest(content, "sha256").hexdigest() == wanted.sha256
        except FileNotFoundError:
            return f"{file}: missing"
        except OSError as error:
            return f"{file}: cannot be read: {error.strerror or error}"
        try:
            found = list(self._other_values(held, file))
        except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
            return f"{file}: damaged: {first_line(error)}"
        if found:
            return f"{file}: damaged: {few(found)}"
        return None if is_same else f"{file}: does not match its checksum"

    def _other_values(self, held: HeldDirectory, file: str) -> Iterator[str]:
        """What lies in a shard and is not what was saved, or not finite."""
        if file == COMMON:
            return
        owned = list(self.manifest.of_file(file))
        with safe_open(f"{path_of(held)}/{file}", framework="pt") as content:
            if _places(content) != {name: chunk.offsets for name, _, chunk in owned}:
                yield "its header has other tensors, or puts them elsewhere"
            for name, tensor, chunk in owned:
                values = content.get_tensor(name)
                if (told := _difference(values, tensor, chunk, _kernel())) is not None:
                    yield f"{name}: {told}"


def own_sums(tensors: Mapping[str, Tensor], kernel: Fingerprint) -> Sums:
    """Returns the fingerprint, modulo 2^64, of what this rank has of each tensor (any shape; all on
    one device, which is waited for). Raises TypeError as width_of."""
    parts = {name: part_of(tensor) for name, tensor in tensors.items()}
    sums = sums_of([*parts.values()], kernel)
    places = [(name, part.first) for name, part in parts.items()]
    return dict(zip(places, sums, strict=True))


def _places(shard: Any) -> dict[str, list[int]]:
    """Where torch would put the tensors of an opened one. Raises KeyError, ValueError."""
    told = (shard.metadata() or {}).get(_PLACES, "{}")
    places, names = msgspec.json.decode(told, type=dict[str, _Place]), shard.keys()
    return {name: places[name].saved_offsets for name in names}


def _difference(
    values: Tensor, tensor: TensorEntry, chunk: Chunk, kernel: Fingerprint
) -> str | None:
    if list(values.shape) != chunk.sizes or str(values.dtype) != f"torch.{tensor.dtype}":
        return f"{values.dtype} {list(values.shape)} instead of {tensor.dtype} {chunk.sizes}"
    first = first_value(chunk.offsets, tensor.shape)
    (found,), wanted = sums_of([Part(values, first)], kernel), int(chunk.sum, 16)
    if found != wanted:
        end = first + values.numel()
        bits = 8 * values.element_size()
        places = [at for at in flipped(wanted, found, end, bits) if at[0] >= first]
        return f"{describe_flip(places)} differs"
    return None if is_finite(values) else "not finite"


def _by_quantity(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        quantity, _, own = name.partition("/")
        found.setdefault(quantity, {})[own] = tensor
    return found


def path_of(held: HeldDirectory) -> str:
    """It stays the same directory, whoever renames another one into its place."""
    return f"/proc/self/fd/{held.descriptor}"


def _reason(error: BaseException) -> str:
    """torch wraps what failed on a rank, with its traceback."""
    for failed, _ in getattr(error, "failures", {}).values():
        return first_line(failed)
    return first_line(error)
