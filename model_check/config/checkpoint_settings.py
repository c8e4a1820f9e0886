"""The settings in a checkpoint, read without torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from model_check.config.fields import nested
from model_check.config.inert import CHECKPOINT
from model_check.config.layers import Layer
from model_check.config.resume import flat, with_defaults
from model_check.config.schema import Settings
from model_check.errors import ConfigError
from model_check.utils.checkpoint_names import common_file, is_sharded, paths_in

_OF_RUN = ("model.", "training.", "data.", "system.seed", "system.deterministic")
_OF_PLACE = (
    *("training.resume", "training.resume_anyway"),
    *("data.cache_dir", "data.output_dir", "data.force_preprocess", "data.offline"),
)


def settings_in(checkpoint: Path) -> Settings | None:
    """The settings of the run that wrote `checkpoint`, a file or a sharded one. Those that it lacks
    had their defaults; those that this version does not know are left out. None: they cannot be
    read, and whoever loads it says why."""
    return _settings_of(_state_in(checkpoint) or {})


def resumed_layer(resume: str) -> Layer | None:
    """What a run that goes on from `resume` need not be given again: the settings that decide its
    steps. Of a directory, those of its newest checkpoint. None: there are none to be read."""
    path = Path(resume)
    try:
        candidates = checkpoints_at(path)
        if not candidates:  # those of workers
            candidates = [file for below in sorted(path.glob("*/")) for file in paths_in(below)]
    except OSError:
        return None
    states = {each: state for each in candidates if (state := _state_in(each)) is not None}
    newest = max(states, key=lambda each: _order(states[each]), default=path)
    if (settings := _settings_of(states.get(newest, {}))) is None:
        return None
    values = flat(msgspec.to_builtins(settings))
    if settings.model.init_from is not None:  # it has those weights, and their tokenizer
        values["model.init_from"] = str(newest)
    of_run = {n: v for n, v in values.items() if n.startswith(_OF_RUN) and n not in _OF_PLACE}
    return f"{CHECKPOINT}{resume}", nested(of_run)


def checkpoints_at(path: Path) -> list[Path]:
    """The checkpoint `path`, or those in the directory `path`; of one worker, or one job. Raises
    OSError."""
    return [path] if path.is_file() or is_sharded(path) else paths_in(path)


def _settings_of(state: Mapping[str, Any]) -> Settings | None:
    given = state.get("settings")
    if not isinstance(given, dict) or "model" not in given:
        return None
    try:
        return with_defaults(flat(given))
    except (ConfigError, AttributeError, TypeError, RecursionError):
        return None


def _order(state: Mapping[str, Any]) -> tuple[int, int]:
    """The greatest is the newest."""
    attempt, step = state.get("attempt", 0), state.get("step", 0)
    return (attempt, step) if isinstance(attempt, int) and isinstance(step, int) else (0, 0)


def _state_in(checkpoint: Path) -> dict[str, Any] | None:
    from model_check.utils.plain_pickle import plain_values  # 10 ms that few starts need

    try:
        file = common_file(checkpoint) if is_sharded(checkpoint) else checkpoint
        state = plain_values(file)
    except (OSError, ValueError):
        return None
    return state if isinstance(state, dict) else None
