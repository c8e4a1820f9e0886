"""What symptoms of GPUs do to the verdict of a run."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

from launcher.report.closing import closing_lines
from launcher.report.page.document import page
from launcher.telemetry.health import Record, slow_symptom
from launcher.verdict.advice import advised
from launcher.verdict.disagreement import Disagreement
from launcher.verdict.record import RunEnd, WorkerEnd
from launcher.verdict.results import Judgement, RunResult, Verdict
from launcher.verdict.severity import CauseClass, Severity
from model_check.events import Counters, Telemetry, Trouble, Xid
from tests.launcher.report.page.stories import story
from tests.launcher.telemetry.test_health import BUSY, SLOW_TEXT, SLOWED, told
from tests.launcher.verdict.test_judge import ended, trained
from tests.launcher.verdict.test_judge import judged as judged_by

FAILED_REMAP = told(Counters(t=1, remap_failed=True))
PENDING = told(Counters(t=1, remap_pending=True))
NARROW = told(Counters(t=1, pcie_max_width=16, remap_failed=False), Telemetry(t=1, pcie_width=8))
WELL = told(Counters(t=1, remap_failed=False), BUSY)
SILENT = told(Trouble(t=1, call="telemetry", text="NVML was silent for 11 s", lost=True))
DEFAULT, ALL = ("isolate", "reset"), ("isolate", "reset", "monitor", "speed")
PASS = Verdict.PASS
SLOW = {name: (SLOWED, slow_symptom(SLOWED, [])) for name in ("GPU0", "GPU1")}


class Run:
    """That is over."""

    def __init__(self, *workers: WorkerEnd, end: RunEnd | None = None, **record: Any) -> None:
        self._workers, self._end = list(workers), end or RunEnd(exit_code=0)
        self._record = record

    def judged(
        self, records: Mapping[str, Record], fail_on: Collection[str] = DEFAULT, **more: Any
    ) -> RunResult:
        healths = {name: record.health() for name, record in records.items()}
        all_facts = {worker.name: trained() for worker in self._workers}
        agreed = dict.fromkeys(all_facts, 3) if len(all_facts) > 1 else {}
        known = self._record | {"healths": healths, "fail_on": list(fail_on)} | more
        return judged_by(self._end, self._workers, all_facts, agreed, **known)

    @property
    def summary(self) -> str:
        """Where no health is known."""
        return self.judged({}).summary


ONE, TWO = Run(ended("GPU0")), Run(ended("GPU0"), ended("GPU1"))
THREE = Run(ended("GPU0"), ended("GPU1"), ended("GPU2"))


def failed(exit_code: int, **end: Any) -> Run:
    """By GPU0."""
    workers = ended("GPU0", exit_code), ended("GPU1", -15, stopped_by_us=True)
    return Run(*workers, end=RunEnd(exit_code=exit_code, reason="it ended", **end))


@pytest.mark.parametrize(
    ("record", "fail_on", "exit_code", "run", "row", "severity"),
    [
        (FAILED_REMAP, DEFAULT, 22, Verdict.FAIL, Verdict.FAIL, Severity.ISOLATE),
        (PENDING, DEFAULT, 22, Verdict.FAIL, Verdict.FAIL, Severity.RESET),
        (PENDING, ("isolate",), 0, Verdict.WARN, Verdict.FAIL, Severity.RESET),
        (FAILED_REMAP, (), 0, Verdict.WARN, Verdict.FAIL, Severity.ISOLATE),
        (FAILED_REMAP, ("speed",), 0, Verdict.WARN, Verdict.FAIL, Severity.ISOLATE),
        (NARROW, DEFAULT, 0, PASS, Verdict.WARN, Severity.MONITOR),
        (NARROW, ("monitor",), 22, Verdict.FAIL, Verdict.WARN, Severity.MONITOR),
        (SILENT, DEFAULT, 0, PASS, Verdict.WARN, Severity.MONITOR),
        (SILENT, ALL, 22, Verdict.FAIL, Verdict.WARN, Severity.MONITOR),
        (Record(), DEFAULT, 0, PASS, Verdict.WARN, Severity.MONITOR),
        (Record(), ALL, 22, Verdict.FAIL, Verdict.WARN, Severity.MONITOR),
        (WELL, ALL, 0, PASS, PASS, None),
    ],
)
def test_what_a_symptom_does_to_a_run_that_nothing_else_failed(
    record: Record,
    fail_on: tuple[str, ...],
    exit_code: int,
    run: Verdict,
    row: Verdict,
    severity: Severity | None,
) -> None:
    result = TWO.judged({"GPU0": WELL, "GPU1": record}, fail_on)
    assert (result.exit_code, result.verdict) == (exit_code, run)
    assert [worker.verdict for worker in result.workers] == [PASS, row]
    assert result.workers[1].severity is severity
    assert result.culprits == (["GPU1"] if exit_code else [])
    assert ("GPU1" in result.summary) is (severity is not None)


@pytest.mark.parametrize(
    ("fail_on", "exit_code", "run"),
    [
        (DEFAULT, 0, PASS),
        (("monitor",), 0, PASS),
        (("speed",), 22, Verdict.FAIL),
        (ALL, 22, Verdict.FAIL),
    ],
)
@pytest.mark.parametrize("is_watched", [True, False])
def test_a_slow_worker_is_warned_of_and_fails_a_run_that_asks_for_it(
    fail_on: tuple[str, ...], exit_code: int, run: Verdict, is_watched: bool
) -> None:
    records = dict.fromkeys(("GPU0", "GPU1"), WELL) if is_watched else {}
    result = TWO.judged(records, fail_on, slow={"GPU1": SLOW["GPU1"]})
    assert (result.exit_code, result.verdict) == (exit_code, run)
    rows = [(row.verdict, row.severity, row.cause_class, row.slow) for row in result.workers]
    warned = (Verdict.WARN, Severity.MONITOR, CauseClass.HARDWARE, SLOWED)
    assert rows == [(PASS, None, None, None), warned]
    assert result.workers[1].warnings[0].startswith(f"GPU1: {SLOW_TEXT}")
    if exit_code:
        assert result.culprits == ["GPU1"]
        assert result.summary.endswith("; launch.fail_on makes this a failure")
    else:
        assert result.summary == f"{TWO.summary}; 1 warning about GPU1"


OTHER_ENDS = [
    failed(7, culprits=("GPU0",)),
    failed(22, culprits=("GPU0",)),
    failed(124, culprits=("GPU0",), is_hang=True),
    failed(143, requests=(15,)),
]


@pytest.mark.parametrize("run", OTHER_ENDS)
def test_slowness_changes_no_other_end(run: Run) -> None:
    before, after = run.judged({}), run.judged({}, ALL, slow=SLOW)
    assert (after.exit_code, after.verdict) == (before.exit_code, before.verdict)
    assert after.summary == before.summary
    told = [(row.verdict, row.severity, row.cause) for row in before.workers]
    assert [(row.verdict, row.severity, row.cause) for row in after.workers] == told


def test_the_summary_names_gpu_figures_and_one_cure() -> None:
    many = told(
        Counters(t=1, ecc_uncorrected=0, remap_pending=False),
        Xid(t=1, xid=63),
        Xid(t=1, xid=48),
        Counters(t=2, ecc_uncorrected=2, remap_pending=True),
    )
    result = ONE.judged({"GPU0": many}, DEFAULT)
    assert result.summary == (
        "GPU0: 2 new uncorrected memory errors (ECC) during this run, a row of its memory waits to "
        "be remapped, Xid 63 (a row of memory was remapped, or will be), Xid 48 (double-bit memory "
        "error (uncorrectable)): distrust its results; end what runs on it, then `nvidia-smi "
        "--gpu-reset -i 0` or reboot; if they come back, have the board replaced"
    )
    (worker,) = result.workers
    assert (worker.cause_class, worker.severity) == (CauseClass.HARDWARE, Severity.ISOLATE)
    assert f"GPU0: {worker.cause}" == result.summary
    assert len(worker.symptoms) == 4


def test_a_warning_passes_and_is_counted_in_the_last_line() -> None:
    result = TWO.judged({"GPU0": WELL, "GPU1": NARROW}, DEFAULT)
    assert result.summary == f"{TWO.summary}; 1 warning about GPU1"
    assert [len(worker.warnings) for worker in result.workers] == [0, 1]


@pytest.mark.parametrize(
    ("fail_on", "xids", "first", "then"),
    [
        ("monitor", (79, 13), "GPU1: Xid 13 ", "GPU0: Xid 79 "),
        ("reset", (79, 63), "GPU1: Xid 63 ", "GPU0: Xid 79 "),
        ("isolate", (63, 79), "GPU1: Xid 79 ", "GPU0: Xid 63 "),
    ],
)
def test_the_gpu_that_the_settings_fail_comes_before_one_that_they_let_pass(
    fail_on: str, xids: tuple[int, int], first: str, then: str
) -> None:
    records = {f"GPU{n}": told(Xid(t=1, xid=xid)) for n, xid in enumerate(xids)}
    result = TWO.judged(records, [fail_on])
    assert (result.exit_code, result.culprits) == (22, ["GPU1"])
    assert result.summary.startswith(first)
    assert result.summary.index(then) > 0
    assert result.summary.endswith("; launch.fail_on lets it pass")
    assert ("launch.fail_on makes this a failure" in result.summary) is (fail_on == "monitor")


def test_a_gpu_that_the_settings_let_pass_is_told_all_the_same() -> None:
    result = ONE.judged({"GPU0": FAILED_REMAP}, ())
    assert result.summary == (
        f"{ONE.summary}; GPU0: a row of its memory could not be remapped: have the board replaced; "
        "launch.fail_on lets it pass"
    )


@pytest.mark.parametrize("run", OTHER_ENDS)
def test_a_run_that_ended_otherwise_keeps_its_exit_code_and_tells_both(run: Run) -> None:
    before, result = run.judged({}), run.judged({"GPU0": WELL, "GPU1": FAILED_REMAP}, ALL)
    kept = (result.exit_code, result.verdict, result.culprits)
    assert kept == (before.exit_code, before.verdict, before.culprits)
    assert result.summary == (
        f"{before.summary}; GPU1: a row of its memory could not be remapped: have the board "
        "replaced"
    )
    (own, failed), was = result.workers, before.workers[0]
    assert (own.verdict, own.cause_class) == (was.verdict, was.cause_class)
    assert (failed.verdict, failed.cause_class) == (Verdict.FAIL, CauseClass.HARDWARE)


def differing(*names: str) -> Run:
    """A tie between these, and one more that has no equal."""
    bits = {name: f"{number:016x}" for number, name in enumerate(names)}
    end = RunEnd(exit_code=23, disagreement=Disagreement(2, "weights", bits))
    return Run(*map(ended, names), ended(f"GPU{len(names)}"), end=end)


@pytest.mark.parametrize("fail_on", [DEFAULT, ()])
@pytest.mark.parametrize("bad", [FAILED_REMAP, PENDING])
def test_of_two_that_differ_a_hard_symptom_of_one_tells_which(
    bad: Record, fail_on: tuple[str, ...]
) -> None:
    result = differing("GPU0", "GPU1").judged({"GPU0": NARROW, "GPU1": bad}, fail_on)
    assert (result.exit_code, result.verdict, result.culprits) == (21, Verdict.FAIL, ["GPU1"])
    assert [row.verdict for row in result.workers] == [Verdict.STOPPED, Verdict.FAIL, PASS]
    peer = result.workers[0]
    assert (peer.severity, peer.cause_class) == (None, None)
    assert peer.cause == "differs from GPU1, whose health tells that it is the odd one"
    assert "; GPU1: " in result.summary
    assert result.summary.endswith("; the health of GPU1 tells that it is the odd one")


@pytest.mark.parametrize(
    ("names", "records"),
    [
        (("GPU0", "GPU1"), {"GPU0": FAILED_REMAP, "GPU1": PENDING}),
        (("GPU0", "GPU1"), {"GPU0": NARROW, "GPU1": WELL}),
        (("GPU0", "GPU1"), {"GPU0": SILENT, "GPU1": WELL}),
        (("GPU0", "GPU1"), {"GPU2": FAILED_REMAP}),
        (("GPU0", "GPU1", "GPU2"), {"GPU1": FAILED_REMAP}),
    ],
)
def test_a_tie_stays_one_where_health_does_not_tell(
    names: tuple[str, ...], records: dict[str, Record]
) -> None:
    result = differing(*names).judged(records)
    assert (result.exit_code, result.verdict, result.culprits) == (23, Verdict.INCONCLUSIVE, [])
    assert "odd" not in result.summary


def test_what_is_not_proven_is_decided_by_a_symptom() -> None:
    unproven = Run(ended("GPU0", None))
    result = unproven.judged({"GPU0": FAILED_REMAP})
    assert (result.exit_code, result.verdict) == (22, Verdict.FAIL)
    assert result.summary.endswith(f"have the board replaced; {unproven.summary}")
    assert unproven.judged({"GPU0": WELL}).exit_code == 70


def test_a_gpu_that_nobody_watches_is_never_told_as_healthy() -> None:
    result = ONE.judged({}, gpus={"GPU0": {"uuid": "GPU-0"}})
    assert (result.exit_code, result.workers[0].verdict) == (0, PASS)
    unwatched = "nobody watched the health of the GPUs (launch.telemetry_interval_s = 0)"
    assert result.summary == f"{ONE.summary}; {unwatched}"
    assert unwatched not in ONE.summary  # a CPU has none


def test_a_run_that_failed_before_it_was_watched_says_nothing_of_it() -> None:
    run = failed(7, culprits=("GPU0",))
    result = run.judged({"GPU0": Record()}, ALL)
    assert (result.exit_code, result.summary) == (7, run.summary)
    assert result.workers[0].warnings == []


def test_a_failed_worker_keeps_its_cause_and_carries_the_class_of_its_gpu() -> None:
    run = failed(7, culprits=("GPU0",))
    before, result = run.judged({}), run.judged({"GPU0": told(Xid(t=1, xid=79))})
    worker = result.workers[0]
    assert (worker.cause, worker.severity) == (before.workers[0].cause, Severity.ISOLATE)
    assert worker.symptoms[0].startswith("Xid 79 (the GPU has fallen off the bus)")
    assert (result.exit_code, result.culprits) == (7, ["GPU0"])


def closing(result: RunResult) -> list[str]:
    told = advised(result, "run")
    return list(closing_lines(Judgement(told, set(), set()), Path("run"), 0))


def test_what_is_wrong_with_all_gpus_alike_is_one_line() -> None:
    records = {"GPU0": SILENT, "GPU1": SILENT}
    lines = closing(TWO.judged(records, DEFAULT))
    silent = "telemetry ended: NVML was silent for 11 s: its health from then on is not known"
    assert [line for line in lines if "warning: " in line] == [f"warning: all 2 GPUs: {silent}"]
    words = "keep it in service, and watch it: cause not known (MONITOR)"
    assert f"all 2 GPUs: {words}" in lines
    assert lines[-1].endswith("; 2 warnings about all 2 GPUs (exit code 0)")
    lost = {"GPU0": FAILED_REMAP, "GPU1": FAILED_REMAP}
    summary = TWO.judged(lost, DEFAULT).summary
    assert summary == (
        "GPU0, GPU1: a row of its memory could not be remapped: have the board replaced"
    )


def test_a_line_that_names_a_gpu_is_about_that_gpu_alone() -> None:
    records = {
        "GPU0": SILENT,
        "GPU1": told(BUSY, Counters(t=1, ecc_corrected=0, watches_xids=True)),
        "GPU2": SILENT,
    }
    result = THREE.judged(records, DEFAULT)
    for name in records:
        others = records.keys() - {name}
        assert not [
            line
            for line in closing(result)
            if name in line and any(other in line for other in others)
        ]
    warned = [line for line in closing(result) if line.startswith("warning: ")]
    assert [line[:15] for line in warned] == ["warning: GPU0: ", "warning: GPU2: "]
    assert result.summary.endswith("; 2 warnings about 2 of 3 GPUs")
    alone = TWO.judged(
        {"GPU0": SILENT, "GPU1": told(BUSY, Counters(t=1, ecc_corrected=0, watches_xids=True))},
        DEFAULT,
    )
    assert alone.summary.endswith("; 1 warning about GPU0")


def test_the_page_has_a_row_for_each_gpu_and_says_what_is_not_known() -> None:
    records = {"GPU0": told(BUSY, Counters(t=1, ecc_corrected=0)), "GPU1": FAILED_REMAP}
    html = page(TWO.judged(records, DEFAULT), story("GPU0", "GPU1"))
    assert "<h2>GPUs</h2>" in html
    assert "<td>n/a</td>" in html  # the rows of memory that GPU0 says nothing of
    assert '<th scope="col">NVLink errors</th>' not in html  # neither says anything
    assert "could not be remapped" in html
    assert "<h2>GPUs</h2>" not in page(ONE.judged({}), story("GPU0"))
