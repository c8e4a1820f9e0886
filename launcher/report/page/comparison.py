"""The page of a comparison: arms side by side, and links to the page of each training. Pure."""

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct, field

from launcher.report.page.axes import of_steps
from launcher.report.page.chart import Figure, Line, lines
from launcher.report.page.render import Link, rendered
from launcher.report.table import number
from launcher.verdict.comparison import Arm, ComparisonResult, Gates, Spread, is_loss
from launcher.verdict.curves import Extent, Series
from model_check.config.fields import setting_text
from model_check.utils.project_files import PROGRAM
from model_check.utils.words import listed

_FIGURES = {
    "end_loss": ("end loss", "{:.4f}", 1),
    "tokens_per_s": ("tokens/s", "{:,.0f}", 1),
    "peak_memory_bytes": ("peak memory, GiB", "{:.2f}", 2**30),
    "duration_s": ("time, s", "{:.1f}", 1),
    "parameters": ("parameters", "{:,.0f}", 1),
}
"""Name in the result -> title, form and unit. What is not here is a loss on a split."""
_MAX_HEADS = 32
"""A wider table of gates would tell nobody anything."""


class TrialCurves(Struct):
    """How one training of an arm went, by its first worker."""

    arm: str
    loss: Series = field(default_factory=Series)
    tokens_per_s: Series = field(default_factory=Series)
    end_loss: float | None = None


def comparison_page(result: ComparisonResult, curves: Sequence[TrialCurves]) -> str:
    """The whole document."""
    arms, first = result.arms, result.arms[0].name
    names = [arm.name for arm in arms]
    figure_names = list(dict.fromkeys(name for arm in arms for name in arm.figures))
    differing = result.run["differing"]
    return rendered(
        "comparison.html",
        title=f"{result.verdict}: {listed(names)} on {result.run.get('host', '')}",
        verdict=result.verdict,
        answers=list(_answers(result)),
        columns=["figure", *names, *(f"{name} beside {first}" for name in names[1:])],
        side_by_side=[_figure_row(name, arms) for name in figure_names],
        first=first,
        num_seeds=len(result.seeds),
        differing_columns=["setting", *names],
        differing=[(n, *map(setting_text, values.values())) for n, values in differing.items()],
        curves=list(_curves(result, curves)),
        gates=[_gates(arm, each) for arm in arms for each in arm.gates],
        trainings=list(_trainings(result)),
        command=f"{PROGRAM} {shlex.join(result.run['command'])}",
    )


def _answers(result: ComparisonResult) -> Iterator[tuple[str, Any]]:
    run = result.run
    yield "do now", result.do_now
    yield "what", result.summary
    yield "seeds", ", ".join(map(str, result.seeds))
    yield "preset", f"{run['preset']}, {run['device']}"
    yield "note", tuple(result.notes)
    yield "started", run["started_at"]
    yield "exit code", str(result.exit_code)


def _figure_row(name: str, arms: Sequence[Arm]) -> tuple[str, ...]:
    title, form, unit = _FIGURES.get(name, (f"loss on {name.removeprefix('val/')}", "{:.4f}", 1))
    beside = "{:+.4f}" if is_loss(name) else "{:.2f}x"
    own = (_cell(arm.figures.get(name), form, unit) for arm in arms)
    others = (_cell(arm.beside.get(name), beside, 1) for arm in arms[1:])
    return (title, *own, *others)


def _cell(spread: Spread | None, form: str, unit: float) -> str:
    if spread is None:
        return number(None)
    mean = form.format(spread.mean / unit)
    if spread.std is None or spread.least == spread.most:
        return mean
    return f"{mean} ± {form.format(spread.std / unit).removeprefix('+')}"


def _curves(result: ComparisonResult, curves: Sequence[TrialCurves]) -> Iterator[Figure]:
    """A line for each arm."""
    steps = max((round(at) for c in curves for at, _, _ in c.loss.points()), default=0)
    num = len(result.seeds)
    about = "by step" if num == 1 else f"by step, mean of {num} seeds"
    arms = _by_arm(curves)
    loss = {name: _mean([each.loss for each in own]) for name, own in arms.items()}
    rate = {name: _mean([each.tokens_per_s for each in own]) for name, own in arms.items()}
    for title, form, series in (("Loss", "{:.3f}", loss), ("Tokens a second", "{:,.0f}", rate)):
        drawn = [Line(name, each, is_odd=at > 0) for at, (name, each) in enumerate(series.items())]
        yield from lines(title, about, drawn, of_steps(0, steps), form)


def _by_arm(curves: Sequence[TrialCurves]) -> dict[str, list[TrialCurves]]:
    by_arm: dict[str, list[TrialCurves]] = {}
    for each in curves:
        by_arm.setdefault(each.arm, []).append(each)
    return by_arm


def _mean(every: Sequence[Series]) -> Series:
    """At each step over the trainings that came so far."""
    width = max(series.width for series in every)
    extents: dict[int, list[Extent]] = {}
    for series in every:
        for at, low, high in series.points():
            extents.setdefault(int(at) // width, []).append((low, high))
    whole = Series(width)
    for bucket, told in extents.items():
        for values in zip(*told, strict=True):
            whole.add(bucket * width, sum(values) / len(values))
    return whole


def _gates(arm: Arm, gates: Gates) -> dict[str, Any]:
    """A histogram by tenths of the share, and each share in a cell that is as blue."""
    seed = f", seed {gates.seed}" if len(arm.gates) > 1 else ""
    widest, rows = max(map(len, gates.shares)), gates.shares
    columns = [f"head {at}" for at in range(widest)]
    if widest > _MAX_HEADS:
        columns = ["mean", "least", "most"]
        rows = [[sum(layer) / len(layer), min(layer), max(layer)] for layer in rows]
    most = max(gates.histogram)
    return {
        "title": f"{arm.name}{seed}",
        "num": sum(gates.histogram),
        "below": f"{gates.below:.0%}",
        "above": f"{gates.above:.0%}",
        "bins": [
            {"count": count, "percent": 75 * count // most, "since": f"{at / 10:.1f}"}
            for at, count in enumerate(gates.histogram)
        ],
        "columns": columns,
        "layers": [
            [{"share": f"{share:.2f}", "blue": f"{0.5 * share:.0%}"} for share in row]
            for row in rows
        ],
    }


def _trainings(result: ComparisonResult) -> Iterator[tuple[Any, ...]]:
    for arm in result.arms:
        for trial in arm.trials:
            page, measured = f"{trial.directory}/report.html", trial.measured
            who, code = listed(trial.workers), str(measured.exit_code)
            yield Link(trial.directory, page), measured.verdict, who, code, measured.summary
