"""Weights of a transformers LLaMA into a model of ours: from a directory with safetensors, in one
file or in shards."""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from model_check.config.geometry import read_config
from model_check.config.resume import differences, full
from model_check.config.schema import ModelSettings
from model_check.config.shape import EMBEDDING, HEAD, hf_name
from model_check.errors import ConfigError
from model_check.models.mismatch import mismatch
from model_check.models.vocabulary import lacks_rows, with_rows
from model_check.utils.words import few

_BY_TOKEN = (str(EMBEDDING.hf_name), str(HEAD.hf_name))
Fill = Callable[[Tensor, Tensor], object]
FLOATS = ("F64", "F32", "F16", "BF16")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@torch.no_grad()
def load_weights(
    model: nn.Module, settings: ModelSettings, directory: Path, fill: Fill = Tensor.copy_
) -> int:
    """Fill `model` from safetensors, one tensor at a time, in the model's own dtype. Where the
    model knows more tokens than the directory, see `vocabulary.with_rows`; returns the directory's
    number of them. `fill`: copies a whole tensor into a parameter, of which a part may lie here.

    Raises ConfigError when the directory holds another geometry; the model is then as it was.
    """
    config = directory / "config.json"
    if config.is_file():
        _refuse_other_settings(settings, config)
    files = _files_of_tensors(directory)
    named = {hf_name(name): p for name, p in model.named_parameters()}
    # A gate keeps its first value: there is none in a LLaMA of transformers.
    parameters = {name: p for name, p in named.items() if name is not None}
    _refuse_other_tensors(parameters, files, directory)
    if not config.is_file():
        raise ConfigError(
            f"model.init_from: {directory} has no config.json, and shapes do not tell its heads, "
            "rotary base and norms: put the model's config.json there"
        )
    for name, parameter in parameters.items():
        tensor = _tensor(files[name], name)
        fill(parameter, with_rows(tensor, len(parameter)) if name in _BY_TOKEN else tensor)
    return _form(files[_BY_TOKEN[0]], _BY_TOKEN[0])[0][0]


def sample_of(directory: Path) -> str:
    """A name of the weights in it, by the first row of each tensor: what is trained differs there,
    and to read all of a large model would take minutes. Raises ConfigError."""
    checksum = 0
    for name, file in sorted(_files_of_tensors(directory).items()):
        with _opened(file, name) as tensors:
            row: Tensor = tensors.get_slice(name)[:1]
        checksum = zlib.crc32(row.contiguous().view(torch.uint8).numpy().tobytes(), checksum)
    return f"{checksum:08x}"


def _refuse_other_settings(settings: ModelSettings, file: Path) -> None:
    """Shapes do not tell everything: heads and rotary bases are not among them."""
    other = differences(read_config(file), full(settings))
    if other := [each for each in other if each.key != "vocab_size"]:
        raise ConfigError(
            f"model.init_from: {file} describes another model: {', '.join(map(str, other))}; "
            f"model.geometry={file.parent} takes all of it from there"
        )


def _refuse_other_tensors(
    parameters: Mapping[str, Tensor], files: Mapping[str, Path], directory: Path
) -> None:
    head = HEAD.hf_name
    known = {name for name in files if not name.endswith("rotary_emb.inv_freq")}  # older exports
    if head in known and head not in parameters and _head_is_embedding(files):
        known -= {head}
    forms = {name: _form(files[name], name) for name in known}
    if others := [f"{name} ({dtype})" for name, (_, dtype) in forms.items() if dtype not in FLOATS]:
        raise ConfigError(
            f"model.init_from: {directory}: weights that are no floats: {few(others)}"
        )
    saved = {name: shape for name, (shape, _) in forms.items()}
    for name in saved.keys() & parameters.keys() & {*_BY_TOKEN}:
        if lacks_rows(saved[name], len(parameters[name])):
            saved[name][0] = len(parameters[name])
    if problem := mismatch(saved, {name: p.shape for name, p in parameters.items()}):
        untied = head in parameters.keys() - known
        hint = "; a tied head needs model.tie_word_embeddings=true" if untied else ""
        raise ConfigError(f"model.init_from: {directory} does not fit the model: {problem}{hint}")


def _head_is_embedding(files: Mapping[str, Path]) -> bool:
    """Whether the file holds a tied head a second time, as some exports do."""
    head, embedding = str(HEAD.hf_name), str(EMBEDDING.hf_name)
    return embedding in files and torch.equal(
        _tensor(files[head], head), _tensor(files[embedding], embedding)
    )


def _files_of_tensors(directory: Path) -> dict[str, Path]:
    """Tensor name -> the file it is in. Raises ConfigError."""
    try:
        if (directory / INDEX).is_file():
            index = json.loads((directory / INDEX).read_text())["weight_map"]
            files = {name: directory / file for name, file in index.items()}
        else:
            with safe_open(directory / WEIGHTS, framework="pt") as tensors:
                files = dict.fromkeys(tensors.keys(), directory / WEIGHTS)
    except (
        OSError,
        SafetensorError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise ConfigError(
            f"model.init_from: {directory}: no readable {WEIGHTS} or {INDEX}: {error}"
        ) from error
    if lost := sorted({str(file) for file in files.values() if not file.is_file()}):
        raise ConfigError(f"model.init_from: missing files: {few(lost)} (see {INDEX})")
    return files


def _form(file: Path, name: str) -> tuple[list[int], str]:
    """Shape and dtype, `BF16`."""
    with _opened(file, name) as tensors:
        part = tensors.get_slice(name)
        return list(part.get_shape()), part.get_dtype()


def _tensor(file: Path, name: str) -> Tensor:
    with _opened(file, name) as tensors:
        tensor: Tensor = tensors.get_tensor(name)
    return tensor


@contextmanager
def _opened(file: Path, name: str) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"model.init_from: {file}: {name}: {error}") from error
