"""The table of GPUs in report.html: a row of cells for each GPU that was watched. Pure."""

from collections.abc import Callable, Mapping, Sequence

from launcher.verdict.health import Health
from launcher.verdict.results import WorkerResult

_NA = "n/a"
_CELLS: Mapping[str, Callable[[Health], str]] = {
    "temperature (memory)": lambda h: (
        f"{_with(h.temperature_max_c, ' C')} ({_with(h.memory_temperature_max_c, ' C')})"
    ),
    "power / limit": lambda h: f"{_with(h.power_mean_w, ' W')} / {_with(h.power_limit_w, ' W')}",
    "SM clock / max": lambda h: f"{_with(h.sm_mean_mhz, '')} / {_with(h.sm_max_mhz, ' MHz')}",
    "busy": lambda h: _with(h.utilization_mean_percent, " %"),
    "memory": lambda h: _with(h.memory_used_max_mib, " MiB"),
    "clocks held back": lambda h: _shares(h.throttled_percent),
    "ECC new (life)": lambda h: (
        f"{_with(h.ecc_corrected_new, '')} corrected, "
        f"{_with(h.ecc_uncorrected_new, '')} uncorrected "
        f"({_with(h.ecc_corrected_total, '')}, {_with(h.ecc_uncorrected_total, '')})"
    ),
    "remapped rows": lambda h: _remapped(h),
    "PCIe": lambda h: (
        f"gen {_range(h.pcie_gen_min, h.pcie_gen)} of {_with(h.pcie_max_gen, '')}, "
        f"x{_range(h.pcie_width_min, h.pcie_width)} of {_with(h.pcie_max_width, '')}, "
        f"{_with(h.pcie_replays_new, '')} new replays"
    ),
    "NVLink errors": lambda h: _with(h.nvlink_errors_new, " new"),
    "Xid": lambda h: _xids(h.xids),
}
"""Title of a column -> its cell."""
COLUMNS = ("GPU", *_CELLS)


def rows(workers: Sequence[WorkerResult]) -> list[tuple[str, ...]]:
    """A row for each worker whose GPU was watched."""
    return [
        (worker.name, *(cell(worker.telemetry) for cell in _CELLS.values()))
        for worker in workers
        if worker.telemetry
    ]


def _with(value: float | None, unit: str) -> str:
    return _NA if value is None else f"{value:g}{unit}"


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
    told = f"{count} ({_with(health.remapped_new, ' new')})"
    return ", ".join([told, *(name for name, is_so in states if is_so)])
