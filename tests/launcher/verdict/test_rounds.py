"""What rounds show together: rates, bounds, and bits that differ between rounds."""

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from launcher.verdict.results import RunResult, Scope, Verdict, WorkerResult
from launcher.verdict.rounds import Bits, RoundsResult, together
from launcher.verdict.severity import CauseClass

SCOPE = Scope(
    steps=10,
    compared_steps=10,
    fingerprints="full",
    flops=None,
    dtype=None,
    kernels=[],
    memory_touched_bytes=None,
    memory_bytes=None,
    max_rate=0.3,
    not_shown=[],
)


def row(name: str, verdict: Verdict = Verdict.PASS) -> WorkerResult:
    return WorkerResult(
        name=name,
        verdict=verdict,
        cause=None,
        steps=10,
        loss_first=None,
        loss_last=None,
        tokens_per_s=None,
        peak_memory_bytes=None,
        duration_s=1.0,
        returncode=0,
    )


def passed(*names: str, verdict: Verdict = Verdict.PASS) -> RunResult:
    return RunResult(
        verdict=verdict,
        exit_code=0,
        summary="all is well",
        culprits=[],
        disagreement=None,
        workers=[row(name) for name in names],
        leftovers=[],
        dropped_lines=0,
        run={"groups": dict.fromkeys(names, "a kind"), "host": "node17"},
        scope=SCOPE,
    )


def failed(name: str, *others: str) -> RunResult:
    """The others were stopped."""
    rows = [row(name, Verdict.FAIL), *(row(other, Verdict.STOPPED) for other in others)]
    told = replace(passed(name, *others), verdict=Verdict.FAIL, exit_code=7, culprits=[name])
    return replace(told, summary=f"{name} failed", workers=rows, scope=None)


def rounds(*results: RunResult, bits: Mapping[str, list[Bits]] | None = None) -> RoundsResult:
    """`bits`: worker -> those of each round."""
    names = [f"round_{number:03}" for number in range(1, len(results) + 1)]
    told = {w: dict(zip(names, each, strict=True)) for w, each in (bits or {}).items()}
    return together(dict(zip(names, results, strict=True)), told, "/r")


@pytest.mark.parametrize(("num", "bound"), [(1, None), (3, None), (4, 0.75), (20, 0.15)])
def test_what_never_failed_is_rarer_than_three_in_n(num: int, bound: float | None) -> None:
    found = rounds(*[passed("GPU0")] * num)
    (worker,) = found.workers
    assert (found.verdict, found.exit_code, worker.rate) == (Verdict.PASS, 0, 0.0)
    assert (worker.rounds, worker.failed, worker.max_rate) == (num, [], bound)
    assert (found.compared_steps, found.max_rate) == (10 * num, 3 / (10 * num))


def test_rounds_in_which_it_was_stopped_are_no_rounds_of_a_worker() -> None:
    found = rounds(passed("GPU0", "GPU3"), failed("GPU3", "GPU0"), passed("GPU0", "GPU3"))
    by_name = {worker.name: worker for worker in found.workers}
    assert (by_name["GPU0"].rounds, by_name["GPU0"].rate) == (2, 0.0)
    assert (by_name["GPU3"].rounds, by_name["GPU3"].failed) == (3, ["round_002"])
    assert by_name["GPU3"].rate == pytest.approx(1 / 3)
    assert (found.verdict, found.exit_code, found.culprits) == (Verdict.FAIL, 7, ["GPU3"])
    assert found.summary == "GPU3 failed in 1 of 3 rounds; round_002: GPU3 failed"
    assert found.max_rate is None, "an error was found"


def test_a_round_to_be_watched_makes_all_of_them_so() -> None:
    found = rounds(passed("GPU0"), passed("GPU0", verdict=Verdict.WARN), passed("GPU0"))
    assert (found.verdict, found.exit_code) == (Verdict.WARN, 0)


SAME, OTHER, THIRD = {0: 1, 1: 2, 2: 3}, {0: 1, 1: 7, 2: 8}, {0: 1, 1: 2, 2: 9}


@pytest.mark.parametrize(
    ("told", "verdict", "code", "which"),
    [
        ([SAME, SAME, SAME], Verdict.PASS, 0, None),
        ([SAME, OTHER, SAME], Verdict.SUSPECT, 21, (["round_002"], 1)),
        ([OTHER, SAME, SAME], Verdict.SUSPECT, 21, (["round_001"], 1)),
        ([SAME, OTHER], Verdict.INCONCLUSIVE, 23, (["round_002"], 1)),
        ([SAME, OTHER, THIRD], Verdict.INCONCLUSIVE, 23, (["round_002", "round_003"], 1)),
        ([SAME, SAME, OTHER, OTHER], Verdict.INCONCLUSIVE, 23, (["round_003", "round_004"], 1)),
        ([SAME, THIRD, SAME], Verdict.SUSPECT, 21, (["round_002"], 2)),
        ([SAME, {0: 1}, SAME], Verdict.PASS, 0, None),  # the deadline came
        ([SAME, {}], Verdict.PASS, 0, None),
    ],
)
def test_bits_of_one_worker_alone(
    told: list[Bits], verdict: Verdict, code: int, which: tuple[list[str], int] | None
) -> None:
    found = rounds(*[passed("GPU0")] * len(told), bits={"GPU0": told})
    assert (found.verdict, found.exit_code) == (verdict, code)
    assert [(each.rounds, each.step) for each in found.differences] == ([which] if which else [])
    assert found.culprits == (["GPU0"] if code == 21 else [])


def test_bits_that_equals_share_blame_no_gpu() -> None:
    both = {"GPU0": [SAME, OTHER, SAME], "GPU1": [SAME, OTHER, SAME]}
    found = rounds(*[passed("GPU0", "GPU1")] * 3, bits=both)
    assert (found.verdict, found.exit_code, found.culprits) == (Verdict.INVALID, 2, [])


def test_a_transient_fault_in_two_rounds_takes_its_gpu_out_of_service() -> None:
    once = replace(failed("GPU0", "GPU1"), do_now="Keep GPU0 in service.")
    rows = [replace(row, cause_class=CauseClass.HARDWARE) for row in once.workers]
    once = replace(once, workers=rows)
    good = passed("GPU0", "GPU1")
    assert rounds(good, once, good).do_now == "Keep GPU0 in service."
    assert rounds(good, once, once).do_now.startswith("Take GPU0 out of service; ")
    drill = replace(once, run=once.run | {"drill": "flip@2"})
    assert rounds(drill, drill).do_now.startswith("Nothing: this is a drill. Otherwise: Take GPU0")


def test_a_program_that_fails_in_two_rounds_condemns_no_gpu() -> None:
    once = replace(failed("GPU0"), do_now="Read the last lines of GPU0.")
    assert rounds(once, once).do_now == "Read the last lines of GPU0."


def test_what_to_do_about_other_bits_between_rounds() -> None:
    good = [passed("GPU0")] * 3
    assert "in service and run again" in rounds(*good, bits={"GPU0": [SAME, OTHER, SAME]}).do_now
    assert "with three workers" in rounds(*good[:2], bits={"GPU0": [SAME, OTHER]}).do_now
    assert rounds(*good).do_now.startswith("Nothing.")


def test_a_failure_is_told_before_other_bits() -> None:
    results = (passed("GPU0"), failed("GPU0"), passed("GPU0"))
    names = {"round_001": SAME, "round_003": OTHER}
    found = together(
        dict(zip(("round_001", "round_002", "round_003"), results, strict=True)),
        {"GPU0": names},
        "/r",
    )
    assert (found.verdict, found.exit_code) == (Verdict.FAIL, 7)
    assert "round_003 gave other bits than the first" in found.summary
