"""Our documents as JSON Schemas, one for each kind: `python -m launcher.report.schema KIND >
docs/KIND.schema.json`."""

import sys
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import msgspec
from msgspec import Struct

from launcher import run_dir
from launcher.verdict.comparison import ComparisonRecord, ComparisonResult
from launcher.verdict.fleet import FleetResult
from launcher.verdict.record import RunRecord
from launcher.verdict.results import RunResult
from launcher.verdict.rounds import RoundsResult
from model_check.config.fields import meanings

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
KINDS: dict[str, tuple[type[Struct], str, str]] = {
    "run": (RunRecord, "run.json of a run", "report"),
    "report": (RunResult, "report.json of a run", "report"),
    "rounds": (RoundsResult, "report.json of a run of several rounds", "report"),
    "trials": (ComparisonRecord, "comparison.json of a comparison", "compare"),
    "comparison": (ComparisonResult, "report.json of a comparison", "compare"),
    "fleet": (FleetResult, "fleet.json of many runs", "fleet"),
}
"""Kind -> its type, what it is, and the page of docs that says what it means."""


def schema_of(kind: str) -> dict[str, Any]:
    """Made of the types and of what their sources say; with what `run_dir.write` adds. Files of
    older versions have no kind."""
    struct, title, page = KINDS[kind]
    schema = msgspec.json.schema(struct)
    structs = {each.__name__: each for each in _structs(struct)}
    for name, definition in schema["$defs"].items():
        definition["description"] = " ".join(definition.get("description", "").split())
        for field, text in _meanings(structs[name]).items() if name in structs else ():
            definition["properties"][field]["description"] = text
    document: dict[str, Any] = schema["$defs"].pop(struct.__name__)
    named = {"schema": {"const": run_dir.SCHEMA}, "kind": {"const": kind}}
    about = {
        "$schema": _DRAFT,
        "title": f"{title} of Model Check",
        "description": f"docs/{page}.md says what it means.",
        "required": ["schema", *(name for name in document["required"] if name != "kind")],
    }
    properties = named | {k: v for k, v in document["properties"].items() if k not in named}
    return document | about | {"properties": properties, "$defs": schema["$defs"]}


def _structs(hint: Any) -> Iterator[type[Struct]]:
    """Those that a value of this type is made of."""
    for argument in get_args(hint):
        yield from _structs(argument)
    if isinstance(hint, type) and issubclass(hint, Struct):
        yield hint
        for each in get_type_hints(hint).values():
            yield from _structs(each)


def _meanings(struct: type[Struct]) -> dict[str, str]:
    """Also of the fields that it inherits."""
    bases = [each for each in struct.__mro__ if issubclass(each, Struct) and each is not Struct]
    return {name: text for each in reversed(bases) for name, text in meanings(each).items()}


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in KINDS:
        sys.exit(f"which kind? {', '.join(KINDS)}")
    print(msgspec.json.format(msgspec.json.encode(schema_of(sys.argv[1])), indent=2).decode())
