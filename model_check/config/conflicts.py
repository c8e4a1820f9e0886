"""Whether settings that are fine alone fit together."""

from collections.abc import Callable, Mapping

from model_check.config.precision import check_precision
from model_check.config.profile import parse_steps
from model_check.config.schema import (
    EVERY_FAILING,
    LaunchSettings,
    ModelSettings,
    Settings,
    TrainingSettings,
)
from model_check.config.validation import parse_validation
from model_check.errors import ConfigError

Refuse = Callable[..., None]
"""(setting, what is wrong with it, *settings that may be to blame instead)"""


def check_together(settings: Settings, sources: Mapping[str, str]) -> None:
    """Refuse settings that are impossible together. Raises ConfigError."""

    def refuse(name: str, text: str, *others: str) -> None:
        """Blame the setting that a person touched: presets and defaults fit together."""
        given = {n: sources.get(n, "settings") for n in (name, *others)}
        own = [s for s in given.values() if not s.startswith(("default", "preset"))]
        raise ConfigError(f"{own[0] if own else given[name]}: {name} {text}")

    check_precision(settings.training, sources)
    if settings.debug.profile_steps is not None:
        parse_steps(settings.debug.profile_steps, settings.training.max_steps)
    parse_validation(settings.data.validation)
    _check_model(settings.model, refuse)
    _check_training(settings.training, refuse)
    _check_batch(settings.training, sources, refuse)
    _check_stride(settings, refuse)
    _check_fail_on(settings.launch, sources, refuse)


def _check_model(model: ModelSettings, refuse: Refuse) -> None:
    if model.num_heads % model.num_kv_heads:
        refuse(
            "model.num_kv_heads",
            f"= {model.num_kv_heads} must divide num_heads = {model.num_heads}",
            "model.num_heads",
        )
    if model.head_dim is None and model.hidden_size % model.num_heads:
        refuse(
            "model.num_heads",
            f"= {model.num_heads} must divide hidden_size = {model.hidden_size} (or set head_dim)",
            "model.hidden_size",
        )
    if (model.head_dim or model.hidden_size // model.num_heads) % 2:
        refuse("model.head_dim", "must be even: rotary embedding turns pairs")
    scaling = model.rope_scaling
    if scaling and scaling.high_freq_factor <= scaling.low_freq_factor:
        refuse("model.rope_scaling.high_freq_factor", "must be above low_freq_factor")


def _check_training(training: TrainingSettings, refuse: Refuse) -> None:
    if training.min_lr > training.learning_rate:
        refuse(
            "training.min_lr",
            f"= {training.min_lr} is above learning_rate = {training.learning_rate}",
            "training.learning_rate",
        )
    if training.warmup_steps > training.max_steps:
        refuse(
            "training.warmup_steps",
            f"= {training.warmup_steps} is more than max_steps = {training.max_steps}",
            "training.max_steps",
        )


def _check_batch(training: TrainingSettings, sources: Mapping[str, str], refuse: Refuse) -> None:
    wanted, batch_size = training.global_batch_size, training.batch_size
    if wanted is None:
        return
    given = sources.get("training.grad_accum_nums", "default") != "default"
    if given and wanted != batch_size * training.grad_accum_nums:
        refuse(
            "training.global_batch_size", "excludes training.grad_accum_nums: give one of the two"
        )
    if wanted % batch_size:
        refuse(
            "training.global_batch_size",
            f"= {wanted} is not a multiple of batch_size = {batch_size}",
        )


def _check_stride(settings: Settings, refuse: Refuse) -> None:
    stride, context_length = settings.data.stride, settings.training.context_length
    if stride is not None and stride > context_length:
        refuse(
            "data.stride",
            f"= {stride} is more than context_length = {context_length}: tokens between the "
            "sequences would never be read",
            "training.context_length",
        )


def _check_fail_on(launch: LaunchSettings, sources: Mapping[str, str], refuse: Refuse) -> None:
    is_given = sources.get("launch.fail_on", "default") != "default"
    if launch.fail_on_health and is_given and set(launch.fail_on) != set(EVERY_FAILING):
        refuse(
            "launch.fail_on_health",
            f"= true means launch.fail_on = {','.join(EVERY_FAILING)}, and "
            f"{','.join(launch.fail_on) or 'none'} is given: give one of the two",
        )
