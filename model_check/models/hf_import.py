"""Weights of a transformers LLaMA into a model of ours."""

import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from model_check.config.geometry import read_config
from model_check.config.resume import differences, full
from model_check.config.schema import ModelSettings
from model_check.config.shape import EMBEDDING, HEAD, hf_name
from model_check.errors import ConfigError
from model_check.models.hf_weights import Stored, find_weights
from model_check.models.mismatch import mismatch
from model_check.models.vocabulary import lacks_rows, with_rows
from model_check.utils.words import Say, few, listed

_EMBEDDING, _HEAD = str(EMBEDDING.hf_name), str(HEAD.hf_name)
_BY_TOKEN = (_EMBEDDING, _HEAD)
Fill = Callable[[Tensor, Tensor], object]
FLOATS = ("F64", "F32", "F16", "BF16", torch.float64, torch.float32, torch.float16, torch.bfloat16)


@torch.no_grad()
def load_weights(
    model: nn.Module,
    settings: ModelSettings,
    place: Path,
    fill: Fill = Tensor.copy_,
    say: Say = lambda line: None,
) -> int:
    """Fill `model` from a directory, or a file of safetensors, one tensor at a time, in the model's
    own dtype. Where the model knows more tokens than that, see `vocabulary.with_rows`; returns its
    number of them. `fill`: copies a whole tensor into a parameter, of which a part may lie here.

    Raises ConfigError when it holds another geometry; the model is then as it was.
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
    """A name of the weights in it, by the first row of each tensor: what is trained differs there,
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
