"""What a step keeps its device busy: on a CPU, the CPU time of this process within the step."""

import time
from collections.abc import Callable

from tests.engine.conftest import FakeBatch, FakeSource, Run

MakeRun = Callable[..., Run]
BURNT_S = 0.2


def burn() -> None:
    until = time.process_time() + BURNT_S
    while time.process_time() < until:
        pass


def total_ms(run: Run) -> float:
    """Of all steps; each of them tells its own."""
    each = [step.busy_ms for step in run.kept.steps()]
    assert None not in each
    return sum(filter(None, each))


def test_a_step_tells_the_cpu_time_that_it_took(tiny_run: MakeRun) -> None:
    run, began = tiny_run(), time.process_time()
    run()
    assert 0 < total_ms(run) <= (time.process_time() - began) * 1000


def test_making_a_batch_does_not_count(tiny_run: MakeRun) -> None:
    source = FakeSource()

    def slowly(number: int) -> FakeBatch:
        burn()
        return source.random(number)

    run, began = tiny_run(source=FakeSource(make=slowly)), time.process_time()
    run()
    assert total_ms(run) <= (time.process_time() - began - 4 * BURNT_S) * 1000


def test_an_evaluation_does_not_count(tiny_run: MakeRun) -> None:
    def batches() -> list[FakeBatch]:
        burn()
        return [FakeSource().random(9)]

    run = tiny_run(splits={"held_out": batches}, training__eval_interval=1)
    began = time.process_time()
    run()
    num = sum(event.__class__.__name__ == "Evaluation" for event in run.kept.events)
    assert num >= 4
    assert total_ms(run) <= (time.process_time() - began - num * BURNT_S) * 1000
