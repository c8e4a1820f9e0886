"""The page of a comparison: arms side by side, and links to the page of each training. Pure."""

from collections.abc import Iterator, Sequence

from msgspec import Struct, field

from launcher.report.page.chart import Line, lines
from launcher.report.page.markup import SIGNS, badge, document, facts, section, table, text
from launcher.report.table import number
from launcher.verdict.comparison import Arm, ComparisonResult, Gates, Spread, is_loss
from launcher.verdict.curves import Extent, Series
from model_check.config.fields import setting_text
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
    names = listed([arm.name for arm in result.arms])
    title = f"{result.verdict}: {names} on {result.run.get('host', '')}"
    return document(title, _parts(result, curves, title))


def _parts(result: ComparisonResult, curves: Sequence[TrialCurves], title: str) -> Iterator[str]:
    yield f'<header class="{result.verdict}"><h1>{SIGNS[result.verdict]} {text(title)}</h1>'
    yield from facts(_facts(result))
    yield "</header>"
    yield from section("Side by side", _side_by_side(result))
    yield from section("What differs", _differing(result))
    yield from section("Curves", _curves(result, curves))
    yield from section("Gates", _gates(result.arms))
    yield from section("Trainings", _trainings(result))


def _facts(result: ComparisonResult) -> Iterator[tuple[str, str]]:
    run = result.run
    yield "what", text(result.summary)
    yield "seeds", text(", ".join(map(str, result.seeds)))
    yield "preset", text(f"{run['preset']}, {run['device']}")
    yield "note", "<br>".join(map(text, result.notes))
    yield "started", text(run["started_at"])
    yield "command", text(" ".join(run["command"]))
    yield "exit code", text(result.exit_code)


def _side_by_side(result: ComparisonResult) -> Iterator[str]:
    """A row for each figure, a column for each arm and, from the second on, for how it stands to
    the first."""
    arms = result.arms
    names = list(dict.fromkeys(name for arm in arms for name in arm.figures))
    if not names:
        return
    heads = [
        "",
        *(arm.name for arm in arms),
        *(f"{a.name} beside {arms[0].name}" for a in arms[1:]),
    ]
    yield from table(heads, (_figure_row(name, arms) for name in names), "figures")
    yield (
        f"<p>End loss: the mean over the last tenth of the steps. Beside {text(arms[0].name)}: by "
        "how much a loss is higher, how many times as much another figure is; seed by seed, since "
        "equal seeds have equal data and equal first values.</p>"
    )
    if (num := len(result.seeds)) > 1:
        yield f"<p>± is the standard deviation over {num} seeds.</p>"


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


def _differing(result: ComparisonResult) -> Iterator[str]:
    differing = result.run["differing"]
    if not differing:
        yield "<p>No setting: the arms are the same, and what differs above is noise.</p>"
        return
    rows = ((name, *map(setting_text, values.values())) for name, values in differing.items())
    yield from table(["setting", *(arm.name for arm in result.arms)], rows)


def _curves(result: ComparisonResult, curves: Sequence[TrialCurves]) -> Iterator[str]:
    """A line for each arm."""
    steps = max((round(at) for c in curves for at, _, _ in c.loss.points()), default=0)
    num = len(result.seeds)
    about = "" if num == 1 else f"mean of {num} seeds"
    arms = _by_arm(curves)
    loss = {name: _mean([each.loss for each in own]) for name, own in arms.items()}
    rate = {name: _mean([each.tokens_per_s for each in own]) for name, own in arms.items()}
    yield '<div class="arms">'
    for title, form, series in (("Loss", "{:.3f}", loss), ("Tokens a second", "{:,.0f}", rate)):
        drawn = [Line(name, each, is_odd=at > 0) for at, (name, each) in enumerate(series.items())]
        yield from lines(title, about, drawn, ("step 0", f"step {steps:,}"), form)
    yield "</div>"


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


def _gates(arms: Sequence[Arm]) -> Iterator[str]:
    if not any(arm.gates for arm in arms):
        return
    yield (
        "<p>The share of each head's output that comes from the memory: 0, the segment alone; 1, "
        "the memory alone.</p>"
    )
    for arm in arms:
        for gates in arm.gates:
            seed = f", seed {gates.seed}" if len(arm.gates) > 1 else ""
            yield f"<h3>{text(arm.name)}{seed}</h3>"
            yield from _histogram(gates)
            yield from _by_head(gates)


def _histogram(gates: Gates) -> Iterator[str]:
    """Bars by tenths of the share."""
    num, most = sum(gates.histogram), max(gates.histogram)
    yield (
        f"<p>{num} heads: {gates.below:.0%} below 0.1, the segment alone; {gates.above:.0%} above "
        "0.9, the memory alone.</p>"
    )
    bars = (
        f'<div>{count or ""}<i style="height:{75 * count // most}%"></i>{at / 10:.1f}</div>'
        for at, count in enumerate(gates.histogram)
    )
    yield f'<div class="bins">{"".join(bars)}</div>'


def _by_head(gates: Gates) -> Iterator[str]:
    """Each share in a cell that is as blue."""
    widest = max(map(len, gates.shares))
    columns, rows = [f"head {at}" for at in range(widest)], gates.shares
    if widest > _MAX_HEADS:
        columns = ["mean", "least", "most"]
        rows = [[sum(layer) / len(layer), min(layer), max(layer)] for layer in rows]
    heads = "".join(f"<th>{column}</th>" for column in ("layer", *columns))
    yield f'<div class="scroll" tabindex="0"><table class="heat"><tr>{heads}</tr>'
    for at, row in enumerate(rows):
        yield f"<tr><td>{at}</td>{''.join(map(_heat, row))}</tr>"
    yield "</table></div>"


def _heat(share: float) -> str:
    blue = f"background:color-mix(in srgb, var(--blue) {0.5 * share:.0%}, var(--paper))"
    return f'<td style="{blue}">{share:.2f}</td>'


def _trainings(result: ComparisonResult) -> Iterator[str]:
    yield "<ul>"
    for arm in result.arms:
        for trial in arm.trials:
            link = f'<a href="{text(trial.directory)}/report.html">{text(trial.directory)}</a>'
            what = f"{text(trial.measured.summary)} ({text(trial.measured.exit_code)})"
            where = text(listed(trial.workers))
            yield f"<li>{link} {badge(trial.measured.verdict)} on {where}: {what}</li>"
    yield "</ul>"
