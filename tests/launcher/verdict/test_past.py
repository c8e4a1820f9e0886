"""What earlier runs say of a run that is over."""

from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec.structs import replace

from launcher.verdict.past import (
    EarlierFaults,
    PastRun,
    against,
    device_of,
    earlier_faults,
    forgotten,
    past_runs,
)
from launcher.verdict.results import Judgement, RunResult, Verdict, WorkerResult
from launcher.verdict.severity import CauseClass, Repeat, Severity

NOW = datetime(2026, 3, 1, 12, 30, 5, tzinfo=UTC)
UUID = "GPU-5d1c92ab-0000-4000-8000-000000000000"
GPU = {"uuid": UUID, "pci_bus_id": "00000000:1B:00.0", "name": "NVIDIA H100", "serial": "7"}


def row(**changes: Any) -> WorkerResult:
    usual: dict[str, Any] = {
        "name": "GPU3",
        "verdict": Verdict.SUSPECT,
        "cause": "differs from the majority at step 5",
        "steps": 6,
        "loss_first": None,
        "loss_last": None,
        "tokens_per_s": None,
        "peak_memory_bytes": None,
        "duration_s": 1.0,
        "returncode": 0,
        "gpu": GPU,
        "cause_class": CauseClass.HARDWARE,
        "severity": Severity.MONITOR,
        "repeat": Repeat.TRANSIENT,
    }
    return WorkerResult(**usual | changes)


def judgement(*rows: WorkerResult, **run: Any) -> Judgement:
    result = RunResult(
        verdict=Verdict.SUSPECT,
        exit_code=21,
        summary="GPU3 differs",
        culprits=["GPU3"],
        disagreement=None,
        workers=list(rows or (row(),)),
        leftovers=[],
        dropped_lines=0,
        run={"host": "box", "run_dir": "/runs/now", "drill": None} | run,
    )
    return Judgement(result, frozenset(), frozenset())


def past(time: str = "2026-02-01T08:00:00+01:00", **changes: Any) -> PastRun:
    (run,) = past_runs(judgement(run_dir="/runs/first").result, NOW)
    return replace(run, time=time, **changes)


def found(
    *earlier: PastRun, gpu: dict[str, Any] = GPU, is_drill: bool = False
) -> dict[str, EarlierFaults]:
    """Of GPU3, in a run at /runs/now."""
    device = device_of(gpu)
    workers = {} if device is None else {device: "GPU3"}
    return earlier_faults(workers, earlier, is_drill=is_drill, run_dir="/runs/now")


def test_a_line_says_what_a_gpu_did_in_a_run() -> None:
    (run,) = past_runs(judgement(drill="flip@1:GPU3").result, NOW)
    assert (run.time, run.host, run.worker) == ("2026-03-01T12:30:05+00:00", "box", "GPU3")
    assert (run.uuid, run.pci_bus_id, run.model) == (UUID, "00000000:1B:00.0", "NVIDIA H100")
    assert run.serial == "7"
    assert (run.verdict, run.exit_code, run.steps) == ("SUSPECT", 21, 6)
    assert (run.cause_class, run.severity, run.repeat) == ("hardware", "MONITOR", "transient")
    assert (run.run_dir, run.is_drill) == ("/runs/now", True)


def test_more_than_two_are_counted_from_the_first() -> None:
    times = ("2026-02-01T08:00:00", "2026-02-02T08:00:00", "2026-02-03T08:00:00")
    runs = (past(time, run_dir=f"/runs/{number}") for number, time in enumerate(times))
    (faults,) = found(*runs).values()
    assert str(faults) == "4 times now: first 2026-02-01 08:00, /runs/0"


def test_of_a_run_that_was_replayed_later_the_last_line_counts() -> None:
    assert not found(past(), past(repeat="persistent"))
    (faults,) = found(past(repeat="not replayed"), past(), past()).values()
    assert faults.count == 1


def test_a_run_is_no_earlier_run_of_itself() -> None:
    assert not found(past(run_dir="/runs/now"))


def test_a_gpu_keeps_its_history_in_another_slot_of_another_host() -> None:
    assert found(past(host="old", worker="GPU0", pci_bus_id="0"))
    assert not found(past(uuid="GPU-another"))


def test_the_number_of_a_cpu_worker_is_no_device_and_has_no_history() -> None:
    cpu = judgement(row(name="CPU1", gpu=None), run_dir="/runs/first")
    assert [run.device for run in past_runs(cpu.result, NOW)] == [None]
    assert device_of({}) is None


def test_a_gpu_without_a_uuid_is_known_by_its_serial_number() -> None:
    assert found(past(uuid=None, serial="17"), gpu={"serial": "17"})
    assert not found(past(uuid=None, serial="17"), gpu={"serial": "18"})


def test_what_was_forgotten_counts_no_more_and_what_comes_after_does() -> None:
    before = [past("2026-02-01T08:00:00", run_dir="/a"), past("2026-02-02T08:00:00", run_dir="/b")]
    line = forgotten(before[0], "replaced", NOW)
    assert (line.verdict, line.cause, line.uuid) == ("FORGOTTEN", "replaced", UUID)
    assert found(*before)
    assert against(before)[UUID].severity is Severity.ISOLATE
    assert not found(*before, line)
    assert against([*before, line]) == {}
    later = past("2026-03-02T08:00:00", run_dir="/c")
    (faults,) = found(*before, line, later).values()
    assert (faults.count, faults.first_run_dir) == (1, "/c")
    assert against([*before, line, later])[UUID].severity is Severity.MONITOR
    assert found(*before, replace(line, uuid="GPU-another"))


def test_drills_count_among_drills_alone() -> None:
    assert not found(past(is_drill=True))
    assert not found(past(), is_drill=True)
    assert found(past(is_drill=True), is_drill=True)


def test_a_nan_that_did_not_come_again_counts() -> None:
    assert found(past(verdict="FAIL", exit_code=20)).keys() == {"GPU3"}


@pytest.mark.parametrize(
    "changes",
    [
        {"repeat": "persistent"},
        {"repeat": "not replayed"},
        {"repeat": None},
        {"cause_class": "unknown"},
        {"cause_class": None},
    ],
    ids=str,
)
def test_only_what_was_transient_and_of_the_hardware_counts(changes: dict[str, Any]) -> None:
    assert not found(past(**changes))


FAILED = past("2026-02-02", run_dir="/b", verdict="FAIL", severity="ISOLATE", repeat="persistent")
PASSED = past("2026-02-03", run_dir="/c", verdict="PASS", severity=None, repeat=None)
STOPPED = replace(PASSED, verdict="STOPPED", run_dir="/d")


@pytest.mark.parametrize(
    ("runs", "severity", "words"),
    [
        ([], None, ""),
        ([PASSED], None, ""),
        ([past()], "MONITOR", "a transient fault in an earlier run, on 2026-02-01"),
        ([past(), PASSED], "MONITOR", "a transient fault"),
        ([past(run_dir="/a"), past(run_dir="/b")], "ISOLATE", "2 transient faults in earlier runs"),
        ([past(run_dir="/a"), past(run_dir="/b"), PASSED], "ISOLATE", "2 transient faults"),
        ([past(), past()], "MONITOR", "a transient fault"),  # replayed later, twice the same run
        ([past(), replace(FAILED, run_dir="/runs/first")], "ISOLATE", "ISOLATE in a run of 2026-"),
        ([FAILED], "ISOLATE", "ISOLATE in a run of 2026-02-02: differs from the majority"),
        ([FAILED, STOPPED], "ISOLATE", "ISOLATE in a run"),
        ([FAILED, PASSED], None, ""),
        ([FAILED, replace(FAILED, severity="MONITOR")], None, ""),  # a replay cleared it
        ([replace(FAILED, is_drill=True), past(is_drill=True)], None, ""),
        ([replace(FAILED, uuid=None)], None, ""),
    ],
)
def test_what_earlier_runs_hold_against_a_gpu(
    runs: list[PastRun], severity: str | None, words: str
) -> None:
    held = against(runs).get(UUID)
    assert (held and held.severity) == severity
    assert held is None or held.figure.startswith(words)


def test_the_past_of_one_gpu_is_none_of_another() -> None:
    assert set(against([past(uuid="GPU-a"), past(uuid="GPU-b"), PASSED])) == {"GPU-a", "GPU-b"}
