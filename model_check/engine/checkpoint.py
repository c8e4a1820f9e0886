"""Checkpoint files: written whole or not at all, verified before anything of them is used. `state`
decides what is in them."""

import errno
import fcntl
import os
import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from model_check.config.fields import all_fields, sections
from model_check.config.resume import flat, with_defaults
from model_check.config.schema import Settings
from model_check.engine.sharded.manifest import QUANTITIES, VALUE_BYTES
from model_check.engine.sharded.shards import Shards
from model_check.errors import CheckpointError, ConfigError, StorageError
from model_check.forensics.scan import bad_tensors
from model_check.utils.archive import DAMAGE, damage_of
from model_check.utils.checkpoint_names import COMMON
from model_check.utils.files import replacing
from model_check.utils.held import hold_unlinked
from model_check.utils.words import few, first_line

SCHEMA = 2
MOMENTS = QUANTITIES[1:]


def write_checkpoint(
    path: Path, state: dict[str, Any], before: Callable[[], None] | None = None
) -> None:
    """Tensors and plain types only: it loads with weights_only=True. `before`: called when the new
    file is whole, just before it takes the name.

    Raises StorageError; an older file of that name then stays. The file is locked while it is
    written: an unlocked leftover is one of a dead writer.
    """
    with storing(path), replacing(path, before) as file:
        with suppress(OSError):  # a file system without locks: a leftover then stays
            fcntl.flock(file, fcntl.LOCK_EX)
        torch.save(state, file)


class Weights(msgspec.Struct):
    """What every checkpoint holds."""

    model: dict[str, Tensor]
    settings: dict[str, dict[str, Any]]


def read_checkpoint(
    path: Path,
    layout: type[Weights] = Weights,
    *,
    hollow: bool = False,
    share: tuple[int, int] = (0, 1),
) -> dict[str, Any]:
    """The state in `path`, a file or a sharded checkpoint: tensors on the CPU, those of a file
    mapped from it; all that `layout` names is in it, and its weights are finite. Raises
    CheckpointError.

    Of a sharded one the optimizer's moments are there where `layout` names them; `hollow`: weights
    and moments have no values, which `shards.load` then fills in, in place. `share`: this rank and
    how many there are; each verifies a part of the files.
    """
    if os.path.isdir(path):  # of Path's own, a directory that we may not enter raises
        return _read_sharded(path, layout, hollow, share)
    _verify(path)
    state: dict[str, Any] = load_plain(path)
    _check(path, state, layout)
    if "shards" in state:
        raise not_ours(path, "it names shards, which a directory has")
    _refuse_spoilt(path, state)
    return state


def _read_sharded(
    path: Path, layout: type[Weights], hollow: bool, share: tuple[int, int]
) -> dict[str, Any]:
    shards = Shards.at(path)
    if problems := shards.problems(*share):
        raise CheckpointError(f"{path}: {few(problems)}")
    common = load_plain(shards.directory / COMMON)
    if not isinstance(common, dict) or not isinstance(common.get("optimizer"), dict):
        raise not_ours(path, f"{COMMON} is none of a sharded checkpoint")
    own = {"model": common.get("model"), "optimizer.state": common["optimizer"].get("state")}
    if hidden := [name for name, tensors in own.items() if tensors != {}]:
        raise not_ours(path, f"{COMMON} has tensors beside the shards: {few(hidden)}")
    has_moments = "optimizer" in layout.__struct_fields__
    kinds = QUANTITIES if has_moments else QUANTITIES[:1]
    found = shards.hollow() if hollow else shards.whole(kinds)
    moments = _by_number(common["optimizer"].get("step"), found) if has_moments else {}
    state = common | {
        "model": found.get("weights", {}),
        "optimizer": common["optimizer"] | {"state": moments},
        "shards": shards,
    }
    _check(path, state, layout)
    return state


def _by_number(
    step: object, found: Mapping[str, Mapping[str, Tensor]]
) -> dict[int, dict[str, object]]:
    """Moments in the form of torch.optim.AdamW, of the weights that have both."""
    first, second = (found.get(kind, {}) for kind in MOMENTS)
    return {
        number: {"step": step, "exp_avg": first[name], "exp_avg_sq": second[name]}
        for number, name in enumerate(name for name in first if name in second)
    }


def load_plain(path: Path) -> Any:
    """Tensors and plain values. Raises CheckpointError."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        # torch's own text says how to load it all the same, which would run its author's code.
        raise CheckpointError(
            f"{path}: not a checkpoint of Model Check: it holds more than tensors and plain "
            "values, which only its author's code could load; nothing of it was loaded"
        ) from error
    except (OSError, AttributeError, *DAMAGE) as error:
        raise not_ours(path, error) from error


def _check(path: Path, state: Any, layout: type[Weights]) -> None:
    """Raises CheckpointError where it is not what `layout` names."""
    schema = state.get("schema") if isinstance(state, dict) else None
    if schema is None:
        raise not_ours(path, _what_is_missing(state, layout))
    if type(schema) is not int or schema != SCHEMA:
        named = schema if type(schema) is int else type(schema).__name__
        raise CheckpointError(
            f"{path}: written by another version (schema {named}, this one reads {SCHEMA})"
        )
    try:
        known = msgspec.convert(state, layout)
        tensors = list(_weights_and_moments(state))
    # A tensor instead of a dict makes msgspec raise an AttributeError.
    except (msgspec.ValidationError, AttributeError, RecursionError) as error:
        raise not_ours(path, error) from error
    if "model" not in known.settings:
        raise not_ours(path, "its settings have no [model]")
    if others := [f"{name} ({what})" for name, t in tensors if (what := _unusual(t, state))]:
        raise not_ours(path, f"tensors that no checkpoint has: {few(others)}")


def packed(tokenizer: bytes) -> Tensor:
    """A tokenizer.json as a checkpoint holds it: its zlib stream, [bytes] uint8, with a checksum
    like the weights. A vocabulary of 8,192 takes 82 kB of 228."""
    return torch.frombuffer(bytearray(zlib.compress(tokenizer)), dtype=torch.uint8)


def tokenizer_of(state: Mapping[str, Any], path: Path, most_bytes: int) -> bytes | None:
    """The tokenizer.json in a checkpoint; None: an older one holds none. Raises CheckpointError,
    also where it is longer than `most_bytes`."""
    if (stream := state.get("tokenizer")) is None:
        return None
    try:
        unpacker = zlib.decompressobj()
        content = unpacker.decompress(stream.numpy().tobytes(), most_bytes)
    except (zlib.error, AttributeError, TypeError, RuntimeError) as error:
        raise not_ours(path, f"its tokenizer: {first_line(error)}") from error
    if not unpacker.eof:
        raise not_ours(path, "its tokenizer is cut off, or too long")
    return content


def settings_of(state: Mapping[str, Any], path: Path) -> Settings:
    """Returns the settings of its run. Those that other versions have, and that change nothing of
    what a model computes, are left out. Raises ConfigError."""
    try:
        saved = flat(msgspec.convert(state["settings"], dict[str, Any]))
        known = all_fields().keys() | sections().keys()
        if unknown := [n for n in saved if n.startswith("model.") and n not in known]:
            raise ConfigError(f"it has {few(unknown)}, which this version does not know")
        return with_defaults(saved)
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"{path}: written by another version: {error}") from error


def not_ours(path: Path, why: object) -> CheckpointError:
    """`why`: an error of whoever tried to use it, or words."""
    text = first_line(why) if isinstance(why, BaseException) else why
    return CheckpointError(f"{path}: not a checkpoint of Model Check: {text}")


def _what_is_missing(state: Any, layout: type[Weights]) -> str:
    """Of a file without a schema, which another program wrote."""
    if not isinstance(state, dict):
        return f"it holds one {type(state).__name__}, where a dict with names is expected"
    return f"it has no {few(['schema', *(n for n in layout.__struct_fields__ if n not in state)])}"


def _refuse_spoilt(path: Path, state: dict[str, Any]) -> None:
    """Raises CheckpointError for weights or moments that are not finite: no step repairs them."""
    if spoilt := [tensor.name for tensor in bad_tensors(_weights_and_moments(state))]:
        raise CheckpointError(
            f"{path}: not finite: {few(spoilt)}; go on from an earlier checkpoint"
        )


def _weights_and_moments(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    return _tensors_in({name: state[name] for name in ("model", "optimizer") if name in state})


def _unusual(tensor: Tensor, state: Mapping[str, Any]) -> str:
    """Why nobody may compute with the tensor; empty: there is no reason."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in VALUE_BYTES:
        return dtype
    if tensor.layout != torch.strided or tensor.is_nested:
        return "sparse or nested"
    is_hollow = "shards" in state
    return "" if tensor.device.type == "cpu" or is_hollow else f"on {tensor.device.type}"


def _tensors_in(tree: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _tensors_in(value, f"{name}.{key}" if name else str(key))
    elif isinstance(tree, Tensor):
        yield name, tree


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """Name -> shape, of a state dict."""
    return {name: tensor.shape for name, tensor in tensors.items()}


def set_earlier_aside(path: Path) -> None:
    """Evidence of an earlier run stays: `a.pt` becomes `a.earlier1.pt`, or the next number that is
    free. Raises OSError."""
    with suppress(FileNotFoundError), hold_unlinked(path.parent) as directory:
        if path.name in (names := set(directory.names())):
            kept = (f"{path.stem}.earlier{number}{path.suffix}" for number in count(1))
            directory.rename(path.name, directory, next(name for name in kept if name not in names))


@contextmanager
def storing(path: Path, setting: str = "system.checkpoint_dir") -> Iterator[None]:
    """Turn a failure to write `path` into a StorageError that names `setting`, which decides where
    it lies. The failure of a GPU stays as it is: a copy to the host may be the first to meet it.
    So does a RuntimeError that is no error of a file: it is a fault of ours."""
    try:
        yield
    except torch.AcceleratorError:
        raise
    except (OSError, RuntimeError) as error:
        if not _is_of_file(error):
            raise
        raise StorageError(
            f"{path}: cannot be written: {_why(error, path)}; free space there, or set {setting}"
        ) from error


def _is_of_file(error: BaseException | None) -> bool:
    """torch's writer raises RuntimeError where the file failed."""
    if error is None or isinstance(error, OSError):
        return error is not None
    is_of_writer = any(word in str(error) for word in ("unexpected pos", "PytorchStreamWriter"))
    return is_of_writer or _is_of_file(error.__context__)


def _why(error: Exception, path: Path) -> str:
    """The reason that the system gave. torch's writer raises an error of its own (`unexpected pos
    143680 vs 143568`) where that of the file system came within its own lines."""
    causes = [each for each in (error, error.__context__) if isinstance(each, OSError)]
    if not causes or causes[0].strerror is None:
        return first_line(error)
    why = causes[0].strerror
    if causes[0].errno == errno.ENOSPC:
        space = os.statvfs(path.parent)
        free_mib = space.f_bavail * space.f_frsize / 2**20
        why += f" ({free_mib:,.1f} MiB and {space.f_favail:,} inodes free)"
    return why


def _verify(path: Path) -> None:
    """torch.load ignores checksums (tried: it loads a flipped weight and reports nothing)."""
    try:
        damage = damage_of(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    if damage is not None:
        raise CheckpointError(f"{path}: damaged: {damage} (or not a checkpoint of Model Check)")
