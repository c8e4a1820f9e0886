"""Weights of a transformers LLaMA into a model of ours: from a directory with safetensors, in one
file or in shards."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from model_check.config.architecture import differences
from model_check.config.geometry import read_config
from model_check.config.schema import ModelSettings
from model_check.config.shape import EMBEDDING, HEAD, hf_name
from model_check.errors import ConfigError
from model_check.utils.words import few

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@torch.no_grad()
def load_weights(model: nn.Module, settings: ModelSettings, directory: Path) -> None:
    """Fill `model` from safetensors, one tensor at a time, in the model's own dtype.

    Raises ConfigError when the directory holds another geometry; the model is then as it was.
    """
    config = directory / "config.json"
    if config.is_file():
        _refuse_other_settings(settings, config)
    files = _files_of_tensors(directory)
    parameters = {hf_name(name): p for name, p in model.named_parameters()}
    _refuse_other_tensors(parameters, files, directory)
    if not config.is_file():
        raise ConfigError(
            f"model.init_from: {directory} has no config.json, and shapes do not tell its heads, "
            "rotary base and norms: put the model's config.json there"
        )
    for name, parameter in parameters.items():
        parameter.copy_(_tensor(files[name], name))


def _refuse_other_settings(settings: ModelSettings, file: Path) -> None:
    """What tensors cannot tell by their shapes, heads and rotary bases among it."""
    other = differences(read_config(file), settings)
    if other:
        raise ConfigError(
            f"model.init_from: {file} describes another model: {', '.join(map(str, other))}; "
            f"model.geometry={file.parent} takes all of it from there"
        )


def _refuse_other_tensors(
    parameters: Mapping[str, Tensor], files: Mapping[str, Path], directory: Path
) -> None:
    known = {name for name in files if not name.endswith("rotary_emb.inv_freq")}  # older exports
    if HEAD.hf_name in known and HEAD.hf_name not in parameters and _written_twice(files):
        known -= {HEAD.hf_name}
    problems = [
        _listed("missing", sorted(parameters.keys() - known)),
        _listed("unexpected", sorted(known - parameters.keys())),
        _listed("of another shape", sorted(_other_shapes(parameters, files))),
    ]
    if any(problems):
        untied = HEAD.hf_name in parameters.keys() - known
        hint = "; a tied head needs model.tie_word_embeddings=true" if untied else ""
        raise ConfigError(
            f"model.init_from: {directory} does not fit the model: "
            f"{'; '.join(problem for problem in problems if problem)}{hint}"
        )


def _written_twice(files: Mapping[str, Path]) -> bool:
    """Whether a tied head is stored beside the embedding, as some exports do."""
    embedding = files.get(EMBEDDING.hf_name)
    return embedding is not None and torch.equal(
        _tensor(files[HEAD.hf_name], HEAD.hf_name), _tensor(embedding, EMBEDDING.hf_name)
    )


def _other_shapes(parameters: Mapping[str, Tensor], files: Mapping[str, Path]) -> Iterator[str]:
    for name, parameter in parameters.items():
        if name in files:
            with safe_open(files[name], framework="pt") as tensors:
                found = list(tensors.get_slice(name).get_shape())
            if found != list(parameter.shape):
                yield f"{name} {found}, the model's is {list(parameter.shape)}"


def _listed(what: str, names: Sequence[str]) -> str:
    return f"{what}: {few(names)}" if names else ""


def _files_of_tensors(directory: Path) -> dict[str, Path]:
    """Tensor name -> the file it is in. Raises ConfigError."""
    try:
        if (directory / INDEX).is_file():
            index = json.loads((directory / INDEX).read_text())["weight_map"]
            files = {name: directory / file for name, file in index.items()}
        else:
            with safe_open(directory / WEIGHTS, framework="pt") as tensors:
                files = dict.fromkeys(tensors.keys(), directory / WEIGHTS)
    except (OSError, SafetensorError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"model.init_from: {directory}: no readable {WEIGHTS} or {INDEX}: {error}"
        ) from error
    if lost := sorted({str(file) for file in files.values() if not file.is_file()}):
        raise ConfigError(f"model.init_from: {_listed('missing files', lost)} (see {INDEX})")
    return files


def _tensor(file: Path, name: str) -> Tensor:
    try:
        with safe_open(file, framework="pt") as tensors:
            tensor: Tensor = tensors.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"model.init_from: {file}: {name}: {error}") from error
    return tensor
