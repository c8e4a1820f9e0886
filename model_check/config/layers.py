"""What a person gives, source by source, before it is laid over presets and defaults. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from model_check.config.aliases import MICRO_BATCH, UNNEEDED
from model_check.config.fields import flatten, full_name, given_by
from model_check.errors import ConfigError

Layer = tuple[str, dict[str, Any]]
"""Where settings come from, for people, and what that source gives: dotted name -> value."""


def command_line(overrides: Sequence[str], flags: Mapping[str, tuple[str, Any]]) -> Iterator[Layer]:
    """A layer for each `section.key=value`, then for each flag (name of a setting -> flag, value).
    Raises ConfigError for two names of one setting; a flag of our own is the setting itself."""
    given: dict[str, tuple[str, str]] = {}
    for label, name, layer in _typed(overrides, flags):
        (setting,) = layer
        before, its_label = given.setdefault(setting, (name, label))
        if before != name:
            shown = " and ".join(text.partition("=")[0] for text in (its_label, label))
            raise ConfigError(f"{shown} are the same setting ({setting}): give one of them")
        yield label, layer


def _typed(
    overrides: Sequence[str], flags: Mapping[str, tuple[str, Any]]
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(what was typed, the name of a setting in it, its setting and value)"""
    for override in overrides:
        key, equals, value = (part.strip() for part in override.partition("="))
        if not equals:
            raise ConfigError(
                f"{override!r}: not an option, and not section.key=value (for example "
                "training.max_steps=20)"
            )
        name = full_name(key)
        yield f"{name}={value}", name, flatten({key: value}, "command line", text=True)
    for name, (flag, value) in flags.items():
        yield flag, name, flatten({name: value}, flag, text=True)


def in_settings(layers: Sequence[Layer]) -> tuple[list[Layer], tuple[str, ...]]:
    """All that a person gives, under the names of settings alone; and a line for each name that
    changes nothing. Raises ConfigError."""
    notes = tuple(
        f"{_shown(label, name)} changes nothing: {UNNEEDED[name].why}"
        for label, layer in layers
        for name in layer
        if name in UNNEEDED
    )
    needed = [(label, _without(layer, *UNNEEDED)) for label, layer in layers]
    return _with_batches(needed), notes


def _shown(label: str, name: str) -> str:
    """`--verbose`, `my.yaml: run_name`: where a person gave `name`."""
    return label if label.startswith("--") else f"{given_by(label, name)}{name}"


def _with_batches(layers: list[Layer]) -> list[Layer]:
    """A batch_size beside a micro_batch_size is the global one, in whatever order and source.
    Raises ConfigError where that is given, too."""
    named = {name for _, layer in layers for name, value in layer.items() if value is not None}
    if MICRO_BATCH not in named:
        return layers
    new = {MICRO_BATCH: "training.batch_size"}
    if "training.batch_size" in named:
        new["training.batch_size"] = "training.global_batch_size"
        if "training.global_batch_size" in named:
            raise ConfigError(
                "training.batch_size beside training.micro_batch_size is "
                "training.global_batch_size, which is given, too: give two of the three"
            )
        # A resolved file says that there is no global one.
        layers = [(label, _without(layer, "training.global_batch_size")) for label, layer in layers]
    return [(label, {new.get(n, n): v for n, v in layer.items()}) for label, layer in layers]


def _without(layer: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in layer.items() if name not in names}
