"""The table of workers in report.html: a row for each, with its GPU and how hot it was. Pure."""

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from launcher.report.page.axes import Scale
from launcher.report.page.chart import Line, Mark, Spark, spark
from launcher.report.page.faults import since
from launcher.report.page.story import Story
from launcher.report.page.tables import Table, filled
from launcher.report.table import columns, number
from launcher.verdict.advice import troubled
from launcher.verdict.health import Health
from launcher.verdict.results import INNOCENT, RunResult, Verdict, WorkerResult
from model_check.utils.words import listed


class _Sparks(Struct, frozen=True):
    """A column of curves, all in one scale."""

    title: str
    figure: str
    text: Callable[[Health], str]
    from_zero: bool


_SPARKS = (
    _Sparks("hottest", "temperature_c", lambda h: number(h.temperature_max_c, "{} °C"), False),
    _Sparks("mean power", "power_w", lambda h: number(h.power_mean_w, "{:.0f} W"), True),
)
_LEAST_RANGE = 20.0
"""Degrees: a scale is not made of noise."""


def workers_table(result: RunResult, story: Story, said: Sequence[str]) -> Table:
    """Those first of which there is something to say. `said`: since when, as the head has it."""
    order = [*troubled(result), *(w for w in result.workers if w.verdict in INNOCENT)]
    names, (verdict, *_), *figures = columns(order)
    return filled(
        [
            names,
            (verdict, *((str(w.verdict), *_state(w, result, story, said)) for w in order)),
            ("device", *map(_device, order)),
            *(_spark_column(sparks, order, story) for sparks in _SPARKS),
            *figures,
        ]
    )


def not_blamed(result: RunResult) -> str:
    """Of whom nothing is known: `GPU0 and GPU1 were stopped: nothing is known against them`"""
    names = [worker.name for worker in result.workers if worker.verdict is Verdict.STOPPED]
    were, them = ("were", "them") if len(names) > 1 else ("was", "it")
    return f"{listed(names)} {were} stopped: nothing is known against {them}." if names else ""


def identity(worker: WorkerResult) -> tuple[str, ...]:
    """`NVIDIA H100`, `GPU-1f...`, `bus 0000:3b:00.0`, `serial 1320...`"""
    gpu = worker.gpu or {}
    named = [(word, gpu.get(key)) for word, key in (("bus ", "pci_bus_id"), ("serial ", "serial"))]
    parts = [gpu.get("name"), gpu.get("uuid"), *(f"{word}{id}" for word, id in named if id)]
    return tuple(str(part) for part in parts if part)


def since_when(worker: WorkerResult, result: RunResult, story: Story) -> str:
    """`step 57, 12.3 s after the start (2026-11-23 05:00:12)`"""
    begun = since(worker, result, story)
    return str(begun) if begun.seconds is None else f"{begun} ({story.clock(begun.seconds)})"


def _device(worker: WorkerResult) -> tuple[str, ...]:
    """What it is, how programs call it, and where it is."""
    model, *numbers = identity(worker) or (str(worker.detail.get("device_name", "")),)
    return tuple(filter(None, (model, *numbers[:1], ", ".join(numbers[1:]))))


def _state(
    worker: WorkerResult, result: RunResult, story: Story, said: Sequence[str]
) -> tuple[str, ...]:
    """What to do with it, and since when something is wrong, where the head does not say so."""
    if worker.verdict is Verdict.STOPPED:
        return tuple(filter(None, (worker.cause,)))
    begun = since_when(worker, result, story) if worker.verdict not in INNOCENT else ""
    told = f"since {begun}" if begun and begun not in said else ""
    return tuple(filter(None, (worker.do_now, told)))


def _spark_column(of: _Sparks, order: Sequence[WorkerResult], story: Story) -> Sequence[Any]:
    """Empty where nothing was told of a GPU."""
    series = [gpu.figures[of.figure] for gpu in story.gpus.values() if of.figure in gpu.figures]
    told = [value for each in series for extent in each.buckets.values() for value in extent]
    if not told:
        return (of.title, *("" for _ in order))
    low, high = 0 if of.from_zero else min(*told, max(told) - _LEAST_RANGE), max(told)
    y = Scale(low, high + 0.05 * (high - low or 1))
    return (of.title, *(_spark(of, worker, y, story) for worker in order))


def _spark(of: _Sparks, worker: WorkerResult, y: Scale, story: Story) -> Spark | str:
    gpu = story.gpus.get(worker.name)
    if gpu is None or of.figure not in gpu.figures or worker.telemetry is None:
        return ""
    x, text = Scale(0, story.seconds(story.ended_ns) * 1000), of.text(worker.telemetry)
    line = Line(worker.name, gpu.figures[of.figure], is_odd=worker.verdict not in INNOCENT)
    marks = [Mark((event.ns - gpu.began_ns) / 1e6, event.what) for event in gpu.happened]
    return spark(line, x, y, f"{worker.name}, {of.title} {text}", text, marks)
