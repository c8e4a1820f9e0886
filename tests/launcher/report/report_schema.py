"""A document against a JSON Schema: as much of it as ours uses, and no property besides."""

import json
from pathlib import Path
from typing import Any

SCHEMA = json.loads((Path(__file__).parents[3] / "docs" / "report.schema.json").read_text())
_TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": int | float,
    "boolean": bool,
    "null": type(None),
}


def faults(
    value: Any, schema: dict[str, Any] = SCHEMA, where: str = "$", root: dict[str, Any] = SCHEMA
) -> list[str]:
    """What of `value` the schema does not allow; nothing for a document that holds to it."""
    if (name := schema.get("$ref")) is not None:
        return faults(value, root["$defs"][name.rpartition("/")[2]], where, root)
    if "anyOf" in schema:
        found = [faults(value, each, where, root) for each in schema["anyOf"]]
        return [] if [] in found else min(found, key=len)
    allowed = schema.get("enum", [schema["const"]] if "const" in schema else [value])
    kind = _TYPES[schema["type"]] if "type" in schema else object
    is_bool = isinstance(value, bool) and kind is not object
    if value not in allowed or not isinstance(value, kind) or (is_bool and kind is not bool):
        return [f"{where}: {value!r}"]
    if isinstance(value, list):
        each = schema.get("items", {})
        return [
            f for n, item in enumerate(value) for f in faults(item, each, f"{where}[{n}]", root)
        ]
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
            found += faults(item, known.get(key, others), f"{where}.{key}", root)
    return found
