"""What a training gets that nobody asked for: its checkpoints, and a warm-up no longer than itself.
Pure, but that it looks whether the data lie here."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from model_check.config.fields import all_fields
from model_check.config.inert import nobody_gave, with_value
from model_check.config.places import FALLBACK
from model_check.config.schema import Settings
from model_check.config.validation import parse_validation

MANY_STEPS = 1000
"""Nobody wants to lose more steps than these."""
_NUM_KEPT = 2
_PLACE, _LAST = "system.checkpoint_dir", "training.save_last"
_INTERVAL, _KEEP = "training.save_interval", "training.keep_last"


class Decision(NamedTuple):
    note: str
    """A line for people; empty: another one tells it."""
    values: Mapping[str, Any] = {}
    source: str = ""
    """Where the values come from."""


def completed(
    settings: Settings, sources: Mapping[str, str]
) -> tuple[Settings, dict[str, str], list[str]]:
    """The settings with what a training needs, the source of each value, and a line for each
    decision that a person should know."""
    deciders = (_warmup, _evaluation, _samples, _tensorboard)
    decisions = [d for decide in deciders if (d := decide(settings, sources))]
    found = dict(sources)
    for decision in decisions:
        settings, found = decided(settings, found, decision)
    return settings, found, [decision.note for decision in decisions if decision.note]


def decided(
    settings: Settings, sources: Mapping[str, str], decision: Decision
) -> tuple[Settings, dict[str, str]]:
    for name, value in decision.values.items():
        settings = with_value(settings, name.split("."), value)
    return settings, {**sources, **dict.fromkeys(decision.values, decision.source)}


def _warmup(settings: Settings, sources: Mapping[str, str]) -> Decision | None:
    name, training = "training.warmup_steps", settings.training
    if training.warmup_steps <= training.max_steps or not nobody_gave(sources[name]):
        return None
    shorter = training.max_steps // 10
    note = (
        f"{name} = {shorter}, a tenth of max_steps: {sources[name]} has {training.warmup_steps}, "
        f"more than the {training.max_steps} steps"
    )
    return Decision(note, {name: shorter}, "follows training.max_steps")


def _evaluation(settings: Settings, sources: Mapping[str, str]) -> Decision | None:
    """A preset evaluates, and nothing validates."""
    name, interval = "training.eval_interval", settings.training.eval_interval
    validates = bool(parse_validation(settings.data.validation))
    if interval is None or validates or not nobody_gave(sources[name]):
        return None
    return Decision("", {name: None}, "follows data.validation")


def _samples(settings: Settings, sources: Mapping[str, str]) -> Decision | None:
    """A preset samples, and no rank holds the model whole."""
    name, interval = "training.sample_interval", settings.training.sample_interval
    if interval is None or settings.launch.mode != "fsdp" or not nobody_gave(sources[name]):
        return None
    return Decision("", {name: None}, "follows launch.mode")


def checkpoints(settings: Settings, sources: Mapping[str, str], num_copies: int) -> Decision | None:
    """What is saved of a training whose end would be lost: its last step, and every tenth of a long
    one. `num_copies`: how many workers would save the same."""
    training, launch = settings.training, settings.launch
    keeps = training.save_last or training.save_best or training.save_interval is not None
    if keeps or launch.repeat is not None or launch.soak_s > 0:
        return None
    place, given = settings.system.checkpoint_dir, not nobody_gave(sources[_PLACE])
    is_asked_for = given and place != all_fields()[_PLACE].default
    is_long = training.max_steps > MANY_STEPS
    if not (nobody_gave(sources[_LAST]) and nobody_gave(sources[_INTERVAL])):
        return None
    if not (is_asked_for or (is_long and num_copies == 1)):
        note = f"this training saves no checkpoint: {_LAST}=true keeps its last step"
        return Decision(note) if _is_own_text(settings, sources) else None
    values: dict[str, Any] = {_LAST: True}
    text = "last.pt at the end"
    if is_long:
        values[_INTERVAL] = interval = training.max_steps // 10
        stay = ""
        # Those that an earlier run has kept are not ours to remove.
        if nobody_gave(sources[_KEEP]) and training.resume is None:
            values[_KEEP], stay = _NUM_KEPT, f" (the newest {_NUM_KEPT} stay)"
        text = f"step_N.pt every {interval:,} steps{stay}, and {text}"
    why = f"{_PLACE} is given" if is_asked_for else f"more than {MANY_STEPS:,} steps"
    note = f"checkpoints go to {place}: {text} ({why}; {_LAST}=false: none)"
    return Decision(note, values, f"since {why}")


def _is_own_text(settings: Settings, sources: Mapping[str, str]) -> bool:
    return not nobody_gave(sources["data.dataset"]) and os.path.exists(settings.data.dataset)


def _tensorboard(settings: Settings, sources: Mapping[str, str]) -> Decision | None:
    """Where checkpoints go home, since the working directory cannot be written, so do logs."""
    name, logging = "logging.tensorboard_dir", settings.logging
    is_homeless = logging.tensorboard and logging.tensorboard_dir is None
    if sources[_PLACE] != FALLBACK or not is_homeless:
        return None
    place = Path(settings.system.checkpoint_dir).with_name("tensorboard_logs")
    return Decision("", {name: str(place)}, FALLBACK)
