"""Which settings may differ from the checkpoint's when it is resumed. Each setting has its rule
(`on_resume`, schema.py). Pure, but that it looks whether the checkpoint exists."""

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
    """Raises ConfigError for a path that does not exist."""
    if resume is not None and resume != AUTO and not os.path.exists(resume):
        raise ConfigError(
            f"training.resume = {resume}: no such file or directory (auto: the newest of "
            "system.checkpoint_dir)"
        )


def forbidden(saved: Mapping[str, Any], settings: Settings) -> list[str]:
    """`training.batch_size 2 -> 4`, for each setting that differs and must equal the
    checkpoint's."""
    batches = [
        text
        for name, text in _changed(saved, settings, "must_equal")
        if not name.startswith("model.")
    ]
    return architecture_changes(saved, settings) + batches


def architecture_changes(saved: Mapping[str, Any], settings: Settings) -> list[str]:
    """The changes of [model] among them: with these the same weights are another model. A null is
    compared as the value that it stands for."""
    return [
        f"model.{key} {setting_text(theirs)} -> {setting_text(ours)}"
        for key, theirs, ours in differences(saved["model"], settings.model)
    ]


def changes(saved: Mapping[str, Any], settings: Settings) -> list[str]:
    """The same for settings that change the steps, and that a person may change on purpose."""
    return [text for _, text in _changed(saved, settings, "tell")]


def _changed(
    saved: Mapping[str, Any], settings: Settings, on_resume: str
) -> Iterator[tuple[str, str]]:
    """(name, `name old -> new`) for each changed setting with the rule `on_resume`. A setting that
    an older checkpoint does not hold had its default."""
    before = _flat(msgspec.to_builtins(Settings())) | _flat(saved)
    now = _flat(msgspec.to_builtins(settings))
    for name, field in all_fields().items():
        old, new = before.get(name), now.get(name)
        if field.on_resume == on_resume and old != new:
            yield name, f"{name} {setting_text(old)} -> {setting_text(new)}"


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{section}.{key}": v for section, keys in tree.items() for key, v in keys.items()}
