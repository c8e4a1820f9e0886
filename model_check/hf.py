"""The weights of a transformers LLaMA: which files of a directory hold them, under which names, and
how they come into a model of ours. What transformers 5 loads there is found here, by its own order
of files."""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from model_check.config.geometry import read_config
from model_check.config.resume import differences, full
from model_check.config.schema import ModelSettings
from model_check.config.shape import EMBEDDING, HEAD, hf_name
from model_check.errors import ConfigError
from model_check.init import lacks_rows, mismatch, with_rows
from model_check.utils.first_bytes import PICKLES, what_is
from model_check.utils.words import Say, few, first_line, listed

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
OLDER, OLDER_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
SETS = (WEIGHTS, INDEX, OLDER, OLDER_INDEX)
"""The first that is there counts (PreTrainedModel.from_pretrained)."""
_INNER, _OLD_BUFFER = "model.", "rotary_emb.inv_freq"
_BROKEN = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
_EMBEDDING, _HEAD = str(EMBEDDING.hf_name), str(HEAD.hf_name)
_BY_TOKEN = (_EMBEDDING, _HEAD)
Fill = Callable[[Tensor, Tensor], object]
FLOATS = ("F64", "F32", "F16", "BF16", torch.float64, torch.float32, torch.float16, torch.bfloat16)


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
        """Returns the whole tensor, on the CPU, in the file's shape and dtype; a pickle's is kept
        for later calls, so not to be changed. Raises ConfigError where the file cannot be read."""
        if _is_pickled(self.file):
            if (found := _unpickled(self.file).get(self.name)) is None:
                raise ConfigError(
                    f"model.init_from: {self.file}: it has no {self.name}, which its index names"
                )
            return found
        with _opened(self) as tensors:
            tensor: Tensor = tensors.get_tensor(self.name)
        return tensor

    def first_row(self) -> Tensor:
        """Returns the first row, [1, ...] in the file's dtype, on the CPU. Raises as `read`."""
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
    """The file that was read."""
    others: tuple[str, ...]
    """The files of weights beside it that were not."""


@torch.no_grad()
def load_weights(
    model: nn.Module,
    settings: ModelSettings,
    place: Path,
    fill: Fill = Tensor.copy_,
    say: Say = lambda line: None,
) -> int:
    """Fills `model` from a directory, or a file of safetensors, one tensor at a time, in its own
    dtype. Returns the number of tokens that these weights know; where the model knows more, see
    `init.with_rows`. `fill` copies a whole tensor into a parameter, of which a part may lie here.

    Raises ConfigError where they are the weights of another geometry; the model stays as it was.
    """
    found = find_weights(place)
    tensors = found.tensors
    if found.others:
        others = listed(list(found.others))
        say(f"weights: {place}: {found.taken} is taken, as transformers does, not {others}")
    directory = place.parent if place.is_file() else place
    config = directory / "config.json"
    named = {hf_name(name): p for name, p in model.named_parameters()}
    # A gate keeps its first value: there is none in a LLaMA of transformers.
    parameters = {name: p for name, p in named.items() if name is not None}
    if _HEAD not in parameters and _EMBEDDING not in tensors and _HEAD in tensors:
        tensors[_EMBEDDING] = tensors.pop(_HEAD)  # tied, and saved under the other name
    if config.is_file():
        _refuse_other_settings(settings, config)
    _refuse_other_tensors(parameters, tensors, place)
    if not config.is_file():
        raise ConfigError(
            f"model.init_from: {directory} has no config.json, and shapes do not tell its heads, "
            "rotary base and norms: put the model's config.json there"
        )
    for name, parameter in parameters.items():
        tensor = tensors[name].read()
        fill(parameter, with_rows(tensor, len(parameter)) if name in _BY_TOKEN else tensor)
    return tensors[_EMBEDDING].form()[0][0]


def sample_of(place: Path) -> str:
    """Returns a checksum of the first row of each tensor: weights that were trained differ there,
    and to read all of a large model would take minutes. Raises ConfigError."""
    checksum = 0
    for _, stored in sorted(find_weights(place).tensors.items()):
        row = stored.first_row().contiguous().view(torch.uint8).numpy().tobytes()
        checksum = zlib.crc32(row, checksum)
    return f"{checksum:08x}"


def _refuse_other_settings(settings: ModelSettings, file: Path) -> None:
    """Shapes do not tell everything: heads and rotary bases are not among them."""
    other = differences(read_config(file), full(settings))
    if other := [each for each in other if each.key not in ("vocab_size", "tie_word_embeddings")]:
        raise ConfigError(
            f"model.init_from: {file} describes another model: {', '.join(map(str, other))}; "
            f"model.geometry={file.parent} takes all of it from there"
        )


def _refuse_other_tensors(
    parameters: Mapping[str, Tensor], tensors: Mapping[str, Stored], place: Path
) -> None:
    known = {*tensors}
    if _HEAD in known and _HEAD not in parameters and _head_is_embedding(tensors):
        known -= {_HEAD}
    forms = {name: tensors[name].form() for name in known}
    if others := [f"{name} ({dtype})" for name, (_, dtype) in forms.items() if dtype not in FLOATS]:
        raise ConfigError(f"model.init_from: {place}: weights that are no floats: {few(others)}")
    saved = {name: shape for name, (shape, _) in forms.items()}
    for name in saved.keys() & parameters.keys() & {*_BY_TOKEN}:
        if lacks_rows(saved[name], len(parameters[name])):
            saved[name][0] = len(parameters[name])
    if problem := mismatch(saved, {name: p.shape for name, p in parameters.items()}):
        hint = ""
        if _HEAD in parameters.keys() - known:
            hint = "; a tied head needs model.tie_word_embeddings=true"
        elif _HEAD in known - parameters.keys():
            hint = "; a head of its own needs model.tie_word_embeddings=false"
        raise ConfigError(f"model.init_from: {place} does not fit the model: {problem}{hint}")


def _head_is_embedding(tensors: Mapping[str, Stored]) -> bool:
    """Whether the file holds a tied head a second time, as some exports do."""
    if _EMBEDDING not in tensors:
        return False
    return torch.equal(tensors[_HEAD].read(), tensors[_EMBEDDING].read())


def find_weights(place: Path) -> Found:
    """Finds the weights in a directory, or in one file of safetensors. Raises ConfigError."""
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
    head = _HEAD
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
