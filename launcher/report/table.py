"""The table of workers that ends a run: its columns, and rows that line up on a terminal. Pure."""

from collections.abc import Sequence

from launcher.verdict.results import WorkerResult

COLUMNS = ("worker", "verdict", "steps", "1st loss", "last", "tokens/s", "GiB", "time")
"""Of the page and the terminal alike; GiB: the peak of the GPU's memory."""
_NUM_LEFT = 2
"""The first two columns hold words and start at the left; the others hold numbers."""
_UNKNOWN = "n/a"
_WIDTH = 80 - len("[launcher] ")
_GAPS = (3, 2, 1)


def table(workers: Sequence[WorkerResult]) -> list[str]:
    """The lines of the closing table, without a prefix; they fit a terminal of 80 columns."""
    head, *lines = aligned([*zip(*columns(workers), strict=True)], _NUM_LEFT, _WIDTH)
    return [head, "─" * max(map(len, [head, *lines])), *lines]


def aligned(rows: Sequence[Sequence[str]], num_left: int, max_width: int) -> list[str]:
    """The rows as lines whose cells stand below each other: the first `num_left` columns start at
    the left, the others end at the right. The widest gap that keeps to `max_width` is taken."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    room = max_width - sum(widths)
    gap = next((gap for gap in _GAPS if gap * (len(widths) - 1) <= room), _GAPS[-1])
    return [_line(cells, widths, num_left, gap) for cells in rows]


def columns(workers: Sequence[WorkerResult]) -> list[tuple[str, ...]]:
    """Title and cells of each column, as the terminal and the page show them. Figures of which
    nothing is known (a foreign command trains no steps) are left out."""
    every = list(zip(COLUMNS, *map(row, workers), strict=True))
    known = [cells for cells in every[_NUM_LEFT:] if {*cells[1:]} - {_UNKNOWN, "0"}]
    return [*every[:_NUM_LEFT], *known]


def row(worker: WorkerResult) -> tuple[str, ...]:
    """One worker's cells."""
    peak_bytes = worker.peak_memory_bytes
    return (
        worker.name,
        str(worker.verdict),
        str(worker.steps),
        number(worker.loss_first),
        number(worker.loss_last),
        number(worker.tokens_per_s, "{:,.0f}"),
        number(peak_bytes and peak_bytes / 2**30, "{:.2f}"),
        _duration(worker.duration_s),
    )


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 1000 else f"{seconds / 3600:.2f} h"


def _line(cells: Sequence[str], widths: Sequence[int], num_left: int, gap: int) -> str:
    padded = [
        cell.ljust(width) if at < num_left else cell.rjust(width)
        for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return (" " * gap).join(padded).rstrip()


def number(value: float | str | None, form: str = "{:.4f}") -> str:
    """A figure in this form. One that is not finite is text already; one that is unknown is n/a."""
    if value is None:
        return _UNKNOWN
    return value if isinstance(value, str) else form.format(value)
