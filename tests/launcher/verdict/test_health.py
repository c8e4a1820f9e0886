"""What telemetry comes down to, and what of it is worth a warning."""

from pathlib import Path

import pytest

from launcher.verdict.closing import closing_lines
from launcher.verdict.health import Health, Record, warnings
from launcher.verdict.health_result import with_health
from launcher.verdict.page import page
from launcher.verdict.results import RunResult, Verdict, WorkerResult
from launcher.verdict.xids import describe_xid
from model_check.events import Counters, GpuEvent, Telemetry, Trouble, Xid

SECOND = 10**9
SW_POWER_CAP, HW_SLOWDOWN, HW_THERMAL, IDLE = 0x4, 0x8, 0x40, 0x1


def told(*events: GpuEvent) -> Record:
    record = Record()
    for event in events:
        record.record(event)
    return record


def health_of(*events: GpuEvent) -> Health:
    health = told(*events).health()
    assert health is not None
    return health


def warned(*events: GpuEvent) -> list[str]:
    return warnings("GPU3", health_of(*events))


def run_of(before: Counters, after: Counters, seconds: float = 100) -> list[str]:
    """Warnings of a run between these counters."""
    at = int(seconds * SECOND)
    return warned(_at(before, 1), _at(after, 1 + at))


def _at(counters: Counters, t: int) -> Counters:
    fields = {name: getattr(counters, name) for name in counters.__struct_fields__}
    return Counters(**fields | {"t": t})


BUSY = Telemetry(t=1, utilization_percent=99)


def test_nothing_told_is_no_health_and_not_a_healthy_gpu() -> None:
    assert told().health() is None
    health = health_of(Telemetry(t=1), Counters(t=1))
    unknown = [health.ecc_uncorrected_new, health.remap_pending, health.throttled_percent]
    assert unknown == [None, None, None]
    assert health.xids is None
    assert warnings("GPU3", health) == []


def test_errors_of_before_the_run_are_no_warning_and_new_ones_are() -> None:
    assert run_of(Counters(ecc_uncorrected=2), Counters(ecc_uncorrected=2)) == []
    (line,) = run_of(Counters(ecc_uncorrected=2), Counters(ecc_uncorrected=3))
    assert line.startswith("GPU3: 1 new uncorrected memory errors (ECC)")
    assert "nvidia-smi --gpu-reset -i 3" in line


def test_a_counter_that_began_anew_counts_what_it_shows() -> None:
    health = health_of(Counters(t=1, ecc_uncorrected=9), Counters(t=2, ecc_uncorrected=1))
    assert health.ecc_uncorrected_new == 1


def test_a_counter_that_was_told_once_only_has_no_difference() -> None:
    assert health_of(Counters(t=1), Counters(t=2, ecc_corrected=7)).ecc_corrected_new is None


def test_rows_that_wait_or_could_not_be_remapped_are_told_although_they_are_old() -> None:
    pending, failed = Counters(t=1, remap_pending=True), Counters(t=1, remap_failed=True)
    assert "waits to be remapped: end what runs on it" in warned(pending)[0]
    assert warned(failed) == [
        "GPU3: a row of its memory could not be remapped: have the board replaced"
    ]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("hw_thermal_ns", "hardware thermal slowdown"),
        ("sw_thermal_ns", "software thermal slowdown"),
        ("power_brake_ns", "power brake"),
    ],
)
def test_time_that_was_lost_to_heat_or_power_is_a_share_of_the_run(name: str, what: str) -> None:
    start = Counters(**{name: 5 * SECOND})
    (line,) = run_of(start, Counters(**{name: 17 * SECOND}))
    assert line.startswith(f"GPU3: {what} for 12 % of the run: ")
    assert run_of(start, Counters(**{name: 5 * SECOND + SECOND // 2})) == []


def test_without_a_counter_the_samples_tell_and_few_samples_tell_nothing() -> None:
    hot = Telemetry(t=1, clocks_event_reasons=HW_THERMAL | HW_SLOWDOWN, temperature_c=93)
    cool = Telemetry(t=1, clocks_event_reasons=SW_POWER_CAP, temperature_c=60)
    assert warned(hot, hot, cool) == []
    (line,) = warned(hot, hot, hot, cool)  # the bit of hardware slowdown only repeats it
    assert line.startswith("GPU3: hardware thermal slowdown for 75 % of the run (up to 93 C)")


def test_a_counter_that_ran_faster_than_time_counts_something_else() -> None:
    assert run_of(Counters(hw_thermal_ns=0), Counters(hw_thermal_ns=5 * SECOND), seconds=2) == []


def test_what_samples_saw_is_not_hidden_by_a_counter_that_stands_still() -> None:
    hot = Telemetry(t=1, clocks_event_reasons=HW_THERMAL)
    still = Counters(hw_thermal_ns=0)
    (line,) = warned(_at(still, 1), *[hot] * 9, _at(still, SECOND))
    assert "hardware thermal slowdown for 100 % of the run" in line


def test_the_power_limit_and_an_idle_gpu_are_no_warning() -> None:
    samples = [Telemetry(t=1, clocks_event_reasons=bits) for bits in (SW_POWER_CAP, IDLE) * 5]
    health = health_of(*samples)
    assert health.throttled_percent == {"power cap": 50.0, "idle": 50.0}
    assert warnings("GPU3", health) == []


def link(gen: int, width: int = 16, utilization: int | None = 99) -> Telemetry:
    return Telemetry(t=1, pcie_gen=gen, pcie_width=width, utilization_percent=utilization)


BEST_LINK = Counters(t=1, pcie_max_gen=5, pcie_max_width=16)


def test_a_slow_link_under_load_is_told_and_an_idle_one_may_be_slow() -> None:
    (line,) = warned(BEST_LINK, *[link(3)] * 3)
    assert line == "GPU3: PCIe link at generation 3 of 5: reseat the board, check riser and slot"
    assert warned(BEST_LINK, *[link(1, utilization=0)] * 9) == []
    assert warned(BEST_LINK, *[link(1, utilization=None)] * 9) == []
    assert warned(BEST_LINK, link(1, utilization=0), link(5), link(5), link(5)) == []


def test_a_narrow_link_is_told_whatever_the_load() -> None:
    (line,) = warned(BEST_LINK, link(1, width=8, utilization=0))
    assert "width x8 of x16" in line


def test_xids_are_told_once_each_and_what_our_own_kill_causes_is_not() -> None:
    lines = warned(Xid(t=1, xid=45), Xid(t=1, xid=13), Xid(t=1, xid=13), Xid(t=1, xid=4711))
    assert [line.split(":")[1].split("(")[0].strip() for line in lines] == ["Xid 13", "Xid 4711"]


def test_every_known_xid_reads_as_a_sentence() -> None:
    assert describe_xid(79) == (
        "Xid 79 (the GPU has fallen off the bus): power-cycle; check power, cooling and seating"
    )
    assert describe_xid(45).endswith("was killed)")


def test_mean_power_is_energy_over_time_where_the_device_counts_it() -> None:
    ends = Counters(t=1, energy_mj=0), Counters(t=1 + 10 * SECOND, energy_mj=6_000_000)
    assert health_of(*ends, Telemetry(t=1, power_w=1.0)).power_mean_w == 600
    assert health_of(Telemetry(t=1, power_w=1.0), Telemetry(t=1, power_w=3.0)).power_mean_w == 2


def test_the_clock_is_that_of_the_busy_samples() -> None:
    idle = Telemetry(t=1, sm_mhz=210, utilization_percent=0)
    health = health_of(idle, Telemetry(t=1, sm_mhz=1900, utilization_percent=90))
    assert health.sm_mean_mhz == 1900


def result_of(*verdicts: Verdict, exit_code: int = 0) -> RunResult:
    workers = [
        WorkerResult(
            name=f"GPU{index}",
            verdict=verdict,
            cause=None,
            steps=1,
            loss_first=1.0,
            loss_last=1.0,
            tokens_per_s=None,
            peak_memory_bytes=None,
            duration_s=1.0,
            returncode=0,
        )
        for index, verdict in enumerate(verdicts)
    ]
    return RunResult(
        verdict=Verdict.PASS if exit_code == 0 else Verdict.FAIL,
        exit_code=exit_code,
        summary="as it was",
        culprits=[],
        disagreement=None,
        workers=workers,
        leftovers=[],
        dropped_lines=0,
        run={},
    )


SICK = told(Counters(t=1, remap_failed=True))
WELL = told(Counters(t=1, remap_failed=False), BUSY)


def test_a_warning_passes_and_is_counted_in_the_last_line() -> None:
    result = with_health(result_of(*[Verdict.PASS] * 2), {"GPU0": WELL, "GPU1": SICK}, fails=False)
    assert (result.verdict, result.exit_code) == (Verdict.PASS, 0)
    assert result.summary == "as it was; 1 warning about GPU1"
    assert [len(worker.warnings) for worker in result.workers] == [0, 1]


def test_a_warning_fails_a_run_when_the_settings_say_so() -> None:
    result = with_health(result_of(*[Verdict.PASS] * 2), {"GPU0": WELL, "GPU1": SICK}, fails=True)
    assert (result.verdict, result.exit_code, result.culprits) == (Verdict.FAIL, 22, ["GPU1"])
    assert [worker.verdict for worker in result.workers] == [Verdict.PASS, Verdict.FAIL]
    assert "could not be remapped" in result.summary
    assert "launch.fail_on_health" in result.summary


def test_a_gpu_that_nobody_could_watch_fails_such_a_run_too() -> None:
    silent = told(Trouble(t=1, call="telemetry", text="NVML was silent for 11 s", lost=True))
    result = with_health(result_of(Verdict.PASS), {"GPU0": silent}, fails=True)
    assert (result.exit_code, result.workers[0].warnings) == (
        22,
        ["GPU0: telemetry ended: NVML was silent for 11 s"],
    )
    unheard = with_health(result_of(Verdict.PASS), {"GPU0": Record()}, fails=True)
    assert unheard.exit_code == 22


def test_a_run_that_failed_keeps_its_own_exit_code() -> None:
    result = with_health(result_of(Verdict.FAIL, exit_code=7), {"GPU0": SICK}, fails=True)
    assert (result.exit_code, result.summary) == (7, "as it was")


def test_what_is_wrong_with_several_gpus_alike_is_one_line() -> None:
    silent = told(Trouble(t=1, call="telemetry", text="NVML was silent for 11 s", lost=True))
    result = with_health(result_of(*[Verdict.PASS] * 2), {"GPU0": silent, "GPU1": silent}, False)
    lines = [line for line in closing_lines(result, Path("run"), 0) if "warning: " in line]
    assert lines == ["warning: GPU0, GPU1: telemetry ended: NVML was silent for 11 s"]


def test_the_page_has_a_row_for_each_gpu_and_says_what_is_not_known() -> None:
    records = {"GPU0": told(BUSY, Counters(t=1, ecc_corrected=0)), "GPU1": SICK}
    html = page(with_health(result_of(*[Verdict.PASS] * 2), records, fails=False))
    assert "<h2>GPUs</h2>" in html
    assert html.count("n/a (n/a)") == 2
    assert "could not be remapped" in html
    assert "<h2>GPUs</h2>" not in page(result_of(Verdict.PASS))
