"""Each kind of document has a published schema, made of the types; every report holds to its."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from launcher import run_dir
from launcher.report.conclude import conclude, write
from launcher.report.schema import KINDS, schema_of
from launcher.verdict.live import Watch
from launcher.verdict.record import RunEnd, RunRecord
from launcher.verdict.results import RunResult
from model_check.events import Done, Event, Finished, Phase, Step, Vectors
from tests.launcher.report.report_schema import faults, published
from tests.launcher.verdict.test_judge import RECORD, ended

NAMES = ("CPU0", "CPU1", "CPU2")


def run_of_three(*, flipped: bool) -> tuple[RunRecord, Watch]:
    """The last one's weights differ in one bit, if `flipped`."""
    watch = Watch(dict.fromkeys(NAMES, "CPU"), max_lead=2)
    for number in range(5):
        for name in NAMES:
            is_odd = flipped and name == NAMES[-1] and number == 4
            for event in events_of(number, is_odd=is_odd):
                watch.on_event(name, event)
    watch.finish()
    found = next(iter(watch.disagreements), None)
    end = RunEnd(exit_code=0)
    if found is not None:
        end = RunEnd(exit_code=21, disagreement=found, culprits=found.odd)
    record = replace(RECORD, end=end, ended=tuple(map(ended, NAMES)), healths={})
    return record, watch


def events_of(number: int, *, is_odd: bool) -> list[Event]:
    value = f"{8 if is_odd else 0:016x}"
    step = Step(
        step=number, loss="nan", grad_norm="inf", lr=1, ms=1, tokens=9, fp={"weights": value}
    )
    if number == 0:
        return [Phase(name="build", detail={"fingerprints": "full, schema 1"}), step]
    if number < 4:
        return [step]
    vectors = Vectors(step=4, fp={"weights": {"a": value}}, sizes={"a": [10, 32]})
    return [step, vectors, Finished(), Done(exit_code=0, loss_last="nan")]


def written(directory: Path, *, flipped: bool) -> dict[str, Any]:
    run = run_of_three(flipped=flipped)
    write(conclude(*run, directory).result, *run, directory)
    document: dict[str, Any] = json.loads((directory / "report.json").read_text())
    return document


@pytest.mark.parametrize("kind", KINDS)
def test_the_published_schema_is_that_of_the_types(kind: str) -> None:
    text = f"run `python -m launcher.report.schema {kind} > docs/{kind}.schema.json`"
    assert json.loads(json.dumps(schema_of(kind))) == published(kind), text


@pytest.mark.parametrize("flipped", [False, True])
def test_a_report_holds_to_it_and_reads_back_as_it_was(tmp_path: Path, flipped: bool) -> None:
    document = written(tmp_path, flipped=flipped)
    assert faults(document) == []
    assert document.pop("schema") == run_dir.SCHEMA
    assert document["kind"] == "report"
    read = msgspec.convert(document, RunResult)
    assert json.loads(msgspec.json.encode(read)) == document


def test_a_difference_is_fields_and_no_sentence(tmp_path: Path) -> None:
    report = written(tmp_path, flipped=True)
    assert report["culprits"] == ["CPU2"]
    found = report["disagreement"]
    assert (found["step"], found["quantity"]) == (4, "weights")
    assert set(found["bits"]) == set(NAMES)
    assert found["tensor"]["name"] == "a"


def test_what_does_not_hold_to_it_is_seen(tmp_path: Path) -> None:
    document = written(tmp_path, flipped=False)
    del document["workers"][0]["steps"]
    document["exit_code"] = True
    document["scope"]["more"] = 1
    document["verdict"] = "FINE"
    assert sorted(faults(document)) == [
        "$.exit_code: True",
        "$.scope: more is not in the schema",
        "$.verdict: 'FINE'",
        "$.workers[0]: no steps",
    ]


def test_who_shares_fingerprints_stands_in_the_order_of_the_run(tmp_path: Path) -> None:
    """Not in that of arrival, which a report that is made again cannot know."""
    record, watch = run_of_three(flipped=False)
    watch.last_vectors = dict(reversed(watch.last_vectors.items()))
    (shared,) = conclude(record, watch, tmp_path).result.fingerprints
    assert tuple(shared.workers) == NAMES
