"""First weights from `model.init_from`: a checkpoint of ours, or safetensors of transformers."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from model_check.config.resume import begin_as_llama, differences, full
from model_check.config.schema import ModelSettings, Settings
from model_check.config.shape import EMBEDDING, parameter
from model_check.data.read.manifest import LONGEST, TOKENIZER
from model_check.engine.checkpoint import read_checkpoint, shapes, tokenizer_of
from model_check.engine.run_context import RunContext
from model_check.errors import ConfigError
from model_check.forensics.scan import bad_parameters, largest
from model_check.forensics.shard import fill
from model_check.init import grown, growth, mismatch
from model_check.utils.files import read_whole
from model_check.utils.words import few

_LARGEST = 1e19


def take_initial_weights(model: nn.Module, settings: Settings, context: RunContext) -> None:
    """Overwrite the weights of `model` with those of `context.weights`, or else of the checkpoint
    that model.init_from names; the optimizer, the schedule and the data start afresh.

    Raises ConfigError or CheckpointError for what does not fit, or cannot be read.
    """
    source, say = settings.model.init_from, context.channels.say
    if source is None:
        return
    casts: Counter[tuple[torch.dtype, torch.dtype]] = Counter()

    def fill_and_count(parameter: Tensor, whole: Tensor) -> None:
        fill(parameter, whole)
        casts[whole.dtype, parameter.dtype] += 1

    if context.weights is not None:
        from model_check.hf import load_weights  # safetensors, for these runs alone

        _refuse_other_directory(context.tokenizer, context.weights)
        place = context.weights
        num_before = load_weights(model, settings.model, place, fill_and_count, say)
    else:
        num_before = _take_checkpoint(
            model,
            settings.model,
            Path(source),
            context.tokenizer,
            fill_and_count,
        )
    if spoilt := [tensor.name for tensor in bad_parameters(model)]:
        raise ConfigError(f"model.init_from: {source}: weights not finite: {few(spoilt)}")
    if absurd := [name for name, p in model.named_parameters() if largest(p) > _LARGEST]:
        raise ConfigError(
            f"model.init_from: {source}: holds values beyond {_LARGEST:.0e}, sums of whose squares "
            f"overflow in float32, in {few(absurd)}: the file is damaged"
        )
    say(f"weights: taken from {source}")
    for (theirs, ours), number in casts.items():
        if theirs != ours:
            say(f"weights: {number} tensors cast from {theirs} to {ours}".replace("torch.", ""))
    if line := growth(num_before, len(model.get_parameter(EMBEDDING.name))):
        say(line)


def _take_checkpoint(
    model: nn.Module,
    settings: ModelSettings,
    path: Path,
    tokenizer: bytes | None,
    fill: Callable[[Tensor, Tensor], None],
) -> int:
    """Returns how many tokens its model knows. `tokenizer`: the data's. `fill`: copies a whole
    tensor into a parameter, whose dtype may be another one."""
    saved = read_checkpoint(path, hollow=True)
    _refuse_other_tokenizer(tokenizer, tokenizer_of(saved, path, LONGEST), path)
    own = model.state_dict()
    weights = grown(saved["model"], own)
    if begin_as_llama(saved["settings"]["model"]):
        settings = full(settings)
        own = {n: value for n, value in own.items() if parameter(n).hf_name is not None}
    other = differences(saved["settings"]["model"], settings)
    if other := [each for each in other if each.key != "vocab_size"]:
        raise ConfigError(
            f"model.init_from: {path} holds the weights of another model: "
            f"{', '.join(map(str, other))}; give these settings of [model] the checkpoint's values"
        )
    if problem := mismatch(shapes(weights), shapes(own)):
        raise ConfigError(f"model.init_from: {path} does not fit the model: {problem}")
    _fill(dict(model.named_parameters()), saved, fill)
    return len(saved["model"][EMBEDDING.name])


def _fill(
    parameters: dict[str, nn.Parameter],
    saved: dict[str, Any],
    fill: Callable[[Tensor, Tensor], None],
) -> None:
    """But for gates, the same names. Of a sharded checkpoint, where nothing grows, only what lies
    here is read."""
    weights, shards = saved["model"], saved.get("shards")
    if shards is not None:
        targets = {f"weights/{name}": parameters[name].detach() for name in weights}
        if shards.fits(targets):
            shards.load(targets)
            return
        weights = shards.whole(["weights"])["weights"]
    for name, weight in grown(weights, parameters).items():
        fill(parameters[name], weight)


def _refuse_other_directory(own: bytes | None, directory: Path) -> None:
    place = directory.parent if directory.is_file() else directory
    if (file := place / TOKENIZER).is_file():
        _refuse_other_tokenizer(own, read_whole(file, LONGEST), directory)


def _refuse_other_tokenizer(own: bytes | None, theirs: bytes | None, path: Path) -> None:
    """Raises ConfigError where a token of the checkpoint has another id in the data: to the model
    the data would be noise. The data may have more tokens."""
    if own is None or theirs is None:
        return
    try:
        ids, known = _vocabulary(own), _vocabulary(theirs)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"model.init_from: {path}: its tokenizer has no vocabulary") from error
    if others := [token for token, number in known.items() if ids.get(token) != number]:
        raise ConfigError(
            f"model.init_from: {path} was trained with another tokenizer than the data's: "
            f"{len(others):,} of its {len(known):,} tokens have another id here, or none; "
            "data.tokenizer=auto takes that one"
        )


def _vocabulary(tokenizer: bytes) -> dict[str, int]:
    """Token -> id, of a tokenizer.json. Unigram has pairs with scores, the others a table."""
    document = json.loads(tokenizer)
    table = document["model"]["vocab"]
    if isinstance(table, list):
        table = {token: number for number, (token, _) in enumerate(table)}
    return {**table, **{added["content"]: added["id"] for added in document["added_tokens"]}}
