"""The settings tree as a flat table: dotted name -> field. Checks single values; knows aliases and
near misses."""

import functools
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from operator import ne
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Struct

from model_check.config.aliases import (
    ABSENT_VALUES,
    ALIASES,
    DECIDED_LATER,
    MICRO_BATCH,
    UNNEEDED,
    VALUES,
    why_absent,
)
from model_check.config.schema import Settings
from model_check.errors import ConfigError
from model_check.utils.secrets import masked

_SURROGATE = re.compile("[\ud800-\udfff]")
"""What Python reads bytes as that are not UTF-8, in a file name for one; no file can be written
with it."""
_NO_SECRETS = (
    "holds what looks like a secret (a token, a password in a URL, NAME=VALUE, or the value of a "
    "variable with such a name), and settings are copied into run directories and checkpoints; "
    "export HF_TOKEN, WANDB_API_KEY or HF_ENDPOINT, or use another name (SECURITY.md)"
)


class Field(Struct, frozen=True):
    """One setting: `training.max_steps`."""

    name: str
    type: Any
    """Annotated with its limits and the rule for --resume, as `msgspec.convert` takes it."""
    default: Any

    @property
    def type_name(self) -> str:
        """`int >= 1 or null`, `"auto" or "cuda"`: for people."""
        return _describe(self.type)

    @property
    def is_bool(self) -> bool:
        return _bare(self.type) is bool

    @property
    def choices(self) -> tuple[str, ...]:
        """The words of which it is one; empty: it is none of a few."""
        kinds = (_bare(self.type), *get_args(_bare(self.type)))
        return next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ())

    @property
    def on_resume(self) -> str:
        """`must_equal`, `tell` or `silent` (schema.py says what they mean)."""
        return str(self._extra("on_resume"))

    @property
    def may_be_empty(self) -> bool:
        """Whether an empty text is a value of it."""
        return bool(self._extra("may_be_empty"))

    @property
    def doc(self) -> str:
        """What the setting means; empty where the schema does not say."""
        section, _, key = self.name.rpartition(".")
        words = (f"{word}: {means}." for word, means in (self._extra("words") or {}).items())
        return " ".join([meanings(sections()[section]).get(key, ""), *words])

    def _extra(self, key: str) -> Any:
        extras = (meta.extra or {} for meta in _metas(self.type))
        return next((extra[key] for extra in extras if key in extra), "")


@functools.cache
def all_fields() -> dict[str, Field]:
    """Every leaf of the tree in declaration order, by dotted name."""
    nodes = _walk(Settings, "")
    return {n: Field(n, f.type, f.default) for n, f in nodes if not isinstance(f.default, Struct)}


@functools.cache
def sections() -> dict[str, type[Struct]]:
    """Dotted names of the inner nodes: `training`, `model.rope_scaling`, ..."""
    nodes = _walk(Settings, "")
    return {n: type(f.default) for n, f in nodes if isinstance(f.default, Struct)}


def flatten(values: dict[str, Any], where: str, *, text: bool = False) -> dict[str, Any]:
    """Nested values of one source -> checked leaves by dotted name.

    `where` names the source in messages; `text`: strings stand for other types (YAML, the command
    line). A name may lack its section. A null section (`model.rope_scaling: null`), what is
    DECIDED_LATER and what is UNNEEDED stay under their own names. Raises ConfigError for an unknown
    name, two names of one setting, or a value that its field refuses.
    """
    flat: dict[str, Any] = {}
    given_as: dict[str, str] = {}
    for leaf, value in leaves(values, where):
        name = full_name(leaf)
        setting = setting_of(name)
        if _is_unsaid(name, value, given_as.get(setting)):
            continue
        if setting in given_as and not _is_unsaid(given_as[setting], flat[setting], name):
            raise ConfigError(f"{where}: {name} and {given_as[setting]} are the same setting")
        given_as[setting] = name
        key = name if name in DECIDED_LATER else setting
        flat[key] = _checked(setting, _our_value(name, value), where, text)
    return flat


def _is_unsaid(name: str, value: Any, beside: str | None) -> bool:
    """Whether `fp16: false` beside `bf16: true` says nothing, as Hugging Face writes both."""
    pair = {"training.bf16", "training.fp16"}
    return {name, beside} == pair and setting_text(value).lower() in ("false", "fp32")


def leaves(values: dict[str, Any], where: str) -> list[tuple[str, Any]]:
    """Nested values of one source by dotted name. Raises ConfigError."""
    try:
        return list(_leaves(values, ""))
    except RecursionError as error:  # a YAML anchor that contains itself
        raise ConfigError(f"{where}: nested too deeply, or within itself") from error


def setting_of(name: str) -> str:
    """The setting that a name stands for. A micro-batch may stand beside a batch: it is its own."""
    return name if name == MICRO_BATCH else ALIASES.get(name, name)


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of values by dotted names."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, leaf = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def full_name(name: str) -> str:
    """`max_iters` -> `training.max_iters`; as it is where it has its section or is unknown. Raises
    ConfigError where it could mean several settings."""
    names = [] if name in sections() else _names_by_leaf().get(name, [])
    if len({ALIASES.get(full, full) for full in names}) > 1:
        raise ConfigError(f"{name}: could mean {' or '.join(names)}: give one of them")
    return names[0] if names else name


def value_of(settings: Settings, name: str) -> Any:
    """The value of a setting by its dotted name. None inside a null section."""
    return functools.reduce(
        lambda node, part: node and getattr(node, part), name.split("."), settings
    )


def given_by(source: str, name: str) -> str:
    """`my.json: `, to put before a message about the setting `name`; nothing where the source, as
    typed, would only say the name twice."""
    return "" if source.startswith(f"{name}=") else f"{source}: "


def setting_text(value: Any) -> str:
    """A value as a command line would give it: null, true, 0.1, auto."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def meanings(struct: type[Struct]) -> dict[str, str]:
    """Field -> the text below it in the source: Python does not keep such a text."""
    import ast  # only for a page or a message that explains a field
    import inspect

    (definition,) = ast.parse(inspect.getsource(struct)).body
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, str] = {}
    for pair in pairwise(definition.body):
        match pair:
            case ast.AnnAssign(target=ast.Name(key)), ast.Expr(value=ast.Constant(str(text))):
                found[key] = " ".join(text.split())
    return found


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate that `name` is a misspelling of, if any: its key is alike in every word."""
    alike = [c for c in candidates if _is_misspelt(_leaf(name), _leaf(c))]
    return max(alike, key=lambda c: (_is_swapped(name, c), _likeness(name, c)), default=None)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _is_swapped(name: str, known: str) -> bool:
    """The same letters in another order: `--gpsu` is `--gpus`, and less likely `--gpu`."""
    return sorted(_leaf(name)) == sorted(_leaf(known))


def _is_misspelt(name: str, known: str) -> bool:
    """`max_step` of `max_steps`, `grad_accum` of `grad_accum_nums`; not `min_steps`."""
    words, known_words = re.split("[-_]+", name), re.split("[-_]+", known)
    if len(words) != len(known_words):
        return _likeness(name, known) >= 0.8
    return all(map(_is_alike, words, known_words))


def _is_alike(word: str, known: str) -> bool:
    """Alike at all, or one letter of two or more is another one: `wr` of `wq`."""
    one_differs = len(word) == len(known) > 1 and sum(map(ne, word, known)) == 1
    return one_differs or _likeness(word, known) >= 0.6


def _likeness(a: str, b: str) -> float:
    """0 to 1."""
    import difflib  # only on the way to an error message

    return difflib.SequenceMatcher(None, a, b).ratio()


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """`; did you mean training.max_steps?`; empty where no candidate is close."""
    near = nearest(name, candidates)
    return f"; did you mean {near}?" if near else ""


@functools.cache
def _names_by_leaf() -> dict[str, list[str]]:
    """`max_iters` -> the settings and aliases that end so."""
    names: dict[str, list[str]] = {}
    for name in (*all_fields(), *ALIASES):
        names.setdefault(name.rpartition(".")[2], []).append(name)
    return names


def _our_value(name: str, value: Any) -> Any:
    """What another project's word for a value means here."""
    return VALUES.get(name, {}).get(setting_text(value).lower(), value)


def _checked(name: str, value: Any, where: str, text: bool) -> Any:
    if (field := all_fields().get(ALIASES.get(name, name))) is not None:
        return _checked_value(field, value, where, text)
    if name in UNNEEDED and _is_unneeded(name, value):
        return value
    if why := why_absent(name):
        is_option = where == f"--{name.replace('_', '-')}"
        raise ConfigError(f"{where}: {why}" if is_option else f"{where}: {name}: {why}")
    if name == "model.rope_scaling" and (value is None or (text and value == "null")):
        return None
    if name in sections():
        raise ConfigError(f"{where}: {name} is a section: give it an object of settings")
    if "token" in name.lower() and "hf" in name.lower():
        raise ConfigError(
            f"{where}: {name}: secrets never come from settings, which are copied into run "
            "directories; export HF_TOKEN instead"
        )
    hint = did_you_mean(name, [*all_fields(), *ALIASES])
    raise ConfigError(f"{where}: {name}: no such setting{hint}")


def _is_unneeded(name: str, value: Any) -> bool:
    only = UNNEEDED[name].only
    return not only or setting_text(value).lower() in only


PATHS = frozenset(
    [
        *("model.model_path", "model.geometry", "model.init_from"),
        *("training.resume", "training.sample_prompts"),
        *("data.dataset", "data.tokenizer", "data.chat_template"),
        *("data.cache_dir", "data.output_dir"),
        *("system.checkpoint_dir", "logging.log_dir", "logging.tensorboard_dir"),
        *("launch.golden", "launch.history_file"),
    ]
)
"""Settings that are, or may be, a path: `~` is a home in each."""
_SWITCHES = {"yes": True, "on": True, "no": False, "off": False}
"""What people write for true and false."""


def _checked_value(field: Field, value: Any, where: str, text: bool) -> Any:
    """`value` in the type of `field`. Raises ConfigError: where, name, what was expected."""
    bare, plain = _bare(field.type), value
    if isinstance(value, str):
        if text and type(None) in get_args(bare) and value.lower() in ("null", "none"):
            return None
        plain = _items(value) if get_origin(bare) is tuple else value
        plain = _SWITCHES.get(value.lower(), plain) if bare is bool else plain
    if isinstance(value, str) and masked(value) != value:
        raise ConfigError(f"{where}: {field.name} {_NO_SECRETS}")
    given = f"{where}: {field.name} = {value!r}"
    if absent := ABSENT_VALUES.get(field.name, {}).get(str(value).lower()):
        raise ConfigError(f"{given}: {absent}")
    try:
        converted = msgspec.convert(plain, field.type, strict=not (text and isinstance(plain, str)))
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        reason = str(error).replace("`", "").removeprefix("Expected ")
        # msgspec's reason does not help where all values are text ("got str"), or among choices,
        # which it does not list.
        if text or reason.startswith("Invalid") or isinstance(error, UnicodeEncodeError):
            reason = field.type_name.replace("bool", "true or false")
        raise ConfigError(f"{given}: expected {reason}") from error
    if isinstance(converted, str) and field.name in PATHS:
        converted = os.path.expanduser(converted)
    if converted == "" and not field.may_be_empty:
        raise ConfigError(f"{where}: {field.name} is empty")
    if isinstance(converted, str) and _SURROGATE.search(converted):
        raise ConfigError(f"{given}: not valid UTF-8 (settings are written to JSON)")
    if isinstance(converted, float) and not math.isfinite(converted):
        raise ConfigError(f"{given}: must be a finite number")
    return converted


def _items(text: str) -> list[str]:
    """`isolate,reset`, also as `[isolate, reset]`. Only `[]` is none: an empty text may be a shell
    variable that nobody set."""
    if text.replace(" ", "") == "[]":
        return []
    inner = text.strip().removeprefix("[").removesuffix("]")
    return [item.strip().strip("\"'") for item in inner.split(",")]


def _leaves(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and (value or name in sections()):
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value


def _walk(struct: type[Struct], prefix: str) -> Iterator[tuple[str, msgspec.structs.FieldInfo]]:
    """Each node below `struct`, depth first, in declaration order. A section is a node whose
    default is a struct."""
    for field in msgspec.structs.fields(struct):
        yield prefix + field.name, field
        if isinstance(field.default, Struct):
            yield from _walk(type(field.default), f"{prefix}{field.name}.")


@functools.cache
def _bare(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _metas(hint: Any) -> tuple[msgspec.Meta, ...]:
    return get_args(hint)[1:] if get_origin(hint) is Annotated else ()


def _describe(hint: Any) -> str:
    """msgspec.inspect would do, but sorts the choices of a Literal: ours have an order."""
    if metas := _metas(hint):
        return " ".join([_describe(_bare(hint)), *_limits(metas)])
    kind, members = get_origin(hint), get_args(hint)
    if kind is tuple:
        return f"list of {_describe(members[0])}"
    if kind is Literal:
        return " or ".join(f'"{choice}"' for choice in members)
    if members:
        return " or ".join(map(_describe, members))
    return "null" if hint is type(None) else str(hint.__name__)


def _limits(metas: Iterable[msgspec.Meta]) -> Iterator[str]:
    for meta in metas:
        for sign, limit in ((">=", meta.ge), (">", meta.gt), ("<=", meta.le), ("<", meta.lt)):
            if limit is not None:
                yield f"{sign} {limit if isinstance(limit, int) else format(limit, 'g')}"
