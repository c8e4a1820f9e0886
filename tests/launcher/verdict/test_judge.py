"""From facts to a verdict for each worker: facts in, words out."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from launcher.report.closing import closing_lines
from launcher.report.table import row, table
from launcher.telemetry.health import symptoms
from launcher.verdict.disagreement import Disagreement, Dispute, Mismatch, Replay
from launcher.verdict.facts import WorkerFacts
from launcher.verdict.judge import Recall, judge
from launcher.verdict.past import EarlierFaults
from launcher.verdict.record import Case, RunEnd, RunRecord, WorkerEnd
from launcher.verdict.results import Judgement, RunResult, Verdict
from launcher.verdict.severity import CauseClass, Repeat, Severity, Symptom
from launcher.verdict.slow import Slow
from model_check.errors import exit_code_of
from model_check.events import Break, Done, Evaluation, NonFinite, Origin, Phase, Step

LOSS = (2.5).hex()
RECORD = RunRecord(
    command=["--debug"],
    started_at=datetime(2026, 1, 1, tzinfo=UTC),
    started_ns=1,
    pid=1,
    cwd="/",
    host="h",
    kernel="6",
    python="3.11",
    run_dir="/r",
    preset="debug",
    device="cpu",
    mode="replicate",
    drill=None,
    steps=None,
    workers=[],
    groups={},
    not_compared=None,
    versions={},
    gpus={},
)


def trained(steps: int = 3) -> WorkerFacts:
    events = [
        Step(step=n, loss=LOSS, grad_norm=LOSS, lr=1e-5, ms=1.0, tokens=100) for n in range(steps)
    ]
    done = Done(
        exit_code=0, steps=steps, loss_last=LOSS, tokens_per_s=1234.5, peak_memory_bytes=2**30
    )
    facts = WorkerFacts()
    for event in (Phase(name="train"), *events, done):
        facts.record(event)
    return facts


def ended(name: str, returncode: int | None = 0, **more: Any) -> WorkerEnd:
    values = {"pid": 1, "stopped_by_us": False, "duration_s": 1.5} | more
    return WorkerEnd(name=name, returncode=returncode, **values)


def judgement(
    end: RunEnd,
    workers: list[WorkerEnd],
    all_facts: dict[str, WorkerFacts],
    agreed: dict[str, int] | None = None,
    slow: dict[str, tuple[Slow, Symptom]] | None = None,
    **record: Any,
) -> Judgement:
    """`record`: what run.json holds otherwise."""
    asked = replace(RECORD, **record)
    told = {name: symptoms(name, health) for name, health in (asked.healths or {}).items()}
    fail_on = ("isolate", "reset") if asked.fail_on is None else asked.fail_on
    case = Case(asked, end, workers, all_facts, agreed or {}, symptoms=told, slow=slow or {})
    return judge(replace(case, fail_on=fail_on))


def judged(*arguments: Any, **more: Any) -> RunResult:
    return judgement(*arguments, **more).result


def spoiled(step: int = 2, grad_norm: str = "nan") -> WorkerFacts:
    facts = trained(step)
    facts.record(
        NonFinite(step=step, where="gradient", loss=LOSS, grad_norm=grad_norm, names=["a.weight"])
    )
    return facts


def test_workers_that_resumed_at_different_steps_are_each_told_with_their_own() -> None:
    all_facts = {"GPU0": trained(2), "GPU1": trained(10)}
    agreed = {"GPU0": 2, "GPU1": 2}
    result = judged(RunEnd(exit_code=0), [ended("GPU0"), ended("GPU1")], all_facts, agreed)
    assert [worker.steps for worker in result.workers] == [2, 10]
    assert result.summary == (
        "GPU0 trained 2 steps, 200 tokens; GPU1 trained 10 steps, 1,000 tokens; "
        "loss and gradient norm equal bit for bit in 2 of the 2 that each trained"
    )


def test_a_clean_run_passes_and_says_what_was_run() -> None:
    all_facts = {"GPU0": trained(), "GPU1": trained()}
    result = judged(
        RunEnd(exit_code=0), [ended("GPU0"), ended("GPU1")], all_facts, {"GPU0": 3, "GPU1": 3}
    )
    assert result.verdict is Verdict.PASS
    assert result.summary == (
        "2 GPUs trained 3 steps, 300 tokens each; "
        "loss and gradient norm equal bit for bit in 3 of 3 steps"
    )


def test_one_worker_claims_no_comparison() -> None:
    result = judged(RunEnd(exit_code=0), [ended("GPU0")], {"GPU0": trained()})
    assert result.verdict is Verdict.PASS
    assert "nothing to compare it with" in result.summary


def test_the_culprit_fails_and_its_peers_are_stopped_not_failed() -> None:
    bad = spoiled()
    end = RunEnd(exit_code=20, reason="GPU1 failed first", culprits=["GPU1"])
    workers = [ended("GPU0", -15, stopped_by_us=True), ended("GPU1", 20, last_lines=["x"])]
    result = judged(end, workers, {"GPU0": trained(), "GPU1": bad})
    stopped, failed = result.workers
    assert (result.verdict, result.exit_code) == (Verdict.FAIL, 20)
    assert (stopped.verdict, failed.verdict) == (Verdict.STOPPED, Verdict.FAIL)
    assert failed.cause == "non-finite gradient at step 2, in a.weight"
    assert (failed.last_lines, stopped.last_lines) == (["x"], [])


def test_a_killed_worker_is_described_by_its_signal_and_its_last_step() -> None:
    facts = WorkerFacts()
    facts.record(Step(step=0, loss=LOSS, grad_norm=LOSS, lr=1e-5, ms=1.0, tokens=1))
    end = RunEnd(exit_code=137, reason="GPU0 failed first", culprits=["GPU0"])
    result = judged(end, [ended("GPU0", -9)], {"GPU0": facts})
    assert result.workers[0].cause == "killed by SIGKILL (9) after step 0"


def test_a_worker_that_died_before_its_first_step_tells_its_phase_or_its_error() -> None:
    silent, talking = WorkerFacts(), WorkerFacts()
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
    workers = [ended(name, 143, stopped_by_us=True) for name in bits]
    polite = trained()
    polite.record(Done(exit_code=143, error="stopped by SIGTERM after 3 steps"))
    result = judged(end, workers, dict.fromkeys(bits, polite))
    assert [w.verdict for w in result.workers] == ["STOPPED", "SUSPECT", "STOPPED"]
    assert result.verdict is Verdict.SUSPECT


def test_a_disagreement_of_two_is_inconclusive() -> None:
    tie = Disagreement(1, "loss", {"GPU0": LOSS, "GPU1": (1.0).hex()})
    end = RunEnd(exit_code=23, reason=str(tie), disagreement=tie)
    workers = [ended(name, -15, stopped_by_us=True) for name in tie.bits]
    result = judged(end, workers, dict.fromkeys(tie.bits, trained()))
    assert {w.verdict for w in result.workers} == {Verdict.INCONCLUSIVE}
    assert result.verdict is Verdict.INCONCLUSIVE


def told(*events: Any) -> WorkerFacts:
    facts = trained(2)
    for event in events:
        facts.record(event)
    return facts


BROKEN = Break(step=2, quantity="exp_avg", tensor="w", since=1, found=[(5, 3)])
SUSPECTED = (CauseClass.UNKNOWN, Severity.MONITOR)


@pytest.mark.parametrize("is_known_to_differ", [False, True])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_state_that_changed_by_itself_names_its_worker_of_one_and_of_two(
    num_workers: int, is_known_to_differ: bool
) -> None:
    names = ["GPU0", "GPU1"][:num_workers]
    tie = Disagreement(2, "before.exp_avg", {"GPU0": "a", "GPU1": "b"})
    end = RunEnd(
        exit_code=21 if num_workers == 1 or not is_known_to_differ else 23,
        reason="r",
        culprits=["GPU0"] if not is_known_to_differ else [],
        disagreement=tie if is_known_to_differ and num_workers == 2 else None,
    )
    workers = [ended(name, 143, stopped_by_us=True) for name in names]
    result = judged(end, workers, {"GPU0": told(BROKEN), "GPU1": told()})
    first, *others = result.workers
    assert first.verdict is Verdict.SUSPECT
    assert (first.cause_class, first.severity) == SUSPECTED
    assert [row.verdict for row in others] == [Verdict.STOPPED] * (num_workers - 1)
    assert (result.verdict, result.exit_code) == (Verdict.SUSPECT, 21)
    assert result.summary == (
        "GPU0: the exp_avg of w changed (bit 3 of value 5) after the update of step 1: nothing in "
        "its program did that"
    )


def test_a_worker_that_ended_of_its_broken_state_has_not_just_failed() -> None:
    facts = told(BROKEN, Done(exit_code=21, error="changed"))
    end = RunEnd(exit_code=21, reason="r", culprits=["GPU0"])
    result = judged(end, [ended("GPU0", 21)], {"GPU0": facts})
    assert (result.verdict, result.exit_code) == (Verdict.SUSPECT, 21)


def test_a_first_step_that_does_not_repeat_itself_is_invalid() -> None:
    step = Step(step=0, loss=LOSS, grad_norm=LOSS, lr=1.0, ms=1.0, tokens=1, repeated=False)
    end = RunEnd(exit_code=2, reason="r", culprits=["GPU1"])
    workers = [ended(name, 143, stopped_by_us=True) for name in ("GPU0", "GPU1")]
    result = judged(end, workers, {"GPU0": told(), "GPU1": told(step)})
    assert [row.verdict for row in result.workers] == [Verdict.STOPPED, Verdict.INVALID]
    assert (result.verdict, result.exit_code) == (Verdict.INVALID, 2)
    assert result.workers[1].cause_class is CauseClass.SOFTWARE
    assert "gave other bits when they were computed twice" in result.summary


def test_one_whose_first_step_alone_varied_is_odd_and_unsettled_where_nobody_told_more() -> None:
    """Of two, or where the others had not made a step."""
    step = Step(step=0, loss=LOSS, grad_norm=LOSS, lr=1.0, ms=1.0, tokens=1, repeated=False)
    workers = [ended(name, 143, stopped_by_us=True) for name in ("GPU0", "GPU1")]
    alone = Disagreement(0, "repeated", {"GPU0": "equal", "GPU1": "other bits"}, ("GPU1",))
    end = RunEnd(exit_code=21, reason="r", culprits=["GPU1"], disagreement=alone)
    named = judged(end, workers, {"GPU0": told(), "GPU1": told(step)})
    assert [row.verdict for row in named.workers] == [Verdict.STOPPED, Verdict.SUSPECT]
    assert (named.verdict, named.exit_code, named.culprits) == (Verdict.SUSPECT, 21, ["GPU1"])
    assert "GPU1 differs in the passes of the first step, computed twice" in named.summary
    end = RunEnd(exit_code=1, reason="r")
    unsettled = judged(end, workers, {"GPU0": told(), "GPU1": told(step)})
    assert unsettled.workers[1].verdict is Verdict.INCONCLUSIVE


DOUBTED = Replay(to_step=2, suspects=("GPU1",), times=2, wrong=1, doubted="GPU2", said="both erred")


@pytest.mark.parametrize("is_broken", [False, True])
def test_where_a_healthy_replay_strays_nobody_is_named_and_both_are_told(is_broken: bool) -> None:
    odd = Disagreement(2, "loss", {"GPU0": "a", "GPU1": "b", "GPU2": "a"})
    end = RunEnd(
        exit_code=21,
        reason="r",
        culprits=["GPU1"],
        disagreement=None if is_broken else odd,
        replays=(DOUBTED,),
    )
    names = ("GPU0", "GPU1", "GPU2")
    workers = [ended(name, 143, stopped_by_us=True) for name in names]
    all_facts = {name: told(*([BROKEN] if is_broken and name == "GPU1" else [])) for name in names}
    result = judged(end, workers, all_facts)
    first, second, third = result.workers
    assert (result.verdict, result.exit_code) == (Verdict.INCONCLUSIVE, 23)
    assert (first.verdict, result.culprits) == (Verdict.STOPPED, [])
    for each in (second, third):
        assert (each.verdict, each.cause_class) == (Verdict.INCONCLUSIVE, CauseClass.UNKNOWN)
    assert third.cause == "both erred"


def test_one_whose_replay_settles_nothing_is_no_culprit_beside_a_guilty_one() -> None:
    names = tuple(f"GPU{n}" for n in range(5))
    odd = Disagreement(2, "loss", dict(zip(names, "xyxzx", strict=True)))
    doubted = Replay(to_step=2, suspects=("GPU1",), times=2, wrong=0, doubted="GPU0", said="both")
    guilty = Replay(
        to_step=2, suspects=("GPU3",), times=4, wrong=4, repeats={"GPU3": Repeat.PERSISTENT}
    )
    end = RunEnd(
        exit_code=21,
        reason="r",
        culprits=["GPU1", "GPU3"],
        disagreement=odd,
        replays=(doubted, guilty),
    )
    workers = [ended(name, 143, stopped_by_us=True) for name in names]
    result = judged(end, workers, {name: told() for name in names})
    assert (result.verdict, result.exit_code, result.culprits) == (Verdict.FAIL, 21, ["GPU3"])
    assert [row.verdict for row in result.workers[:4]] == [
        *(Verdict.INCONCLUSIVE, Verdict.INCONCLUSIVE, Verdict.STOPPED, Verdict.FAIL)
    ]


def test_what_a_worker_was_asked_alone_counts_more_than_of_two() -> None:
    of_two = Replay(
        to_step=2,
        suspects=("GPU0", "GPU1"),
        times=1,
        repeats=dict.fromkeys(("GPU0", "GPU1"), Repeat.UNSETTLED),
    )
    alone = Replay(
        to_step=2, suspects=("GPU0",), times=6, wrong=6, repeats={"GPU0": Repeat.PERSISTENT}
    )
    end = RunEnd(exit_code=21, reason="r", culprits=["GPU0"], replays=(of_two, alone))
    workers = [ended(name, 143, stopped_by_us=True) for name in ("GPU0", "GPU1")]
    result = judged(end, workers, {"GPU0": told(BROKEN), "GPU1": told()})
    assert result.workers[0].verdict is Verdict.FAIL
    assert str(result.workers[0].cause).endswith("wrong again in 6 of 6 replays")


def test_of_two_that_differ_the_rows_tell_which_gave_its_bits_again() -> None:
    odd = Disagreement(2, "loss", {"GPU0": "a", "GPU1": "b"})
    both = dict.fromkeys(("GPU0", "GPU1"), Repeat.TRANSIENT)
    replay = Replay(
        to_step=2, suspects=("GPU0", "GPU1"), times=3, wrong=0, odd="GPU1", repeats=both
    )
    end = RunEnd(exit_code=23, reason="r", disagreement=odd, replays=(replay,))
    workers = [ended(name, 143, stopped_by_us=True) for name in both]
    result = judged(end, workers, {name: told() for name in both})
    assert [row.cause for row in result.workers] == [
        "differs from its peer at step 2, loss; computed again it gave the same bits",
        "differs from its peer at step 2, loss; computed again it gave other bits",
    ]
    again = replace(replay, wrong=6, times=6, repeats={"GPU1": Repeat.PERSISTENT})
    named = judged(replace(end, replays=(again,)), workers, {name: told() for name in both})
    assert (named.verdict, named.exit_code, named.culprits) == (Verdict.FAIL, 21, ["GPU1"])
    assert [row.verdict for row in named.workers] == [Verdict.STOPPED, Verdict.FAIL]
    again_in = "differs from its peer at step 2, loss, wrong again in 6 of 6 replays"
    assert named.workers[1].cause == again_in


NAMES_OF_FIVE = tuple(f"GPU{n}" for n in range(5))


def test_who_is_in_dispute_beside_a_suspect_is_told() -> None:
    """Two and two differ in a later quantity: they are no witnesses, and not cleared either."""
    bits = dict(zip(NAMES_OF_FIVE, "xxxxy", strict=True))
    later = Dispute("weights", dict(zip(NAMES_OF_FIVE, "ppqq", strict=False)))
    odd = Disagreement(2, "loss", bits, dispute=later)
    end = RunEnd(exit_code=21, reason="r", culprits=["GPU4"], disagreement=odd)
    workers = [ended(name, 143, stopped_by_us=True) for name in NAMES_OF_FIVE]
    result = judged(end, workers, {name: told() for name in NAMES_OF_FIVE})
    assert [row.verdict for row in result.workers] == [Verdict.INCONCLUSIVE] * 4 + [Verdict.SUSPECT]
    assert result.workers[0].cause == "differs from its peer at step 2, weights"
    assert result.exit_code == 21


def test_workers_that_cannot_be_compared_are_invalid() -> None:
    mismatch = Mismatch("torch", {"GPU0": "2.13", "GPU2": "2.12"})
    end = RunEnd(exit_code=2, reason=str(mismatch), mismatch=mismatch)
    workers = [ended(f"GPU{n}", 143, stopped_by_us=True) for n in range(3)]
    result = judged(end, workers, {f"GPU{n}": told() for n in range(3)})
    invalid, stopped = Verdict.INVALID, Verdict.STOPPED
    assert [row.verdict for row in result.workers] == [invalid, stopped, invalid]
    assert (result.verdict, result.exit_code, result.culprits) == (Verdict.INVALID, 2, [])
    assert result.workers[0].cause_class is CauseClass.USER
    assert result.summary == ("not comparable: the workers differ in torch: GPU0 2.13, GPU2 2.12")


def test_a_run_that_a_person_stopped_blames_nobody() -> None:
    end = RunEnd(exit_code=130, reason="stopped by SIGINT")
    result = judged(end, [ended("GPU0", -15, stopped_by_us=True)], {"GPU0": trained()})
    assert (result.verdict, result.culprits) == (Verdict.INCONCLUSIVE, [])
    assert result.workers[0].verdict is Verdict.STOPPED


def test_the_table_shows_nan_as_text_and_what_is_unknown_as_n_a() -> None:
    facts = WorkerFacts()
    facts.record(Step(step=0, loss="nan", grad_norm="nan", lr=1e-5, ms=1.0, tokens=1))
    end = RunEnd(exit_code=20, reason="r", culprits=["GPU0"])
    result = judged(end, [ended("GPU0", 20)], {"GPU0": facts})
    cells = row(result.workers[0])
    assert cells == ("GPU0", "FAIL", "1", "nan", "nan", "n/a", "n/a", "1.5 s")
    assert any("GPU0" in line and "FAIL" in line for line in table(result.workers))


def test_the_last_lines_of_the_only_worker_are_not_printed_again() -> None:
    end = RunEnd(exit_code=7, reason="CPU0 failed first: exit code 7", culprits=("CPU0",))
    found = judgement(end, [ended("CPU0", 7, last_lines=("x", "y"))], {"CPU0": WorkerFacts()})
    told = list(closing_lines(found, Path("/runs/r"), tail_lines=2))
    assert not any("last lines of" in line or "| y" in line for line in told)


def test_the_summary_of_a_failure_is_its_cause_and_is_told_once() -> None:
    bad = spoiled()
    end = RunEnd(exit_code=20, reason="GPU1 failed first: exit code 20", culprits=["GPU1"])
    workers = [ended("GPU0", -15, stopped_by_us=True), ended("GPU1", 20, last_lines=["x", "y"])]
    found = judgement(end, workers, {"GPU0": trained(), "GPU1": bad})
    told = "GPU1 failed first: non-finite gradient at step 2, in a.weight"
    assert found.result.summary == told
    lines = list(closing_lines(found, Path("/runs/r"), tail_lines=1))
    assert lines[:2] == ["last lines of GPU1:", "  | y"]
    assert lines[-1] == f"FAIL: {told} (exit code 20)"
    assert sum("a.weight" in line for line in lines) == 1


def test_a_worker_that_ends_well_without_all_its_steps_proves_nothing() -> None:
    all_facts = {"GPU0": trained(3), "GPU1": trained(2)}
    workers = [ended("GPU0"), ended("GPU1")]
    result = judged(RunEnd(exit_code=0), workers, all_facts, {"GPU0": 2, "GPU1": 2}, steps=3)
    assert [w.verdict for w in result.workers] == [Verdict.PASS, Verdict.INCONCLUSIVE]
    assert (result.verdict, result.exit_code) == (Verdict.INCONCLUSIVE, 70)
    assert result.summary == "GPU1 ended with exit code 0 after 2 of 3 steps"


def early(steps: int, why: str, first: int = 0) -> WorkerFacts:
    facts = WorkerFacts()
    facts.record(Phase(name="train", detail={"first_step": first}))
    for number in range(first, first + steps):
        facts.record(Step(step=number, loss=LOSS, grad_norm=LOSS, lr=1e-5, ms=1.0, tokens=100))
    facts.record(Done(exit_code=0, early=why))
    return facts


def test_an_end_that_was_asked_for_is_told_as_one_with_exit_code_0() -> None:
    why = "ended early by SIGUSR1: 2 of 9 steps, saved"
    all_facts = {"GPU0": early(2, why), "GPU1": early(2, why)}
    workers = [ended("GPU0"), ended("GPU1")]
    result = judged(RunEnd(exit_code=0), workers, all_facts, {"GPU0": 2, "GPU1": 2}, steps=9)
    assert {w.verdict for w in result.workers} == {Verdict.STOPPED}
    assert (result.verdict, result.exit_code) == (Verdict.INCONCLUSIVE, 0)
    assert result.summary == (
        f"2 GPUs {why}; loss and gradient norm equal bit for bit in 2 of 2 steps"
    )


def test_an_end_that_was_asked_for_excuses_nobody_else() -> None:
    all_facts = {"GPU0": early(2, "asked"), "GPU1": trained(2)}
    workers = [ended("GPU0"), ended("GPU1")]
    result = judged(RunEnd(exit_code=0), workers, all_facts, steps=9)
    assert (result.verdict, result.exit_code) == (Verdict.INCONCLUSIVE, 70)
    assert result.summary == "GPU0 asked; GPU1 ended with exit code 0 after 2 of 9 steps"


def test_a_resumed_worker_has_only_its_own_steps_to_train() -> None:
    facts = WorkerFacts()
    facts.record(Phase(name="train", detail={"first_step": 5}))
    for number in (5, 6, 7):
        facts.record(Step(step=number, loss=LOSS, grad_norm=LOSS, lr=1e-5, ms=1.0, tokens=100))
    result = judged(RunEnd(exit_code=0), [ended("GPU0")], {"GPU0": facts}, steps=8)
    assert (result.verdict, result.workers[0].steps) == (Verdict.PASS, 3)
    killed = judged(
        RunEnd(exit_code=137, culprits=["GPU0"]), [ended("GPU0", -9)], {"GPU0": facts}, steps=8
    )
    assert killed.workers[0].cause == "killed by SIGKILL (9) after step 7 in phase train"


def test_a_run_with_nothing_left_to_train_is_no_pass() -> None:
    nothing = early(0, "had nothing left to train", first=9)
    result = judged(RunEnd(exit_code=0), [ended("GPU0")], {"GPU0": nothing}, steps=9)
    assert (result.verdict, result.exit_code) == (Verdict.INCONCLUSIVE, 0)
    assert result.summary == "GPU0 had nothing left to train"


def test_validation_is_reported_once_where_all_workers_have_the_same_bits() -> None:
    all_facts = {"GPU0": trained(), "GPU1": trained()}
    for facts in all_facts.values():
        facts.record(Evaluation(step=3, split="full", loss=(2.0).hex(), tokens=9))
    workers = [ended(name) for name in all_facts]
    found = judgement(RunEnd(exit_code=0), workers, all_facts)
    lines = closing_lines(found, Path("/runs/r"), tail_lines=0)
    assert "all 2 GPUs: validation after 3 steps: full 2.0000" in lines


def test_validation_is_reported_for_each_worker_where_one_has_other_bits() -> None:
    all_facts = {"GPU0": trained(), "GPU1": trained(), "GPU2": trained()}
    for name, facts in all_facts.items():
        loss = "nan" if name == "GPU2" else (2.0).hex()
        perplexity = None if name == "GPU2" else 7.389
        for step in (1, 3):
            facts.record(
                Evaluation(step=step, split="full", loss=loss, perplexity=perplexity, tokens=9)
            )
    workers = [ended(name) for name in all_facts]
    found = judgement(RunEnd(exit_code=0), workers, all_facts)
    assert [(v.split, v.step, v.loss) for v in found.result.workers[0].validation] == [
        ("full", 3, 2.0)
    ]
    lines = list(closing_lines(found, Path("/runs/r"), tail_lines=0))
    for name in ("GPU0", "GPU1"):
        assert f"{name}: validation after 3 steps: full 2.0000 (perplexity 7.39)" in lines
    assert "GPU2: validation after 3 steps: full nan" in lines


def test_a_gpu_without_an_equal_is_said_to_be_compared_with_nobody() -> None:
    names = ("GPU0", "GPU1", "GPU2")
    all_facts = dict.fromkeys(names, trained())
    agreed = {"GPU0": 3, "GPU1": 3}
    result = judged(RunEnd(exit_code=0), [ended(name) for name in names], all_facts, agreed)
    assert result.summary.endswith(
        "loss and gradient norm of GPU0 and GPU1 equal bit for bit in 3 of 3 steps; "
        "GPU2 has no equal here"
    )


def test_a_hang_is_what_we_ended_for_silence_whatever_the_exit_code_says() -> None:
    workers = [ended("GPU0", -15, stopped_by_us=True), ended("GPU1", 124)]
    all_facts = {"GPU0": trained(1), "GPU1": trained(1)}
    own = RunEnd(exit_code=124, reason="GPU1 failed first: exit code 124", culprits=["GPU1"])
    result = judged(own, workers, all_facts)
    assert result.workers[1].cause == "exit code 124 after step 0 in phase train"
    hung = [ended("GPU0", -15, stopped_by_us=True), ended("GPU1", -9, stopped_by_us=True)]
    silent = "GPU1 silent for 61 s (limit 60 s)"
    end = RunEnd(exit_code=124, reason=silent, culprits=["GPU1"], is_hang=True)
    result = judged(end, hung, all_facts)
    assert (result.workers[1].cause, result.summary) == (silent, silent)


def ranks(result: RunResult) -> list[tuple[str, str | None, str | None]]:
    return [(w.verdict, w.cause_class, w.severity) for w in result.workers]


OF_SOFTWARE = ("INCONCLUSIVE", "software", "IGNORE")
STOPPED = ("STOPPED", None, None)


def met_a_nan(*all_facts: WorkerFacts, **record: Any) -> RunResult:
    """The first ended of it, the others were stopped then."""
    names = [f"GPU{n}" for n in range(len(all_facts))]
    workers = [ended("GPU0", 20), *(ended(n, -15, stopped_by_us=True) for n in names[1:])]
    end = RunEnd(exit_code=20, reason="GPU0 failed first", culprits=("GPU0",))
    return judged(end, workers, dict(zip(names, all_facts, strict=True)), **record)


def spoiled_later(module: str, *, repeated: bool | None = True) -> WorkerFacts:
    """It has told where the NaN was born."""
    facts = spoiled()
    origin = Origin(
        direction="forward",
        module=module,
        tensor="output",
        shape=[4],
        num_nan=1,
        num_inf=0,
        first=[0],
    )
    assert facts.nonfinite is not None
    facts.record(replace(facts.nonfinite, t=9, origin=origin, repeated=repeated))
    return facts


@pytest.mark.parametrize("module", ["layers.0", "layers.1"])
def test_a_nan_that_every_worker_met_in_one_step_blames_no_gpu(module: str) -> None:
    """Also where they tell of it otherwise, and one was stopped before its last word."""
    result = met_a_nan(spoiled(), spoiled_later("layers.0"), spoiled_later(module))
    assert (result.verdict, result.exit_code, result.culprits) == (Verdict.FAIL, 20, [])
    assert ranks(result) == [OF_SOFTWARE] * 3
    told = "the settings or the data, not a GPU: every worker met a non-finite gradient at step 2"
    assert result.summary.startswith(f"{told}, born in layers.0 (forward")


def test_a_nan_where_a_peer_was_finite_is_this_gpus() -> None:
    result = met_a_nan(spoiled(2), trained(3))
    assert (result.verdict, result.culprits) == (Verdict.FAIL, ["GPU0"])
    assert ranks(result) == [("FAIL", "hardware", "ISOLATE"), STOPPED]
    one_of_three = met_a_nan(spoiled(2), trained(3), trained(3))
    assert ranks(one_of_three) == [("FAIL", "hardware", "ISOLATE"), STOPPED, STOPPED]


def test_a_nan_that_most_of_a_kind_met_condemns_none_of_them() -> None:
    """The finite one may be wrong."""
    result = met_a_nan(spoiled(2), spoiled(2), trained(3))
    assert ranks(result) == [*[("FAIL", "unknown", "MONITOR")] * 2, STOPPED]
    assert result.workers[0].cause is not None
    assert result.workers[0].cause.endswith("so has most of its kind: the others may err")
    tied = met_a_nan(spoiled(2), spoiled(2), trained(3), trained(3))
    assert ranks(tied) == [*[("FAIL", "hardware", "ISOLATE")] * 2, STOPPED, STOPPED]


def test_a_nan_whose_step_no_peer_reached_is_of_unknown_cause() -> None:
    result = met_a_nan(spoiled(2), trained(2))
    assert (result.verdict, result.culprits) == (Verdict.FAIL, ["GPU0"])
    assert ranks(result) == [("FAIL", "unknown", "MONITOR"), STOPPED]


OF_HARDWARE = ("FAIL", "hardware", "ISOLATE")
OF_UNKNOWN = ("FAIL", "unknown", "MONITOR")


def of_kinds(*kinds: str) -> dict[str, str]:
    return {f"GPU{n}": kind for n, kind in enumerate(kinds)}


@pytest.mark.parametrize("is_told_by_workers", [False, True])
def test_a_nan_that_all_of_a_kind_met_in_one_step_blames_no_gpu(is_told_by_workers: bool) -> None:
    """Whether another kind was finite or not; the group says the kind, or the workers do."""
    all_facts, groups = [spoiled(2), spoiled(2), trained(3)], of_kinds("V100", "V100", "A100")
    if is_told_by_workers:
        for facts, device in zip(all_facts, groups.values(), strict=True):
            facts.detail["device_name"] = device
        groups = of_kinds(*["GPU"] * 3)
    result = met_a_nan(*all_facts, groups=groups)
    assert ranks(result) == [OF_SOFTWARE, OF_SOFTWARE, STOPPED]
    assert (result.verdict, result.exit_code, result.culprits) == (Verdict.FAIL, 20, [])
    assert result.summary == (
        "the settings, the data or the kernels, not a GPU: the equals GPU0 and GPU1 met a "
        "non-finite gradient at step 2, in a.weight"
    )


@pytest.mark.parametrize("repeated", [True, False, None])
def test_of_a_nan_of_the_only_one_of_its_kind_other_kinds_prove_nothing(
    repeated: bool | None,
) -> None:
    first = spoiled_later("layers.0", repeated=repeated)
    result = met_a_nan(first, trained(3), trained(3), groups=of_kinds("V100", "A100", "A100"))
    assert ranks(result) == [OF_UNKNOWN, STOPPED, STOPPED]
    assert result.culprits == ["GPU0"]


def test_a_nan_beside_a_finite_one_of_its_kind_is_this_gpus() -> None:
    """Though another kind met one, too: that kind's own, as its others were finite."""
    all_facts = [spoiled(2), trained(3), spoiled(2), trained(3)]
    result = met_a_nan(*all_facts, groups=of_kinds("V100", "V100", "A100", "A100"))
    assert ranks(result) == [OF_HARDWARE, STOPPED, OF_HARDWARE, STOPPED]


def test_a_nan_that_workers_of_all_kinds_met_in_one_step_blames_no_gpu() -> None:
    result = met_a_nan(spoiled(2), spoiled(2), groups=of_kinds("V100", "A100"))
    assert ranks(result) == [OF_SOFTWARE] * 2
    assert "every worker met a non-finite gradient at step 2" in result.summary


def test_where_bits_may_differ_a_finite_worker_proves_nothing_and_all_of_a_kind_do() -> None:
    """Runs whose kernels vary drift apart, and diverge at different steps. The group of each worker
    is then its own name."""
    names = of_kinds("GPU0", "GPU1", "GPU2")
    asked: dict[str, Any] = {"groups": names, "not_compared": "system.deterministic is false"}
    alone = met_a_nan(spoiled(2), trained(3), trained(3), **asked)
    assert ranks(alone) == [OF_UNKNOWN, STOPPED, STOPPED]
    all_facts = [spoiled(2), spoiled(2), trained(3)]
    for facts, device in zip(all_facts, ("V100", "V100", "A100"), strict=True):
        facts.detail["device_name"] = device
    assert ranks(met_a_nan(*all_facts, **asked)) == [OF_SOFTWARE, OF_SOFTWARE, STOPPED]


def test_a_death_that_ends_the_run_is_told_though_a_kind_shares_a_nan() -> None:
    end = RunEnd(exit_code=137, reason="r", culprits=("GPU2",))
    workers = [ended("GPU0", 20), ended("GPU1", 20), ended("GPU2", -9)]
    all_facts = {"GPU0": spoiled(2), "GPU1": spoiled(2), "GPU2": trained(1)}
    result = judged(end, workers, all_facts, groups=of_kinds("V100", "V100", "A100"))
    assert ranks(result) == [OF_SOFTWARE, OF_SOFTWARE, ("FAIL", None, None)]
    assert result.culprits == ["GPU2"]
    assert result.summary.startswith("GPU2 failed first: killed by SIGKILL (9)")


@pytest.mark.parametrize(
    ("repeated", "row", "verdict", "culprits"),
    [
        (True, OF_SOFTWARE, Verdict.FAIL, []),
        (False, ("SUSPECT", "unknown", "MONITOR"), Verdict.SUSPECT, ["GPU0"]),
        (None, ("FAIL", "unknown", "MONITOR"), Verdict.FAIL, ["GPU0"]),
    ],
)
def test_a_nan_of_the_only_worker_is_classed_by_whether_it_came_again(
    repeated: bool | None, row: tuple[str, str, str], verdict: Verdict, culprits: list[str]
) -> None:
    result = met_a_nan(spoiled_later("layers.0", repeated=repeated))
    assert (result.verdict, result.exit_code, result.culprits) == (verdict, 20, culprits)
    assert ranks(result) == [row]
    words = {True: "persistent", False: "transient", None: "not replayed"}
    assert [w.repeat for w in result.workers] == [words[repeated]]


def failing(exit_code: int, error: str | None) -> WorkerFacts:
    facts = trained(1)
    facts.record(Done(exit_code=exit_code, error=error))
    return facts


@pytest.mark.parametrize(
    ("exit_code", "of", "whose"),
    [(1, "software", "the software or the settings"), (2, "user", "the settings")],
)
def test_a_failure_that_every_worker_told_blames_no_gpu(
    exit_code: int, of: str, whose: str
) -> None:
    all_facts = {
        f"GPU{n}": failing(exit_code, f"CUDA out of memory: GPU {n} has {n}.5 GiB free\nmore {n}")
        for n in range(2)
    }
    end = RunEnd(exit_code=exit_code, reason="GPU0 failed first", culprits=("GPU0",))
    workers = [ended("GPU0", exit_code), ended("GPU1", -15, stopped_by_us=True)]
    result = judged(end, workers, all_facts)
    assert (result.verdict, result.exit_code, result.culprits) == (Verdict.FAIL, exit_code, [])
    assert ranks(result) == [("INCONCLUSIVE", of, "IGNORE")] * 2
    assert result.summary == (
        f"every worker ended with exit code {exit_code}: CUDA out of memory: GPU 0 has 0.5 GiB "
        f"free; {whose}, not a GPU"
    )


def test_a_failure_that_all_of_a_kind_told_blames_no_gpu() -> None:
    """They lack memory, or a kernel, that another kind has."""
    all_facts = {f"GPU{n}": failing(1, f"no kernel image for GPU {n}") for n in (0, 2)}
    all_facts["GPU1"] = trained(3)
    end = RunEnd(exit_code=1, reason="GPU0 failed first", culprits=("GPU0",))
    stopped = [ended(f"GPU{n}", -15, stopped_by_us=True) for n in (1, 2)]
    groups = of_kinds("V100", "A100", "V100")
    result = judged(end, [ended("GPU0", 1), *stopped], all_facts, groups=groups)
    assert (result.verdict, result.exit_code, result.culprits) == (Verdict.FAIL, 1, [])
    assert ranks(result) == [OF_SOFTWARE, STOPPED, OF_SOFTWARE]
    assert result.summary == (
        "the equals GPU0 and GPU2 ended with exit code 1: no kernel image for GPU 0; "
        "the software or the settings, not a GPU"
    )


@pytest.mark.parametrize(
    "other", [failing(1, "a kernel is missing"), failing(7, "out of memory"), trained(1)]
)
def test_a_failure_that_another_worker_does_not_share_is_its_own(other: WorkerFacts) -> None:
    end = RunEnd(exit_code=1, reason="GPU0 failed first", culprits=("GPU0",))
    workers = [ended("GPU0", 1), ended("GPU1", -15, stopped_by_us=True)]
    result = judged(end, workers, {"GPU0": failing(1, "out of memory"), "GPU1": other})
    assert result.culprits == ["GPU0"]
    assert result.workers[0].verdict is Verdict.FAIL


def test_nans_of_different_steps_are_the_first_workers_fault() -> None:
    end = RunEnd(exit_code=20, reason="GPU0 failed first", culprits=["GPU0"])
    workers = [ended("GPU0", 20), ended("GPU1", -15, stopped_by_us=True)]
    all_facts = {"GPU0": spoiled(2), "GPU1": spoiled(3)}
    for step, facts in enumerate(all_facts.values(), start=2):
        facts.record(Done(exit_code=20, error=f"step {step}: gradient not finite"))
    result = judged(end, workers, all_facts)
    assert result.culprits == ["GPU0"]
    assert [w.verdict for w in result.workers] == [Verdict.FAIL, Verdict.FAIL]
    assert result.summary.startswith("GPU0 failed first: non-finite gradient at step 2")


def test_a_failure_that_a_worker_told_before_it_was_stopped_is_its_own() -> None:
    talking = trained(1)
    talking.record(Done(exit_code=1, error="CUDA out of memory"))
    end = RunEnd(exit_code=7, reason="GPU0 failed first", culprits=["GPU0"])
    workers = [ended("GPU0", 7), ended("GPU1", -15, stopped_by_us=True)]
    result = judged(end, workers, {"GPU0": trained(1), "GPU1": talking})
    assert result.workers[1].cause == "exit code 1 after step 0: CUDA out of memory"


def test_a_worker_that_says_it_was_stopped_is_stopped() -> None:
    polite = trained(1)
    polite.record(Done(exit_code=143, error="stopped by SIGTERM after 1 steps"))
    end = RunEnd(exit_code=130, reason="SIGINT received")
    result = judged(end, [ended("GPU0", 143, stopped_by_us=True)], {"GPU0": polite})
    assert result.workers[0].verdict is Verdict.STOPPED


def test_a_difference_that_shows_during_the_teardown_does_not_replace_the_culprit() -> None:
    tie = Disagreement(1, "loss", {"GPU0": LOSS, "GPU1": (1.0).hex()})
    end = RunEnd(exit_code=137, reason="r", culprits=["GPU0"], disagreement=tie)
    workers = [ended("GPU0", -9), ended("GPU1", -15, stopped_by_us=True)]
    result = judged(end, workers, dict.fromkeys(tie.bits, trained(2)))
    assert (result.verdict, result.exit_code) == (Verdict.FAIL, 137)
    assert result.summary.startswith("GPU0 failed first: killed by SIGKILL (9)")
    assert "besides, step 1: workers differ" in result.summary
    assert [w.verdict for w in result.workers] == [Verdict.FAIL, Verdict.INCONCLUSIVE]


WENT_ON_WITHOUT = Disagreement(1, "loss", {"GPU0": LOSS, "GPU1": (1.0).hex(), "GPU2": LOSS})
NOT_REPLAYED = "not replayed, since something else ended the run: `run.sh replay RUN_DIR` does that"


def gone_on(end: RunEnd, **all_facts: WorkerFacts) -> RunResult:
    """Without GPU1, until GPU2 ended the run."""
    workers = [ended("GPU0", -15, stopped_by_us=True), ended("GPU1"), ended("GPU2", end.exit_code)]
    known = {"GPU0": trained(3), "GPU1": trained(2), "GPU2": trained(2)} | all_facts
    return judged(replace(end, disagreement=WENT_ON_WITHOUT), workers, known)


@pytest.mark.parametrize(
    ("code", "second", "verdict"), [(20, spoiled(2), "FAIL"), (137, trained(2), "FAIL")]
)
def test_who_was_named_before_another_ended_the_run_is_a_culprit_too(
    code: int, second: WorkerFacts, verdict: str
) -> None:
    result = gone_on(RunEnd(exit_code=code, reason="r", culprits=("GPU2",)), GPU2=second)
    assert (result.exit_code, result.culprits) == (code, ["GPU2", "GPU1"])
    assert [row.verdict for row in result.workers] == ["STOPPED", "SUSPECT", verdict]
    assert result.summary.endswith(f"; besides, {WENT_ON_WITHOUT}; {NOT_REPLAYED}")


def test_a_second_one_that_is_named_ends_the_run_and_the_first_is_a_culprit_too() -> None:
    second = Disagreement(2, "loss", {"GPU0": LOSS, "GPU2": (1.0).hex(), "GPU3": LOSS})
    end = RunEnd(exit_code=21, reason="r", culprits=("GPU2",), further=(second,))
    result = gone_on(end)
    assert (result.exit_code, result.culprits) == (21, ["GPU2", "GPU1"])
    assert "not replayed" not in result.summary


def test_who_changed_by_itself_before_another_ended_the_run_is_a_culprit_too() -> None:
    end = RunEnd(exit_code=137, reason="r", culprits=("GPU1",))
    workers = [ended("GPU0"), ended("GPU1", -9)]
    result = judged(end, workers, {"GPU0": told(BROKEN), "GPU1": trained(2)})
    assert (result.exit_code, result.culprits) == (137, ["GPU1", "GPU0"])
    assert result.summary.endswith(NOT_REPLAYED)


def test_who_was_named_before_all_others_met_a_nan_is_the_only_culprit() -> None:
    """Of them it tells nothing, whether it came so far or not."""
    for first in (trained(2), trained(3)):
        end = RunEnd(exit_code=20, reason="r", culprits=("GPU2",))
        result = gone_on(end, GPU0=spoiled(2), GPU1=first, GPU2=spoiled(2))
        assert [row.verdict for row in result.workers] == [
            "INCONCLUSIVE",
            "SUSPECT",
            "INCONCLUSIVE",
        ]
        assert (result.exit_code, result.culprits) == (20, ["GPU1"])
        assert "the equals GPU0 and GPU2 met a non-finite gradient" in result.summary


def test_a_break_in_one_kind_clears_nobody_of_another_that_differs() -> None:
    tie = Disagreement(2, "loss", {"GPU1": LOSS, "GPU2": (1.0).hex()})
    end = RunEnd(exit_code=23, reason="r", disagreement=tie)
    workers = [ended(f"GPU{n}", 143, stopped_by_us=True) for n in range(3)]
    all_facts = {"GPU0": told(BROKEN), "GPU1": told(), "GPU2": told()}
    result = judged(end, workers, all_facts, groups=of_kinds("V100", "A100", "A100"))
    assert [row.verdict for row in result.workers] == ["SUSPECT", *["INCONCLUSIVE"] * 2]
    assert (result.exit_code, result.culprits) == (21, ["GPU0"])
    assert str(tie) in result.summary


def test_a_difference_found_after_a_run_that_ended_well_counts() -> None:
    odd = Disagreement(1, "loss", {"GPU0": LOSS, "GPU1": (1.0).hex()})
    end = RunEnd(exit_code=0, disagreement=odd)
    result = judged(end, [ended("GPU0"), ended("GPU1")], dict.fromkeys(odd.bits, trained()))
    assert (result.verdict, result.exit_code) == (Verdict.INCONCLUSIVE, 23)


def test_a_process_that_could_not_be_killed_is_no_pass() -> None:
    end = RunEnd(exit_code=0, leftovers=[77])
    result = judged(end, [ended("GPU0")], {"GPU0": trained()})
    assert (result.verdict, result.exit_code) == (Verdict.INCONCLUSIVE, 70)
    assert "may still hold a GPU: pid 77" in result.summary


def test_the_culprits_last_lines_are_the_last_before_the_table() -> None:
    end = RunEnd(exit_code=7, reason="r", culprits=["GPU0"])
    workers = [ended("GPU0", 7, last_lines=["mine"]), ended("GPU1", 1, last_lines=["other"])]
    found = judgement(end, workers, dict.fromkeys(("GPU0", "GPU1"), trained()))
    lines = list(closing_lines(found, Path("/r"), tail_lines=5))
    assert lines[:4] == [
        *("last lines of GPU1:", "  | other"),
        *("last lines of GPU0:", "  | mine"),
    ]
    assert lines[-1].startswith("FAIL: ")


def test_a_worker_that_had_trained_every_step_when_we_stopped_it_passed() -> None:
    end = RunEnd(exit_code=7, reason="r", culprits=["GPU1"])
    workers = [ended("GPU0", 0, stopped_by_us=True), ended("GPU1", 7)]
    result = judged(end, workers, {"GPU0": trained(3), "GPU1": trained(2)}, steps=3)
    assert [w.verdict for w in result.workers] == [Verdict.PASS, Verdict.FAIL]


def test_the_last_error_of_a_process_without_events_is_its_cause_and_is_told_once() -> None:
    end = RunEnd(exit_code=2, reason="r", culprits=["prepare"])
    workers = [ended("prepare", 2, last_lines=["error: /nope: no such file"])]
    found = judgement(end, workers, {"prepare": WorkerFacts()})
    assert found.result.summary == "prepare failed: exit code 2: /nope: no such file"
    *_, last = closing_lines(found, Path("/r"), tail_lines=20)
    assert last == "FAIL: prepare failed: exit code 2: /nope: no such file (exit code 2)"


def test_a_worker_that_announced_a_failure_and_exited_well_fails_the_run() -> None:
    talking = trained(3)
    talking.record(Done(exit_code=7))
    workers = [ended("GPU0"), ended("GPU1")]
    result = judged(RunEnd(exit_code=0), workers, {"GPU0": trained(3), "GPU1": talking})
    assert (result.verdict, result.exit_code) == (Verdict.FAIL, 7)
    assert result.summary.startswith("GPU1 failed first: exit code 7")


def test_an_announced_code_that_the_run_was_stopped_for_is_the_culprits_cause() -> None:
    talking = trained(1)
    talking.record(Done(exit_code=200, error="x"))
    end = RunEnd(exit_code=200, reason="GPU0 announced", culprits=["GPU0"])
    result = judged(end, [ended("GPU0", -15, stopped_by_us=True)], {"GPU0": talking})
    assert result.workers[0].cause == "exit code 200 after step 0: x"


def test_a_nan_that_a_worker_trained_on_after_is_not_what_it_ended_of() -> None:
    facts = spoiled(1)
    facts.record(Step(step=2, loss=LOSS, grad_norm=LOSS, lr=1e-5, ms=1.0, tokens=1))
    assert facts.nonfinite is None


def test_a_worker_that_never_started_has_nothing_against_it() -> None:
    end = RunEnd(exit_code=127, reason="GPU0 could not start", culprits=["GPU0"])
    workers = [ended("GPU0", 127, pid=None, spawn_error="ENOENT"), ended("GPU1", None, pid=None)]
    result = judged(end, workers, {"GPU0": WorkerFacts(), "GPU1": WorkerFacts()})
    assert [w.verdict for w in result.workers] == [Verdict.FAIL, Verdict.STOPPED]
    assert result.workers[1].cause == "never started"


def test_a_host_without_a_process_for_a_worker_is_no_verdict_on_its_gpu() -> None:
    end = RunEnd(exit_code=70, reason="GPU0 could not start: EMFILE")
    workers = [ended("GPU0", 70, pid=None, spawn_error="EMFILE"), ended("GPU1", None, pid=None)]
    result = judged(end, workers, {"GPU0": WorkerFacts(), "GPU1": WorkerFacts()})
    assert (result.exit_code, result.verdict, result.culprits) == (70, Verdict.INCONCLUSIVE, [])
    first, second = result.workers
    assert (first.verdict, second.verdict) == (Verdict.INCONCLUSIVE, Verdict.STOPPED)
    assert (first.cause_class, first.severity) == (CauseClass.HOST, Severity.IGNORE)


OOM = "the cgroup counted an OOM kill (limit 3.0 GiB)"


def test_a_worker_that_the_kernel_killed_for_memory_is_no_verdict_on_its_gpu() -> None:
    """A second one that failed of it a moment later does not take its place in the summary."""
    end = RunEnd(exit_code=137, reason=f"GPU0 was killed for want of host memory; {OOM}")
    workers = [ended("GPU0", -9, oom=OOM), ended("GPU1", 1), ended("GPU2", -9, oom=OOM)]
    all_facts = {"GPU0": trained(2), "GPU1": trained(2), "GPU2": trained(2)}
    result = judged(end, workers, all_facts)
    assert (result.exit_code, result.verdict, result.culprits) == (137, Verdict.INCONCLUSIVE, [])
    assert result.summary == end.reason
    rows = [(row.verdict, row.cause_class, row.severity) for row in result.workers]
    of_host = (Verdict.INCONCLUSIVE, CauseClass.HOST, Severity.IGNORE)
    assert rows == [of_host, (Verdict.FAIL, None, None), of_host]
    cause = "killed for want of host memory: SIGKILL (9) after step 1 in phase train; "
    cause += f"{OOM} (a fault of this host"
    assert str(result.workers[0].cause).startswith(cause)


def test_a_death_by_sigkill_that_no_cgroup_counted_stays_a_failure() -> None:
    end = RunEnd(exit_code=137, reason="GPU0 failed first", culprits=["GPU0"])
    result = judged(end, [ended("GPU0", -9)], {"GPU0": trained(2)})
    assert (result.exit_code, result.verdict, result.culprits) == (137, Verdict.FAIL, ["GPU0"])
    assert result.workers[0].cause_class is None


def test_what_a_worker_announced_before_it_was_killed_for_memory_counts_more() -> None:
    end = RunEnd(exit_code=137, reason="GPU0 failed first", culprits=["GPU0"])
    result = judged(end, [ended("GPU0", -9, oom=OOM)], {"GPU0": spoiled(1)})
    assert (result.verdict, result.workers[0].verdict) == (Verdict.FAIL, Verdict.FAIL)
    assert str(result.workers[0].cause).startswith("non-finite ")


def test_a_worker_that_ended_by_a_signal_that_we_got_too_was_stopped() -> None:
    end = RunEnd(exit_code=143, reason="SIGTERM received", requests=[15, 1])
    polite = trained(1)
    polite.record(Done(exit_code=143, error="stopped by SIGTERM after 1 steps"))
    workers = [ended("GPU0", -15), ended("GPU1", 143), ended("GPU2", -1), ended("GPU3", 143)]
    all_facts = {"GPU0": trained(1), "GPU1": WorkerFacts(), "GPU2": WorkerFacts(), "GPU3": polite}
    result = judged(end, workers, all_facts)
    assert {worker.verdict for worker in result.workers} == {Verdict.STOPPED}
    assert [worker.cause for worker in result.workers][1:3] == [
        "ended by SIGTERM",
        "ended by SIGHUP",
    ]
    assert (result.verdict, result.summary) == (Verdict.INCONCLUSIVE, "SIGTERM received")


def test_a_failure_beside_a_signal_to_us_is_told_and_not_blamed() -> None:
    """Its own way to end when it was asked to, perhaps; what it said of a failure stays one."""
    end = RunEnd(exit_code=143, reason="SIGTERM received", requests=[15])
    talking = trained(1)
    talking.record(Done(exit_code=1, error="CUDA out of memory"))
    workers = [ended("GPU0", 1), ended("GPU1", 1), ended("GPU2", 20)]
    all_facts = {"GPU0": trained(1), "GPU1": talking, "GPU2": spoiled()}
    result = judged(end, workers, all_facts)
    assert [w.verdict for w in result.workers] == ["INCONCLUSIVE", "FAIL", "FAIL"]
    assert (result.verdict, result.summary) == (Verdict.INCONCLUSIVE, "SIGTERM received")


def test_a_worker_that_was_blamed_before_the_signal_came_stays_blamed() -> None:
    end = RunEnd(exit_code=143, reason="r", culprits=["GPU0"], requests=[15])
    workers = [ended("GPU0", -15), ended("GPU1", -15)]
    result = judged(end, workers, dict.fromkeys(("GPU0", "GPU1"), trained(1)))
    assert [w.verdict for w in result.workers] == ["FAIL", "STOPPED"]
    assert result.summary.startswith("GPU0 failed first: killed by SIGTERM (15)")


def test_a_worker_that_a_job_wide_signal_ended_after_its_last_step_passed() -> None:
    end = RunEnd(exit_code=143, reason="SIGTERM received", requests=[15])
    workers = [ended("GPU0", -15), ended("GPU1", -15)]
    result = judged(end, workers, {"GPU0": trained(3), "GPU1": trained(2)}, steps=3)
    assert [w.verdict for w in result.workers] == ["PASS", "STOPPED"]


@pytest.mark.parametrize("code", [137, 21])
def test_a_tie_is_inconclusive_and_keeps_the_last_lines(code: int) -> None:
    reason = "died within one reading, so none is named before the other: GPU0 (x), GPU1 (x)"
    end = RunEnd(exit_code=code, reason=reason, tied=["GPU0", "GPU1"])
    workers = [ended(name, code, last_lines=["mine"]) for name in ("GPU0", "GPU1")]
    workers.append(ended("GPU2", -15, stopped_by_us=True))
    result = judged(end, workers, dict.fromkeys(("GPU0", "GPU1", "GPU2"), trained(1)))
    assert [w.verdict for w in result.workers] == ["INCONCLUSIVE", "INCONCLUSIVE", "STOPPED"]
    assert (result.verdict, result.exit_code) == (Verdict.INCONCLUSIVE, code)
    assert (result.culprits, result.summary) == ([], reason)
    assert [w.last_lines for w in result.workers] == [["mine"], ["mine"], []]


def test_a_last_line_that_the_summary_does_not_quote_is_shown() -> None:
    """However short it is: "b" stands in "killed by", too."""
    end = RunEnd(exit_code=137, reason="r", culprits=("GPU0",))
    workers = [ended("GPU0", -9, last_lines=["b"]), ended("GPU1", -15, stopped_by_us=True)]
    found = judgement(end, workers, dict.fromkeys(("GPU0", "GPU1"), trained(1)))
    assert list(closing_lines(found, Path("/r"), tail_lines=5))[:2] == [
        "last lines of GPU0:",
        "  | b",
    ]


def test_a_cause_that_the_summary_does_not_tell_has_a_line_of_its_own() -> None:
    end = RunEnd(exit_code=7, reason="r", culprits=("GPU0",))
    workers = [ended("GPU0", 7), ended("GPU1", 1), ended("GPU2", -15, stopped_by_us=True)]
    found = judgement(end, workers, dict.fromkeys(("GPU0", "GPU1", "GPU2"), WorkerFacts()))
    assert found.unexplained == {"GPU1"}
    lines = list(closing_lines(found, Path("/r"), tail_lines=0))
    assert [line for line in lines if line.startswith("GPU") and ": " in line] == [
        "GPU1: exit code 1"
    ]


def test_kernels_that_vary_on_one_kind_clear_nobody_of_another() -> None:
    names = [f"GPU{number}" for number in range(6)]
    groups = dict(zip(names, ["V100"] * 3 + ["A100"] * 3, strict=True))
    first = Disagreement(2, "loss", {"GPU0": "a", "GPU1": "b", "GPU2": "a"})
    second = Disagreement(4, "loss", {"GPU3": "c", "GPU4": "c", "GPU5": "d"})
    replays = (
        Replay(to_step=2, suspects=("GPU1",), times=1, is_software=True, said="its kernels vary"),
        Replay(to_step=4, suspects=("GPU5",), times=2, repeats={"GPU5": Repeat.PERSISTENT}),
    )
    end = RunEnd(
        exit_code=21, culprits=("GPU5",), disagreement=first, further=(second,), replays=replays
    )
    result = judged(end, [ended(n) for n in names], {n: trained() for n in names}, groups=groups)
    rows = {row.name: row.verdict for row in result.workers}
    assert [rows[name] for name in names[:3]] == [Verdict.INVALID] * 3
    assert [rows[name] for name in names[3:]] == [Verdict.PASS, Verdict.PASS, Verdict.FAIL]
    assert (result.verdict, result.exit_code) == (Verdict.FAIL, 21)
    assert result.culprits == ["GPU5"]


def test_kernels_that_vary_clear_all_where_all_are_of_a_kind() -> None:
    names = ["GPU0", "GPU1", "GPU2"]
    found = Disagreement(2, "loss", {"GPU0": "a", "GPU1": "b", "GPU2": "a"})
    replay = Replay(to_step=2, suspects=("GPU1",), times=1, is_software=True, said="they vary")
    end = RunEnd(exit_code=21, culprits=("GPU1",), disagreement=found, replays=(replay,))
    all_facts = {name: trained() for name in names}
    groups = dict.fromkeys(names, "V100")
    result = judged(end, [ended(name) for name in names], all_facts, groups=groups)
    assert (result.verdict, result.exit_code, result.culprits) == (Verdict.INVALID, 2, [])


@pytest.mark.parametrize(
    ("codes", "verdict", "classes"),
    [
        ((1, 1, 1), Verdict.FAIL, {"software"}),
        ((22, 22, 22), Verdict.FAIL, {"software"}),
        ((-11, -11, -11), Verdict.FAIL, {"software"}),
        ((-11, 139, -11), Verdict.FAIL, {"software"}),
        ((-9, -9, -9), Verdict.INCONCLUSIVE, {None}),
        ((-15, -15, -15), Verdict.INCONCLUSIVE, {None}),
        ((124, 124, 124), Verdict.FAIL, {"software"}),
        ((2, 2, 2), Verdict.FAIL, {"user"}),
        ((1, 1, 7), Verdict.INCONCLUSIVE, {None}),
        ((1, 1, 0), Verdict.INCONCLUSIVE, {None}),
    ],
)
def test_what_died_alike_within_one_reading_is_no_tie_but_the_softwares(
    codes: tuple[int, ...], verdict: Verdict, classes: set[str | None]
) -> None:
    names = ["GPU0", "GPU1", "GPU2"]
    tied = tuple(name for name, code in zip(names, codes, strict=True) if code)
    exit_code = exit_code_of(codes[0])
    end = RunEnd(exit_code=exit_code, reason="died within one reading", tied=tied)
    lines = ("Traceback", "ModuleNotFoundError: No module named 'x'")
    ends = [ended(name, c, last_lines=lines) for name, c in zip(names, codes, strict=True)]
    result = judged(end, ends, {name: WorkerFacts() for name in names}, steps=None)
    assert (result.verdict, result.exit_code, result.culprits) == (verdict, exit_code, [])
    told = [row for row in result.workers if row.name in tied]
    assert {row.verdict for row in told} == {Verdict.INCONCLUSIVE}
    assert {row.cause_class for row in told} == classes
    is_told = "settings, not a GPU" in result.summary
    assert is_told is (verdict is Verdict.FAIL)


def test_ends_of_which_one_said_something_else_are_no_shared_failure() -> None:
    said = {"GPU0": "ConnectionResetError: rank 0", "GPU1": "CUDA error: uncorrectable ECC"}
    ends = [ended(name, 1, last_lines=(text,)) for name, text in said.items()]
    end = RunEnd(exit_code=1, reason="GPU1 failed first: exit code 1", culprits=("GPU1",))
    result = judged(end, ends, {name: WorkerFacts() for name in said}, steps=None)
    assert (result.verdict, result.culprits) == (Verdict.FAIL, ["GPU1"])
    assert {row.cause_class for row in result.workers} == {None}


def test_workers_that_fell_silent_together_blame_no_gpu() -> None:
    names = ("GPU0", "GPU1")
    end = RunEnd(exit_code=124, reason="every worker silent for 9 s", tied=names, is_hang=True)
    ends = [ended(name, -15, stopped_by_us=True) for name in names]
    result = judged(end, ends, {name: trained(2) for name in names})
    assert (result.verdict, result.exit_code, result.culprits) == (Verdict.FAIL, 124, [])
    assert {row.kind for row in result.workers} == {"hang_alike"}


def test_a_tie_of_which_not_all_ended_alike_is_no_software() -> None:
    codes = {"GPU0": -11, "GPU1": -11, "GPU2": -7}
    end = RunEnd(exit_code=139, reason="died within one reading", tied=tuple(codes))
    ends = [ended(name, code) for name, code in codes.items()]
    groups = {"GPU0": "a", "GPU1": "a", "GPU2": "b"}
    all_facts = {name: WorkerFacts() for name in codes}
    result = judged(end, ends, all_facts, groups=groups, steps=None)
    assert (result.verdict, result.exit_code) == (Verdict.INCONCLUSIVE, 139)


def test_a_setting_that_the_only_worker_refuses_is_told_as_that() -> None:
    end = RunEnd(exit_code=2, reason="CPU0 failed first: exit code 2", culprits=("CPU0",))
    ends = [ended("CPU0", 2, last_lines=("error: model.init_from: no weights in it",))]
    (row,) = judged(end, ends, {"CPU0": WorkerFacts()}).workers
    assert (row.verdict, row.kind) == (Verdict.FAIL, "refused")


def test_an_exit_code_is_that_of_a_shell_whoever_ended_the_run() -> None:
    ends = [ended("CPU0", -11), ended("CPU1")]
    all_facts = {"CPU0": WorkerFacts(), "CPU1": trained()}
    assert judged(RunEnd(exit_code=0), ends, all_facts).exit_code == 139


def test_a_command_that_the_deadline_ended_has_compared_no_steps() -> None:
    ends = [ended("CPU0", -15, stopped_by_us=True)]
    result = judged(
        RunEnd(exit_code=0, is_deadline=True), ends, {"CPU0": WorkerFacts()}, steps=None
    )
    assert result.exit_code == 75
    assert "had not ended when the time was up" in result.summary


def test_of_a_trainer_no_line_of_progress_is_quoted_as_the_reason() -> None:
    names = ["CPU0", "CPU1"]
    end = RunEnd(exit_code=7, reason="died within one reading", tied=("CPU0", "CPU1"))
    ends = [ended(name, 7, last_lines=("Step 3 | Loss: 4.1",)) for name in names]
    training = WorkerFacts()
    training.record(Phase(name="train"))
    told = judged(end, ends, dict.fromkeys(names, training)).summary
    assert "every worker ended with exit code 7; the software or the settings" in told


def test_a_pass_says_whose_what_was_not_compared() -> None:
    names = ["GPU0", "GPU1", "GPU2"]
    all_facts, agreed = {name: trained() for name in names}, dict.fromkeys(names, 3)
    end, ends = RunEnd(exit_code=0), [ended(name) for name in names]
    lacking = {"GPU1": {"grad_norms": None, "weights": None}}
    result = judge(Case(RECORD, end, ends, all_facts, agreed, lacking)).result
    assert result.verdict is Verdict.PASS
    assert result.summary == (
        "3 GPUs trained 3 steps, 300 tokens each; "
        "loss and gradient norm of GPU0 and GPU2 equal bit for bit in 3 of 3 steps; not compared: "
        "norms of its gradients and weights of GPU1, which did not tell them in each step"
    )


ONCE = Replay(to_step=2, suspects=("GPU2",), times=4, repeats={"GPU2": Repeat.TRANSIENT})
BEFORE = EarlierFaults(1, "2026-02-01T08:00:00+01:00", "/runs/first")


def of_three_one_is_odd(replay: Replay, recall: Recall) -> Judgement:
    differ = Disagreement(2, "weights", {"GPU0": "aa", "GPU1": "aa", "GPU2": "bb"})
    end = RunEnd(exit_code=21, disagreement=differ, culprits=("GPU2",), replays=(replay,))
    names = [*differ.bits]
    all_facts = {name: trained() for name in names}
    return judge(
        Case(RECORD, end, [*map(ended, names)], all_facts, dict.fromkeys(names, 3)), recall
    )


def test_the_second_transient_fault_of_a_gpu_takes_it_out_of_service() -> None:
    first = of_three_one_is_odd(ONCE, lambda names: {})
    second = of_three_one_is_odd(ONCE, lambda names: dict.fromkeys(names, BEFORE))
    told = [(row.verdict, row.severity) for row in (*first.result.workers, *second.result.workers)]
    passed = (Verdict.PASS, None)
    watched, isolated = (Verdict.SUSPECT, Severity.MONITOR), (Verdict.SUSPECT, Severity.ISOLATE)
    assert told == [passed, passed, watched, passed, passed, isolated]
    said = "; the second time: first 2026-02-01 08:00, /runs/first"
    assert second.result.workers[2].cause == f"{first.result.workers[2].cause}{said}"
    assert second.unexplained == {"GPU2"}
    assert (second.result.verdict, second.result.exit_code) == (Verdict.SUSPECT, 21)


def test_a_fault_that_was_not_transient_asks_no_history() -> None:
    def forbidden(names: Sequence[str]) -> dict[str, EarlierFaults]:
        raise AssertionError("it was asked")

    again = replace(ONCE, repeats={"GPU2": Repeat.PERSISTENT})
    odd = of_three_one_is_odd(again, forbidden).result.workers[2]
    assert (odd.verdict, odd.severity) == (Verdict.FAIL, Severity.ISOLATE)
