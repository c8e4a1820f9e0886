"""report.json and fleet.json as JSON Schemas: `python -m launcher.report.schema >
docs/report.schema.json`, `python -m launcher.report.schema fleet > docs/fleet.schema.json`."""

import sys
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import msgspec
from msgspec import Struct

from launcher import run_dir
from launcher.verdict.fleet import FleetResult
from launcher.verdict.results import RunResult
from model_check.config.fields import meanings

_DRAFT = "https://json-schema.org/draft/2020-12/schema"


def report_schema() -> dict[str, Any]:
    return _schema(RunResult, "report.json of a run of Model Check", "docs/report.md")


def fleet_schema() -> dict[str, Any]:
    return _schema(FleetResult, "fleet.json of many runs of Model Check", "docs/fleet.md")


def _schema(kind: type[Struct], title: str, document: str) -> dict[str, Any]:
    """Made of the types and of what their sources say; with what `run_dir.write` adds."""
    schema = msgspec.json.schema(kind)
    structs = {struct.__name__: struct for struct in _structs(kind)}
    for name, definition in schema["$defs"].items():
        definition["description"] = " ".join(definition.get("description", "").split())
        for field, text in meanings(structs[name]).items() if name in structs else ():
            definition["properties"][field]["description"] = text
    report: dict[str, Any] = schema["$defs"].pop(kind.__name__)
    report["properties"] = {"schema": {"const": run_dir.SCHEMA}} | report["properties"]
    about = {"$schema": _DRAFT, "title": title, "description": f"{document} says what it means."}
    required = ["schema", *report["required"]]
    return report | about | {"required": required, "$defs": schema["$defs"]}


def _structs(hint: Any) -> Iterator[type[Struct]]:
    """Those that a value of this type is made of."""
    for argument in get_args(hint):
        yield from _structs(argument)
    if isinstance(hint, type) and issubclass(hint, Struct):
        yield hint
        for each in get_type_hints(hint).values():
            yield from _structs(each)


if __name__ == "__main__":
    schema = fleet_schema() if sys.argv[1:] == ["fleet"] else report_schema()
    print(msgspec.json.format(msgspec.json.encode(schema), indent=2).decode())
