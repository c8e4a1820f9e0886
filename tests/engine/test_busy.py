"""What a step keeps its device busy: on a CPU, the CPU time of this process within the step."""

import time
from collections.abc import Callable

import pytest

from model_check.engine import busy
from tests.engine.conftest import FakeBatch, FakeSource, Run

MakeRun = Callable[..., Run]
BURNT_S = 0.25


class Cpu:
    """The CPU time of this process, as the steps see it: only `burn` takes any."""

    seconds = 0.0

    def burn(self) -> None:
        self.seconds += BURNT_S


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> Cpu:
    cpu = Cpu()
    monkeypatch.setattr(busy, "moment", lambda *_: cpu.seconds)
    return cpu


def total_ms(run: Run) -> float:
    """Of all steps; each of them tells its own."""
    each = [step.busy_ms for step in run.kept.steps()]
    assert None not in each
    return sum(filter(None, each))


def test_a_step_tells_the_cpu_time_that_it_took(tiny_run: MakeRun) -> None:
    run, began = tiny_run(), time.process_time()
    run()
    assert 0 < total_ms(run) <= (time.process_time() - began) * 1000


def test_making_a_batch_does_not_count(tiny_run: MakeRun, cpu: Cpu) -> None:
    source = FakeSource()

    def slowly(number: int) -> FakeBatch:
        cpu.burn()
        return source.random(number)

    run = tiny_run(source=FakeSource(make=slowly))
    run()
    assert cpu.seconds >= 4 * BURNT_S
    assert total_ms(run) == 0


def test_an_evaluation_does_not_count(tiny_run: MakeRun, cpu: Cpu) -> None:
    def batches() -> list[FakeBatch]:
        cpu.burn()
        return [FakeSource().random(9)]

    run = tiny_run(splits={"held_out": batches}, training__eval_interval=1)
    run()
    num = sum(event.__class__.__name__ == "Evaluation" for event in run.kept.events)
    assert cpu.seconds == num * BURNT_S >= 4 * BURNT_S
    assert total_ms(run) == 0
