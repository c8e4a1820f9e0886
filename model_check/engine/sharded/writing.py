"""Writes a sharded checkpoint: each rank its own files, the manifest last. Raises on every rank
where it fails on one."""

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from torch import Tensor

from model_check.dist.peers import heeding_peers
from model_check.engine.sharded.manifest import (
    SHARD,
    Chunk,
    FileEntry,
    Manifest,
    TensorEntry,
    World,
    read_manifest,
    remove_empty,
    remove_unfinished,
)
from model_check.engine.sharded.parts import mesh_of, place_of
from model_check.engine.sharded.shards import Sums, path_of
from model_check.engine.sharded.together import Together
from model_check.errors import CheckpointError, PeerLost, StorageError
from model_check.utils.checkpoint_names import COMMON, MANIFEST
from model_check.utils.files import sync
from model_check.utils.held import HeldDirectory, hold_unlinked
from model_check.utils.words import first_line

_FILE_BYTES = 1 << 28
"""Of a rank: torch makes two copies of a file in memory before it writes it."""

_SHARE = "the machines of a job must share system.checkpoint_dir"


Keep = Callable[[str], AbstractContextManager[Path | None]]
"""Entered while the manifest of the save in a directory of that name replaces another one."""


class Written(msgspec.Struct):
    """By one rank."""

    files: dict[str, FileEntry]
    chunks: dict[str, list[Chunk]]


def write_shards(
    path: Path,
    common: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    sums: Sums,
    together: Together,
    *,
    keep: Keep | None = None,
) -> Path | None:
    """Writes a checkpoint to the directory `path`; all ranks call it. `tensors`: DTensors, or the
    same on each rank, of any shape but a scalar's and a dtype of VALUE_BYTES; `sums`: of what this
    rank has of them; `common`: all else, of the first rank. `keep`, of the first rank: moves what
    is there, another run's. Returns where; None: nothing was moved. Raises OSError, StorageError,
    PeerLost.

    A kill leaves no manifest, or the one that was there before with its files; an error leaves
    nothing else.
    """
    attempt = together.first_does("make a directory", lambda: _begin(path))
    with _discarded_on_error(path, attempt, together), _hold(path / attempt) as held:
        _mark_in_use(held, together)
        _write_tensors(held, tensors, together)
        found = together.each("read back", lambda: _inventory(held, tensors, sums, together.rank))
        return together.first_does(
            "write the manifest",
            lambda: _finish(path, held, common, tensors, found, together, keep),
        )


def _begin(path: Path) -> str:
    """A directory for the files, of a name that none has."""
    name = os.urandom(8).hex()
    with hold_unlinked(path, make=True) as held:
        held.make_directory(name)
        try:
            held.sync()
        except OSError:
            _discard(path, name)
            raise
    return name


def _hold(attempt: Path) -> HeldDirectory:
    """Raises StorageError where a rank's machine has another directory of that name."""
    try:
        return hold_unlinked(attempt)
    except FileNotFoundError as error:
        why = f"{attempt}: the first rank has made it, and this rank does not see it"
        raise StorageError(f"{why}: {_SHARE}") from error


@contextmanager
def _discarded_on_error(path: Path, attempt: str, together: Together) -> Iterator[None]:
    """On a full disk, what is written of it is in the way."""
    try:
        yield
    except BaseException:
        if together.is_first and not _is_published(path, attempt):
            _discard(path, attempt)
        raise


def _discard(path: Path, attempt: str) -> None:
    with suppress(OSError), hold_unlinked(path.parent) as parent:
        with parent.directory(path.name) as held:
            held.remove(attempt)
        remove_empty(parent, path.name)


def _is_published(path: Path, attempt: str) -> bool:
    """Whether the manifest names these files: an error after that must not take them away."""
    with suppress(CheckpointError):
        return read_manifest(path).directory == attempt
    return False


def _mark_in_use(held: HeldDirectory, together: Together) -> None:
    """A directory that is locked is no leftover."""
    if together.is_first:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(held.descriptor, fcntl.LOCK_EX)


def _write_tensors(held: HeldDirectory, tensors: Mapping[str, Tensor], together: Together) -> None:
    """Each its own; torch sees to it that none is written twice, and that none is missing."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(
        path_of(held), _files(tensors, together.size), save_distributed=True
    )
    writer.write_data = together.works(writer.write_data)  # type: ignore[method-assign]
    try:
        with heeding_peers(), together.waits():
            save(dict(tensors), storage_writer=writer, process_group=together.group)
    except CheckpointException as error:
        failures = {rank: failure for rank, (failure, _) in error.failures.items()}
        if together.rank in failures:
            raise failures[together.rank] from error
        rank = min(failures)
        raise PeerLost(f"rank {rank} failed to save: {first_line(failures[rank])}") from error
    held.sync()


def _files(tensors: Mapping[str, Tensor], num_ranks: int) -> dict[str, int]:
    """The number of each tensor's file, from 1."""
    numbers, held = {}, 0.0
    for name, tensor in tensors.items():
        held += tensor.numel() * tensor.element_size() / num_ranks
        numbers[name] = 1 + int(held / _FILE_BYTES)
    used = {number: place for place, number in enumerate(sorted(set(numbers.values())), start=1)}
    return {name: used[number] for name, number in numbers.items()}


def _inventory(
    held: HeldDirectory, tensors: Mapping[str, Tensor], sums: Sums, rank: int
) -> Written:
    """What this rank has written."""
    written, own = Written({}, {}), {name: value for (name, _), value in sums.items()}
    for file in held.names():
        match = SHARD.fullmatch(file)
        if match is None or int(match[1]) != rank + 1:
            continue
        written.files[file] = _entry(held, file)
        with safe_open(f"{path_of(held)}/{file}", framework="pt") as content:
            for name in content.keys():  # noqa: SIM118
                written.chunks.setdefault(name, []).append(_chunk(file, tensors[name], own[name]))
    return written


def _chunk(file: str, tensor: Tensor, value: int) -> Chunk:
    offsets, sizes = place_of(tensor)
    return Chunk(file, list(offsets), list(sizes), f"{value:016x}")


def _entry(held: HeldDirectory, file: str) -> FileEntry:
    with held.open(file) as content:
        size = os.fstat(content.fileno()).st_size
        return FileEntry(size, hashlib.file_digest(content, "sha256").hexdigest())


def _finish(
    path: Path,
    held: HeldDirectory,
    common: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    found: list[Written],
    together: Together,
    keep: Keep | None,
) -> Path | None:
    """The first rank's last part, when all others are done. Returns where an earlier run's save was
    moved."""
    with held.create_first(COMMON) as file:
        torch.save(dict(common), file)
        file.flush()
        os.fsync(file.fileno())
    files = {COMMON: _entry(held, COMMON)}
    for rank, written in enumerate(found):
        _refuse_unseen(held, written, rank)
        files |= written.files
    held.sync()
    manifest = Manifest(
        step=common["step"],
        world=World(together.size, mesh_of(tensors)),
        directory=held.path.name,
        files=files,
        tensors={name: _tensor_entry(name, tensor, found) for name, tensor in tensors.items()},
    )
    with hold_unlinked(path) as parent:
        keeping = nullcontext() if keep is None else keep(manifest.directory)
        with keeping as earlier:
            parent.replace(MANIFEST, msgspec.json.encode(manifest))
        with suppress(OSError):  # the checkpoint is whole, whatever lies beside it
            remove_unfinished(parent, keep=manifest.directory)
    sync(path.absolute().parent)  # its own name may be new there
    return earlier


def _refuse_unseen(held: HeldDirectory, written: Written, rank: int) -> None:
    """Raises StorageError where a rank's machine writes to a directory of its own."""
    for file, entry in written.files.items():
        with suppress(FileNotFoundError):
            if held.plain(file).st_size == entry.size:
                continue
        raise StorageError(
            f"{held.path / file}: rank {rank} has written it, and the first rank does not see it: "
            f"{_SHARE}"
        )


def _tensor_entry(name: str, tensor: Tensor, found: list[Written]) -> TensorEntry:
    chunks = [chunk for written in found for chunk in written.chunks.get(name, [])]
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorEntry(list(tensor.shape), dtype, chunks)  # type: ignore[arg-type]
