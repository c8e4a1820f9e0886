"""report.json as a JSON Schema: `python -m launcher.report.schema > docs/report.schema.json`."""

from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import msgspec
from msgspec import Struct

from launcher import run_dir
from launcher.verdict.results import RunResult
from model_check.config.fields import meanings

_ABOUT = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "report.json of a run of Model Check",
    "description": "docs/report.md says what it means.",
}


def report_schema() -> dict[str, Any]:
    """Made of the types and of what their sources say; with what `run_dir.write` adds."""
    schema = msgspec.json.schema(RunResult)
    structs = {struct.__name__: struct for struct in _structs(RunResult)}
    for name, definition in schema["$defs"].items():
        definition["description"] = " ".join(definition.get("description", "").split())
        for field, text in meanings(structs[name]).items() if name in structs else ():
            definition["properties"][field]["description"] = text
    report: dict[str, Any] = schema["$defs"].pop(RunResult.__name__)
    report["properties"] = {"schema": {"const": run_dir.SCHEMA}} | report["properties"]
    required = ["schema", *report["required"]]
    return report | _ABOUT | {"required": required, "$defs": schema["$defs"]}


def _structs(hint: Any) -> Iterator[type[Struct]]:
    """Those that a value of this type is made of."""
    for argument in get_args(hint):
        yield from _structs(argument)
    if isinstance(hint, type) and issubclass(hint, Struct):
        yield hint
        for each in get_type_hints(hint).values():
            yield from _structs(each)


if __name__ == "__main__":
    print(msgspec.json.format(msgspec.json.encode(report_schema()), indent=2).decode())
