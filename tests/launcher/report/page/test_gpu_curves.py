"""Telemetry over time: throttling with its reasons, errors where they were counted, all bounded."""

from pathlib import Path

from launcher.report.page.gpu_curves import GpuCurves, read_gpu_curves
from launcher.verdict.curves import MAX_SPANS, Span
from model_check.events import Counters, Telemetry, Trouble, Xid, encode

SECOND = 1_000_000_000


def test_clocks_that_are_held_back_are_stretches_with_reasons() -> None:
    curves = GpuCurves(began_ns=0)
    for second, bits in enumerate([1, 0, 0x40, 0x40, 0x44, 0, 0x02]):
        curves.record(Telemetry(t=second * SECOND, clocks_event_reasons=bits))
    assert [span for span in curves.held_back if span.what] == [
        Span("hardware thermal slowdown", 2 * SECOND, 4 * SECOND),
        Span("power cap, hardware thermal slowdown", 4 * SECOND, 5 * SECOND),
    ]


def test_errors_are_told_where_they_grew() -> None:
    curves = GpuCurves(began_ns=0)
    curves.record(Counters(t=SECOND, ecc_uncorrected=2, ecc_corrected=None))
    curves.record(Counters(t=2 * SECOND, ecc_uncorrected=2, ecc_corrected=7))
    curves.record(Counters(t=3 * SECOND, ecc_uncorrected=5, ecc_corrected=None))
    curves.record(Xid(t=4 * SECOND, xid=63))
    curves.record(Trouble(t=5 * SECOND, call="nvmlDeviceGetTemperature", text="lost", lost=True))
    assert [(h.ns // SECOND, h.what) for h in curves.happened] == [
        (3, "3 uncorrected memory errors"),
        (4, "Xid 63"),
        (5, "nvmlDeviceGetTemperature: lost"),
    ]


def test_a_storm_of_errors_takes_bounded_memory() -> None:
    curves = GpuCurves(began_ns=0)
    for at in range(10_000):
        curves.record(Xid(t=at, xid=31))
        curves.record(Telemetry(t=at, clocks_event_reasons=0x40 * (at % 2)))
    assert len(curves.happened) <= 12
    assert len(curves.held_back) <= MAX_SPANS


def test_a_file_that_is_cut_tells_what_it_holds_and_none_tells_nothing(tmp_path: Path) -> None:
    lines = [encode(Telemetry(t=second * SECOND, power_w=300.0)) for second in (1, 2, 3)]
    (tmp_path / "gpu0.telemetry.jsonl").write_bytes(b"".join(lines)[:-20])
    curves = read_gpu_curves(tmp_path, "GPU0", 0)
    assert list(curves.figures["power_w"].buckets) == [1000, 2000]
    assert read_gpu_curves(tmp_path, "GPU1", 0).figures == {}
