"""What telemetry said of a GPU over the time of a run, thinned."""

from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from launcher.report.files import lines_of
from launcher.telemetry.health import throttle_reasons
from launcher.verdict.curves import Series, Span, bounded
from model_check.events import Counters, GpuEvent, Telemetry, Trouble, Xid, decode_gpu
from model_check.utils.worker_env import telemetry_path

FIGURES = ("temperature_c", "power_w", "sm_mhz")
_MAX_HAPPENED = 12
_GROWING = {
    "ecc_uncorrected": "uncorrected memory errors",
    "ecc_corrected": "corrected memory errors",
    "remapped_uncorrected": "rows of memory remapped after uncorrected errors",
    "nvlink_errors": "NVLink errors",
}
"""Counters that are worth a mark where they grow."""
_USUAL = {"idle", "application clocks"}


class Happened(Struct, frozen=True):
    ns: int
    what: str


class GpuCurves(Struct):
    """Of one GPU. Figures by milliseconds of CLOCK_MONOTONIC since the run began."""

    began_ns: int
    figures: dict[str, Series] = field(default_factory=dict)
    """By FIGURES; one of which nothing was told is not in it."""
    held_back: list[Span] = field(default_factory=list)
    """Between samples that told the same reasons to hold the clocks back, each by these; by nothing
    where they were not."""
    happened: list[Happened] = field(default_factory=list)
    """Xids, errors that were counted, what NVML could not tell: the first _MAX_HAPPENED."""
    _counters: Counters | None = None

    def record(self, event: GpuEvent) -> None:
        match event:
            case Telemetry():
                self._take_sample(event)
            case Counters():
                self._take_counters(event)
            case Xid():
                self._note(event.t, f"Xid {event.xid}")
            case Trouble() if event.lost:
                self._note(event.t, f"{event.call}: {event.text}")

    def _take_sample(self, sample: Telemetry) -> None:
        at = (sample.t - self.began_ns) // 1_000_000
        for name in FIGURES:
            if (value := getattr(sample, name)) is not None:
                self.figures.setdefault(name, Series()).add(at, value)
        told = throttle_reasons(sample.clocks_event_reasons or 0)
        self._take_reasons(", ".join(r for r in told if r not in _USUAL), sample.t)

    def _take_reasons(self, reasons: str, now: int) -> None:
        """They hold since the sample before, which is where these began, until now."""
        if self.held_back:
            self.held_back[-1] = replace(self.held_back[-1], until_ns=now)
        if not self.held_back or self.held_back[-1].what != reasons:
            self.held_back = bounded([*self.held_back, Span(reasons, now, now)])

    def _take_counters(self, counters: Counters) -> None:
        for name, what in _GROWING.items():
            before, now = (getattr(c, name, None) for c in (self._counters, counters))
            if before is not None and now is not None and now > before:
                self._note(counters.t, f"{now - before} {what}")
        self._counters = counters

    def _note(self, ns: int, what: str) -> None:
        if len(self.happened) < _MAX_HAPPENED:
            self.happened.append(Happened(ns, what))


def read_gpu_curves(directory: Path, worker: str, began_ns: int) -> GpuCurves:
    """From the file that telemetry wrote. Raises UsageError for one that cannot be read."""
    curves = GpuCurves(began_ns)
    for event in _events(directory, worker):
        curves.record(event)
    return curves


def _events(directory: Path, worker: str) -> Iterator[GpuEvent]:
    return lines_of(telemetry_path(directory, worker), decode_gpu)
