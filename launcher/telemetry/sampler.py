"""Ask NVML again and again while a run lasts: the child process of `monitor.Monitor`.

A line of output is `[WORKER, EVENT]` as JSON (events: `model_check.events.GpuEvent`; worker "":
NVML as a whole). It ends when its standard input does, after one last look, or with its parent.
Imports little.
"""

import ctypes
import json
import os
import select
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from launcher.gpus.codes import GPU_IS_LOST, RESET_REQUIRED, TIMEOUT
from launcher.gpus.nvml import MIB, CallFailed, Fields, Nvml, begin, open_nvml

LOST = {GPU_IS_LOST, RESET_REQUIRED}
"""Nothing more comes of the GPU until a person acts."""
COUNTERS_EVERY_S = 10.0
"""Counters are dearer than a sample, and only their last values count: for one that is lost."""
_EVENT_WAIT_MS = 1
_MAX_XIDS = 64
"""In one look: a GPU that reports one after the other must not keep the others waiting."""

_MEMORY_TEMP = 82
_SW_THERMAL, _HW_THERMAL, _POWER_BRAKE = 269, 270, 271
_NVLINK_ERRORS = (38, 45, 52, 59)
"""Totals of all links: flit CRC, data CRC, replays, recoveries."""
_POWER_POLICY, _THERMAL_POLICY = 0, 1
_ECC_COUNTERS = {
    "ecc_corrected": (0, 0),
    "ecc_uncorrected": (1, 0),
    "ecc_corrected_total": (0, 1),
    "ecc_uncorrected_total": (1, 1),
}
"""The arguments of nvmlDeviceGetTotalEccErrors: corrected or uncorrected; since the driver was
loaded, or in the life of the board."""

_VALUE_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Of nvmlValue_t, by the type that a field says it has; a newer driver may know more types."""


def main(arguments: Sequence[str]) -> None:
    """`PARENT_PID SHARED_FD INTERVAL_S DEVICES` (JSON: [[worker, uuid], ...])."""
    parent_pid, shared_fd, interval_s, devices = arguments
    announce = begin(parent_pid, shared_fd)
    try:
        nvml = open_nvml(announce)
    except CallFailed as failed:
        _print("", _trouble(failed, lost=True))
        return
    watched = [Device(nvml, *device) for device in json.loads(devices)]
    sample(watched, float(interval_s), at_rest=lambda: announce(""))
    os._exit(0)  # no nvmlShutdown: a driver in trouble may hang in it


def sample(devices: "list[Device]", interval_s: float, at_rest: Callable[[], None]) -> None:
    """Look at every device each `interval_s`, until standard input ends, and once more then.
    `at_rest` is called when NVML is not asked for a while."""
    due = counters_due = now = time.monotonic()
    while True:
        if now >= counters_due:
            counters_due = now + COUNTERS_EVERY_S
            for device in devices:
                device.report_counters()
        for device in devices:
            device.look()
        now = time.monotonic()
        due = max(due + interval_s, now)
        at_rest()
        if select.select([0], [], [], due - now)[0]:
            break
    for device in devices:
        device.report_xids()
        device.report_counters()  # they tell that this look was the whole one


class Device:
    """One worker's GPU. A MIG instance has memory of its own; the rest is its board's."""

    def __init__(self, nvml: Nvml, worker: str, uuid: str) -> None:
        self._nvml = nvml
        self._worker = worker
        self._reported_codes: set[int | None] = set()
        self._lost = False
        self._events: Any = None
        self._num_nvlink = 0
        """How many counters of its links it reported at first."""
        nvml.subject = f" on {worker}"
        try:
            self._handle = nvml.call("nvmlDeviceGetHandleByUUID", uuid)
            self._board = self._handle
            if uuid.startswith("MIG-"):
                find = "nvmlDeviceGetDeviceHandleFromMigDeviceHandle"
                self._board = nvml.call(find, self._handle)
            self._events = self._register()
        except CallFailed as failed:
            self._has_failed(failed, lost=True)

    def look(self) -> None:
        """A sample, and the Xids since the last look."""
        self._report(lambda: {"kind": "telemetry", **self._sample()})
        self.report_xids()

    def report_counters(self) -> None:
        self._report(lambda: {"kind": "counters", **self._counters()})

    def report_xids(self) -> None:
        """The Xids that the driver has queued: also of a lost GPU, which they may explain."""
        self._nvml.subject = f" on {self._worker}"
        for _ in range(_MAX_XIDS if self._events is not None else 0):
            try:
                wait = "nvmlEventSetWait_v2"
                event = self._nvml.call(wait, self._events, _EVENT_WAIT_MS)
            except CallFailed as failed:
                if failed.code != TIMEOUT and not self._lost:
                    self._has_failed(failed)
                return
            if _is_ours(event, self._instance):
                _print(self._worker, {"kind": "xid", "xid": event.eventData})

    def _register(self) -> Any:
        """The set that its Xids come to; None: this device or driver reports none."""
        nvml, xid = self._nvml, self._nvml.module.nvmlEventTypeXidCriticalError
        self._instance = None
        if self._board is not self._handle:
            self._instance = nvml.ask("nvmlDeviceGetGpuInstanceId", self._handle)
        if not (nvml.ask("nvmlDeviceGetSupportedEventTypes", self._board) or 0) & xid:
            return None
        # A set of its own: one with a lost GPU in it answers for no other.
        events = nvml.ask("nvmlEventSetCreate")
        if events is not None:
            nvml.call("nvmlDeviceRegisterEvents", self._board, xid, events)
        return events

    def _report(self, ask: Callable[[], Fields]) -> None:
        """Print the event that `ask` makes, or the failure of its calls."""
        if self._lost:
            return
        self._nvml.subject = f" on {self._worker}"
        try:
            fields = ask()
        except CallFailed as failed:
            self._has_failed(failed)
        else:
            _print(self._worker, fields)

    def _has_failed(self, failed: CallFailed, lost: bool = False) -> None:
        self._lost = lost or failed.code in LOST
        if failed.code not in self._reported_codes:
            self._reported_codes.add(failed.code)
            _print(self._worker, _trouble(failed, self._lost))

    def _sample(self) -> Fields:
        nvml, ask, board = self._nvml, self._nvml.ask, self._board
        sm, memory = nvml.module.NVML_CLOCK_SM, nvml.module.NVML_CLOCK_MEM
        used = nvml.memory(self._handle)
        return {
            "temperature_c": ask("nvmlDeviceGetTemperature", board, 0),
            "memory_temperature_c": self._fields(_MEMORY_TEMP)[0],
            "power_w": _thousandth(ask("nvmlDeviceGetPowerUsage", board)),
            "power_limit_w": _thousandth(ask("nvmlDeviceGetEnforcedPowerLimit", board)),
            "sm_mhz": ask("nvmlDeviceGetClockInfo", board, sm),
            "sm_max_mhz": ask("nvmlDeviceGetMaxClockInfo", board, sm),
            "memory_mhz": ask("nvmlDeviceGetClockInfo", board, memory),
            "utilization_percent": nvml.utilization_percent(self._handle),
            "memory_used_mib": None if used is None else used.used // MIB,
            "clocks_event_reasons": self._event_reasons(),
            "pcie_gen": ask("nvmlDeviceGetCurrPcieLinkGeneration", board),
            "pcie_width": ask("nvmlDeviceGetCurrPcieLinkWidth", board),
        }

    def _counters(self) -> Fields:
        ask, board = self._nvml.ask, self._board
        rows = ask("nvmlDeviceGetRemappedRows", board) or (None,) * 4
        sw_thermal, hw_thermal, power_brake, *nvlink = self._fields(
            _SW_THERMAL, _HW_THERMAL, _POWER_BRAKE, *_NVLINK_ERRORS
        )
        nvlink_errors = [count for count in nvlink if count is not None]
        # A total that lacks one of its parts would look like one that began anew.
        self._num_nvlink = self._num_nvlink or len(nvlink_errors)
        if len(nvlink_errors) != self._num_nvlink:
            nvlink_errors = []
        return {
            "energy_mj": ask("nvmlDeviceGetTotalEnergyConsumption", board),
            "power_violation_ns": self._violation(_POWER_POLICY),
            "thermal_violation_ns": self._violation(_THERMAL_POLICY),
            "sw_thermal_ns": sw_thermal,
            "hw_thermal_ns": hw_thermal,
            "power_brake_ns": power_brake,
            **{
                name: ask("nvmlDeviceGetTotalEccErrors", board, *which)
                for name, which in _ECC_COUNTERS.items()
            },
            "remapped_corrected": rows[0],
            "remapped_uncorrected": rows[1],
            "remap_pending": None if rows[2] is None else bool(rows[2]),
            "remap_failed": None if rows[3] is None else bool(rows[3]),
            "pcie_replays": ask("nvmlDeviceGetPcieReplayCounter", board),
            "pcie_max_gen": ask("nvmlDeviceGetMaxPcieLinkGeneration", board),
            "pcie_max_width": ask("nvmlDeviceGetMaxPcieLinkWidth", board),
            "nvlink_errors": sum(nvlink_errors) if nvlink_errors else None,
            "power_default_limit_w": _thousandth(
                ask("nvmlDeviceGetPowerManagementDefaultLimit", board)
            ),
            "fabric_ready": self._fabric_ready(),
            "watches_xids": self._events is not None,
        }

    def _fabric_ready(self) -> bool | None:
        module = self._nvml.module
        # A driver that does not know this call, or this version of it, tells all else the same.
        with suppress(CallFailed, AttributeError):
            info = module.c_nvmlGpuFabricInfo_v2_t()
            self._nvml.call("nvmlDeviceGetGpuFabricInfoV", self._board, ctypes.byref(info))
            is_done = (info.state, info.status) == (module.NVML_GPU_FABRIC_STATE_COMPLETED, 0)
            return is_done if info.state else None
        return None

    def _event_reasons(self) -> int | None:
        reasons = self._nvml.ask("nvmlDeviceGetCurrentClocksEventReasons", self._board)
        if reasons is None:  # a driver from before 535 knows the old name only
            reasons = self._nvml.ask("nvmlDeviceGetCurrentClocksThrottleReasons", self._board)
        return None if reasons is None else int(reasons)

    def _violation(self, policy: int) -> int | None:
        status = self._nvml.ask("nvmlDeviceGetViolationStatus", self._board, policy)
        return None if status is None else int(status.violationTime)

    def _fields(self, *ids: int) -> list[int | None]:
        """Values of NVML fields, each with an answer of its own."""
        values = self._nvml.ask("nvmlDeviceGetFieldValues", self._board, list(ids))
        return [None] * len(ids) if values is None else [field_value(value) for value in values]


def field_value(value: Any) -> int | None:
    if value.nvmlReturn != 0 or value.valueType not in range(len(_VALUE_MEMBERS)):
        return None
    return int(getattr(value.value, _VALUE_MEMBERS[value.valueType]))


def _is_ours(event: Any, instance: int | None) -> bool:
    """Whether an event of the board is about this MIG instance, or about the whole board."""
    whole_board = ctypes.c_uint(-1).value
    return instance is None or event.gpuInstanceId in (instance, whole_board)


def _thousandth(value: int | None) -> float | None:
    return None if value is None else value / 1000


def _trouble(failed: CallFailed, lost: bool) -> Fields:
    cause = {"call": failed.call, "code": failed.code, "text": failed.text}
    return {"kind": "trouble", **cause, "lost": lost}


def _print(worker: str, fields: Fields) -> None:
    """One event, stamped now."""
    line = json.dumps([worker, {"t": time.monotonic_ns(), **fields}])
    os.write(1, line.encode() + b"\n")
