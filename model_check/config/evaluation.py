"""Whether what is to be evaluated, and saved for it, can be. Pure but for the look whether the text
that validates is there."""

import os
from collections.abc import Mapping

from model_check.config.schema import Settings
from model_check.config.validation import TextPath, parse_validation
from model_check.errors import ConfigError


def check_evaluation(settings: Settings, sources: Mapping[str, str]) -> None:
    """Refuse settings of evaluation and of checkpoints that could not act. Raises ConfigError."""
    training, splits = settings.training, list(parse_validation(settings.data.validation))
    if training.keep_last is not None and training.save_interval is None:
        raise _refused("keep_last", training.keep_last, "needs training.save_interval", sources)
    if training.eval_interval is None:
        for name in ("save_best", "eval_batches", "best_split"):
            if (value := getattr(training, name)) not in (None, False):
                raise _refused(name, value, "needs training.eval_interval", sources)
    elif not splits:
        why = "there is no validation split; name one with data.validation (held_out=0.01)"
        raise _refused("eval_interval", training.eval_interval, why, sources)
    elif training.best_split is not None and training.best_split not in splits:
        why = f"data.validation names {', '.join(splits)}"
        raise _refused("best_split", training.best_split, why, sources)


def check_validation_text(settings: Settings, sources: Mapping[str, str]) -> None:
    """Raises ConfigError for a path at which there is nothing."""
    for name, what in parse_validation(settings.data.validation).items():
        if isinstance(what, TextPath) and not os.path.exists(os.path.expanduser(what.path)):
            raise ConfigError(
                f"{sources['data.validation']}: data.validation: {name} = {what.path}: no such "
                f"file or directory (split:{what.path} would be a split of the hub dataset)"
            )


def _refused(name: str, value: object, why: str, sources: Mapping[str, str]) -> ConfigError:
    shown = "true" if value is True else value
    source = sources.get(f"training.{name}", "settings")
    return ConfigError(f"{source}: training.{name} = {shown}: {why}")
