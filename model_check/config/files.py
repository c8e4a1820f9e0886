"""Read one settings file into plain dicts. JSON (comments and trailing commas allowed), YAML,
TOML."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model_check.errors import ConfigError
from model_check.utils.files import SETTINGS_BYTES, read_whole

if TYPE_CHECKING:
    import yaml


def read_settings_file(path: Path) -> dict[str, Any]:
    """The file's top-level table. Raises ConfigError naming the file, and the line where there is
    one."""
    suffix = path.suffix.lower()
    try:
        text = read_whole(path, SETTINGS_BYTES).decode("utf-8-sig")  # a BOM: Windows' editors
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
        """PyYAML's own lets the second of two equal keys win."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            _no_duplicates((key.value, None) for key in keys)
            return super().construct_mapping(node, deep)

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
