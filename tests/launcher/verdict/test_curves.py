"""What a run looked like: no spike is lost, equal curves are known to be equal, no time is lost."""

import random

import msgspec
import pytest

from launcher.verdict.curves import MAX_BUCKETS, Curves, Series
from model_check.events import Done, Metrics, NonFinite, Phase, Step

SECOND = 1_000_000_000


def series(values: dict[int, float]) -> Series:
    made = Series()
    for x, value in values.items():
        made.add(x, value)
    return made


@pytest.mark.parametrize("num", [1, MAX_BUCKETS, MAX_BUCKETS + 1, 10_000, 123_457])
def test_a_spike_survives_whatever_is_thinned(num: int) -> None:
    draw = random.Random(num)
    values = {x: draw.random() for x in range(num)}
    at = draw.randrange(num)
    values[at] = 99.0
    made = series(values).thinned(100)
    assert len(made.buckets) <= 100
    assert made.buckets[at // made.width][1] == 99.0
    assert min(low for low, _ in made.buckets.values()) == min(values.values())


def test_what_is_not_finite_is_left_out() -> None:
    assert series({0: 1.0, 1: float("nan"), 2: float("inf")}).buckets == {0: (1.0, 1.0)}


@pytest.mark.parametrize(("num", "other"), [(40, 40), (40, 12), (20_000, 20_000), (20_000, 300)])
def test_curves_are_alike_as_far_as_both_go(num: int, other: int) -> None:
    values = [random.Random(x).random() for x in range(num)]
    one, two = (series(dict(enumerate(values[:n]))) for n in (num, other))
    assert one.is_like(two)
    assert two.is_like(one)


@pytest.mark.parametrize(("num", "at"), [(40, 0), (40, 39), (20_000, 77), (20_000, 19_000)])
def test_one_value_tells_curves_apart(num: int, at: int) -> None:
    values = {x: 1.0 for x in range(num)}
    assert not series(values).is_like(series(values | {at: 1.0000001}))


def test_curves_of_runs_that_began_elsewhere_are_compared_where_both_are() -> None:
    values = {x: float(x) for x in range(60)}
    resumed = {x: float(x) for x in range(40, 80)}
    assert series(values).is_like(series(resumed))
    assert not series(values).is_like(series({40: 7.0}))


def step(number: int, second: float) -> Step:
    return Step(
        t=round(second * SECOND),
        step=number,
        loss=(2.0).hex(),
        grad_norm=(1.0).hex(),
        lr=1e-3,
        ms=10.0,
        tokens=64,
    )


def test_phases_are_timed_and_the_last_one_lasts_to_what_was_heard_last() -> None:
    curves = Curves()
    for event in (
        Phase(name="import", t=SECOND),
        Phase(name="train", t=3 * SECOND),
        step(0, 4),
        Metrics(t=5 * SECOND, step=0, data_wait=0.25, memory_bytes=1, peak_memory_bytes=1),
        Phase(name="eval", t=5 * SECOND),
        Phase(name="train", t=6 * SECOND),
        step(1, 8),
    ):
        curves.record(event)
    assert curves.spent == {
        "import": 2 * SECOND,
        "train": 4 * SECOND,
        "eval": SECOND,
    }
    assert curves.waited_ns == SECOND // 2
    assert [span.what for span in curves.all_spans] == [
        "import",
        "train",
        "eval",
        "train",
    ]


def test_a_step_without_a_loss_is_on_no_curve_of_losses() -> None:
    curves = Curves()
    curves.record(msgspec.structs.replace(step(0, 1), loss=None))
    assert (len(curves.loss.buckets), len(curves.grad_norm.buckets)) == (0, 1)


def test_nothing_is_timed_after_the_end() -> None:
    curves = Curves()
    curves.record(Phase(name="train", t=SECOND))
    curves.record(Done(exit_code=0, t=3 * SECOND))
    assert curves.spent == {"train": 2 * SECOND}


def test_phases_without_number_take_bounded_memory_and_lose_no_time() -> None:
    curves = Curves()
    for at in range(10_000):
        curves.record(Phase(name="train", t=10 * at * SECOND))
        curves.record(Phase(name="eval", t=(10 * at + 9) * SECOND))
    curves.record(Done(exit_code=0, t=100_000 * SECOND))
    assert len(curves.spans) <= 256
    assert curves.spent == {"train": 90_000 * SECOND, "eval": 10_000 * SECOND}
    joined = [
        (a.until_ns, b.since_ns) for a, b in zip(curves.spans, curves.spans[1:], strict=False)
    ]
    assert all(until == since for until, since in joined)


def test_the_first_step_that_is_not_finite_is_kept() -> None:
    curves = Curves()
    for number in (7, 8):
        curves.record(NonFinite(step=number, where="loss", loss="nan", grad_norm="nan"))
    assert curves.nonfinite_step == 7
