"""All steps of a worker as a few numbers: equal where the steps are, and bounded."""

import msgspec
import pytest

from launcher.verdict.slow import IN_A_ROW, WARM_UP
from launcher.verdict.trace import Trace, trace_of
from model_check.events import Evaluation, Event, Step


def step(number: int, loss: float = 1.0, busy_ms: float | None = None, fp: str = "0") -> Step:
    return Step(
        step=number,
        loss=loss.hex(),
        grad_norm=loss.hex(),
        lr=0.1,
        ms=1.0,
        tokens=1,
        busy_ms=busy_ms,
        fp={"weights": fp},
    )


def traced(*events: Event) -> Trace:
    trace = trace_of(events)
    assert trace is not None
    return trace


@pytest.mark.parametrize("num", [1, 7, 33, 100, 1000])
def test_equal_steps_give_equal_traces_whose_links_are_those_of_a_shorter_run(num: int) -> None:
    steps = [step(n) for n in range(num)]
    long = traced(*steps)
    assert long == traced(*steps)
    for length in long.kept():
        assert long.after(length) == traced(*steps[:length]).bits


@pytest.mark.parametrize("what", [{"loss": 2.0}, {"fp": "1"}])
def test_one_other_bit_changes_all_that_follows(what: dict[str, object]) -> None:
    steps = [step(n) for n in range(20)]
    other = [*steps[:7], step(7, **what), *steps[8:]]  # type: ignore[arg-type]
    one, two = traced(*steps), traced(*other)
    assert [one.after(n) == two.after(n) for n in range(1, 21)] == [True] * 7 + [False] * 13


def test_what_is_no_result_changes_nothing() -> None:
    slow = step(3, busy_ms=9.0)
    quick = msgspec.structs.replace(slow, busy_ms=1.0, ms=3.0, t=99)
    assert traced(slow).bits == traced(quick).bits


def test_an_evaluation_counts_before_its_step_and_behind_the_last() -> None:
    def told(loss: float) -> Evaluation:
        return Evaluation(step=1, split="valid", loss=loss.hex(), tokens=1)

    within = [traced(step(0), told(loss), step(1)) for loss in (1.0, 2.0)]
    assert within[0].bits != within[1].bits
    behind = [traced(step(0), told(loss)) for loss in (1.0, 2.0)]
    assert behind[0].bits == behind[1].bits == traced(step(0)).bits
    assert behind[0].evaluations != behind[1].evaluations


@pytest.mark.parametrize("num", [40, 333, 10_000])
def test_it_stays_small_and_a_block_is_as_quick_as_its_quickest_step(num: int) -> None:
    steps = [step(n, busy_ms=100 + n % 10) for n in range(num)]
    trace = traced(*steps)
    assert len(msgspec.json.encode(trace)) < 2000
    assert set(trace.least_ms) == {100.0}
    assert trace.block * len(trace.least_ms) <= num - WARM_UP
    assert (len(trace.least_ms) + 1) * trace.block > num - WARM_UP
    assert trace.block % IN_A_ROW == 0


def test_a_worker_without_a_step_has_none() -> None:
    assert trace_of([]) is None
