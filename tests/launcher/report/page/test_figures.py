"""The pictures: what is equal is drawn once, the odd one stands out, marks stand where it began."""

import re
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import pytest

from launcher.report.page.axes import Axis, Scale, of_steps
from launcher.report.page.chart import Bar, Figure, Line, Mark, Segment, bars, lines
from launcher.report.page.document import page
from launcher.report.page.faults import since
from launcher.report.page.gpu_curves import GpuCurves
from launcher.report.page.render import _environment
from launcher.report.page.story import Story
from launcher.verdict.curves import Curves, Series
from launcher.verdict.disagreement import Disagreement
from launcher.verdict.facts import WorkerFacts
from launcher.verdict.results import RunResult, Verdict
from launcher.verdict.slow import Slow
from model_check.errors import EXIT_HANG
from model_check.events import Done, Event, NonFinite, Phase, Step, Telemetry, Xid
from model_check.utils.project_files import PACKAGES
from tests.launcher.report.page.stories import result, story, worker

SECOND = 1_000_000_000
PAGE = PACKAGES / "launcher" / "report" / "page"
NAMES = ("CPU0", "CPU1", "CPU2")


def step(number: int, loss: float = 2.0) -> Step:
    return Step(
        t=(number + 2) * SECOND,
        step=number,
        loss=(loss - number / 100).hex(),
        grad_norm=(1.0).hex(),
        lr=1e-3,
        ms=10.0,
        tokens=64,
    )


def told(events: dict[str, list[Event]], **more: Any) -> Any:
    """The story of workers that sent these events."""
    curves = {name: Curves() for name in events}
    all_facts = {name: WorkerFacts() for name in events}
    for name, sent in events.items():
        for event in (Phase(name="train", t=SECOND), *sent):
            curves[name].record(event)
            all_facts[name].record(event)
    return story(*events, curves=curves, all_facts=all_facts, **more)


def figures(of: RunResult, how: Story) -> str:
    """The page that has them."""
    return page(of, how)


def markup(drawn: Iterable[Figure]) -> str:
    parts = _environment().get_template("parts.html").module
    return str(parts.figures(list(drawn)))  # type: ignore[attr-defined]


def figure(title: str, drawn: str) -> str:
    """The one of that title."""
    found = re.findall(r"<figure.*?</figure>", drawn, re.S)
    return next(f for f in found if f"<b>{title}</b>" in f)


def kinds(drawn: str) -> list[str]:
    return re.findall(r'<path class="([^"]*)"', drawn)


def places(path: str) -> list[tuple[int, int]]:
    """Of the points along a path: where it begins, and by how much each is away from the last."""
    numbers = [int(number) for number in re.findall(r"-?\d+", path)]
    return [*zip(accumulate(numbers[::2]), accumulate(numbers[1::2]), strict=True)]


def curve(*values: float) -> Series:
    series = Series()
    for x, value in enumerate(values):
        series.add(x, value)
    return series


def test_equal_curves_are_drawn_once() -> None:
    events: dict[str, list[Event]] = {name: [step(n) for n in range(9)] for name in NAMES}
    events["CPU2"] = events["CPU2"][:5]  # it did not come so far
    drawn = figure("Loss", figures(result(*map(worker, NAMES)), told(events)))
    assert kinds(drawn) == ["grid", "usual u0 open"]
    assert "CPU0, CPU1 and CPU2</li>" in drawn
    assert "equal in all workers" in drawn


def test_the_odd_one_is_drawn_apart_and_marked_where_bits_part() -> None:
    events: dict[str, list[Event]] = {name: [step(n) for n in range(9)] for name in NAMES}
    events["CPU1"] = [step(n, 2.0 if n < 6 else 2.001) for n in range(9)]
    found = Disagreement(6, "loss", {"CPU0": "a", "CPU1": "b", "CPU2": "a"})
    rows = [worker("CPU0"), worker("CPU1", Verdict.FAIL), worker("CPU2")]
    of = result(*rows, disagreement=found, culprits=["CPU1"])
    agreed = {"CPU0": 9, "CPU1": 6, "CPU2": 9}
    drawn = figures(of, told(events, agreed_steps=agreed))
    loss = figure("Loss", drawn)
    assert kinds(loss) == ["grid", "usual u0 open", "odd odd0 open", "mark"]
    assert "CPU1: step 6" in loss
    assert drawn.count("<li>CPU1: step 6</li>") == 1
    strip = figure("Worker by step", drawn)
    assert "CPU1: differs at step 6" in strip
    assert strip.count('class="equal"') == 4  # three bars and the legend
    assert '<rect class="differs" x="66.7%" width="33.3%"/>' in strip


def test_where_it_was_not_finite_is_marked() -> None:
    events: dict[str, list[Event]] = {name: [step(n) for n in range(4)] for name in NAMES}
    events["CPU0"] = [step(0), NonFinite(step=1, where="loss", loss="nan", grad_norm="nan")]
    of = result(worker("CPU0", Verdict.FAIL), worker("CPU1"), worker("CPU2", Verdict.STOPPED))
    strip = figure("Worker by step", figures(of, told(events)))
    assert "CPU0: not finite at step 1" in strip
    assert '<rect class="nonfinite" x="25.0%" width="25.0%"/>' in strip
    assert "CPU2: stopped after step 3" in strip


def test_the_onset_of_a_straggler_is_marked() -> None:
    slow = Slow(
        since_step=4,
        last_step=8,
        num_steps=5,
        ratio=1.3,
        busy_ms=13,
        expected_ms=10,
        by_history=False,
        lasted=True,
        since_ns=6 * SECOND,
        last_ns=9 * SECOND,
    )
    events: dict[str, list[Event]] = {name: [step(n) for n in range(9)] for name in NAMES}
    of = result(worker("CPU0"), worker("CPU1", Verdict.WARN, slow=slow), worker("CPU2"))
    drawn = figure("Step time", figures(of, told(events)))
    assert "CPU1: slow since step 4" in drawn
    assert "odd odd0" in drawn


def test_a_silent_worker_is_silent_to_the_end() -> None:
    """Not from the moment that it was stopped, and said so, on."""
    said = Done(t=9 * SECOND, exit_code=143)
    events: dict[str, list[Event]] = {"CPU0": [step(0)], "CPU1": [step(0), said]}
    of = result(
        worker("CPU0"), worker("CPU1", Verdict.FAIL), culprits=["CPU1"], exit_code=EXIT_HANG
    )
    drawn = figure("Worker by time", figures(of, told(events)))
    assert "CPU1: silent since 2.0 s, in train" in drawn
    assert "CPU0: until 2.0 s" in drawn
    begun = since(of.workers[1], of, told(events))
    assert str(begun) == "after step 0, 2.0 s after the start"


def test_a_run_without_steps_has_no_empty_figure() -> None:
    assert "<figure" not in figures(result(worker("CPU0")), story("CPU0"))


def test_an_xid_stands_on_the_time_axis_of_every_figure_of_the_gpus() -> None:
    curves = GpuCurves(began_ns=0)
    for second in range(10):
        sample = Telemetry(t=second * SECOND, temperature_c=50, power_w=300.0, sm_mhz=1980)
        curves.record(sample)
    curves.record(Xid(t=5 * SECOND, xid=79))
    how = told({"GPU0": [step(0), step(8)]}, gpus={"GPU0": curves})
    drawn = figures(result(worker("GPU0", Verdict.FAIL)), how)
    for title in ("Temperature", "Power", "SM clock"):
        assert "GPU0: Xid 79" in figure(title, drawn)
        assert '<path class="mark" d="M200 0v400"/>' in figure(title, drawn)
    assert drawn.count("<li>GPU0: Xid 79</li>") == 1


def test_a_power_cap_is_no_alarm() -> None:
    curves = GpuCurves(began_ns=0)
    for second, reasons in enumerate((0x04, 0x04, 0x08, 0)):
        curves.record(Telemetry(t=second * SECOND, clocks_event_reasons=reasons))
    how = told({"GPU0": [step(0), step(8)]}, gpus={"GPU0": curves})
    drawn = figure("Clocks held back", figures(result(worker("GPU0")), how))
    assert [kind in drawn for kind in ('class="capped"', 'class="held"')] == [True, True]


def test_a_spike_stands_in_the_picture() -> None:
    series = Series()
    for x in range(10_000):
        series.add(x, 50.0 if x == 7777 else 1.0)
    drawn = markup(lines("t", "", [Line("a", series)], of_steps(0, 9999), "{}"))
    _, path = re.findall(r' d="([^"]*)"', drawn)
    points = places(path)
    top = min(y for _, y in points)
    assert [at for at, y in points if y == top] == [pytest.approx(400 * 0.777, abs=8)]
    assert max(y for _, y in points) - top > 250
    assert len(path) < 2000


def test_one_value_is_a_dash_and_none_is_no_figure() -> None:
    one = Series()
    one.add(3, 1.0)
    drawn = markup(lines("t", "", [Line("a", one)], of_steps(3, 3), "{}"))
    assert kinds(drawn) == ["grid", "usual u0 open"]
    assert not list(lines("t", "", [Line("a", Series())], of_steps(0, 1), "{}"))


def test_names_are_escaped() -> None:
    series = Series()
    series.add(1, 1.0)
    hostile = '"><script>'
    bar = Bar(hostile, [Segment(0, 1, "a")], hostile)
    line, mark = Line(hostile, series), Mark(1, hostile)
    drawn = markup(
        (
            *lines(hostile, hostile, [line], of_steps(0, 1), "{}", [mark]),
            bars(hostile, [bar], Axis(Scale(0, 1), []), [(hostile, hostile)]),
        )
    )
    assert "<script>" not in drawn
    assert '""' not in drawn


def test_a_curve_has_room_and_round_numbers_beside_it() -> None:
    line = Line("a", curve(6.2623, 6.2465, 6.2384, 6.2405))
    drawn = markup(lines("Loss", "", [line], of_steps(0, 3), "{:.4g}"))
    grid, path = re.findall(r' d="([^"]*)"', drawn)
    assert all(0 < x < 400 and 0 < y < 400 for x, y in places(path))
    ticks = re.findall(r"<span[^>]*>([^<]*)</span>", drawn)
    assert ticks == ["6.23", "6.24", "6.25", "6.26", "6.27", "0", "1", "2", "3"]
    assert grid.count("M") == len(ticks)


def test_the_numbers_of_a_chart_are_said_to_those_who_do_not_see_it() -> None:
    line, mark = Line("GPU0", curve(3.0, 5.0, 1.0, 2.0)), Mark(1, "GPU0: Xid 79")
    drawn = markup(lines("Power", "", [line], of_steps(0, 3), "{:.0f} W", [mark]))
    said = "Power. GPU0: 3 W first, 2 W last, 1 W to 5 W. GPU0: Xid 79"
    assert f'role="img" aria-label="{said}"' in drawn


def test_few_lines_have_a_colour_each_and_many_are_one_band() -> None:
    few = [Line(f"GPU{at}", curve(at, at + 1)) for at in range(3)]
    drawn = markup(lines("t", "", few, of_steps(0, 1), "{}"))
    assert kinds(drawn) == ["grid", "usual u0 open", "usual u1 open", "usual u2 open"]
    many = [Line(f"GPU{at}", curve(at, at + 1), is_odd=at == 3) for at in range(8)]
    drawn = markup(lines("t", "", many, of_steps(0, 1), "{}"))
    assert kinds(drawn) == ["grid", "band", "odd odd0 open"]
    assert "GPU0, GPU1, GPU2, GPU4 and 3 more: from the lowest to the highest</li>" in drawn
    assert "GPU3</li>" in drawn


def test_lines_that_lie_on_each_other_are_said_to_do_so() -> None:
    same = [Line("GPU0", curve(50, 60, 64)), Line("GPU1", curve(50.2, 60, 64))]
    apart = [Line("GPU0", curve(50, 60, 64)), Line("GPU1", curve(50, 60, 54))]
    said = "the lines lie on each other"
    for drawn, is_said in ((same, True), (apart, False), (same[:1], False)):
        figure = markup(lines("t", "", drawn, of_steps(0, 2), "{}", from_zero=True))
        assert (said in figure) is is_said


def test_a_legend_has_what_is_drawn_and_each_phase_a_colour_of_its_own() -> None:
    style = (PAGE / "style.css").read_text()
    colours = dict(re.findall(r"\.(\w+) { --f: var\(--(\w+)\)", style))
    phases = ("import", "build", "compile", "train", "eval", "save")
    assert len({colours[name] for name in phases}) == len(phases)
    assert colours["eval"] != colours["equal"]
    events: dict[str, list[Event]] = {"CPU0": [step(0)]}
    drawn = figure("Worker by time", figures(result(worker("CPU0")), told(events)))
    assert re.findall(r'<li><i class="(\w+)"', drawn) == ["train"]


def test_a_note_that_all_bars_share_stands_once() -> None:
    events: dict[str, list[Event]] = {name: [step(n) for n in range(4)] for name in NAMES}
    strip = figure("Worker by step", figures(result(*map(worker, NAMES)), told(events)))
    assert "all to step 3</figcaption>" in strip
    assert 'class="note"' not in strip
    assert 'aria-label="CPU2: to step 3"' in strip
