"""The tensors of a transformers LLaMA in a directory: which of its files hold them, and under which
names. What transformers 5 loads there is found here, by its own order of files."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model_check.config.shape import HEAD
from model_check.errors import ConfigError
from model_check.utils.first_bytes import PICKLES, what_is
from model_check.utils.words import few, first_line

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
OLDER, OLDER_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
SETS = (WEIGHTS, INDEX, OLDER, OLDER_INDEX)
"""The first that is there counts (PreTrainedModel.from_pretrained)."""
_INNER, _OLD_BUFFER = "model.", "rotary_emb.inv_freq"
_BROKEN = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)


class Stored(NamedTuple):
    """A tensor in a file."""

    file: Path
    name: str
    """Its name there."""

    def form(self) -> tuple[list[int], torch.dtype | str]:
        """Shape and dtype, of safetensors as it is written there, `BF16`."""
        if _is_pickled(self.file):
            tensor = self.read()
            return list(tensor.shape), tensor.dtype
        with _opened(self) as tensors:
            part = tensors.get_slice(self.name)
            return list(part.get_shape()), part.get_dtype()

    def read(self) -> Tensor:
        if _is_pickled(self.file):
            return _unpickled(self.file)[self.name]
        with _opened(self) as tensors:
            tensor: Tensor = tensors.get_tensor(self.name)
        return tensor

    def first_row(self) -> Tensor:
        if _is_pickled(self.file):
            return self.read()[:1]
        with _opened(self) as tensors:
            row: Tensor = tensors.get_slice(self.name)[:1]
        return row


class Found(NamedTuple):
    """The weights in a directory."""

    tensors: dict[str, Stored]
    """By transformers' names for a LlamaForCausalLM."""
    taken: str
    """The file that was asked for them."""
    others: tuple[str, ...]
    """Which lie there, too, and were not."""


def find_weights(place: Path) -> Found:
    """In a directory, or in one file of safetensors. Raises ConfigError."""
    if place.is_file():
        return Found(_named(_in_one(place)), place.name, ())
    here = [name for name in SETS if (place / name).is_file()]
    if not here:
        raise ConfigError(f"model.init_from: {place}: no weights in it: none of {', '.join(SETS)}")
    taken, *others = here
    read = _in_index if taken.endswith(".json") else _in_one
    return Found(_named(read(place / taken)), taken, tuple(others))


def _in_one(file: Path) -> dict[str, Stored]:
    if _is_pickled(file):
        return {name: Stored(file, name) for name in _unpickled(file)}
    try:
        with safe_open(file, framework="pt") as tensors:
            return {name: Stored(file, name) for name in tensors.keys()}  # noqa: SIM118 (no mapping)
    except (*_BROKEN, SafetensorError) as error:
        raise _unreadable(file, error) from error


def _in_index(index: Path) -> dict[str, Stored]:
    try:
        named = dict(json.loads(index.read_bytes())["weight_map"])
    except _BROKEN as error:
        raise _unreadable(index, error) from error
    for name, file in named.items():
        if not isinstance(file, str) or Path(file).is_absolute() or ".." in Path(file).parts:
            raise ConfigError(
                f"model.init_from: {index}: names for {name} no file of its directory: {file!r}"
            )
    found = {name: Stored(index.parent / file, name) for name, file in named.items()}
    if lost := sorted({each.file.name for each in found.values() if not each.file.is_file()}):
        raise ConfigError(f"model.init_from: missing files: {few(lost)} (see {index})")
    return found


def _named(found: dict[str, Stored]) -> dict[str, Stored]:
    """A LlamaModel's names lack the first part."""
    head = HEAD.hf_name
    if not any(name.startswith(_INNER) for name in found):
        found = {name if name == head else f"{_INNER}{name}": each for name, each in found.items()}
    return {name: each for name, each in found.items() if not name.endswith(_OLD_BUFFER)}


def _is_pickled(file: Path) -> bool:
    return file.suffix == ".bin"


@lru_cache(1)
def _unpickled(file: Path) -> Mapping[str, Tensor]:
    """Of the file that was asked last: shards are read one after the other."""
    load: Callable[..., Any] = torch.load
    try:
        try:
            found = load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # older than torch 1.6
            found = load(file, map_location="cpu", weights_only=True)
    # Whatever is wrong with a pickle.
    except Exception as error:
        raise _unreadable(file, error) from error
    if not isinstance(found, Mapping) or not all(isinstance(t, Tensor) for t in found.values()):
        raise ConfigError(f"model.init_from: {file}: it holds more than named tensors")
    return found


@contextmanager
def _opened(stored: Stored) -> Iterator[Any]:
    try:
        with safe_open(stored.file, framework="pt") as tensors:
            yield tensors
    except (OSError, SafetensorError) as error:
        raise _unreadable(stored.file, error, f"{stored.name}: ") from error


def _unreadable(file: Path, error: Exception, where: str = "") -> ConfigError:
    what = what_is(file)
    is_as_named = what is None or (_is_pickled(file) and what in PICKLES)
    why = first_line(error) if is_as_named else f"it is {what}"
    return ConfigError(f"model.init_from: {file}: cannot be read: {where}{why}")
