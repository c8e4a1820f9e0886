"""What telemetry comes down to, what of it is a symptom, and what that does to a verdict."""

import pytest
from msgspec.structs import replace

from launcher.telemetry.health import Record, slow_symptom, symptoms
from launcher.telemetry.xids import xid_symptom
from launcher.verdict.health import Health
from launcher.verdict.severity import CauseClass, Severity, Symptom
from launcher.verdict.slow import Slow
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


SLOWED = Slow(
    since_step=40,
    last_step=59,
    num_steps=20,
    ratio=1.308,
    busy_ms=412.0,
    expected_ms=315.0,
    by_history=False,
    lasted=True,
    since_ns=10 * SECOND,
    last_ns=20 * SECOND,
)

SLOW_TEXT = "slow: 1.31 x its equals since step 40 (412 ms against 315 ms)"


def found_in(*events: GpuEvent) -> list[Symptom]:
    return symptoms("GPU3", health_of(Counters(t=0, watches_xids=True), *events))


def warned(*events: GpuEvent) -> list[str]:
    return [str(symptom) for symptom in found_in(*events)]


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
    for nothing in (None, health):
        (symptom,) = symptoms("GPU3", nothing)
        assert symptom.figure.endswith("its health is not known")
        assert (symptom.severity, symptom.cause_class) == (Severity.MONITOR, CauseClass.UNKNOWN)


@pytest.mark.parametrize(
    "told_it",
    [
        [Counters(t=1, remap_failed=False)],
        [Counters(t=1, remap_pending=False)],
        [Counters(t=1, watches_xids=True)],
        [Counters(t=1, ecc_uncorrected=0), Counters(t=2, ecc_uncorrected=0)],
        [Counters(t=1, ecc_uncorrected_total=4), Counters(t=2, ecc_uncorrected_total=4)],
    ],
)
def test_one_figure_that_could_condemn_a_gpu_is_enough_to_know_its_health(
    told_it: list[GpuEvent],
) -> None:
    assert symptoms("GPU3", health_of(*told_it)) == []


def test_errors_of_before_the_run_are_no_warning_and_new_ones_are() -> None:
    assert run_of(Counters(ecc_uncorrected=2), Counters(ecc_uncorrected=2)) == []
    (line,) = run_of(Counters(ecc_uncorrected=2), Counters(ecc_uncorrected=3))
    assert line.startswith("1 new uncorrected memory errors (ECC)")
    assert "nvidia-smi --gpu-reset -i 3" in line


def test_a_counter_that_began_anew_counts_what_it_shows() -> None:
    health = health_of(Counters(t=1, ecc_uncorrected=9), Counters(t=2, ecc_uncorrected=1))
    assert health.ecc_uncorrected_new == 1


def test_a_counter_that_was_told_once_only_has_no_difference() -> None:
    assert health_of(Counters(t=1), Counters(t=2, ecc_corrected=7)).ecc_corrected_new is None
    assert health_of(Counters(t=1, ecc_uncorrected=7)).ecc_uncorrected_new is None


@pytest.mark.parametrize(
    ("counts", "new"),
    [((0, 2, None), 2), ((0, 2, 0), 2), ((None, 1, 3, None), 2), ((5, 5, 5), 0), ((1, 4, 2), 5)],
)
def test_errors_that_were_told_once_are_never_taken_back(
    counts: tuple[int | None, ...], new: int
) -> None:
    """A GPU in trouble may tell no more, or count anew after a reset."""
    events = [Counters(t=at, ecc_uncorrected=count) for at, count in enumerate(counts, 1)]
    assert health_of(*events).ecc_uncorrected_new == new


def test_a_failed_remap_is_remembered_when_the_gpu_tells_no_more() -> None:
    health = health_of(Counters(t=1, remap_failed=True), Counters(t=2))
    assert health.remap_failed is True


def test_a_gpu_that_tells_only_the_errors_of_its_life_is_judged_by_them() -> None:
    counters = [Counters(t=at, ecc_uncorrected_total=7 + at) for at in (1, 2)]
    assert found_in(*counters)[0].severity is Severity.ISOLATE


@pytest.mark.parametrize(
    ("before", "after", "new"),
    [
        ({"ecc_uncorrected": 0, "ecc_uncorrected_total": 4}, {"ecc_uncorrected_total": 6}, 2),
        ({"ecc_uncorrected": 0, "ecc_uncorrected_total": 4}, {"ecc_uncorrected": 3}, 3),
        ({"ecc_uncorrected": 2}, {"ecc_uncorrected": 2, "ecc_uncorrected_total": 9}, 0),
    ],
)
def test_the_larger_gain_of_the_two_counts_of_errors_decides(
    before: dict[str, int], after: dict[str, int], new: int
) -> None:
    health = health_of(Counters(t=1, **before), Counters(t=2, **after))
    assert (health.ecc_uncorrected_new, health.told_no_more) == (new, [])


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        ({"ecc_uncorrected": 0}, {}, "memory errors"),
        ({"ecc_uncorrected": 0}, {"ecc_uncorrected_total": 5}, "memory errors"),
        (
            {"remap_pending": False, "remap_failed": False},
            {"remap_pending": False},
            "remapped rows",
        ),
        ({"ecc_uncorrected": 0, "remap_failed": False}, {}, "memory errors and remapped rows"),
    ],
)
def test_a_figure_that_is_told_no_more_leaves_the_health_unknown(
    before: dict[str, int], after: dict[str, int], what: str
) -> None:
    (symptom,) = found_in(
        Counters(t=1, watches_xids=True, **before), Counters(t=2, watches_xids=True, **after)
    )
    words = f"it told {what}, and no more at the end: its health from then on is not known"
    assert symptom.figure == words
    assert (symptom.severity, symptom.cause_class) == (Severity.MONITOR, CauseClass.UNKNOWN)


@pytest.mark.parametrize(
    ("name", "gain", "line"),
    [
        ("ecc_corrected", 1, "1 new corrected memory errors (ECC) during this run: watch its"),
        ("ecc_corrected_total", 5, "5 new corrected memory errors (ECC) during this run: watch"),
        ("remapped_corrected", 2, "2 newly remapped rows of its memory during this run: watch"),
        ("remapped_uncorrected", 1, "1 newly remapped rows of its memory during this run: watch"),
        ("nvlink_errors", 1, "1 NVLink errors during this run: check bridges and seating"),
        ("pcie_replays", 14, "14 PCIe replays during this run: reseat the board"),
    ],
)
def test_what_was_mended_during_the_run_is_told_and_what_was_before_it_is_not(
    name: str, gain: int, line: str
) -> None:
    (warning,) = run_of(Counters(**{name: 7}), Counters(**{name: 7 + gain}))
    assert warning.startswith(line)
    assert run_of(Counters(**{name: 7}), Counters(**{name: 7})) == []


def test_a_link_may_repeat_eight_packets_a_minute() -> None:
    replays = Counters(pcie_replays=0), Counters(pcie_replays=16)
    assert len(run_of(*replays, seconds=119)) == 1
    assert run_of(*replays, seconds=120) == []
    assert run_of(Counters(pcie_replays=0), Counters(pcie_replays=8), seconds=1) == []


LOST = Trouble(t=1, call="nvmlDeviceGetTemperature", code=15, text="GPU is lost", lost=True)


@pytest.mark.parametrize(
    ("event", "severity"),
    [
        *((Xid(t=1, xid=xid), Severity.ISOLATE) for xid in (48, 64, 74, 79, 94, 95, 140)),
        (Xid(t=1, xid=63), Severity.RESET),
        *((Xid(t=1, xid=xid), Severity.MONITOR) for xid in (13, 31, 43, 92, 119, 4711)),
        (Counters(t=1, remap_failed=True), Severity.ISOLATE),
        (Counters(t=1, remap_pending=True), Severity.RESET),
        (LOST, Severity.ISOLATE),
        (Trouble(t=1, call="nvmlEventSetWait_v2", code=15, text="lost"), Severity.ISOLATE),
        (Trouble(t=1, call="nvmlDeviceGetName", code=16, text="reset"), Severity.RESET),
        (Trouble(t=1, call="nvmlDeviceGetHandleByUUID", code=6, text="?"), Severity.ISOLATE),
        (Trouble(t=1, call="nvmlDeviceGetName", code=999, text="Unknown"), Severity.MONITOR),
        (Trouble(t=1, call="nvmlInitWithFlags", code=15, text="?"), Severity.MONITOR),
        (Trouble(t=1, call="telemetry", text="silent", lost=True), Severity.MONITOR),
        (Telemetry(t=1, pcie_width=8), Severity.MONITOR),
    ],
)
def test_each_cause_has_its_severity(event: GpuEvent, severity: Severity) -> None:
    (symptom,) = found_in(Counters(t=1, pcie_max_width=16), event)
    assert symptom.severity is severity
    assert symptom.is_hard is (severity is not Severity.MONITOR)
    assert symptom.figure
    assert symptom.cure


def test_rows_that_wait_or_could_not_be_remapped_are_told_although_they_are_old() -> None:
    pending, failed = Counters(t=1, remap_pending=True), Counters(t=1, remap_failed=True)
    assert "waits to be remapped: end what runs on it" in warned(pending)[0]
    assert warned(failed) == ["a row of its memory could not be remapped: have the board replaced"]


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
    assert line.startswith(f"{what} for 12 % of the run: ")
    assert run_of(start, Counters(**{name: 5 * SECOND + SECOND // 2})) == []


def test_without_a_counter_the_samples_tell_and_few_samples_tell_nothing() -> None:
    hot = Telemetry(t=1, clocks_event_reasons=HW_THERMAL | HW_SLOWDOWN, temperature_c=93)
    cool = Telemetry(t=1, clocks_event_reasons=SW_POWER_CAP, temperature_c=60)
    assert warned(hot, hot, cool) == []
    (line,) = warned(hot, hot, hot, cool)  # the bit of hardware slowdown only repeats it
    assert line.startswith("hardware thermal slowdown for 75 % of the run (up to 93 C)")


def test_a_counter_that_ran_faster_than_time_counts_something_else() -> None:
    assert run_of(Counters(hw_thermal_ns=0), Counters(hw_thermal_ns=5 * SECOND), seconds=2) == []


def test_what_samples_saw_is_not_hidden_by_a_counter_that_stands_still() -> None:
    hot = Telemetry(t=1, clocks_event_reasons=HW_THERMAL)
    still = Counters(hw_thermal_ns=0)
    (line,) = warned(_at(still, 1), *[hot] * 9, _at(still, SECOND))
    assert "hardware thermal slowdown for 100 % of the run" in line


def test_the_power_limit_and_an_idle_gpu_are_no_warning() -> None:
    samples = [Telemetry(t=1, clocks_event_reasons=bits) for bits in (SW_POWER_CAP, IDLE) * 5]
    assert health_of(*samples).throttled_percent == {"power cap": 50.0, "idle": 50.0}
    assert warned(*samples) == []


SLOW = Telemetry(t=1, utilization_percent=99, sm_mhz=660, sm_max_mhz=1980)
FAST = replace(SLOW, sm_mhz=1755)
BY_HAND, BRAKE = 0x2, 0x80


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([SLOW] * 3, "SM clock 660 of 1980 MHz under load, and NVML gives no reason: `nvidia-smi"),
        ([FAST] * 9 + [SLOW] * 3 + [FAST] * 9, "SM clock 660 of 1980 MHz under load, and NVML"),
        ([replace(SLOW, clocks_event_reasons=BY_HAND)] * 3, "held back by application clocks: "),
        ([replace(SLOW, clocks_event_reasons=SW_POWER_CAP)] * 9, None),
        ([FAST] * 9 + [SLOW] * 2, None),
        ([FAST] * 9, None),
        ([replace(SLOW, utilization_percent=20)] * 9, None),
        ([replace(SLOW, utilization_percent=None)] * 9, None),
    ],
)
def test_a_busy_gpu_at_a_low_clock_is_told_unless_power_or_heat_explain_it(
    samples: list[Telemetry], words: str | None
) -> None:
    found = warned(*samples)
    assert len(found) == (words is not None)
    assert all(words is not None and words in line for line in found)


def test_a_low_clock_that_heat_or_power_explain_is_told_once() -> None:
    (line,) = warned(*[replace(SLOW, clocks_event_reasons=BRAKE)] * 3)
    assert line.startswith("power brake for 100 % of the run")


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ([350.0], "power limit 350 W of 700 W by default: `nvidia-smi -i 3 -pl 700` sets it"),
        ([700.0, 350.0, 700.0], "power limit 350 W of 700 W by default: "),
        ([700.0], None),
        ([650.0], None),
        ([900.0], None),
    ],
)
def test_a_power_limit_far_below_the_boards_own_is_told(
    limits: list[float], words: str | None
) -> None:
    samples = [Telemetry(t=1, power_limit_w=limit) for limit in limits]
    found = warned(Counters(t=1, power_default_limit_w=700.0), *samples)
    assert [words is not None and line.startswith(words) for line in found] == [True] * len(found)
    assert len(found) == (words is not None)
    assert warned(*samples) == []


def link(gen: int, width: int = 16, utilization: int | None = 99) -> Telemetry:
    return Telemetry(t=1, pcie_gen=gen, pcie_width=width, utilization_percent=utilization)


BEST_LINK = Counters(t=1, pcie_max_gen=5, pcie_max_width=16)


def test_a_slow_link_under_load_is_told_and_an_idle_one_may_be_slow() -> None:
    (line,) = warned(BEST_LINK, *[link(3)] * 3)
    assert line == "PCIe link at generation 3 of 5: reseat the board, check riser and slot"
    assert warned(BEST_LINK, *[link(1, utilization=0)] * 9) == []
    assert warned(BEST_LINK, *[link(1, utilization=None)] * 9) == []
    assert warned(BEST_LINK, link(1, utilization=0), link(5), link(5), link(5)) == []


def test_a_narrow_link_is_told_whatever_the_load() -> None:
    (line,) = warned(BEST_LINK, link(1, width=8, utilization=0))
    assert "width x8 of x16" in line


@pytest.mark.parametrize(
    ("links", "words"),
    [
        ([link(5)] * 9 + [link(5, width=8)] * 3, "width x8 of x16"),
        ([link(5)] * 9 + [link(2)] * 3 + [link(5)] * 9, "generation 2 of 5"),
        (
            [link(5)] * 3 + [link(4, width=4), link(4, width=2), link(3, width=4)],
            "4 of 5, width x4",
        ),
        ([link(5)] * 9 + [link(5, width=8)] * 2, None),
        ([link(5)] * 9 + [link(1, width=8, utilization=0)] * 9, None),
        ([link(5), link(1), link(1), link(5), link(1), link(1), link(5)], None),
    ],
)
def test_a_link_that_falls_in_the_middle_of_a_run_is_told(
    links: list[Telemetry], words: str | None
) -> None:
    found = warned(BEST_LINK, *links)
    assert len(found) == (words is not None)
    assert all(words is not None and words in line for line in found)


def test_xids_are_told_once_each_and_what_our_own_kill_causes_is_not() -> None:
    lines = warned(Xid(t=1, xid=45), Xid(t=1, xid=13), Xid(t=1, xid=13), Xid(t=1, xid=4711))
    assert [line.split(":")[0].split("(")[0].strip() for line in lines] == ["Xid 13", "Xid 4711"]


def test_every_known_xid_reads_as_a_sentence() -> None:
    assert str(xid_symptom(79)) == (
        "Xid 79 (the GPU has fallen off the bus): power-cycle; check power, cooling and seating"
    )
    assert str(xid_symptom(45)).endswith("was killed)")


def test_mean_power_is_energy_over_time_where_the_device_counts_it() -> None:
    ends = Counters(t=1, energy_mj=0), Counters(t=1 + 10 * SECOND, energy_mj=6_000_000)
    assert health_of(*ends, Telemetry(t=1, power_w=1.0)).power_mean_w == 600
    assert health_of(Telemetry(t=1, power_w=1.0), Telemetry(t=1, power_w=3.0)).power_mean_w == 2


def test_the_clock_is_that_of_the_busy_samples() -> None:
    idle = Telemetry(t=1, sm_mhz=210, utilization_percent=0)
    health = health_of(idle, Telemetry(t=1, sm_mhz=1900, utilization_percent=90))
    assert health.sm_mean_mhz == 1900


def test_a_slow_gpu_is_told_with_what_telemetry_said_then() -> None:
    brake = Telemetry(sm_mhz=1005, sm_max_mhz=1980, temperature_c=87, clocks_event_reasons=0x88)
    short = replace(brake, sm_mhz=1700, temperature_c=80, clocks_event_reasons=SW_POWER_CAP)
    assert str(slow_symptom(SLOWED, [brake, short, brake])) == (
        f"{SLOW_TEXT}, at 1,005 of 1,980 MHz, 87 C, power brake: "
        "look for heat, limits of power and clocks, and other work on it"
    )
    assert slow_symptom(SLOWED, []).figure == SLOW_TEXT
    assert slow_symptom(SLOWED, [Telemetry()]).figure == SLOW_TEXT
    assert slow_symptom(SLOWED, [Telemetry(sm_mhz=999)]).figure == f"{SLOW_TEXT}, at 999 MHz"
