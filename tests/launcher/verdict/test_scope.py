"""A PASS says what it shows, in numbers, and what it does not."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from launcher.report.closing import closing_lines
from launcher.report.page.document import page
from launcher.verdict.facts import WorkerFacts
from launcher.verdict.judge import judge
from launcher.verdict.record import Case, RunEnd
from launcher.verdict.results import Judgement, Scope, Verdict
from launcher.verdict.scope import scope_of
from model_check.events import Done, Finished, Phase, Saved, Step
from tests.launcher.report.page.stories import story
from tests.launcher.verdict.test_judge import LOSS, RECORD, ended

GPU = {
    "dtype": "bfloat16",
    "attention_backend": "flash_attn",
    "flops_per_token": 1.2e9,
    "memory_bytes": 80 << 30,
    "fingerprints": "full, schema 1",
}


def trained(
    steps: int, *, finished: bool = True, loss: str | None = LOSS, **detail: Any
) -> WorkerFacts:
    facts = WorkerFacts()
    facts.record(Phase(name="build", detail=GPU | detail))
    for n in range(steps):
        repeated = True if n == 0 else None
        facts.record(
            Step(step=n, loss=loss, grad_norm=LOSS, lr=0, ms=1, tokens=1000, repeated=repeated)
        )
    if finished:
        facts.record(Finished())
    facts.record(Done(exit_code=0, peak_memory_bytes=41 << 30))
    return facts


def concluded(
    agreed: dict[str, int], device: str = "cuda", verb: str = "", **all_facts: WorkerFacts
) -> Judgement:
    workers = [ended(name) for name in all_facts]
    record = replace(RECORD, device=device, command=[verb])
    case = Case(record, RunEnd(exit_code=0), workers, all_facts, agreed)
    found = judge(case)
    return replace(found, result=replace(found.result, scope=scope_of(case, found.result)))


def scope(*arguments: Any, **more: Any) -> Scope:
    found = concluded(*arguments, **more).result.scope
    assert found is not None
    return found


def last_lines(judgement: Judgement) -> list[str]:
    return list(closing_lines(judgement, Path("/r"), tail_lines=0))[-3:]


@pytest.mark.parametrize(("fingerprints", "loss"), [("full, c", "loss, "), ("off", "loss and ")])
def test_no_loss_is_called_equal_where_none_was_told(fingerprints: str, loss: str) -> None:
    def summary(loss: str | None) -> str:
        names = ("GPU0", "GPU1")
        told = {name: trained(9, loss=loss, fingerprints=fingerprints) for name in names}
        return concluded(dict.fromkeys(names, 9), **told).result.summary

    assert summary(None) == summary(LOSS).replace(loss, "")
    assert loss in summary(LOSS)


def test_losses_of_a_part_of_the_steps_are_not_called_equal() -> None:
    told = {name: trained(9) for name in ("GPU0", "GPU1")}
    for facts in told.values():
        facts.record(Step(step=9, loss=None, grad_norm=LOSS, lr=0, ms=1, tokens=1000))
        assert facts.loss_last == LOSS
    result = concluded(dict.fromkeys(told, 10), **told).result
    assert "gradients" in result.summary
    assert "loss" not in result.summary


@pytest.mark.parametrize("verb", ["train", "check"])
def test_a_training_of_one_worker_is_told_in_a_trainers_words(verb: str) -> None:
    """What it shows of the GPU is in its report; a check says it, also where it saves."""
    facts = trained(100)
    facts.record(Saved(step=100, path="/c/last.pt", content=""))
    found = concluded({}, verb=verb, GPU0=facts)
    result, loss = found.result, float.fromhex(LOSS)
    assert (result.verdict, result.exit_code) == (Verdict.PASS, 0)
    assert result.scope is not None
    closing = " ".join(last_lines(found))
    if verb == "check":
        assert "checked: " in closing
        assert "nothing to compare it with" in result.summary
        return
    what = f"GPU0 trained 100 steps, 100,000 tokens, loss {loss:.4f} -> {loss:.4f}"
    assert result.summary == what
    assert "checked: " not in closing
    (note,) = result.workers[0].notes
    assert "its weights and moments stayed as each update left them" in note


def test_two_gpus_say_work_memory_what_is_out_of_reach_and_the_bound() -> None:
    steps = {"GPU0": 100, "GPU1": 100}
    found = concluded(steps, GPU0=trained(100), GPU1=trained(100))
    assert last_lines(found) == [
        "checked: 120 TFLOP a worker in bfloat16 with flash_attn attention, "
        "41.0 of 80.0 GiB of each GPU's memory",
        "not shown: links between GPUs, the rest of the memory, other kernels, "
        "faults that all workers share, errors in fewer than 3 of 100 steps (95 %)",
        "PASS: 2 GPUs trained 100 steps, 100,000 tokens each; loss, gradients, weights, "
        "moments and what flows between blocks equal bit for bit in 100 of 100 steps "
        "(exit code 0)",
    ]
    text = page(found.result, story("GPU0"))
    assert "checked: 120 TFLOP" in text
    assert "not shown: links between GPUs" in text


def test_the_same_in_numbers() -> None:
    least = trained(100, flops_per_token=1.0e9, memory_bytes=160 << 30)
    found = scope({"GPU0": 99, "GPU1": 100}, GPU0=trained(100), GPU1=least)
    assert (found.steps, found.compared_steps, found.max_rate) == (100, 99, 3 / 99)
    assert found.flops == 1.0e14
    assert (found.memory_touched_bytes, found.memory_bytes) == (41 << 30, 160 << 30)
    assert (found.dtype, found.kernels) == ("bfloat16", ["flash_attn"])


@pytest.mark.parametrize("steps", [1, 3])
def test_too_few_steps_exclude_no_rate(steps: int) -> None:
    found = scope({"GPU0": steps, "GPU1": steps}, GPU0=trained(steps), GPU1=trained(steps))
    assert found.max_rate is None
    assert found.not_shown[-1] == f"rare errors (too few steps: {steps})"


def test_four_steps_exclude_one() -> None:
    assert scope({"GPU0": 4, "GPU1": 4}, GPU0=trained(4), GPU1=trained(4)).max_rate == 0.75


@pytest.mark.parametrize(
    ("detail", "finished", "told"),
    [
        ({"fingerprints": "off, schema 1"}, True, "loss and gradient norm equal bit for bit in 9"),
        (
            {"fingerprints": "rotate, schema 1"},
            True,
            "loss and gradient norms equal bit for bit in 9 of 9 steps, a part of gradients, "
            "weights, moments and what flows between blocks in each, all in the first and the last",
        ),
        ({"fingerprints": "rotate, schema 1"}, False, "between blocks in each, all in the first"),
    ],
)
def test_the_summary_says_what_was_compared(
    detail: dict[str, str], finished: bool, told: str
) -> None:
    all_facts = {name: trained(9, finished=finished, **detail) for name in ("GPU0", "GPU1")}
    summary = concluded({"GPU0": 9, "GPU1": 9}, **all_facts).result.summary
    assert told in summary
    assert summary.endswith("the last") or not finished or "rotate" not in detail["fingerprints"]


def test_what_took_no_fingerprints_of_any_worker_is_not_claimed() -> None:
    all_facts = {"GPU0": trained(9), "GPU1": trained(9, fingerprints="rotate, schema 1")}
    summary = concluded({"GPU0": 9, "GPU1": 9}, **all_facts).result.summary
    assert "loss and gradient norm equal" in summary


def test_one_worker_says_what_it_showed_and_that_nothing_was_compared() -> None:
    found = concluded({}, GPU0=trained(100))
    *_, checked, not_shown, verdict = last_lines(found)
    assert checked.startswith("checked: 120 TFLOP in bfloat16")
    assert checked.endswith("41.0 of 80.0 GiB of the GPU's memory")
    assert not_shown == (
        "not shown: links between GPUs, the rest of the memory, other kernels, "
        "wrong numbers (nothing was compared)"
    )
    assert verdict == (
        "PASS: GPU0 trained 100 steps, 100,000 tokens; one worker, so nothing to compare it with; "
        "its weights and moments stayed as each update left them; "
        "the passes of its first step gave the same bits twice (exit code 0)"
    )


def test_a_cpu_has_no_memory_to_tell_and_shows_no_gpu() -> None:
    cpu = trained(5, memory_bytes=None, attention_backend="sdpa", dtype="float32")
    found = concluded({"CPU0": 5, "CPU1": 5}, device="cpu", CPU0=cpu, CPU1=cpu)
    checked, not_shown, _ = last_lines(found)
    assert checked == "checked: 6.0 TFLOP a worker in float32 with sdpa attention"
    assert not_shown.startswith("not shown: GPUs, other kernels, ")


def test_who_did_not_pass_or_trained_nothing_has_no_scope() -> None:
    nothing = WorkerFacts()
    nothing.record(Done(exit_code=0))
    assert concluded({}, GPU0=nothing).result.scope is None
    failed = concluded({"GPU0": 5, "GPU1": 5}, GPU0=trained(5), GPU1=trained(5)).result
    case = Case(RECORD, RunEnd(exit_code=0), [], {}, {})
    assert scope_of(case, replace(failed, verdict=Verdict.FAIL)) is None


def test_a_run_of_an_older_version_says_what_it_can() -> None:
    older = trained(9)
    older.detail = {}
    found = scope({"GPU0": 9, "GPU1": 9}, GPU0=older, GPU1=older)
    assert (found.flops, found.dtype, found.kernels, found.memory_bytes) == (None, None, [], None)


@pytest.mark.parametrize(
    ("shards", "is_told"), [(("0 of 2", "1 of 2"), True), (("0 of 1", "0 of 1"), False)]
)
def test_a_shard_that_one_rank_alone_holds_is_compared_with_nothing(
    shards: tuple[str, str], is_told: bool
) -> None:
    ranks = {f"GPU{n}": trained(5, shard=shard) for n, shard in enumerate(shards)}
    workers = [ended(name) for name in ranks]
    record = replace(RECORD, device="cuda", mode="fsdp")
    case = Case(record, RunEnd(exit_code=0), workers, ranks, dict.fromkeys(ranks, 5))
    found = scope_of(case, judge(case).result)
    assert found is not None
    assert any("shard, which one rank alone holds" in text for text in found.not_shown) == is_told
