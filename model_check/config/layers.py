"""What a person gives, source by source, before it is laid over presets and defaults. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from model_check.config.aliases import (
    ALIASES,
    BESIDE,
    DECIDED_LATER,
    MICRO_BATCH,
    UNNEEDED,
    VALUES,
)
from model_check.config.fields import flatten, full_name, given_by, setting_of, setting_text
from model_check.errors import ConfigError

Layer = tuple[str, dict[str, Any]]
"""Where settings come from, for people, and what that source gives: dotted name -> value."""


def command_line(overrides: Sequence[str], flags: Mapping[str, tuple[str, Any]]) -> Iterator[Layer]:
    """A layer for each `section.key=value`, then for each flag (name of a setting -> flag, value).
    Raises ConfigError for two names of one setting; a flag of our own is the setting itself."""
    given: dict[str, _Typed] = {}
    for typed in _typed(overrides, flags):
        setting = setting_of(*typed.layer)
        before = given.setdefault(setting, typed)
        if not typed.is_named_as(before):
            pair = [each.label.partition("=")[0] for each in (before, typed)]
            shown = pair if pair[0] != pair[1] else [before.key, typed.key]
            raise ConfigError(
                f"{' and '.join(shown)} are the same setting ({setting}): give one of them"
            )
        yield typed.label, typed.layer


def replaced(layers: Sequence[Layer]) -> list[str]:
    """A line for each value of a command line that a later one takes the place of."""
    notes, last = [], dict[str, tuple[str, Any]]()
    for label, layer in layers:
        for name, value in layer.items():
            before, old = last.get(name, (label, value))
            if old != value:
                notes.append(f"{_with(label, value)} takes the place of {_with(before, old)}")
            last[name] = label, value
    return notes


def _with(label: str, value: Any) -> str:
    """`training.max_steps=20`, `--max-steps 20`"""
    return f"{label} {setting_text(value)}" if label.startswith("--") else label


class _Typed(NamedTuple):
    label: str
    key: str
    """As typed: `init_from`, `--init-from`."""
    name: str
    """The name of a setting in it, with its section."""
    layer: dict[str, Any]
    """Its setting and value."""
    is_their_word: bool = False
    """The value is another project's word, so that the key is its name, too."""

    def is_named_as(self, other: "_Typed") -> bool:
        are_ours = not (self.is_their_word or other.is_their_word)
        return self.name == other.name and (are_ours or self.key == other.key)


def _typed(overrides: Sequence[str], flags: Mapping[str, tuple[str, Any]]) -> Iterator[_Typed]:
    for override in overrides:
        key, equals, value = (part.strip() for part in override.partition("="))
        if not equals:
            raise ConfigError(
                f"{override!r}: not an option, and not section.key=value (for example "
                "training.max_steps=20)"
            )
        name = full_name(key)
        layer = flatten({key: value}, "command line", text=True)
        yield _Typed(f"{name}={value}", key, name, layer, _is_their_word(name, value))
    for name, (flag, value) in flags.items():
        layer = flatten({name: value}, flag, text=True)
        yield _Typed(flag, flag, name, layer, _is_their_word(name, value))


def _is_their_word(name: str, value: Any) -> bool:
    return setting_text(value).lower() in VALUES.get(name, {})


def in_settings(layers: Sequence[Layer]) -> tuple[list[Layer], tuple[str, ...]]:
    """All that a person gives, under the names of settings alone; and a line for each name that
    changes nothing. Raises ConfigError."""
    named = {name for _, layer in layers for name in layer}
    notes = tuple(
        f"{_shown(label, name)} changes nothing: {UNNEEDED[name].why}"
        for label, layer in layers
        for name in layer
        if name in UNNEEDED and not named & {*BESIDE.get(name, ())}
    )
    return [(label, _without(layer, *UNNEEDED)) for label, layer in _decided(layers)], notes


def _shown(label: str, name: str) -> str:
    """`--verbose`, `my.yaml: run_name`: where a person gave `name`."""
    return label if label.startswith("--") else f"{given_by(label, name)}{name}"


def _decided(layers: Sequence[Layer]) -> list[Layer]:
    """What is DECIDED_LATER under the names of settings: BESIDE says which, in whatever order and
    source. Raises ConfigError for three batches."""
    named = {name for _, layer in layers for name, value in layer.items() if value is not None}
    new = {name: ALIASES[name] for name in DECIDED_LATER}
    for name in named & {*BESIDE}:
        new |= BESIDE[name]
    dropped = []
    if {MICRO_BATCH, "training.batch_size"} <= named:
        if "training.global_batch_size" in named:
            raise ConfigError(
                "training.batch_size beside training.micro_batch_size is "
                "training.global_batch_size, which is given, too: give two of the three"
            )
        # A resolved file says that there is no global one.
        dropped = ["training.global_batch_size"]
    kept = [(label, _without(layer, *dropped)) for label, layer in layers]
    return [(label, {new.get(n, n): v for n, v in layer.items()}) for label, layer in kept]


def _without(layer: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in layer.items() if name not in names}
