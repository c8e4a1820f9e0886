"""Which settings may differ from the checkpoint's when it is resumed: each setting has its rule
(`on_resume`, schema.py). And which model a set of weights belongs to: the shapes of tensors do not
tell everything, since with other heads, rotary bases or norms the same weights compute other
numbers. Pure, but that it looks whether the checkpoint exists."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from model_check.config.aliases import ABSENT_VALUES
from model_check.config.attention import KINDS, OF_KINDS
from model_check.config.fields import all_fields, nested, sections, setting_text
from model_check.config.ranks import sequences_of_step
from model_check.config.schema import ModelSettings, Settings
from model_check.config.shape import geometry
from model_check.errors import ConfigError
from model_check.utils.checkpoint_names import is_earlier, is_named, is_sharded

AUTO = "auto"
_NUM_NAMED = 3
KEYS = tuple(
    dict.fromkeys(
        name.split(".")[1]
        for name, field in all_fields().items()
        if name.startswith("model.") and field.on_resume == "must_equal"
    )
)
"""The keys of [model] that decide what the weights compute. The others say where weights and
tokenizer come from, how weights begin, and which kernel computes."""


COUNTS = tuple(
    f"training.{key}" for key in ("grad_accum_nums", "global_batch_size", "global_grad_accum_nums")
)
"""Three ways to say how many micro-batches a step has."""
BATCH = ("training.batch_size", *COUNTS)
FIRST_WEIGHTS = ("model.init_from", "model.init_std", "model.infini.gate_init")
"""A checkpoint has its weights; a run that begins at step 0 has those that these ask for."""


def settings_digest(settings: Settings) -> str:
    """Of all that decides or changes the steps: equal runs have equal ones, wherever they write."""
    acting = acting_settings(msgspec.to_builtins(settings))
    return hashlib.sha256(msgspec.json.encode(acting, order="sorted")).hexdigest()[:16]


def digest_of_run(tree: Mapping[str, Any]) -> str:
    """A digest of the settings that a run never changes. `tree`: all settings, as plain types."""
    values = flat(msgspec.to_builtins(Settings())) | flat(tree)
    fixed = [n for n, field in all_fields().items() if field.on_resume == "must_equal"]
    text = msgspec.json.encode([(name, values.get(name)) for name in fixed])
    return hashlib.sha256(text).hexdigest()[:16]


def acting_settings(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> value of those. `tree`: all settings, as plain types."""
    silent = {name for name, field in all_fields().items() if field.on_resume == "silent"}
    values = flat(tree)
    return {n: value for n, value in values.items() if n not in silent or n in FIRST_WEIGHTS}


def check_resume(resume: str | None) -> None:
    """Raises ConfigError for a path where nothing is, or that may not be looked at."""
    if resume is None or resume == AUTO:
        return
    try:
        os.stat(resume)
    except OSError as error:
        is_absent = isinstance(error, FileNotFoundError | NotADirectoryError)
        why = "no such file or directory" if is_absent else error.strerror
        there = _those_beside(Path(resume)) if is_absent else ""
        raise ConfigError(
            f"training.resume = {resume}: {why}{there} (auto: the newest of system.checkpoint_dir)"
        ) from error


def _those_beside(path: Path) -> str:
    """`; there are checkpoints/gpu0/last.pt, ...`: what could be resumed in its directory and in
    those of workers below it, the newest first; empty where nothing could."""
    found = [file for at in ("", "*/") for file in path.parent.glob(f"{at}*")]
    found = [at for at in found if is_named(at) and not is_earlier(at)]
    found = [at for at in found if at.suffix or is_sharded(at)]
    names = [str(at) for at in sorted(found, key=os.path.getmtime, reverse=True)]
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return f"; there are {', '.join(names[:_NUM_NAMED])}{more}" if names else ""


def forbidden(
    saved: Mapping[str, Any], settings: Settings, num_ranks: tuple[int, int] = (1, 1)
) -> list[str]:
    """`training.batch_size 2 -> 4`, for each setting that differs and must equal the checkpoint's.
    `num_ranks`: the checkpoint's, and those of now; where they differ, the sequences of a step
    must be as many, whatever makes them."""
    before, now = num_ranks
    others = [
        text
        for name, text in changed(saved, settings, "must_equal")
        if not name.startswith("model.") and (before == now or name not in BATCH)
    ]
    if before != now:
        was = sequences_of_step(saved["training"], before)
        own = sequences_of_step(msgspec.to_builtins(settings.training), now)
        others += [f"sequences of a step {was} -> {own}"] if was != own else []
    return architecture_changes(saved, settings) + others


def architecture_changes(saved: Mapping[str, Any], settings: Settings) -> list[str]:
    """The changes of [model] among them: with these the same weights are another model. A null is
    compared as the value that it stands for."""
    return [
        f"model.{key} {setting_text(theirs)} -> {setting_text(ours)}"
        for key, theirs, ours in differences(saved["model"], settings.model)
    ]


def changes(saved: Mapping[str, Any], settings: Settings) -> list[str]:
    """The same for settings that change the steps, and that a person may change on purpose."""
    return [text for _, text in changed(saved, settings, "tell")]


def changed(saved: Mapping[str, Any], settings: Settings, *rules: str) -> Iterator[tuple[str, str]]:
    """Name and `name old -> new` of each changed setting whose `on_resume` is one of `rules`. A
    setting that an older checkpoint does not hold had its default."""
    before = flat(msgspec.to_builtins(Settings())) | flat(saved)
    now = flat(msgspec.to_builtins(settings))
    for name, field in all_fields().items():
        old, new = before.get(name), now.get(name)
        if field.on_resume in rules and old != new:
            yield name, f"{name} {setting_text(old)} -> {setting_text(new)}"


def known_settings(saved: Mapping[str, Any]) -> Settings:
    """The settings of a checkpoint that decide its steps. Those that it lacks have their defaults;
    names and values that this version does not know are left out. Raises ConfigError for a damaged
    value."""
    return with_defaults(acting_settings(saved))


def with_defaults(saved: Mapping[str, Any]) -> Settings:
    """The settings of a checkpoint by dotted name, completed in the same way. Raises
    ConfigError."""
    known = all_fields().keys() | sections().keys()
    kept = {n: v for n, v in saved.items() if n in known and str(v) not in ABSENT_VALUES.get(n, {})}
    try:
        return msgspec.convert(nested(kept), Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"its settings are damaged: {error}") from error


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """By the names of all_fields(). A section that is null, or no section, has its own name."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        is_section = name in sections() and isinstance(value, Mapping)
        values |= flat(value, f"{name}.") if is_section else {name: value}
    return values


def full(model: ModelSettings) -> ModelSettings:
    """The same with full attention: whose weights all other kinds can begin with."""
    return replace(model, attention="full")


def begin_as_llama(weights_of: Mapping[str, Any]) -> bool:
    """Whether `weights_of`, the [model] that weights were trained with, are those of any LLaMA."""
    kind = KINDS.get(weights_of.get("attention", "full"))
    return kind is not None and kind.is_llama


def _with_defaults_of_others(model: ModelSettings) -> dict[str, Any]:
    """As plain types, with the default for each setting of a kind of attention that does not decide
    what these weights compute."""
    values: dict[str, Any] = msgspec.to_builtins(model)
    for name in OF_KINDS:
        field = all_fields()[name]
        if name not in KINDS[model.attention].settings or field.on_resume != "must_equal":
            _, *sections, key = name.split(".")
            reduce(getitem, sections, values)[key] = field.default
    return values


class Difference(NamedTuple):
    """A key of [model] with its two values, as they were given."""

    key: str
    theirs: Any
    ours: Any

    def __str__(self) -> str:
        return f"{self.key} {self.ours} here, {self.theirs} there"


def differences(weights_of: Mapping[str, Any], model: ModelSettings) -> list[Difference]:
    """Where `weights_of`, the [model] that weights were trained with, differs from `model`.

    A key that is missing had its default. A vocabulary of null is the tokenizer's, and the shape of
    the embedding is checked elsewhere. Raises ConfigError.
    """
    theirs, ours = _complete(weights_of), _complete(msgspec.to_builtins(model))
    if None in (theirs["vocab_size"], ours["vocab_size"]):
        theirs["vocab_size"] = ours["vocab_size"]
    pairs = [(key, theirs[key], ours[key]) for key in KEYS]
    return [Difference(*each) for pair in pairs for each in _leaves(*pair) if each[1] != each[2]]


def check_first_weights(weights: Mapping[str, Any], model: ModelSettings) -> None:
    """Raises ConfigError where the weights of model.init_from are those of another model than
    `model`. `weights`: what is known of their shape, by names of settings; none: nothing."""
    if not weights:
        return
    theirs = nested(weights)["model"]
    if begin_as_llama(theirs):
        model = full(model)
    # A larger vocabulary begins with theirs.
    found = [each for each in differences(theirs, model) if each.key != "vocab_size"]
    if found:
        values = " ".join(f"model.{each.key}={setting_text(each.theirs)}" for each in found)
        own = ", ".join(f"{each.key} {setting_text(each.ours)}" for each in found)
        raise ConfigError(
            f"the weights of model.init_from need {values}, not {own}: give these values, or none"
        )


def _leaves(key: str, theirs: Any, ours: Any) -> Iterator[tuple[str, Any, Any]]:
    """Of a section, which either may lack, its keys."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for inner in theirs:
            yield f"{key}.{inner}", theirs[inner], ours[inner]
    else:
        yield key, theirs, ours


def _complete(model: Mapping[str, Any]) -> dict[str, Any]:
    """With defaults, and what a null stands for. Raises ConfigError for values that no model can
    have."""
    try:
        known = msgspec.convert({key: model[key] for key in KEYS if key in model}, ModelSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the [model] settings of these weights are damaged: {error}") from error
    values = _with_defaults_of_others(known)
    shape = geometry(known, 0)
    derived = ("intermediate_size", "num_kv_heads", "head_dim")
    values |= {key: getattr(shape, key) for key in derived}
    return values
