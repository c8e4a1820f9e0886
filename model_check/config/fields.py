"""The settings tree as a flat table: dotted name -> field. Checks single values; knows aliases and
near misses."""

import functools
import math
import types
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct

from model_check.config.aliases import ALIASES
from model_check.config.schema import Settings
from model_check.errors import ConfigError


class Field(Struct, frozen=True):
    """One setting: `training.max_steps`."""

    name: str
    type: Any
    """Annotated with its limits, as `msgspec.convert` takes it."""
    default: Any
    doc: str

    @property
    def optional(self) -> bool:
        return type(None) in _members(self.type)

    @property
    def is_list(self) -> bool:
        return any(get_origin(_bare(member)) is tuple for member in _members(self.type))

    @property
    def type_name(self) -> str:
        """`int or null`, `"auto" or "cuda"`: for people."""
        names = [_describe(member) for member in _members(self.type)]
        return " or ".join(names)


@functools.cache
def all_fields() -> dict[str, Field]:
    """Every leaf of the tree in declaration order, by dotted name."""
    return {field.name: field for field in _walk(Settings, "")}


@functools.cache
def sections() -> dict[str, type[msgspec.Struct]]:
    """Dotted names of the inner nodes: `training`, `model.rope_scaling`, ..."""
    return dict(_walk_sections(Settings, ""))


def flatten(values: dict[str, Any], where: str, *, text: bool = False) -> dict[str, Any]:
    """Nested values of one source -> checked leaves by dotted name.

    `where` names the source in messages; `text`: strings stand for other types (YAML, the command
    line).
    A null section (`model.rope_scaling: null`) stays under its own name. Raises ConfigError for an
    unknown name,
    two names of one setting, or a value that its field refuses.
    """
    flat: dict[str, Any] = {}
    given_as: dict[str, str] = {}
    try:
        leaves = _leaves(values, "", where)
    except RecursionError as error:  # a YAML anchor that contains itself
        raise ConfigError(f"{where}: nested too deeply, or within itself") from error
    for name, value in leaves:
        canonical = ALIASES.get(name, name)
        if canonical in given_as:
            raise ConfigError(f"{where}: {name} and {given_as[canonical]} are the same setting")
        given_as[canonical] = name
        flat[canonical] = _checked(canonical, value, where, text)
    return flat


def check(field: Field, value: Any, where: str, *, text: bool = False) -> Any:
    """`value` as `field` wants it. Raises ConfigError: where, name, what was expected."""
    if text and isinstance(value, str) and field.optional and value.lower() in ("null", "none"):
        return None
    plain = _items(value) if field.is_list and isinstance(value, str) else value
    try:
        converted = msgspec.convert(plain, field.type, strict=not (text and isinstance(plain, str)))
    except msgspec.ValidationError as error:
        reason = str(error).replace("`", "").removeprefix("Expected ")
        if text or reason.startswith("Invalid"):  # typed by hand, everything is a str
            reason = field.type_name.replace("bool", "true or false")
        raise ConfigError(f"{where}: {field.name} = {value!r}: expected {reason}") from error
    if converted == "":
        raise ConfigError(f"{where}: {field.name} is empty")
    if isinstance(converted, str) and not _is_unicode(converted):
        raise ConfigError(
            f"{where}: {field.name} = {value!r}: not valid UTF-8 (settings are written to JSON)"
        )
    if isinstance(converted, float) and not math.isfinite(converted):
        raise ConfigError(f"{where}: {field.name} = {value!r}: must be a finite number")
    return converted


def _items(text: str) -> list[str]:
    """`isolate,reset`, also as `[isolate, reset]`. Only `[]` is none: an empty text may be a shell
    variable that nobody set."""
    if text.replace(" ", "") == "[]":
        return []
    inner = text.strip().removeprefix("[").removesuffix("]")
    return [item.strip().strip("\"'") for item in inner.split(",")]


def _is_unicode(text: str) -> bool:
    """False for a file name's bytes that are no UTF-8, and for half a pair of surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def nearest(name: str, candidates: list[str]) -> str | None:
    """The candidate most like `name`, if any is close."""
    import difflib  # only on the way to an error message

    whole = difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)
    if whole:
        return whole[0]
    leaf = name.rpartition(".")[2]
    by_leaf = {candidate.rpartition(".")[2]: candidate for candidate in candidates}
    close = difflib.get_close_matches(leaf, list(by_leaf), n=1, cutoff=0.6)
    return by_leaf[close[0]] if close else None


def _checked(name: str, value: Any, where: str, text: bool) -> Any:
    if (field := all_fields().get(name)) is not None:
        return check(field, value, where, text=text)
    if name == "model.rope_scaling" and (value is None or (text and value == "null")):
        return None
    if name in sections():
        raise ConfigError(f"{where}: {name} is a section: give it an object of settings")
    if "token" in name.lower() and "hf" in name.lower():
        raise ConfigError(
            f"{where}: {name}: secrets never come from settings, which are copied into run "
            f"directories; "
            "export HF_TOKEN instead"
        )
    near = nearest(name, [*all_fields(), *ALIASES])
    hint = f"; did you mean {near!r}?" if near else ""
    raise ConfigError(f"{where}: {name}: no such setting{hint}")


def _leaves(values: dict[str, Any], prefix: str, where: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and (value or name in sections()):
            found += _leaves(value, f"{name}.", where)
        else:
            found.append((name, value))
    return found


def _walk(struct: type[msgspec.Struct], prefix: str) -> list[Field]:
    hints = get_type_hints(struct, include_extras=True)
    found: list[Field] = []
    for field in msgspec.structs.fields(struct):
        hint, name = hints[field.name], prefix + field.name
        if (inner := _struct_in(hint)) is not None:
            found += _walk(inner, f"{name}.")
        else:
            found.append(Field(name, hint, field.default, _doc_of(hint)))
    return found


def _walk_sections(
    struct: type[msgspec.Struct], prefix: str
) -> list[tuple[str, type[msgspec.Struct]]]:
    hints = get_type_hints(struct, include_extras=True)
    found: list[tuple[str, type[msgspec.Struct]]] = []
    for field in msgspec.structs.fields(struct):
        if (inner := _struct_in(hints[field.name])) is not None:
            found.append((prefix + field.name, inner))
            found += _walk_sections(inner, f"{prefix}{field.name}.")
    return found


def _struct_in(hint: Any) -> type[msgspec.Struct] | None:
    for member in _members(hint):
        if isinstance(member, type) and issubclass(member, msgspec.Struct):
            return member
    return None


def _members(hint: Any) -> list[Any]:
    """The alternatives of a union, each still with its limits."""
    if get_origin(hint) is Annotated and get_origin(get_args(hint)[0]) in (Union, types.UnionType):
        hint = get_args(hint)[0]
    if get_origin(hint) in (Union, types.UnionType):
        return list(get_args(hint))
    return [hint]


def _bare(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _limits(meta: Any) -> list[str]:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    limits = [(sign, getattr(meta, name, None)) for name, sign in signs.items()]
    return [
        f"{sign} {limit if isinstance(limit, int) else format(limit, 'g')}"
        for sign, limit in limits
        if limit is not None
    ]


def _doc_of(hint: Any) -> str:
    for meta in get_args(hint)[1:] if get_origin(hint) is Annotated else ():
        if isinstance(meta, msgspec.Meta) and meta.description:
            return meta.description
    return ""


def _describe(member: Any) -> str:
    if member is type(None):
        return "null"
    if get_origin(member) is Annotated:
        base, *metas = get_args(member)
        return " ".join([_describe(base), *(limit for meta in metas for limit in _limits(meta))])
    if get_origin(member) is tuple:
        return f"list of {_describe(get_args(member)[0])}"
    if (choices := get_args(member)) and get_origin(member) is not None:
        return " or ".join(f'"{choice}"' for choice in choices)
    return str(member.__name__)
