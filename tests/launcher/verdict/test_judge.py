"""From outcomes and histories to a verdict for each worker: facts in, words out."""

from pathlib import Path
from typing import Any

from launcher.verdict.agreement import Disagreement
from launcher.verdict.closing import closing_lines
from launcher.verdict.history import History, replay
from launcher.verdict.judge import Ended, RunEnd, RunResult, Verdict, judge
from launcher.verdict.report import row, table
from model_check.events import Done, NonFinite, Phase, Step

LOSS = (2.5).hex()


def trained(steps: int = 3) -> History:
    events = [
        Step(step=n, loss=LOSS, grad_norm=LOSS, lr=1e-5, ms=1.0, tokens=100) for n in range(steps)
    ]
    done = Done(
        exit_code=0, steps=steps, loss_last=LOSS, tokens_per_s=1234.5, peak_memory_bytes=2**30
    )
    return replay([Phase(name="train"), *events, done])


def ended(name: str, returncode: int | None = 0, **more: Any) -> Ended:
    values = {"pid": 1, "stopped_by_us": False, "duration_s": 1.5} | more
    return Ended(name=name, returncode=returncode, **values)


def judged(
    end: RunEnd, workers: list[Ended], histories: dict[str, History], agreed: int = 0
) -> RunResult:
    return judge({}, end, workers, histories, agreed)


def test_a_clean_run_passes_and_says_what_was_run() -> None:
    histories = {"GPU0": trained(), "GPU1": trained()}
    result = judged(RunEnd(exit_code=0), [ended("GPU0"), ended("GPU1")], histories, agreed=3)
    assert result.verdict is Verdict.PASS
    assert result.summary == (
        "GPU0 and GPU1 trained 3 steps, 300 tokens each; "
        "loss and gradient norm equal bit for bit in 3 of 3 steps"
    )


def test_one_worker_claims_no_comparison() -> None:
    result = judged(RunEnd(exit_code=0), [ended("GPU0")], {"GPU0": trained()})
    assert result.verdict is Verdict.PASS
    assert "nothing to compare it with" in result.summary


def test_the_culprit_fails_and_its_peers_are_stopped_not_failed() -> None:
    bad = trained(2)
    bad.record(NonFinite(step=2, where="gradient", loss=LOSS, grad_norm="nan", names=["a.weight"]))
    end = RunEnd(exit_code=20, reason="GPU1 failed first", culprits=["GPU1"])
    workers = [ended("GPU0", -15, stopped_by_us=True), ended("GPU1", 20, last_lines=["x"])]
    result = judged(end, workers, {"GPU0": trained(), "GPU1": bad})
    stopped, failed = result.workers
    assert (result.verdict, result.exit_code) == (Verdict.FAIL, 20)
    assert (stopped.verdict, failed.verdict) == (Verdict.STOPPED, Verdict.FAIL)
    assert failed.cause == "non-finite gradient at step 2, first in a.weight"
    assert (failed.last_lines, stopped.last_lines) == (["x"], [])


def test_a_killed_worker_is_described_by_its_signal_and_its_last_step() -> None:
    history = History()
    history.record(Step(step=0, loss=LOSS, grad_norm=LOSS, lr=1e-5, ms=1.0, tokens=1))
    end = RunEnd(exit_code=137, reason="GPU0 failed first", culprits=["GPU0"])
    result = judged(end, [ended("GPU0", -9)], {"GPU0": history})
    assert result.workers[0].cause == "killed by SIGKILL (9) after step 0"


def test_a_worker_that_died_before_its_first_step_tells_its_phase_or_its_error() -> None:
    silent, talking = History(), History()
    silent.record(Phase(name="import"))
    talking.record(Done(exit_code=1, error="CUDA out of memory\nmore"))
    end = RunEnd(exit_code=1, reason="both", culprits=["GPU0", "GPU1"])
    workers = [ended("GPU0", 1), ended("GPU1", 1)]
    result = judged(end, workers, {"GPU0": silent, "GPU1": talking})
    assert result.workers[0].cause == "exit code 1 in phase import"
    assert result.workers[1].cause == "exit code 1: CUDA out of memory"


def test_a_disagreement_suspects_the_odd_worker_only() -> None:
    bits = {"GPU0": LOSS, "GPU1": (1.0).hex(), "GPU2": LOSS}
    odd = Disagreement(1, "loss", bits)
    end = RunEnd(exit_code=21, reason=str(odd), culprits=["GPU1"], disagreement=odd)
    workers = [ended(name, -15, stopped_by_us=True) for name in bits]
    result = judged(end, workers, dict.fromkeys(bits, trained()))
    assert [w.verdict for w in result.workers] == ["STOPPED", "SUSPECT", "STOPPED"]
    assert result.verdict is Verdict.SUSPECT


def test_a_disagreement_of_two_is_inconclusive() -> None:
    tie = Disagreement(1, "loss", {"GPU0": LOSS, "GPU1": (1.0).hex()})
    end = RunEnd(exit_code=21, reason=str(tie), disagreement=tie)
    workers = [ended(name, -15, stopped_by_us=True) for name in tie.bits]
    result = judged(end, workers, dict.fromkeys(tie.bits, trained()))
    assert {w.verdict for w in result.workers} == {Verdict.INCONCLUSIVE}
    assert result.verdict is Verdict.INCONCLUSIVE


def test_a_run_that_a_person_stopped_blames_nobody() -> None:
    end = RunEnd(exit_code=130, reason="stopped by SIGINT")
    result = judged(end, [ended("GPU0", -15, stopped_by_us=True)], {"GPU0": trained()})
    assert (result.verdict, result.culprits) == (Verdict.INCONCLUSIVE, [])
    assert result.workers[0].verdict is Verdict.STOPPED


def test_the_table_shows_nan_as_text_and_what_is_unknown_as_n_a() -> None:
    history = History()
    history.record(Step(step=0, loss="nan", grad_norm="nan", lr=1e-5, ms=1.0, tokens=1))
    end = RunEnd(exit_code=20, reason="r", culprits=["GPU0"])
    result = judged(end, [ended("GPU0", 20)], {"GPU0": history})
    cells = row(result.workers[0])
    assert cells == ("GPU0", "FAIL", "1", "nan", "nan", "n/a", "n/a", "1.5 s")
    assert any("GPU0" in line and "FAIL" in line for line in table(result))


def test_the_summary_of_a_failure_is_its_cause_and_is_told_once() -> None:
    bad = trained(2)
    bad.record(NonFinite(step=2, where="gradient", loss=LOSS, grad_norm="nan", names=["a.weight"]))
    end = RunEnd(exit_code=20, reason="GPU1 failed first: exit code 20", culprits=["GPU1"])
    workers = [ended("GPU0", -15, stopped_by_us=True), ended("GPU1", 20, last_lines=["x", "y"])]
    result = judged(end, workers, {"GPU0": trained(), "GPU1": bad})
    told = "GPU1 failed first: non-finite gradient at step 2, first in a.weight"
    assert result.summary == told
    lines = list(closing_lines(result, Path("/runs/r"), tail_lines=1))
    assert lines[-3:] == [f"FAIL: {told} (exit code 20)", "last lines of GPU1:", "  | y"]
    assert sum("a.weight" in line for line in lines) == 1


def test_a_worker_that_ends_well_without_all_its_steps_proves_nothing() -> None:
    histories = {"GPU0": trained(3), "GPU1": trained(2)}
    workers = [ended("GPU0"), ended("GPU1")]
    result = judge({"steps": 3}, RunEnd(exit_code=0), workers, histories, agreed_steps=2)
    assert [w.verdict for w in result.workers] == [Verdict.PASS, Verdict.INCONCLUSIVE]
    assert (result.verdict, result.exit_code) == (Verdict.INCONCLUSIVE, 70)
    assert result.summary == "GPU1 ended with exit code 0 after 2 of 3 steps"
