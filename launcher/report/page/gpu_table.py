"""The table of GPUs in report.html: a row of cells for each GPU that was watched. Pure."""

from collections.abc import Callable, Mapping, Sequence

from launcher.report.page.tables import Table, filled
from launcher.verdict.health import Health
from launcher.verdict.results import WorkerResult

_NA = "n/a"
_CELLS: Mapping[str, Callable[[Health], str]] = {
    "hottest": lambda h: _with(h.temperature_max_c, " °C"),
    "its memory": lambda h: _with(h.memory_temperature_max_c, " °C"),
    "power / limit": lambda h: f"{_with(h.power_mean_w, ' W')} / {_with(h.power_limit_w, ' W')}",
    "SM clock / max": lambda h: f"{_with(h.sm_mean_mhz, '')} / {_with(h.sm_max_mhz, ' MHz')}",
    "busy": lambda h: _with(h.utilization_mean_percent, " %"),
    "memory": lambda h: _with(h.memory_used_max_mib, " MiB"),
    "clocks held back": lambda h: _shares(h.throttled_percent),
    "memory errors (ECC), new": lambda h: _known(
        (h.ecc_corrected_new, f"{h.ecc_corrected_new} corrected"),
        (h.ecc_uncorrected_new, f"{h.ecc_uncorrected_new} uncorrected"),
    ),
    "in its life": lambda h: _known(
        (h.ecc_corrected_total, f"{h.ecc_corrected_total} corrected"),
        (h.ecc_uncorrected_total, f"{h.ecc_uncorrected_total} uncorrected"),
    ),
    "remapped rows": lambda h: _remapped(h),
    "PCIe": lambda h: _known(
        (h.pcie_gen, f"gen {_range(h.pcie_gen_min, h.pcie_gen)} of {_with(h.pcie_max_gen, '')}"),
        (
            h.pcie_width,
            f"x{_range(h.pcie_width_min, h.pcie_width)} of {_with(h.pcie_max_width, '')}",
        ),
        (h.pcie_replays_new, f"{h.pcie_replays_new} new replays"),
    ),
    "NVLink errors": lambda h: _with(h.nvlink_errors_new, " new"),
    "Xid": lambda h: _xids(h.xids),
}
"""Title of a column -> its cell."""


def table(workers: Sequence[WorkerResult]) -> Table:
    """A row for each worker whose GPU was watched. A column of which nothing is known is left
    out."""
    watched = [(worker.name, worker.telemetry) for worker in workers if worker.telemetry]
    columns = [("GPU", *(name for name, _ in watched))]
    columns += [(title, *(cell(health) for _, health in watched)) for title, cell in _CELLS.items()]
    return filled(column for column in columns if {*column[1:]} != {_NA})


def _with(value: float | None, unit: str) -> str:
    return _NA if value is None else f"{value:g}{unit}"


def _known(*parts: tuple[float | None, str]) -> str:
    """Of (figure, what is told of it) those whose figure is known."""
    return ", ".join(text for figure, text in parts if figure is not None) or _NA


def _range(least: int | None, most: int | None) -> str:
    return _with(most, "") if least in (None, most) else f"{least} to {_with(most, '')}"


def _shares(percents: dict[str, float] | None) -> str:
    if percents is None:
        return _NA
    shares = [f"{reason} {percent:g} %" for reason, percent in percents.items() if reason != "idle"]
    return ", ".join(shares) or "never"


def _xids(counts: dict[int, int] | None) -> str:
    if counts is None:
        return _NA
    return ", ".join(f"{xid} ({count} x)" for xid, count in counts.items()) or "none"


def _remapped(health: Health) -> str:
    if health.remapped_corrected is None and health.remapped_uncorrected is None:
        return _NA
    count = (health.remapped_corrected or 0) + (health.remapped_uncorrected or 0)
    states = [("pending", health.remap_pending), ("failed", health.remap_failed)]
    told = f"{count}" if health.remapped_new is None else f"{count} ({health.remapped_new} new)"
    return ", ".join([told, *(name for name, is_so in states if is_so)])
