"""A report is a function of the run directory: what is said of each run of the corpus is what was
said of it before, byte for byte. Where a sentence changes on purpose: `tests/corpus/make.sh`."""

import json
from pathlib import Path

import pytest

from launcher.report.schema import KINDS
from tests.corpus.said import FLEET, RUNS, SAID, say_again, say_of_fleet
from tests.launcher.report.report_schema import faults


@pytest.mark.parametrize("name", sorted(path.name for path in RUNS.iterdir()))
def test_what_is_said_of_a_run_is_a_function_of_its_directory(name: str) -> None:
    assert say_again(name) == before(RUNS / name)


def test_what_is_said_of_a_fleet_is_a_function_of_its_runs() -> None:
    assert say_of_fleet() == before(FLEET)


# The runs themselves are of an older version, which wrote no kind.
OF_OLDER = {"run.json": "run", "comparison.json": "trials", "report.json": "report"}
DOCUMENTS = [p for name in (*OF_OLDER, "fleet.json") for p in RUNS.parent.rglob(name)]


def test_each_document_holds_to_the_schema_of_its_kind() -> None:
    kinds = set()
    for path in DOCUMENTS:
        document = json.loads(path.read_text())
        kinds.add(kind := document.get("kind") or OF_OLDER[path.name])
        assert faults(document, kind) == [], path
    assert kinds == {*KINDS}


def before(directory: Path) -> dict[str, str]:
    return {f: path.read_text() for f in SAID if (path := directory / f).exists()}
