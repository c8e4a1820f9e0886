"""The state of each GPU's memory, clocks and link, as telemetry tells it in one look."""

from launcher.checkup.finding import Finding, ok, warn
from launcher.gpus.probe import Gpu
from launcher.verdict.health import Record, throttle_reasons, warnings
from model_check.events import Counters, Telemetry

_HELD_BACK = ("hardware", "software thermal", "power brake")
"""Beginnings of the reasons that a healthy, idle GPU does not have."""


def check_health(gpu: Gpu, record: Record) -> Finding:
    """`gpu`: of which `record` was told."""
    name = f"{gpu.label} health"
    health, counters = record.health(), record.counters or Counters()
    if health is None:
        return warn(name, "nothing was told", "see what `nvidia-smi -q` says")
    found = _describe(counters, record.sample or Telemetry())
    advice = [text.removeprefix(f"{gpu.label}: ") for text in warnings(gpu.label, health)]
    if counters.ecc_uncorrected:
        advice.append("uncorrected memory errors since the driver was loaded: reset it when idle")
    reasons = throttle_reasons((record.sample or Telemetry()).clocks_event_reasons or 0)
    if any(reason.startswith(_HELD_BACK) for reason in reasons):
        advice.append("its clocks are held back now: check its cooling and its power supply")
    return warn(name, found, "; ".join(advice)) if advice else ok(name, found)


def _describe(counters: Counters, sample: Telemetry) -> str:
    errors = f"{_na(counters.ecc_corrected)}, {_na(counters.ecc_uncorrected)}"
    in_life = f"{_na(counters.ecc_corrected_total)}, {_na(counters.ecc_uncorrected_total)}"
    rows = f"{_na(counters.remapped_corrected)}, {_na(counters.remapped_uncorrected)}"
    states = [("pending", counters.remap_pending), ("failed", counters.remap_failed)]
    rows += "".join(f", {state}" for state, is_so in states if is_so)
    link = f"gen {_na(sample.pcie_gen)} x{_na(sample.pcie_width)}"
    most = f"gen {_na(counters.pcie_max_gen)} x{_na(counters.pcie_max_width)}"
    return (
        f"ECC errors (corrected, uncorrected) {errors} since load, {in_life} in its life; "
        f"remapped rows {rows}; clocks: {_clocks(sample.clocks_event_reasons)}; "
        f"PCIe {link} of {most}"
    )


def _clocks(bits: int | None) -> str:
    return "N/A" if bits is None else ", ".join(throttle_reasons(bits)) or "free"


def _na(value: int | None) -> str:
    return "N/A" if value is None else str(value)
