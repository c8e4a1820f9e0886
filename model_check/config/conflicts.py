"""Whether settings that are valid alone fit together. Each check yields conflicts; check_together
raises the first. Pure, but that check_validation_text looks whether the text exists."""

import os
from collections.abc import Iterator, Mapping
from itertools import chain

from model_check.config.fields import setting_text
from model_check.config.precision import precision
from model_check.config.profile import parse_steps
from model_check.config.schema import (
    EVERY_FAILING,
    LaunchSettings,
    ModelSettings,
    Settings,
    TrainingSettings,
)
from model_check.config.validation import TextPath, parse_validation
from model_check.errors import ConfigError

Conflict = tuple[str, ...]
"""(setting, what is wrong with it, *other settings that may be the cause)"""


def check_together(settings: Settings, sources: Mapping[str, str]) -> None:
    """Refuse settings that contradict each other, or that would have no effect. Raises ConfigError,
    which names the source of a setting that a person gave."""
    training = settings.training
    if settings.debug.profile_steps is not None:
        parse_steps(settings.debug.profile_steps, training.max_steps)
    conflicts = chain(
        _of_precision(training, sources),
        _of_model(settings.model),
        _of_steps(training),
        _of_batch(training, sources),
        _of_stride(settings),
        _of_fail_on(settings.launch, sources),
        _of_evaluation(training, list(parse_validation(settings.data.validation))),
    )
    for name, text, *others in conflicts:
        # Presets and defaults fit together, so the cause is a setting that a person gave.
        given = [sources.get(n, "settings") for n in (name, *others)]
        own = [source for source in given if not source.startswith(("default", "preset"))]
        raise ConfigError(f"{(own or given)[0]}: {name} {text}")


def check_validation_text(settings: Settings, sources: Mapping[str, str]) -> None:
    """Raises ConfigError for validation text that does not exist."""
    for name, what in parse_validation(settings.data.validation).items():
        if isinstance(what, TextPath) and not os.path.exists(os.path.expanduser(what.path)):
            raise ConfigError(
                f"{sources['data.validation']}: data.validation: {name} = {what.path}: no such "
                f"file or directory (split:{what.path} would be a split of the hub dataset)"
            )


def _of_precision(training: TrainingSettings, sources: Mapping[str, str]) -> Iterator[Conflict]:
    """Only a use_amp that a person gave contradicts a precision; one of a preset does not."""
    given = not sources.get("training.use_amp", "default").startswith(("default", "preset"))
    if given and training.use_amp is (precision(training) == "fp32"):
        yield (
            "training.use_amp",
            f"= {setting_text(training.use_amp)} contradicts training.precision = "
            f"{training.precision}: give one of the two",
        )


def _of_model(model: ModelSettings) -> Iterator[Conflict]:
    if model.num_heads % model.num_kv_heads:
        yield (
            "model.num_kv_heads",
            f"= {model.num_kv_heads} must divide num_heads = {model.num_heads}",
            "model.num_heads",
        )
    if model.head_dim is None and model.hidden_size % model.num_heads:
        yield (
            "model.num_heads",
            f"= {model.num_heads} must divide hidden_size = {model.hidden_size} (or set head_dim)",
            "model.hidden_size",
        )
    if (model.head_dim or model.hidden_size // model.num_heads) % 2:
        yield "model.head_dim", "must be even: rotary embedding turns pairs"
    scaling = model.rope_scaling
    if scaling and scaling.high_freq_factor <= scaling.low_freq_factor:
        yield "model.rope_scaling.high_freq_factor", "must be above low_freq_factor"


def _of_steps(training: TrainingSettings) -> Iterator[Conflict]:
    if training.min_lr > training.learning_rate:
        yield (
            "training.min_lr",
            f"= {training.min_lr} is above learning_rate = {training.learning_rate}",
            "training.learning_rate",
        )
    if training.warmup_steps > training.max_steps:
        yield (
            "training.warmup_steps",
            f"= {training.warmup_steps} is more than max_steps = {training.max_steps}",
            "training.max_steps",
        )


def _of_batch(training: TrainingSettings, sources: Mapping[str, str]) -> Iterator[Conflict]:
    name, total = "training.global_batch_size", training.global_batch_size
    if total is None:
        return
    given = sources.get("training.grad_accum_nums", "default") != "default"
    if given and total != training.batch_size * training.grad_accum_nums:
        yield name, "excludes training.grad_accum_nums: give one of the two"
    if total % training.batch_size:
        yield name, f"= {total} is not a multiple of batch_size = {training.batch_size}"


def _of_stride(settings: Settings) -> Iterator[Conflict]:
    stride, context_length = settings.data.stride, settings.training.context_length
    if stride is not None and stride > context_length:
        yield (
            "data.stride",
            f"= {stride} is more than context_length = {context_length}: tokens between the "
            "sequences would never be read",
            "training.context_length",
        )


def _of_fail_on(launch: LaunchSettings, sources: Mapping[str, str]) -> Iterator[Conflict]:
    given = sources.get("launch.fail_on", "default") != "default"
    if launch.fail_on_health and given and set(launch.fail_on) != set(EVERY_FAILING):
        yield (
            "launch.fail_on_health",
            f"= true means launch.fail_on = {','.join(EVERY_FAILING)}, and "
            f"{','.join(launch.fail_on) or 'none'} is given: give one of the two",
        )


def _of_evaluation(training: TrainingSettings, splits: list[str]) -> Iterator[Conflict]:
    def conflict(key: str, why: str) -> Conflict:
        return f"training.{key}", f"= {setting_text(getattr(training, key))}: {why}"

    if training.keep_last is not None and training.save_interval is None:
        yield conflict("keep_last", "needs training.save_interval")
    if training.eval_interval is None:
        for key in ("save_best", "eval_batches", "best_split"):
            if getattr(training, key) not in (None, False):
                yield conflict(key, "needs training.eval_interval")
    elif not splits:
        why = "there is no validation split; name one with data.validation (held_out=0.01)"
        yield conflict("eval_interval", why)
    elif training.best_split is not None and training.best_split not in splits:
        yield conflict("best_split", f"data.validation names {', '.join(splits)}")
