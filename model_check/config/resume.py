"""Which settings of a checkpoint may be other ones when it is resumed. Pure, but for the look
whether there is something to resume."""

import os
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from model_check.config.architecture import KEYS, differences
from model_check.config.schema import Settings
from model_check.errors import ConfigError

AUTO = "auto"

_MUST_STAY = (
    "training.batch_size",
    "training.grad_accum_nums",
    "training.global_batch_size",
    "training.context_length",
    "data.document_masking",
    "system.seed",
)
"""With another one the next batches are not those that the interrupted run would have read. Nor are
the weights those of the same model with another architecture."""
_MAY_CHANGE = (
    *("logging.", "debug.", "launch.", "data."),  # what the data is, its own identity tells
    *("system.device", "system.device_id", "system.checkpoint_dir"),
    *("training.num_workers", "training.resume", "training.resume_anyway"),
    *("training.save_", "training.keep_last", "training.async_save", "training.eval_"),
    *("training.best_split", "model.model_path", "model.init_", "model.geometry", *_MUST_STAY),
    *(f"model.{key}" for key in KEYS),
)
"""Beginnings of the names that are not worth a word: they change no step, or are refused anyway."""


def check_resume(resume: str | None) -> None:
    """Raises ConfigError for a path at which there is nothing."""
    if resume is not None and resume != AUTO and not os.path.exists(resume):
        raise ConfigError(
            f"training.resume = {resume}: no such file or directory (auto: the newest of "
            "system.checkpoint_dir)"
        )


def forbidden(saved: Mapping[str, Any], settings: Settings) -> list[str]:
    """`training.batch_size 2 -> 4`, for each setting that must be the checkpoint's."""
    batches = [text for name, text in _compared(saved, settings) if name in _MUST_STAY]
    return architecture_changes(saved, settings) + batches


def architecture_changes(saved: Mapping[str, Any], settings: Settings) -> list[str]:
    """Those of them that make the same weights another model."""
    return [
        f"model.{key} {_text(theirs)} -> {_text(ours)}"
        for key, theirs, ours in differences(saved["model"], settings.model)
    ]


def changes(saved: Mapping[str, Any], settings: Settings) -> list[str]:
    """The same for settings that make the steps other ones and may be changed on purpose."""
    return [text for name, text in _compared(saved, settings) if not name.startswith(_MAY_CHANGE)]


def _compared(saved: Mapping[str, Any], settings: Settings) -> Iterator[tuple[str, str]]:
    """A setting that the checkpoint does not know had its default."""
    before = _flat(msgspec.to_builtins(Settings())) | _flat(saved)
    for name, value in _flat(msgspec.to_builtins(settings)).items():
        if before.get(name) != value:
            yield name, f"{name} {_text(before.get(name))} -> {_text(value)}"


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{section}.{key}": v for section, keys in tree.items() for key, v in keys.items()}


def _text(value: object) -> str:
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )
