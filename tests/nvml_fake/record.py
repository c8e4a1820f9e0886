"""Record what a real NVML answers to the calls that telemetry makes, for the fake's contract test.

`python -m tests.nvml_fake.record > recording.json` on a machine with GPUs, best while they work. It
only asks, and keeps no UUID and no serial number. `scenario_of(recording)` makes the fake answer
the same; recording that again must give the same answers (test_record.py).
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pynvml

from tests.nvml_fake.build import fake_gpu, fault, scenario

NOT_SUPPORTED = 3

# function without nvml, arguments after the handle, key of the fake's scenario
CALLS: tuple[tuple[str, tuple[int, ...], str], ...] = (
    ("DeviceGetTemperature", (0,), "temperature"),
    ("DeviceGetPowerUsage", (), "power_mw"),
    ("DeviceGetEnforcedPowerLimit", (), "power_limit_mw"),
    ("DeviceGetPowerManagementDefaultLimit", (), "power_default_limit_mw"),
    ("DeviceGetTotalEnergyConsumption", (), "energy_mj"),
    ("DeviceGetClockInfo", (1,), "clock_sm"),
    ("DeviceGetClockInfo", (2,), "clock_mem"),
    ("DeviceGetMaxClockInfo", (1,), "max_clock_sm"),
    ("DeviceGetCurrentClocksEventReasons", (), "clocks_event_reasons"),
    ("DeviceGetPerformanceState", (), "pstate"),
    ("DeviceGetCurrPcieLinkGeneration", (), "pcie_gen"),
    ("DeviceGetCurrPcieLinkWidth", (), "pcie_width"),
    ("DeviceGetMaxPcieLinkGeneration", (), "pcie_max_gen"),
    ("DeviceGetMaxPcieLinkWidth", (), "pcie_max_width"),
    ("DeviceGetPcieReplayCounter", (), "pcie_replays"),
    ("DeviceGetTotalEccErrors", (0, 0), "ecc_corrected"),
    ("DeviceGetTotalEccErrors", (1, 0), "ecc_uncorrected"),
    ("DeviceGetTotalEccErrors", (0, 1), "ecc_corrected_total"),
    ("DeviceGetTotalEccErrors", (1, 1), "ecc_uncorrected_total"),
    ("DeviceGetSupportedEventTypes", (), "event_types"),
)
POLICIES = {0: "violation_power_ns", 1: "violation_thermal_ns"}
ROWS = ("remapped_corrected", "remapped_uncorrected", "remap_pending", "remap_failed")
FIELDS = (82, 269, 270, 271, 38, 45, 52, 59)

Answers = dict[str, dict[str, int]]
"""Scenario key -> {"value": n} or {"code": why not}, and "us": how long the call took."""


def record() -> dict[str, Any]:
    """All GPUs of this machine."""
    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    gpus = [{"name": pynvml.nvmlDeviceGetName(h), "answers": _gpu(h)} for h in handles]
    return {"schema": 1, "driver": pynvml.nvmlSystemGetDriverVersion(), "gpus": gpus}


def scenario_of(recording: Mapping[str, Any]) -> str:
    """A scenario in which the fake gives the answers of `recording`."""
    gpus, rules = [], []
    functions = {key: name for name, _, key in CALLS}
    for index, gpu in enumerate(recording["gpus"]):
        answers: Answers = gpu["answers"]
        values: dict[str, int | str] = {k: a["value"] for k, a in answers.items() if "value" in a}
        temperature = values.pop("temperature", None)
        gpus.append(fake_gpu(index, name=gpu["name"], temperature=temperature, more=values))
        for key, answer in answers.items():
            code = answer.get("code", NOT_SUPPORTED)
            if code != NOT_SUPPORTED and key in functions:
                rules.append(fault(functions[key], index, code))
    return scenario(gpus, rules, driver=recording["driver"])


def _gpu(handle: Any) -> Answers:
    answers: Answers = {}
    for name, arguments, key in CALLS:
        answers[key] = _ask(f"nvml{name}", handle, *arguments)
    for policy, key in POLICIES.items():
        answers[key] = _ask("nvmlDeviceGetViolationStatus", handle, policy)
    answers |= _rows(handle)
    for value in pynvml.nvmlDeviceGetFieldValues(handle, list(FIELDS)):
        told = {"value": _value(value)} if value.nvmlReturn == 0 else {"code": value.nvmlReturn}
        answers[f"field_{value.fieldId}"] = told | {"type": value.valueType}
    return answers


def _ask(name: str, handle: Any, *arguments: int) -> dict[str, int]:
    start = time.perf_counter_ns()
    try:
        answer = getattr(pynvml, name)(handle, *arguments)
        told = {"value": int(getattr(answer, "violationTime", answer))}
    except pynvml.NVMLError as error:
        told = {"code": error.value}
    return told | {"us": (time.perf_counter_ns() - start) // 1000}


def _rows(handle: Any) -> Answers:
    try:
        rows: Sequence[int] = pynvml.nvmlDeviceGetRemappedRows(handle)
    except pynvml.NVMLError as error:
        return {key: {"code": error.value} for key in ROWS}
    return {key: {"value": int(row)} for key, row in zip(ROWS, rows, strict=True)}


def _value(field: Any) -> int:
    members = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
    return int(getattr(field.value, members[field.valueType]))


if __name__ == "__main__":
    json.dump(record(), sys.stdout, indent=1)
