"""Charts as inline SVG without text: it stretches with the page, and what is to be read stands
beside it as HTML. Colours are the page's. Pure."""

from collections.abc import Iterator, Sequence

from msgspec import Struct

from launcher.report.page.markup import text
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
) -> Iterator[str]:
    """A figure of lines. `x_names`: what stands at its left and right end; `y_form`: how a value is
    written; `span`: from where to where x goes, where that is more than the lines have;
    `from_zero`: y begins there, so that heights are in proportion."""
    points = {line.name: list(_thinned(line, drawn).points()) for line in drawn}
    every = [point for each in points.values() for point in each]
    if not every:
        return
    x = span or Scale(min(p[0] for p in every), max(p[0] for p in every))
    y = Scale(0 if from_zero else min(p[1] for p in every), max(p[2] for p in every))
    yield from _head(title, about)
    top, bottom = y_form.format(y.high), y_form.format(y.low)
    yield f'<div class="y"><span>{top}</span><span>{bottom}</span></div>'
    yield f'<div class="plot">{_svg(title)}'
    odd = [line.name for line in drawn if line.is_odd]
    for line in sorted(drawn, key=lambda line: line.is_odd):
        kind = f"odd odd{odd.index(line.name) % _NUM_STYLES}" if line.is_odd else "usual"
        path = _path(points[line.name], x, y)
        yield f'<path class="{kind}{"" if path.endswith("z") else " open"}" d="{path}"/>'
    yield f"{_verticals(marks, x)}</svg>{_numbers(marks, x)}</div>{_ends(x_names)}"
    yield f"{_legend(drawn)}{_told(marks)}</figure>"


def bars(
    title: str,
    drawn: Sequence[Bar],
    x_names: tuple[str, str],
    x: Scale,
    kinds: Sequence[tuple[str, str]],
) -> Iterator[str]:
    """A figure with a bar a row. `kinds`: (class of a segment, its meaning) for the legend."""
    yield from _head(title)
    for bar in drawn:
        rects = "".join(_rect(segment, x) for segment in bar.segments)
        svg = f"{_svg(f'{bar.name}: {bar.note}')}{rects}</svg>"
        yield f'<div class="name">{text(bar.name)}</div><div class="bar">{svg}</div>'
        yield f'<div class="note">{text(bar.note)}</div>'
    keys = "".join(f'<li><i class="{kind}"></i>{text(meaning)}</li>' for kind, meaning in kinds)
    yield f'{_ends(x_names)}<ul class="legend">{keys}</ul></figure>'


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


def _rect(segment: Segment, x: Scale) -> str:
    since, until = x(segment.since), x(segment.until)
    return f'<rect class="{segment.kind}" x="{since}" width="{max(1, until - since)}"/>'


def _verticals(marks: Sequence[Mark], x: Scale) -> str:
    path = "".join(f"M{x(mark.x)} 0V{_SIDE}" for mark in marks)
    return f'<path class="mark" d="{path}"/>' if path else ""


def _numbers(marks: Sequence[Mark], x: Scale) -> str:
    spans = (f'<b style="left:{x(m.x) / 10}%">{n}</b>' for n, m in enumerate(marks, 1))
    return "".join(spans)


def _told(marks: Sequence[Mark]) -> str:
    items = "".join(f"<li>{text(mark.what)}</li>" for mark in marks)
    return f'<ol class="marks">{items}</ol>' if items else ""


def _legend(drawn: Sequence[Line]) -> str:
    usual = [line.name for line in drawn if not line.is_odd]
    odd = [line.name for line in drawn if line.is_odd]
    styles = (f"line odd odd{at % _NUM_STYLES}" for at in range(len(odd)))
    keys = [f'<li><i class="{s}"></i>{text(n)}</li>' for s, n in zip(styles, odd, strict=True)]
    if usual:
        keys.insert(0, f'<li><i class="line usual"></i>{text(", ".join(usual))}</li>')
    return f'<ul class="legend">{"".join(keys)}</ul>'


def _head(title: str, about: str = "") -> Iterator[str]:
    yield f"<figure><figcaption><b>{text(title)}</b> {text(about)}</figcaption>"


def _svg(label: str) -> str:
    box = f'viewBox="0 0 {_SIDE} {_SIDE}" preserveAspectRatio="none"'
    return f'<svg role="img" aria-label="{text(label)}" {box}>'


def _ends(names: tuple[str, str]) -> str:
    return f'<div class="x"><span>{text(names[0])}</span><span>{text(names[1])}</span></div>'
