"""Heat, power, clock and load of a worker's GPU, for the logs of people: the launcher asks NVML for
them each second and writes them down."""

import time
from pathlib import Path

import msgspec

from model_check.events import Telemetry, decode_gpu

_TAIL_BYTES = 1 << 14
_FRESH_NS = 60_000_000_000
"""An older sample tells nothing of this moment."""
_SHOWN = ("temperature_c", "power_w", "sm_mhz", "utilization_percent")


def gpu_figures(telemetry: Path) -> dict[str, float]:
    """Name of a scalar -> what the newest sample in `telemetry` says; empty where there is none."""
    try:
        with telemetry.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            sample = decode_gpu(line)
        except msgspec.DecodeError:  # half a line, at either end
            continue
        if isinstance(sample, Telemetry) and time.monotonic_ns() - sample.t < _FRESH_NS:
            told = {name: getattr(sample, name) for name in _SHOWN}
            return {f"gpu/{name}": value for name, value in told.items() if value is not None}
    return {}
