"""The pictures of a run. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from launcher.report.page import chart
from launcher.report.page.axes import Axis, Scale, of_seconds, of_steps
from launcher.report.page.chart import Bar, Figure, Line, Mark, Segment
from launcher.report.page.faults import Since, difference_of, since
from launcher.report.page.story import Story
from launcher.telemetry.health import POWER_CAP
from launcher.verdict.curves import Series, Span
from launcher.verdict.results import INNOCENT, RunResult, Verdict, WorkerResult
from launcher.verdict.slow import WARM_UP
from model_check.errors import EXIT_HANG
from model_check.utils.words import few, listed

_STEP_KINDS = (
    ("equal", "equal to its peers"),
    ("alone", "trained, not compared"),
    ("differs", "bits differ"),
    ("nonfinite", "not finite"),
)
_PHASES = (
    ("import", "import"),
    ("build", "build"),
    ("compile", "compile"),
    ("train", "training"),
    ("eval", "evaluation"),
    ("save", "saving"),
)
_SILENT = ("silent", "silent")
_GPU_FIGURES = {
    "temperature_c": ("Temperature", "in °C", "{:.0f} °C"),
    "power_w": ("Power", "in W", "{:.0f} W"),
    "sm_mhz": ("SM clock", "in MHz", "{:,.0f} MHz"),
}
"""Name -> title, unit, how a value is told."""
_MAX_MARKS = 8
_MANY = 6
"""So many names are not all said."""


def figures(result: RunResult, story: Story) -> dict[str, Any]:
    """Of the sections about steps, time and GPUs, as the template names them."""
    happened = _happened(story)
    columns, shares = _shares(result, story)
    return {
        "strip": list(_strip(result, story)),
        "steps": [*_losses(result, story), *_step_times(result, story)],
        "time": list(_timeline(result, story)),
        "share_columns": columns,
        "shares": shares,
        "gpu_figures": list(_gpu_figures(result, story, happened)),
        "throttling": list(_throttling(story)),
        "num_more_events": max(0, len(happened) - _MAX_MARKS),
    }


def _strip(result: RunResult, story: Story) -> Iterator[Figure]:
    """A bar a worker: where it was equal, where its bits part, where it was not finite."""
    trained = [w for w in result.workers if story.facts(w.name).last_step is not None]
    if not trained:
        return
    first = min(story.facts(worker.name).first_step for worker in trained)
    last = max(story.facts(worker.name).last_step or 0 for worker in trained)
    stop = max(last + 1, story.record.steps or 0)
    x = Axis(Scale(first, stop), of_steps(first, stop - 1).ticks)
    bars = [_bar_of_steps(worker, result, story) for worker in trained]
    yield chart.bars("Worker by step", bars, x, _STEP_KINDS)


def _bar_of_steps(worker: WorkerResult, result: RunResult, story: Story) -> Bar:
    facts = story.facts(worker.name)
    first, stop = facts.first_step, (facts.last_step or 0) + 1
    agreed = min(stop, first + story.agreed_steps.get(worker.name, 0))
    segments = [Segment(first, agreed, "equal")] if agreed > first else []
    note = f"to step {stop - 1:,}"
    if agreed < stop:
        segments.append(Segment(agreed, stop, "alone"))
    found = difference_of(worker.name, result)
    if found is not None:
        segments.append(Segment(found.step, max(stop, found.step + 1), "differs"))
        note = f"differs at step {found.step:,}"
    if (step := story.curve(worker.name).nonfinite_step) is not None:
        segments.append(Segment(step, step + 1, "nonfinite"))
        note = f"not finite at step {step:,}"
    elif worker.verdict is Verdict.STOPPED:
        note = f"stopped after step {stop - 1:,}"
    return Bar(worker.name, segments, note)


def _losses(result: RunResult, story: Story) -> Iterator[Figure]:
    marks = _faults(result, story)
    for title, name in (("Loss", "loss"), ("Gradient norm", "grad_norm")):
        series = {w.name: getattr(story.curve(w.name), name) for w in result.workers}
        lines = _alike(series, result)
        yield from chart.lines(title, _told(lines), lines, _steps(series), "{:,.4g}", marks)


def _alike(series: Mapping[str, Series], result: RunResult) -> list[Line]:
    """Equal curves are one line, drawn by the longest. Those that are not as most stand out; where
    no two are equal, those of whom the run blames."""
    groups: list[list[str]] = []
    for name in sorted(series, key=lambda name: -_length(series[name])):
        if not series[name].buckets:
            continue
        same = next((g for g in groups if series[g[0]].is_like(series[name])), None)
        groups.append([name]) if same is None else same.append(name)
    order = list(series)
    named = [sorted(group, key=order.index) for group in groups]
    usual = max(named, key=len, default=[])
    blamed = {*order} - {*usual} if len(usual) > 1 else {*result.culprits}
    lines = zip(groups, named, strict=True)
    return [Line(_names(who), series[g[0]], is_odd=not blamed.isdisjoint(who)) for g, who in lines]


def _names(who: Sequence[str]) -> str:
    return listed(who) if len(who) < _MANY else few(who)


def _length(series: Series) -> int:
    return max(series.buckets, default=0) * series.width


def _told(lines: Sequence[Line]) -> str:
    is_one = len(lines) == 1 and " and " in lines[0].name
    return "by step; equal in all workers" if is_one else "by step"


def _steps(series: Mapping[str, Series]) -> Axis:
    filled = [s for s in series.values() if s.buckets]
    first = min((min(s.buckets) * s.width for s in filled), default=0)
    last = max((next(reversed(list(s.points())))[0] for s in filled), default=0)
    return of_steps(first, last)


def _faults(result: RunResult, story: Story) -> list[Mark]:
    """Where something began to be wrong, one a step."""
    told: dict[Since, list[str]] = {}
    for worker in result.workers:
        begun = since(worker, result, story)
        if worker.verdict not in (*INNOCENT, Verdict.WARN) and begun.step is not None:
            told.setdefault(replace(begun, seconds=None), []).append(worker.name)
    items = sorted(told.items(), key=lambda item: item[0].step or 0)[:_MAX_MARKS]
    return [Mark(begun.step or 0, f"{listed(names)}: {begun}") for begun, names in items]


def _step_times(result: RunResult, story: Story) -> Iterator[Figure]:
    """Without the warm-up, where there is more."""
    series = {w.name: _warm(story.curve(w.name).busy_ms) for w in result.workers}
    lines = [
        Line(w.name, series[w.name], is_odd=w.slow is not None)
        for w in result.workers
        if series[w.name].buckets
    ]
    slow = [w for w in result.workers if w.slow is not None]
    marks = [
        Mark(w.slow.since_step, f"{w.name}: slow since step {w.slow.since_step:,}")
        for w in slow[:_MAX_MARKS]
        if w.slow
    ]
    about = "ms that a step kept its device busy"
    yield from chart.lines(
        "Step time", about, lines, _steps(series), "{:,.4g} ms", marks, from_zero=True
    )


def _warm(series: Series) -> Series:
    first = min(series.buckets, default=0)
    warm = {at: value for at, value in series.buckets.items() if at >= first + WARM_UP}
    is_enough = series.width == 1 and len(warm) > WARM_UP
    return Series(series.width, warm) if is_enough else series


def _timeline(result: RunResult, story: Story) -> Iterator[Figure]:
    bars = [bar for worker in result.workers if (bar := _bar_of_time(worker, result, story))]
    if bars:
        x = of_seconds(story.seconds(story.ended_ns))
        yield chart.bars("Worker by time", bars, x, (*_PHASES, _SILENT))


def _bar_of_time(worker: WorkerResult, result: RunResult, story: Story) -> Bar | None:
    curve = story.curve(worker.name)
    spans = curve.all_spans
    if not spans:
        return None
    seconds = story.seconds
    is_silent = result.exit_code == EXIT_HANG and worker.name in result.culprits
    last_ns = curve.before_end_ns if is_silent else curve.last_ns
    segments = [
        Segment(seconds(span.since_ns), seconds(min(span.until_ns, last_ns)), span.what)
        for span in spans
    ]
    note = f"until {seconds(last_ns):,.1f} s"
    if is_silent:
        segments.append(Segment(seconds(last_ns), seconds(story.ended_ns), "silent"))
        note = f"silent since {seconds(last_ns):,.1f} s, in {spans[-1].what}"
    return Bar(worker.name, segments, note)


def _shares(result: RunResult, story: Story) -> tuple[list[str], list[list[str]]]:
    """Where the time went, by the phases that each worker told: columns, rows."""
    told = {w.name: story.curve(w.name) for w in result.workers}
    spent = {name: curve.spent for name, curve in told.items() if sum(curve.spent.values())}
    parts = {}
    for name, phases in spent.items():
        train = phases.get("train", 0)
        waited = min(train, told[name].waited_ns)
        parts[name] = {**phases, "train": train - waited, "wait": waited}
    every = (*_PHASES, ("wait", "waiting for data"))
    kinds = [kind for kind in every if any(each.get(kind[0]) for each in parts.values())]
    rows = [[name, *_cells(each, kinds)] for name, each in parts.items()]
    return ["worker", "total", *(title for _, title in kinds)], rows


def _cells(parts: Mapping[str, int], kinds: Sequence[tuple[str, str]]) -> list[str]:
    total = sum(parts.values())
    shares = (_share(parts.get(name, 0), total) for name, _ in kinds)
    return [f"{total / 1e9:,.1f} s", *shares]


def _share(part: int, total: int) -> str:
    return f"{100 * part / total:.1f} %" if part else "0"


def _happened(story: Story) -> list[Mark]:
    """Events of all GPUs, by milliseconds since the run began."""
    marks = (
        Mark((event.ns - gpu.began_ns) / 1e6, f"{name}: {event.what}")
        for name, gpu in story.gpus.items()
        for event in gpu.happened
    )
    return sorted(marks, key=lambda mark: mark.x)


def _gpu_figures(result: RunResult, story: Story, happened: Sequence[Mark]) -> Iterator[Figure]:
    seconds = story.seconds(story.ended_ns)
    odd = {worker.name for worker in result.workers if worker.verdict not in INNOCENT}
    for figure, (title, unit, form) in _GPU_FIGURES.items():
        lines = [
            Line(name, gpu.figures[figure], is_odd=name in odd)
            for name, gpu in story.gpus.items()
            if figure in gpu.figures
        ]
        x, marks = of_seconds(seconds, unit=1000), happened[:_MAX_MARKS]
        yield from chart.lines(title, unit, lines, x, form, marks, from_zero=True)


def _throttling(story: Story) -> Iterator[Figure]:
    """Where clocks were held back, and why."""
    bars = []
    for name, gpu in story.gpus.items():
        held = [span for span in gpu.held_back if span.what]
        if held:
            reasons = "; ".join(dict.fromkeys(span.what for span in held))
            bars.append(Bar(name, [_held_back(span, story) for span in held], reasons))
    if bars:
        kinds = (("capped", POWER_CAP), ("held", "held back"))
        x = of_seconds(story.seconds(story.ended_ns))
        yield chart.bars("Clocks held back", bars, x, kinds)


def _held_back(span: Span, story: Story) -> Segment:
    """At its power cap a GPU at full load is well."""
    kind = "capped" if span.what == POWER_CAP else "held"
    return Segment(story.seconds(span.since_ns), story.seconds(span.until_ns), kind)
