"""Read one settings file into plain dicts. JSON (comments and trailing commas allowed), YAML,
TOML."""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model_check.errors import ConfigError
from model_check.utils.files import read_text

if TYPE_CHECKING:
    import yaml


_YAML_SCALARS = (
    ("bool", r"(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"[-+]?(?:[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+)$", "-+0123456789"),
    (
        "float",
        r"(?:[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        "-+0123456789.",
    ),
    ("merge", r"<<$", "<"),
    ("null", r"(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
)
"""Of YAML 1.2's core schema (section 10.3.2), and digits parted by `_`: kind, what it is, how it
begins."""


def read_settings_file(path: Path) -> dict[str, Any]:
    """The file's top-level table. Raises ConfigError naming the file, and the line where there is
    one."""
    suffix = path.suffix.lower()
    try:
        text = read_text(path)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such settings file") from error
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read as text: {why}") from error
    if suffix not in _READERS:
        raise ConfigError(f"{path}: {suffix} is no settings file: .json, .yaml or .toml")
    try:
        values = _READERS[suffix](text)
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deeply, or within itself") from error
    except (ValueError, _DuplicateKey) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path}: the top level must be an object of sections, not {type(values).__name__}"
        )
    return values


def _read_json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_no_duplicates)
    except json.JSONDecodeError:
        return _read_json5(text)  # comments or trailing commas: slower to read, still JSON


def _read_json5(text: str) -> Any:
    import json5  # 30 ms, and only files with comments need it

    try:
        return json5.loads(text, object_pairs_hook=_no_duplicates)
    except ValueError as error:
        reason = str(error).removeprefix("<string>:")
        raise ValueError(f"not JSON: line {reason}") from error


def _read_yaml(text: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """PyYAML's own lets the second of two equal keys win, and knows YAML 1.1: there `off` and
        `no` are false, `010` is 8, `1:30` is 90, and a date is no text."""

        def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
            text = self.construct_scalar(node).replace("_", "")
            base = {"0x": 16, "0o": 8}.get(text.lstrip("+-")[:2], 10)
            return int(text, base)

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            _no_duplicates((key.value, None) for key in keys)
            return super().construct_mapping(node, deep)

    Loader.yaml_implicit_resolvers = {}
    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
    for kind, pattern, first in _YAML_SCALARS:
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", re.compile(pattern), list(first))
    try:
        values = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {_yaml_problem(error)}") from error
    return {} if values is None else values


def _yaml_problem(error: "yaml.YAMLError") -> str:
    """Its own text quotes the file, where a secret may stand."""
    import yaml

    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    context = f" {error.context}" if error.context else ""
    return f"line {error.problem_mark.line + 1}: {error.problem}{context}"


def _read_toml(text: str) -> Any:
    import tomllib

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"not TOML: {error}") from error


_READERS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("", ".json", ".jsonc", ".json5"), _read_json),
    **dict.fromkeys((".yaml", ".yml"), _read_yaml),
    ".toml": _read_toml,
}
"""Suffix -> reader. A reader raises ValueError with the reason."""


class _DuplicateKey(Exception):
    pass


def _no_duplicates(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise _DuplicateKey(f"{key!r} is given twice in one object")
        values[key] = value
    return values
