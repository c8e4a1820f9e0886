"""Whether settings that are valid alone fit together. Each check yields conflicts; check_together
raises the first. Pure, but that check_validation_text looks whether the text exists."""

import math
import os
from collections.abc import Iterator, Mapping
from itertools import chain

from model_check.config.derived import precision
from model_check.config.fields import given_by, setting_text, value_of
from model_check.config.inert import nobody_gave
from model_check.config.profile import parse_steps
from model_check.config.schema import EVERY_FAILING, ModelSettings, Settings, TrainingSettings
from model_check.config.validation import TextPath, parse_validation
from model_check.errors import ConfigError

Conflict = tuple[str, ...]
"""(setting, what is wrong with its value, *other settings that may be the cause)"""


def check_together(settings: Settings, sources: Mapping[str, str]) -> None:
    """Refuse settings that contradict each other. Raises ConfigError, which names the source of a
    setting that a person gave."""
    if settings.debug.profile_steps is not None:
        parse_steps(settings.debug.profile_steps, settings.training.max_steps)
    conflicts = chain(
        _of_two_ways_to_say_it(settings, sources),
        _of_model(settings.model),
        _of_lengths(settings),
        _of_evaluation(settings, sources),
    )
    for name, wrong, *others in conflicts:
        # Presets and defaults fit together, so the cause is a setting that a person gave.
        given = [sources.get(n, "settings") for n in (name, *others)]
        own = [source for source in given if not nobody_gave(source)]
        whose = f" ({given[0]})" if own and given[0] not in own else ""
        value = setting_text(value_of(settings, name))
        raise ConfigError(f"{given_by((own or given)[0], name)}{name} = {value}{whose}{wrong}")


def check_validation_text(settings: Settings, sources: Mapping[str, str]) -> None:
    """Raises ConfigError for validation text that does not exist."""
    for name, what in parse_validation(settings.data.validation).items():
        if isinstance(what, TextPath) and not os.path.exists(os.path.expanduser(what.path)):
            raise ConfigError(
                f"{given_by(sources['data.validation'], 'data.validation')}"
                f"data.validation: {name} = {what.path}: no such "
                f"file or directory (split:{what.path} would be a split of the hub dataset)"
            )


def _of_two_ways_to_say_it(settings: Settings, sources: Mapping[str, str]) -> Iterator[Conflict]:
    training, launch = settings.training, settings.launch
    # A use_amp that a preset gives does not contradict a precision.
    person_gave_amp = not nobody_gave(sources.get("training.use_amp", "default"))
    if person_gave_amp and training.use_amp is (precision(training) == "fp32"):
        contradicted = f" contradicts training.precision = {training.precision}"
        yield "training.use_amp", f"{contradicted}: give one of the two"
    yield from _of_accumulation(training, sources)
    says_fail_on = sources.get("launch.fail_on", "default") != "default"
    if launch.fail_on_health and says_fail_on and set(launch.fail_on) != set(EVERY_FAILING):
        yield (
            "launch.fail_on_health",
            f" means launch.fail_on = {','.join(EVERY_FAILING)}, and "
            f"{','.join(launch.fail_on) or 'none'} is given: give one of the two",
        )


def _of_accumulation(training: TrainingSettings, sources: Mapping[str, str]) -> Iterator[Conflict]:
    """Three settings say how many micro-batches a step has; two may agree."""
    counts_batches = sources.get("training.grad_accum_nums", "default") != "default"
    own, of_job = training.grad_accum_nums, training.global_grad_accum_nums
    sequences = training.global_batch_size
    excluded = " excludes {}: give one of the two"
    if counts_batches and sequences not in (None, training.batch_size * own):
        yield "training.global_batch_size", excluded.format("training.grad_accum_nums")
    if counts_batches and of_job not in (None, own):
        yield "training.global_grad_accum_nums", excluded.format("training.grad_accum_nums")
    if None not in (of_job, sequences) and sequences != training.batch_size * (of_job or 0):
        yield "training.global_batch_size", excluded.format("training.global_grad_accum_nums")


def _of_model(model: ModelSettings) -> Iterator[Conflict]:
    if model.num_kv_heads and model.num_heads % model.num_kv_heads:
        yield "model.num_kv_heads", f" must divide num_heads = {model.num_heads}", "model.num_heads"
    if model.head_dim is None and model.hidden_size % model.num_heads:
        divided = f" must divide hidden_size = {model.hidden_size} (or set head_dim)"
        yield "model.num_heads", divided, "model.hidden_size"
    if (head_dim := model.head_dim or model.hidden_size // model.num_heads) % 2:
        yield "model.head_dim", f" ({head_dim}) must be even: rotary embedding turns pairs"
    scaling = model.rope_scaling
    if scaling and scaling.high_freq_factor <= scaling.low_freq_factor:
        yield "model.rope_scaling.high_freq_factor", " must be above low_freq_factor"


def _of_lengths(settings: Settings) -> Iterator[Conflict]:
    training, stride = settings.training, settings.data.stride
    if training.min_lr > training.learning_rate:
        above = f" is above learning_rate = {training.learning_rate}"
        yield "training.min_lr", above, "training.learning_rate"
    if training.warmup_steps > training.max_steps:
        longer = f" is more than max_steps = {training.max_steps} (0: no warm-up)"
        yield "training.warmup_steps", longer, "training.max_steps"
    if training.global_batch_size and training.global_batch_size % training.batch_size:
        yield "training.global_batch_size", _uneven(training.global_batch_size, training.batch_size)
    if stride is not None and stride > training.context_length:
        yield (
            "data.stride",
            f" is more than context_length = {training.context_length}: tokens between the "
            "sequences would never be read",
            "training.context_length",
        )


def _uneven(total: int, each: int) -> str:
    below, above = total - total % each, total - total % each + each
    totals = " and ".join(str(n) for n in (below, above) if n)
    halves = [n for n in range(1, math.isqrt(total) + 1) if total % n == 0]
    smaller = max(n for half in halves for n in (half, total // half) if n < each)
    return f" is not a multiple of batch_size = {each} ({totals} would be); {smaller} divides it"


def _of_evaluation(settings: Settings, sources: Mapping[str, str]) -> Iterator[Conflict]:
    training, dataset = settings.training, settings.data.dataset
    splits = list(parse_validation(settings.data.validation))
    if training.eval_interval is None:
        return
    if not splits:
        why = "there is no validation split; name one with data.validation (held_out=0.01)"
        if sources.get("data.validation") == dataset:  # a prepared directory's
            why = (
                f"{dataset} was prepared without a validation split; prepare the text again with "
                "data.validation=held_out=0.01"
            )
        yield "training.eval_interval", f": {why}"
    elif training.best_split is not None and training.best_split not in splits:
        yield "training.best_split", f": data.validation names {', '.join(splits)}"
