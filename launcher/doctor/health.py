"""The state of each GPU's memory, clocks and link, as telemetry tells it in one look."""

from collections.abc import Collection

from launcher.doctor.finding import Finding, fail, ok, warn
from launcher.gpus.probe import Gpu
from launcher.telemetry.health import Record, symptoms, throttle_reasons
from model_check.errors import EXIT_HEALTH
from model_check.events import Counters, Telemetry

_HELD_BACK = ("hardware", "software thermal", "power brake")
"""Beginnings of the reasons that a healthy, idle GPU does not have."""


def check_health(gpu: Gpu, record: Record, fail_on: Collection[str]) -> Finding:
    """`gpu`: of which `record` was told. A symptom that `fail_on` holds is a FAIL."""
    name = f"{gpu.label} health"
    counters, sample = record.counters or Counters(), record.sample or Telemetry()
    found_symptoms = symptoms(gpu.label, record.health())
    advice = [str(symptom) for symptom in found_symptoms]
    if counters.ecc_uncorrected:
        advice.append("uncorrected memory errors since the driver was loaded: reset it when idle")
    reasons = throttle_reasons(sample.clocks_event_reasons or 0)
    if any(reason.startswith(_HELD_BACK) for reason in reasons):
        advice.append("its clocks are held back now: check its cooling and its power supply")
    found, what_to_do = _describe(counters, sample), "; ".join(advice)
    if any(symptom.severity.lower() in fail_on for symptom in found_symptoms):
        return fail(name, found, what_to_do, EXIT_HEALTH)
    return warn(name, found, what_to_do) if advice else ok(name, found)


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
