"""Charts: what a template draws as inline SVG without text. It stretches with the page, and what is
to be read stands beside it as HTML, and once more in the picture's label. Colours are the page's.
Pure."""

from collections.abc import Iterator, Sequence

from msgspec import Struct

from launcher.report.page.axes import SIDE, Axis, Scale, of_values
from launcher.verdict.curves import Series
from model_check.utils.words import few

_NUM_STYLES = 5
"""Of lines that stand out, and of lines that can be told apart."""
_MAX_SINGLE = 4
"""More usual lines than these are one band, from the lowest to the highest of them."""
_MAX_BUCKETS, _MAX_SPARK = 90, 24
"""Of a line: what a page may weigh."""
_NUM_LOOKS, _APART = 16, SIDE // 50
"""Where lines are looked at, and how far they are apart where an eye can tell."""


class Line(Struct, frozen=True):
    name: str
    series: Series
    is_odd: bool = False
    """It stands out, in front of the others."""
    is_band: bool = False
    """It is several lines."""


class Mark(Struct, frozen=True):
    """Something that happened at x."""

    x: float
    what: str


class Segment(Struct, frozen=True):
    since: float
    until: float
    kind: str
    """A class of the style: `equal`, `train`, ..."""


class Bar(Struct, frozen=True):
    """A row of segments."""

    name: str
    segments: Sequence[Segment]
    note: str
    """What the bar says, in words."""


class Path(Struct, frozen=True):
    kind: str
    """Classes of the style."""
    d: str


class Point(Struct, frozen=True):
    percent: float
    what: str


class Rect(Struct, frozen=True):
    kind: str
    x: float
    width: float
    """Both in percent."""


class Row(Struct, frozen=True):
    name: str
    label: str
    """What it shows, for those who do not see it."""
    note: str
    rects: Sequence[Rect]


class Figure(Struct, frozen=True, kw_only=True):
    """What a template draws: lines (`paths`) with marks, or bars (`rows`)."""

    title: str
    about: str = ""
    label: str = ""
    """What the lines show, in numbers: for those who do not see it."""
    x_ticks: Sequence[Point]
    y_ticks: Sequence[Point] = ()
    paths: Sequence[Path] = ()
    marks: tuple[Point, ...] = ()
    rows: Sequence[Row] = ()
    legend: Sequence[tuple[str, str]]
    """(classes of the style, meaning)"""


class Spark(Struct, frozen=True):
    """A curve as small as a word, in a table; `text` stands beside it."""

    paths: Sequence[Path]
    label: str
    text: str


def lines(
    title: str,
    about: str,
    drawn: Sequence[Line],
    x: Axis,
    y_form: str,
    marks: Sequence[Mark] = (),
    *,
    from_zero: bool = False,
) -> Iterator[Figure]:
    """None where there is no value. `y_form`: how a value is told; `from_zero`: y begins there, so
    that heights are in proportion."""
    told = [*_banded([line for line in drawn if line.series.buckets])]
    if not told:
        return
    points = [[*line.series.thinned(_MAX_BUCKETS).points()] for line in told]
    low, high = min(p[1] for each in points for p in each), max(p[2] for e in points for p in e)
    y = of_values(low, high, from_zero=from_zero)
    kinds = _kinds(told)
    grid = "".join(f"M0 {SIDE - y.scale(tick.at)}h{SIDE}" for tick in y.ticks)
    grid += "".join(f"M{x.scale(tick.at)} 0v{SIDE}" for tick in x.ticks)
    paths = [Path("grid", grid)]
    for kind, each in zip(kinds, points, strict=True):
        d = _path(each, x.scale, y.scale)
        paths.append(Path(f"{kind}{'' if d.endswith('z') else ' open'}", d))
    if marks:
        paths.append(_marked(marks, x.scale))
    yield Figure(
        title=title,
        about=f"{about}; the lines lie on each other" if _is_one(points, y.scale) else about,
        label=_label(title, told, y_form, marks),
        x_ticks=_points(x),
        y_ticks=[Point(round(100 - y.scale.percent(tick.at), 1), tick.text) for tick in y.ticks],
        paths=paths,
        marks=tuple(Point(x.scale.percent(mark.x), mark.what) for mark in marks),
        legend=[(f"line {kind}", line.name) for kind, line in zip(kinds, told, strict=True)],
    )


def bars(title: str, drawn: Sequence[Bar], x: Axis, kinds: Sequence[tuple[str, str]]) -> Figure:
    """A bar a row. `kinds`: (class of a segment, its meaning) for the legend. A note that all rows
    share stands once."""
    notes = {bar.note for bar in drawn}
    shared = drawn[0].note if len(notes) == 1 and len(drawn) > 1 else ""
    seen = {segment.kind for bar in drawn for segment in bar.segments}
    return Figure(
        title=title,
        about=f"all {shared}" if shared else "",
        x_ticks=_points(x),
        rows=[_row(bar, x.scale, "" if shared else bar.note) for bar in drawn],
        legend=[each for each in kinds if each[0] in seen],
    )


def spark(
    line: Line, x: Scale, y: Scale, label: str, text: str, marks: Sequence[Mark] = ()
) -> Spark:
    kind = "odd odd0" if line.is_odd else "usual u0"
    drawn = [Path(f"{kind} open", _path([*_middles(line.series)], x, y))]
    return Spark([*drawn, *([_marked(marks, x)] if marks else [])], label, text)


def _banded(drawn: Sequence[Line]) -> Iterator[Line]:
    """Usual lines, which are one where they are too many; then those that stand out."""
    usual = [line for line in drawn if not line.is_odd]
    if len(usual) > _MAX_SINGLE:
        names = few([line.name for line in usual])
        usual = [Line(f"{names}: from the lowest to the highest", _hull(usual), is_band=True)]
    yield from usual
    yield from (line for line in drawn if line.is_odd)


def _hull(drawn: Sequence[Line]) -> Series:
    each = [line.series.thinned(_MAX_BUCKETS) for line in drawn]
    hull = Series(max(series.width for series in each))
    for series in each:
        for at, (low, high) in series.buckets.items():
            for value in (low, high):
                hull.add(at * series.width, value)
    return Series(hull.width, dict(sorted(hull.buckets.items())))


def _is_one(lines: Sequence[Sequence[tuple[float, float, float]]], y: Scale) -> bool:
    """Whether nobody can tell the lines apart: at some x of the shortest."""
    first, last = max(each[0][0] for each in lines), min(each[-1][0] for each in lines)
    for at in range(_NUM_LOOKS if len(lines) > 1 else 0):
        x = first + (last - first) * at / (_NUM_LOOKS - 1)
        seen = [y(min(each, key=lambda point: abs(point[0] - x))[2]) for each in lines]
        if max(seen) - min(seen) > _APART:
            return False
    return len(lines) > 1


def _kinds(told: Sequence[Line]) -> list[str]:
    """Classes of the style: who stands out, and who not, each in a colour of its own."""
    odd = [line for line in told if line.is_odd]
    usual = [line for line in told if not line.is_odd]
    kinds = ["band" if line.is_band else f"usual u{at}" for at, line in enumerate(usual)]
    return kinds + [f"odd odd{at % _NUM_STYLES}" for at in range(len(odd))]


def _label(title: str, told: Sequence[Line], form: str, marks: Sequence[Mark]) -> str:
    """`Loss. GPU0: 6.26 first, 6.24 last, 6.2 to 6.3. GPU3: step 57`"""
    said = (f"{line.name}: {_in_numbers(line.series, form)}" for line in told)
    return ". ".join([title, *said, *(mark.what for mark in marks)])


def _in_numbers(series: Series, form: str) -> str:
    values = [*series.buckets.values()]
    least, most = min(low for low, _ in values), max(high for _, high in values)
    first, last = (form.format((low + high) / 2) for low, high in (values[0], values[-1]))
    return f"{first} first, {last} last, {form.format(least)} to {form.format(most)}"


def _points(x: Axis) -> list[Point]:
    return [Point(x.scale.percent(tick.at), tick.text) for tick in x.ticks]


def _marked(marks: Sequence[Mark], x: Scale) -> Path:
    return Path("mark", "".join(f"M{x(mark.x)} 0v{SIDE}" for mark in marks))


def _middles(series: Series) -> Iterator[tuple[float, float, float]]:
    for at, low, high in series.thinned(_MAX_SPARK).points():
        yield at, (low + high) / 2, (low + high) / 2


def _path(points: Sequence[tuple[float, float, float]], x: Scale, y: Scale) -> str:
    """Along the highest value of each bucket; where these have more than one, back along the
    lowest: a band."""
    upper = [(x(at), SIDE - y(high)) for at, _, high in points]
    lower = [(x(at), SIDE - y(low)) for at, low, _ in points]
    if len(points) == 1:  # a single value is a dash
        upper.append((upper[0][0] + SIDE // 100, upper[0][1]))
    if lower == upper[: len(lower)]:
        return _along(upper)
    return f"{_along([*upper, *lower[::-1]])}z"


def _along(points: Sequence[tuple[int, int]]) -> str:
    """By how much each is away from the one before: half as long as where it is."""
    (x, y), d = points[0], []
    for to_x, to_y in points[1:]:
        d.append(f"{to_x - x} {to_y - y}")
        x, y = to_x, to_y
    return f"M{points[0][0]} {points[0][1]}l{' '.join(d).replace(' -', '-')}"


def _row(bar: Bar, x: Scale, note: str) -> Row:
    rects = [_rect(segment, x) for segment in bar.segments]
    return Row(bar.name, f"{bar.name}: {bar.note}", note, rects)


def _rect(segment: Segment, x: Scale) -> Rect:
    since, until = x.percent(segment.since), x.percent(segment.until)
    return Rect(segment.kind, since, max(0.1, round(until - since, 1)))
