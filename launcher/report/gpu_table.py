"""The table of GPUs in report.html: what telemetry said of each, in cells. Pure."""

from collections.abc import Sequence

from launcher.verdict.health import Health
from launcher.verdict.results import WorkerResult

COLUMNS = (
    "GPU",
    "temperature (memory)",
    "power / limit",
    "SM clock / max",
    "busy",
    "memory",
    "clocks held back",
    "ECC new (life)",
    "remapped rows",
    "PCIe",
    "Xid",
)
_NA = "n/a"


def rows(workers: Sequence[WorkerResult]) -> list[tuple[str, ...]]:
    """A row for each worker whose GPU was watched."""
    return [_row(worker.name, worker.telemetry) for worker in workers if worker.telemetry]


def _row(name: str, health: Health) -> tuple[str, ...]:
    return (
        name,
        f"{_with(health.temperature_max_c, ' C')} ({_with(health.memory_temperature_max_c, ' C')})",
        f"{_with(health.power_mean_w, ' W')} / {_with(health.power_limit_w, ' W')}",
        f"{_with(health.sm_mean_mhz, '')} / {_with(health.sm_max_mhz, ' MHz')}",
        _with(health.utilization_mean_percent, " %"),
        _with(health.memory_used_max_mib, " MiB"),
        _shares(health.throttled_percent),
        f"{_errors(health)} ({_life(health)})",
        _remapped(health),
        f"gen {_of(health.pcie_gen, health.pcie_max_gen)}, "
        f"x{_of(health.pcie_width, health.pcie_max_width)}",
        _xids(health.xids),
    )


def _with(value: float | None, unit: str) -> str:
    return _NA if value is None else f"{value:g}{unit}"


def _of(value: int | None, most: int | None) -> str:
    return f"{_with(value, '')} of {_with(most, '')}"


def _shares(percents: dict[str, float] | None) -> str:
    if percents is None:
        return _NA
    told = [f"{reason} {percent:g} %" for reason, percent in percents.items() if reason != "idle"]
    return ", ".join(told) or "never"


def _errors(health: Health) -> str:
    corrected, uncorrected = health.ecc_corrected_new, health.ecc_uncorrected_new
    return f"{_with(corrected, '')} corrected, {_with(uncorrected, '')} uncorrected"


def _life(health: Health) -> str:
    return f"{_with(health.ecc_corrected_total, '')}, {_with(health.ecc_uncorrected_total, '')}"


def _xids(counts: dict[int, int] | None) -> str:
    if counts is None:
        return _NA
    return ", ".join(f"{xid} ({count} x)" for xid, count in counts.items()) or "none"


def _remapped(health: Health) -> str:
    if health.remapped_corrected is None and health.remapped_uncorrected is None:
        return _NA
    count = (health.remapped_corrected or 0) + (health.remapped_uncorrected or 0)
    states = [("pending", health.remap_pending), ("failed", health.remap_failed)]
    return ", ".join([str(count), *(name for name, is_so in states if is_so)])
