"""Charts: what a template draws as inline SVG without text. It stretches with the page, and what is
to be read stands beside it as HTML. Colours are the page's. Pure."""

from collections.abc import Iterator, Sequence

from msgspec import Struct

from launcher.verdict.curves import Series

_SIDE = 1000
"""Of the square in which each picture is drawn, whatever becomes of its shape."""
_NUM_STYLES = 5
"""Of lines that stand out."""
_MAX_ODD, _ALL_USUAL = 300, 1500
"""Buckets of each line that stands out; of all others together: what a page may weigh."""


class Line(Struct, frozen=True):
    name: str
    series: Series
    is_odd: bool = False
    """It stands out, in front of the others."""


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


class Scale(Struct, frozen=True):
    low: float
    high: float

    def __call__(self, value: float) -> int:
        width = (self.high - self.low) or 1.0
        return round(_SIDE * min(1.0, max(0.0, (value - self.low) / width)))


class Path(Struct, frozen=True):
    kind: str
    """Classes of the style."""
    d: str


class Point(Struct, frozen=True):
    percent: float
    what: str


class Rect(Struct, frozen=True):
    kind: str
    x: int
    width: int


class Row(Struct, frozen=True):
    name: str
    note: str
    rects: Sequence[Rect]


class Figure(Struct, frozen=True, kw_only=True):
    """What a template draws: lines (`paths`) with marks, or bars (`rows`)."""

    title: str
    about: str = ""
    x_names: tuple[str, str]
    """What stands at the left and the right end."""
    paths: Sequence[Path] = ()
    top: str = ""
    bottom: str = ""
    marks: Sequence[Point] = ()
    rows: Sequence[Row] = ()
    legend: Sequence[tuple[str, str]]
    """(classes of the style, meaning)"""


def lines(
    title: str,
    about: str,
    drawn: Sequence[Line],
    x_names: tuple[str, str],
    y_form: str,
    marks: Sequence[Mark] = (),
    span: Scale | None = None,
    *,
    from_zero: bool = False,
) -> Iterator[Figure]:
    """None where there is no value. `y_form`: how a value is written; `span`: from where to where x
    goes, where that is more than the lines have; `from_zero`: y begins there, so that heights are
    in proportion."""
    points = {line.name: list(_thinned(line, drawn).points()) for line in drawn}
    every = [point for each in points.values() for point in each]
    if not every:
        return
    x = span or Scale(min(p[0] for p in every), max(p[0] for p in every))
    y = Scale(0 if from_zero else min(p[1] for p in every), max(p[2] for p in every))
    odd = [line.name for line in drawn if line.is_odd]
    paths = []
    for line in sorted(drawn, key=lambda line: line.is_odd):
        kind = f"odd odd{odd.index(line.name) % _NUM_STYLES}" if line.is_odd else "usual"
        path = _path(points[line.name], x, y)
        paths.append(Path(f"{kind}{'' if path.endswith('z') else ' open'}", path))
    if marks:
        paths.append(Path("mark", "".join(f"M{x(mark.x)} 0V{_SIDE}" for mark in marks)))
    yield Figure(
        title=title,
        about=about,
        x_names=x_names,
        paths=paths,
        top=y_form.format(y.high),
        bottom=y_form.format(y.low),
        marks=[Point(x(mark.x) / 10, mark.what) for mark in marks],
        legend=_legend(drawn),
    )


def bars(
    title: str,
    drawn: Sequence[Bar],
    x_names: tuple[str, str],
    x: Scale,
    kinds: Sequence[tuple[str, str]],
) -> Figure:
    """A bar a row. `kinds`: (class of a segment, its meaning) for the legend."""
    rows = [Row(bar.name, bar.note, [_rect(each, x) for each in bar.segments]) for bar in drawn]
    return Figure(title=title, x_names=x_names, rows=rows, legend=kinds)


def _thinned(line: Line, drawn: Sequence[Line]) -> Series:
    num_usual = sum(not other.is_odd for other in drawn) or 1
    return line.series.thinned(_MAX_ODD if line.is_odd else min(_MAX_ODD, _ALL_USUAL // num_usual))


def _path(points: Sequence[tuple[float, float, float]], x: Scale, y: Scale) -> str:
    """Along the highest value of each bucket; where these have more than one, back along the
    lowest: a band."""
    upper = [(x(at), _SIDE - y(high)) for at, _, high in points]
    lower = [(x(at), _SIDE - y(low)) for at, low, _ in points]
    if len(points) == 1:  # a single value is a dash
        upper.append((upper[0][0] + _SIDE // 100, upper[0][1]))
    if lower == upper[: len(lower)]:
        return f"M{_joined(upper)}"
    return f"M{_joined(upper)}L{_joined(lower[::-1])}z"


def _joined(points: Sequence[tuple[int, int]]) -> str:
    return "L".join(f"{at} {value}" for at, value in points)


def _rect(segment: Segment, x: Scale) -> Rect:
    since, until = x(segment.since), x(segment.until)
    return Rect(segment.kind, since, max(1, until - since))


def _legend(drawn: Sequence[Line]) -> list[tuple[str, str]]:
    usual = ", ".join(line.name for line in drawn if not line.is_odd)
    odd = [line.name for line in drawn if line.is_odd]
    keys = [("line usual", usual)] if usual else []
    return keys + [(f"line odd odd{at % _NUM_STYLES}", name) for at, name in enumerate(odd)]
