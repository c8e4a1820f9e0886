"""What lies in a sharded checkpoint, and where: `step_N/manifest.json`, written last. A directory
without it is a save that was not finished, and is none.

    step_8/manifest.json            JSON, below; renamed into place when all else is on the disk
    step_8/3f9a01c2/common.pt       what is not sharded: settings, random states, ... (`state`)
    step_8/3f9a01c2/shard-*.safetensors   of each rank, by torch.distributed.checkpoint

The second save of one name (`last/`, `best/`) writes beside the first, in a directory with another
random name; the new manifest replaces the old one, and only then the old files go.

torch's own file of metadata is a pickle, which runs its author's code; so nothing here reads or
writes one: JSON and safetensors hold no code.
"""

import math
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from model_check.errors import CheckpointError
from model_check.utils.checkpoint_names import ATTEMPT, COMMON, LONGEST, MANIFEST, was_begun
from model_check.utils.fingerprint import SCHEMA as FINGERPRINTS
from model_check.utils.held import HeldDirectory, hold_unlinked
from model_check.utils.words import first_line

SHARD = re.compile(r"shard-0*(\d+)-model-\d+-of-\d+\.safetensors")
"""A file of rank N - 1, as torch.distributed.checkpoint names it."""

VALUE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
QUANTITIES = ("weights", "exp_avg", "exp_avg_sq")
"""A tensor is `QUANTITY/NAME`."""

Natural = Annotated[int, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(pattern=r"^[\w./]+\Z")]
"""Of what a message may name: it stays in its line."""
Sum = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
"""A fingerprint of values at their places in the whole tensor."""


class FileEntry(msgspec.Struct, frozen=True):
    size: Natural
    """Bytes."""
    sha256: str


class Chunk(msgspec.Struct, frozen=True):
    """A part of a tensor, in one file."""

    file: str
    offsets: list[Natural]
    sizes: list[Natural]
    sum: Sum


class TensorEntry(msgspec.Struct, frozen=True):
    shape: list[Natural]
    dtype: Literal["float64", "float32", "bfloat16", "float16"]
    chunks: list[Chunk]

    @property
    def sum(self) -> int:
        """Of the whole: it is the same however it is cut."""
        return sum(int(chunk.sum, 16) for chunk in self.chunks) % (1 << 64)


class World(msgspec.Struct, frozen=True):
    """Who wrote it."""

    ranks: Annotated[int, msgspec.Meta(ge=1)]
    mesh: dict[Name, Natural] = {}
    """The name of each dimension of the device mesh -> its size."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    schema: Literal[1] = 1
    step: Natural
    """Optimizer steps done."""
    world: World
    directory: Annotated[str, msgspec.Meta(pattern=ATTEMPT)]
    """Where the files lie, beside the manifest."""
    files: dict[str, FileEntry]
    fingerprints: int = FINGERPRINTS
    """The schema of the sums."""
    tensors: dict[Name, TensorEntry]
    """Those of each of QUANTITIES in the order of the model."""

    def of_file(self, file: str) -> Iterator[tuple[str, TensorEntry, Chunk]]:
        """What lies in it, by the name of the tensor."""
        for name, tensor in self.tensors.items():
            yield from ((name, tensor, chunk) for chunk in tensor.chunks if chunk.file == file)


def read_manifest(path: Path, name: str = MANIFEST) -> Manifest:
    """Of the checkpoint in the directory `path`. Raises CheckpointError."""
    try:
        with hold_unlinked(path) as held:
            manifest = msgspec.json.decode(held.read(name, LONGEST), type=Manifest)
    except FileNotFoundError as error:
        lacks = "its save was not finished" if was_begun(path) else f"it has no {MANIFEST}"
        raise CheckpointError(f"{path}: not a checkpoint: {lacks}") from error
    except OSError as error:
        why = error.strerror or error
        raise CheckpointError(f"{path / MANIFEST}: cannot be read: {why}") from error
    # What is not UTF-8 is a ValueError, as is every error of msgspec.
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path / MANIFEST}: damaged: {first_line(error)}") from error
    if wrong := _contradiction(manifest):
        raise CheckpointError(f"{path / MANIFEST}: damaged: {wrong}")
    return manifest


def _contradiction(manifest: Manifest) -> str | None:
    if manifest.fingerprints != FINGERPRINTS:
        return f"its sums are of schema {manifest.fingerprints}, this version has {FINGERPRINTS}"
    for name in manifest.files:
        if name != COMMON and not SHARD.fullmatch(name):
            return f"it names the file {name!r}"
    if COMMON not in manifest.files:
        return f"it names no {COMMON}"
    for name in manifest.tensors:
        if name.partition("/")[0] not in QUANTITIES:
            return f"it names the tensor {name}"
    world = manifest.world
    files = (SHARD.fullmatch(name) for name in manifest.files)
    if max((int(file[1]) for file in files if file), default=0) > world.ranks:
        return f"it names files of more ranks than {world.ranks}"
    if world.mesh and math.prod(world.mesh.values()) != world.ranks:
        return f"a mesh {world.mesh} is not one of {world.ranks} ranks"
    return next(filter(None, map(_gap, manifest.tensors.items())), None) or _overfull(manifest)


def _gap(named: tuple[str, TensorEntry]) -> str | None:
    name, tensor = named
    if not math.prod(tensor.shape) or not tensor.shape:
        return f"{name} has the shape {tensor.shape}"
    if any(len(tensor.shape) != len(at) for c in tensor.chunks for at in (c.offsets, c.sizes)):
        return f"the chunks of {name} have another number of dimensions"
    return None if _are_whole(tensor) else f"the chunks of {name} do not make a whole"


def _are_whole(tensor: TensorEntry) -> bool:
    """Rows that follow each other, each once: what lies elsewhere nobody could look for."""
    num_rows, *others = tensor.shape
    end = 0
    for chunk in sorted(tensor.chunks, key=lambda chunk: (chunk.offsets, chunk.sizes)):
        (first, *columns), (number, *sizes) = chunk.offsets, chunk.sizes
        if any(columns) or sizes != others or first != (end if number else min(first, num_rows)):
            return False
        end += number
    return end == num_rows


def _overfull(manifest: Manifest) -> str | None:
    """More values than a file can hold would fill our memory."""
    held: Counter[str] = Counter()
    for tensor in manifest.tensors.values():
        for chunk in tensor.chunks:
            held[chunk.file] += math.prod(chunk.sizes) * VALUE_BYTES[tensor.dtype]
    for file, num_bytes in held.items():
        if file not in manifest.files:
            return f"it uses {file}, which it does not name"
        if num_bytes > manifest.files[file].size:
            return f"{file} cannot hold {num_bytes:,} bytes"
    return None


def remove_empty(parent: HeldDirectory, name: str) -> None:
    """The directory of a checkpoint, where nothing is left in it."""
    with suppress(OSError):
        os.rmdir(name, dir_fd=parent.descriptor)


def remove_unfinished(held: HeldDirectory, keep: str | None) -> None:
    """Remove the directories of saves in `held`, all but `keep`; and no other name. Raises
    OSError."""
    for name in held.names():
        if re.fullmatch(ATTEMPT, name) and name != keep:
            held.remove(name)
