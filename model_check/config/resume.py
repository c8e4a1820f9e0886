"""Which settings of a checkpoint may be other ones when it is resumed: each setting says so itself
(`on_resume`, schema.py). Pure, but for the look whether there is something to resume."""

import os
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from model_check.config.architecture import differences
from model_check.config.fields import all_fields, setting_text
from model_check.config.schema import Settings
from model_check.errors import ConfigError

AUTO = "auto"


def check_resume(resume: str | None) -> None:
    """Raises ConfigError for a path at which there is nothing."""
    if resume is not None and resume != AUTO and not os.path.exists(resume):
        raise ConfigError(
            f"training.resume = {resume}: no such file or directory (auto: the newest of "
            "system.checkpoint_dir)"
        )


def forbidden(saved: Mapping[str, Any], settings: Settings) -> list[str]:
    """`training.batch_size 2 -> 4`, for each setting that must be the checkpoint's."""
    batches = [
        text
        for name, text in _changed(saved, settings, "must_equal")
        if not name.startswith("model.")
    ]
    return architecture_changes(saved, settings) + batches


def architecture_changes(saved: Mapping[str, Any], settings: Settings) -> list[str]:
    """Those of [model] among them, which make the same weights another model. A null of theirs is
    compared by what it stands for."""
    return [
        f"model.{key} {setting_text(theirs)} -> {setting_text(ours)}"
        for key, theirs, ours in differences(saved["model"], settings.model)
    ]


def changes(saved: Mapping[str, Any], settings: Settings) -> list[str]:
    """The same for settings that change the steps and may be changed on purpose."""
    return [text for _, text in _changed(saved, settings, "tell")]


def _changed(
    saved: Mapping[str, Any], settings: Settings, on_resume: str
) -> Iterator[tuple[str, str]]:
    """A setting that the checkpoint does not know had its default."""
    before = _flat(msgspec.to_builtins(Settings())) | _flat(saved)
    now = _flat(msgspec.to_builtins(settings))
    for name, field in all_fields().items():
        old, new = before.get(name), now.get(name)
        if field.on_resume == on_resume and old != new:
            yield name, f"{name} {setting_text(old)} -> {setting_text(new)}"


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{section}.{key}": v for section, keys in tree.items() for key, v in keys.items()}
