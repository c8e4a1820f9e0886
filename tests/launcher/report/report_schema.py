"""A document against a JSON Schema: as much of it as ours uses, and no property besides."""

import json
from functools import cache
from itertools import repeat
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[3] / "docs"
_TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": int | float,
    "boolean": bool,
    "null": type(None),
}


@cache
def published(kind: str) -> dict[str, Any]:
    """The schema of such a document."""
    schema: dict[str, Any] = json.loads((DOCS / f"{kind}.schema.json").read_text())
    return schema


def faults(document: dict[str, Any], kind: str = "report") -> list[str]:
    """What of it the schema of its kind does not allow; nothing for one that holds to it."""
    return _faults(document, published(kind), "$", published(kind))


def _faults(value: Any, schema: dict[str, Any], where: str, root: dict[str, Any]) -> list[str]:
    if (name := schema.get("$ref")) is not None:
        return _faults(value, root["$defs"][name.rpartition("/")[2]], where, root)
    if "anyOf" in schema:
        found = [_faults(value, each, where, root) for each in schema["anyOf"]]
        return [] if [] in found else min(found, key=len)
    allowed = schema.get("enum", [schema["const"]] if "const" in schema else [value])
    kind = _TYPES[schema["type"]] if "type" in schema else object
    is_bool = isinstance(value, bool) and kind is not object
    if value not in allowed or not isinstance(value, kind) or (is_bool and kind is not bool):
        return [f"{where}: {value!r}"]
    if isinstance(value, list):
        each = [*schema.get("prefixItems", []), *repeat(schema.get("items", {}), len(value))]
        pairs = enumerate(zip(value, each, strict=False))
        return [f for n, (v, s) in pairs for f in _faults(v, s, f"{where}[{n}]", root)]
    return _faults_of_object(value, schema, where, root) if isinstance(value, dict) else []


def _faults_of_object(
    value: dict[str, Any], schema: dict[str, Any], where: str, root: dict[str, Any]
) -> list[str]:
    known, others = schema.get("properties", {}), schema.get("additionalProperties", {})
    found = [f"{where}: no {key}" for key in schema.get("required", []) if key not in value]
    for key, item in value.items():
        if "properties" in schema and key not in known:
            found.append(f"{where}: {key} is not in the schema")
        else:
            found += _faults(item, known.get(key, others), f"{where}.{key}", root)
    return found
