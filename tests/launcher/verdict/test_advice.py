"""What to do now is a sentence for each row of the table of verdicts."""

from typing import Any

import pytest
from msgspec.structs import replace

from launcher.verdict.advice import advised
from launcher.verdict.nodes import Elsewhere
from launcher.verdict.results import RunResult, Verdict, WorkerResult
from launcher.verdict.rules import Kind, document
from launcher.verdict.severity import Repeat
from model_check.utils.project_files import PROJECT
from tests.launcher.report.page.stories import result, worker


def row(kind: Kind, name: str = "GPU0", **more: Any) -> WorkerResult:
    cause_class, severity = kind.rule.classed
    found = worker(name, kind.rule.verdict, kind=kind.name.lower(), **more)
    return replace(found, cause_class=cause_class, severity=severity)


def run_of(*rows: WorkerResult, **more: Any) -> RunResult:
    culprits = [row.name for row in rows if row.verdict in (Verdict.FAIL, Verdict.SUSPECT)]
    return advised(result(*rows, culprits=culprits, **{"verdict": rows[0].verdict} | more), "/run")


@pytest.mark.parametrize("kind", Kind)
def test_every_kind_of_finding_has_something_to_do(kind: Kind) -> None:
    found = run_of(row(kind, symptoms=["hot: cool it"]))
    assert found.do_now
    assert "{" not in found.do_now
    (words,) = (each.do_now for each in found.workers)
    is_told = kind.rule.classed[1] is not None and kind.rule.verdict is not Verdict.STOPPED
    assert (words is not None) == is_told


@pytest.mark.parametrize(
    ("found", "step"),
    [
        (run_of(row(Kind.PASSED)), "Nothing. A longer run finds"),
        (run_of(row(Kind.GPU_FAULT, symptoms=["Xid 79: power-cycle"])), "GPU0: Xid 79: power-"),
        (run_of(row(Kind.GPU_WARNING, warnings=["GPU0: hot: cool it"])), "GPU0: hot: cool it"),
        (run_of(row(Kind.ODD)), "Compute the steps again: bash run.sh replay /run GPU0"),
        (run_of(row(Kind.ODD), run=result().run | {"mode": "ddp"}), "--mode replicate"),
        (run_of(row(Kind.ODD), run=result().run | {"drill": "nan@2"}), "Nothing: this is a drill."),
        (run_of(row(Kind.STOPPED), verdict=Verdict.INCONCLUSIVE, exit_code=130), "it was stopped"),
        (run_of(row(Kind.ODD_ONCE), row(Kind.ODD_AGAIN, "GPU1")), "Take GPU1 out of service"),
        (run_of(row(Kind.ODD_AGAIN), row(Kind.NON_FINITE, "GPU1")), "Take GPU0 and GPU1 out of"),
    ],
)
def test_what_to_do_names_the_worker_and_the_command(found: RunResult, step: str) -> None:
    assert step in found.do_now


def test_a_command_that_a_replay_did_not_settle_runs_with_operations_that_repeat() -> None:
    run = result().run
    first, then = (
        run_of(row(Kind.ODD_UNSETTLED), run=run | {"checked": {"deterministic": given}}).do_now
        for given in (False, True)
    )
    assert "Run again with --deterministic: if GPU0 is named again, suspect it." in first
    assert then == run_of(row(Kind.ODD_UNSETTLED)).do_now
    assert "replay /run GPU0" in then
    assert first.endswith(then)


def test_a_condemned_gpu_is_told_beside_the_culprit() -> None:
    sick = row(Kind.GPU_FAULT, "GPU1", symptoms=["Xid 79: power-cycle the host"])
    found = result(row(Kind.ODD_AGAIN), sick, culprits=["GPU0"], verdict=Verdict.FAIL)
    told = advised(found, "/run").do_now
    assert "GPU1: Xid 79: power-cycle the host" in told
    assert "Take GPU0 out of service." in told


def test_a_fault_of_another_worker_than_the_drills_is_real() -> None:
    drill = result().run | {"drill": "nan@9:GPU1"}
    assert run_of(row(Kind.FAILED, "GPU0"), run=drill).do_now.startswith("Read the last lines")
    assert run_of(row(Kind.FAILED, "GPU1"), run=drill).do_now.startswith("Nothing: this is a dr")


def test_a_command_can_be_typed_whatever_the_directory_is_called() -> None:
    told = advised(result(row(Kind.ODD), culprits=["GPU0"]), "/my runs/a").do_now
    assert "replay '/my runs/a' GPU0" in told


def test_what_ended_on_another_node_is_looked_for_there() -> None:
    elsewhere = Elsewhere(node="n2", worker="GPU3", cause="NaN", exit_code=20)
    found = result(row(Kind.STOPPED), elsewhere=elsewhere, exit_code=20, verdict=Verdict.FAIL)
    assert advised(found, "/run").do_now == "See the report of n2, GPU3: the job ended there."


def test_the_page_of_findings_is_that_of_the_table() -> None:
    page = (PROJECT / "docs" / "findings.md").read_text()
    assert page == document(), "run `python -m launcher.verdict.rules > docs/findings.md`"


def test_words_come_before_the_class() -> None:
    found = run_of(row(Kind.ODD_AGAIN, repeat=Repeat.PERSISTENT))
    words = "take it out of service: hardware fault, repeats (ISOLATE)"
    assert found.workers[0].do_now == words
