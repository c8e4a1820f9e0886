"""What telemetry reports of a GPU during a run: the figures, and the symptoms they are. Pure."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median_low
from typing import Any

from msgspec import Struct, field
from msgspec.structs import asdict

from launcher.gpus.codes import GPU_IS_LOST, NOT_FOUND, RESET_REQUIRED, cure_for
from launcher.telemetry.xids import HARMLESS, xid_symptom
from launcher.verdict.health import Health
from launcher.verdict.severity import CauseClass, Severity, Symptom
from launcher.verdict.slow import Slow
from model_check.events import Counters, GpuEvent, Telemetry, Trouble, Xid

SLOW_PERCENT = 1.0
"""A GPU that is slowed down for less of a run is not worth a word."""
MIN_SAMPLES = 3
"""A share of fewer samples, or a link that was seen less often under load, proves nothing."""
_LOADED_PERCENT = 10
_BUSY_PERCENT = 50
"""A GPU with less to do may clock down."""
_LOW_CLOCK, _LOW_LIMIT = 0.5, 0.9
"""Shares of the highest SM clock and of the board's own power limit: below them is a warning."""
_COUNTER_SLACK = 1.1

REPLAYS_PER_MINUTE = 8
"""A sound PCIe link may repeat so many packets (DCGM's limit)."""

_CORRECTED = ("ecc_corrected", "ecc_corrected_total")
_UNCORRECTED = ("ecc_uncorrected", "ecc_uncorrected_total")
"""Each counts what the other does, from another beginning on."""
_REMAPPED = ("remapped_corrected", "remapped_uncorrected")
_CONDEMNING = {
    **dict.fromkeys(_UNCORRECTED, "memory errors"),
    **dict.fromkeys(("remap_pending", "remap_failed"), "remapped rows"),
}
"""The members of Counters that could condemn a GPU, and how messages call them."""

POWER_CAP = "power cap"
_REASONS = {
    0x01: "idle",
    0x02: "application clocks",
    0x04: POWER_CAP,
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
    0x100: "display clocks",
}
"""The bits of nvmlClocksEventReason*."""


class Slowdown(Struct, frozen=True):
    """A reason for lower clocks that a healthy GPU does not have."""

    cure: str
    counter: str | None = None
    """The member of Counters with its time; None: only samples see it."""
    implied_by: tuple[str, ...] = ()
    """The reasons that say more: beside one of them this one is not worth a word."""


_COOL = "check its fans, the air flow and the temperature of the room"
SLOWDOWNS = {
    "hardware thermal slowdown": Slowdown(_COOL, "hw_thermal_ns"),
    "software thermal slowdown": Slowdown(_COOL, "sw_thermal_ns"),
    "power brake": Slowdown(
        "the power supply asks for it: check it, and its cables", "power_brake_ns"
    ),
    "hardware slowdown": Slowdown(
        f"heat or power: {_COOL}, and the power supply",
        implied_by=("hardware thermal slowdown", "software thermal slowdown", "power brake"),
    ),
}
"""By their names in _REASONS."""


class Record(Struct):
    """What was reported of one GPU so far, in bounded memory."""

    is_lost: bool = False
    sample: Telemetry | None = None
    """The latest."""
    counters: Counters | None = None
    """The latest."""
    xids: Counter[int] = field(default_factory=Counter)
    _last_values: dict[str, Any] = field(default_factory=dict)
    """Each member of Counters as it was last reported: a GPU in trouble may report it no more."""
    _gains: Counter[str] = field(default_factory=Counter)
    """What each member of Counters gained, once it was reported twice; of a state it means
    nothing."""
    _troubles: list[Trouble] = field(default_factory=list)
    _num_samples: int = 0
    _num_loaded: int = 0
    _reasons: Counter[str] = field(default_factory=Counter)
    _told: Counter[str] = field(default_factory=Counter)
    """In how many samples each member of Telemetry was reported: below, their highest and sum."""
    _highest: dict[str, Any] = field(default_factory=dict)
    _sums: dict[str, float] = field(default_factory=dict)
    _lowest_limit_w: float | None = None
    _recent: list[dict[str, Any]] = field(default_factory=list)
    """The last MIN_SAMPLES samples under load."""
    _slowest: dict[str, int] = field(default_factory=dict)
    """The slowest link and clock that lasted for MIN_SAMPLES samples under load."""

    def record(self, event: GpuEvent) -> None:
        match event:
            case Telemetry():
                self._take_sample(event)
            case Counters():
                self._take_counters(event)
            case Xid():
                self.xids[event.xid] += 1
            case Trouble():
                self._troubles.append(event)
                self.is_lost = self.is_lost or event.lost

    def _take_counters(self, counters: Counters) -> None:
        """A counter that began anew gained what it shows."""
        self.counters = counters
        for name, value in _reported(counters).items():
            if (before := self._last_values.get(name)) is not None:
                self._gains[name] += value - before if value >= before else value
            self._last_values[name] = value

    def _take_sample(self, sample: Telemetry) -> None:
        self._num_samples += 1
        self.sample = sample
        values = _reported(sample)
        if values.get("utilization_percent", 0) >= _LOADED_PERCENT:
            self._num_loaded += 1
            self._take_slowest(values)
        if values.get("utilization_percent", 100) < _LOADED_PERCENT:
            values.pop("sm_mhz", None)  # an idle GPU clocks down
        if (limit_w := sample.power_limit_w) is not None:
            self._lowest_limit_w = min(limit_w, self._lowest_limit_w or limit_w)
        for name, value in values.items():
            self._told[name] += 1
            self._highest[name] = max(value, self._highest.get(name, value))
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._reasons.update(throttle_reasons(sample.clocks_event_reasons or 0))

    def _take_slowest(self, values: dict[str, Any]) -> None:
        """Link and clock may fall in mid-run; those of an idle GPU, and of one that just
        wakes up, are slower."""
        if values["utilization_percent"] < _BUSY_PERCENT or _is_slowed(values):
            values = values | {"sm_mhz": None}
        self._recent = [*self._recent, values][-MIN_SAMPLES:]
        for name in ("pcie_gen", "pcie_width", "sm_mhz"):
            recent = [each[name] for each in self._recent if each.get(name) is not None]
            if len(recent) == MIN_SAMPLES:
                self._slowest[name] = min(max(recent), self._slowest.get(name, max(recent)))

    # -- what it comes down to

    def health(self) -> Health | None:
        """None: nothing was reported at all."""
        if not (self._num_samples or self.counters or self._troubles or self.xids):
            return None
        sample, highest = self.sample or Telemetry(), self._highest.get
        last, gained = self._last_values.get, self._gains.get
        return Health(
            samples=self._num_samples,
            samples_loaded=self._num_loaded,
            temperature_max_c=highest("temperature_c"),
            memory_temperature_max_c=highest("memory_temperature_c"),
            power_mean_w=self._mean_power(),
            power_max_w=highest("power_w"),
            power_limit_w=self._lowest_limit_w,
            sm_mean_mhz=self._mean("sm_mhz"),
            sm_min_mhz=self._slowest.get("sm_mhz"),
            sm_max_mhz=highest("sm_max_mhz"),
            power_default_limit_w=last("power_default_limit_w"),
            memory_mhz=sample.memory_mhz,
            utilization_mean_percent=self._mean("utilization_percent"),
            memory_used_max_mib=highest("memory_used_mib"),
            throttled_percent=self._throttled(),
            slowed_percent=self._slowed(),
            power_violation_percent=self._percent_of_time("power_violation_ns"),
            thermal_violation_percent=self._percent_of_time("thermal_violation_ns"),
            counted_s=round(self._seconds, 3),
            ecc_corrected_new=max(self._gains_of(_CORRECTED), default=None),
            ecc_uncorrected_new=max(self._gains_of(_UNCORRECTED), default=None),
            ecc_corrected_total=last("ecc_corrected_total"),
            ecc_uncorrected_total=last("ecc_uncorrected_total"),
            remapped_corrected=last("remapped_corrected"),
            remapped_uncorrected=last("remapped_uncorrected"),
            remapped_new=sum(remapped) if (remapped := self._gains_of(_REMAPPED)) else None,
            remap_pending=last("remap_pending"),
            remap_failed=last("remap_failed"),
            pcie_gen=highest("pcie_gen"),
            pcie_gen_min=self._slowest.get("pcie_gen"),
            pcie_max_gen=last("pcie_max_gen"),
            pcie_width=highest("pcie_width"),
            pcie_width_min=self._slowest.get("pcie_width"),
            pcie_max_width=last("pcie_max_width"),
            pcie_replays_new=gained("pcie_replays"),
            nvlink_errors_new=gained("nvlink_errors"),
            xids=dict(self.xids) if self.xids or last("watches_xids") else None,
            told_no_more=self._no_longer_reported(),
            trouble=list(self._troubles),
        )

    def _mean(self, name: str) -> float | None:
        return round(self._sums[name] / self._told[name], 1) if name in self._sums else None

    def _gains_of(self, names: Iterable[str]) -> list[int]:
        """Of those that are known. Of two counts of the same errors the larger gain is true: those
        since load are forgotten in a reset, and a device may report only one of the two."""
        return [self._gains[name] for name in names if name in self._gains]

    def _no_longer_reported(self) -> list[str]:
        """What could condemn the GPU and was not reported until the end; of the two counts of
        errors one is enough."""
        missing_at_the_end = self._last_values.keys() - _reported(self.counters or Counters())
        ended = [name for name in _CONDEMNING if name in missing_at_the_end]
        is_counted = any(name in self._gains and name not in ended for name in _UNCORRECTED)
        missing = [name for name in ended if not (is_counted and name in _UNCORRECTED)]
        return list(dict.fromkeys(_CONDEMNING[name] for name in missing))

    @property
    def _seconds(self) -> float:
        """Between the first and the last counters."""
        return self._gains["t"] / 1e9

    def _mean_power(self) -> float | None:
        energy_mj = self._gains.get("energy_mj")
        if energy_mj and self._seconds >= 1:  # the energy counter moves a few times a second
            return round(energy_mj / 1000 / self._seconds, 1)
        return self._mean("power_w")

    def _percent_of_time(self, name: str) -> float | None:
        """None also for a counter that ran faster than time: the numbers of NVML's fields changed
        between drivers, so it may count something else."""
        gained_ns = self._gains.get(name)
        if gained_ns is None or gained_ns / 1e9 > self._seconds * _COUNTER_SLACK:
            return None
        return _percent(gained_ns / 1e9, self._seconds)

    def _throttled(self) -> dict[str, float] | None:
        if not self._num_reasons:
            return None
        in_order = self._reasons.most_common()
        return {reason: _percent(count, self._num_reasons) for reason, count in in_order}

    @property
    def _num_reasons(self) -> int:
        """Samples that say why the clocks are not higher."""
        return self._told["clocks_event_reasons"]

    def _slowed(self) -> dict[str, float]:
        percents = {reason: self._slowed_percent(reason) for reason in SLOWDOWNS}
        found = {reason: percent for reason, percent in percents.items() if percent >= SLOW_PERCENT}
        return {reason: found[reason] for reason in _telling(found)}

    def _slowed_percent(self, reason: str) -> float:
        """Of the run: by the counter of its time, or by samples if that is more."""
        counter, num_seen = SLOWDOWNS[reason].counter, self._reasons[reason]
        counted = self._percent_of_time(counter) if counter else None
        seen = _percent(num_seen, self._num_reasons) if num_seen >= MIN_SAMPLES else 0.0
        return max(counted or 0.0, seen)


def _is_slowed(values: Mapping[str, Any]) -> bool:
    """Whether heat or power, which are judged by themselves, hold the clocks back."""
    reasons = throttle_reasons(values.get("clocks_event_reasons", 0))
    return any(reason in SLOWDOWNS or reason == POWER_CAP for reason in reasons)


def _reported(event: Counters | Telemetry) -> dict[str, Any]:
    return {name: value for name, value in asdict(event).items() if value is not None}


def symptoms(worker: str, health: Health | None) -> list[Symptom]:
    """What is wrong with a worker's GPU, or not known of it. None: nothing was reported."""
    if health is None:
        return [_not_known("nothing was heard of it: its health is not known")]
    index = worker.removeprefix("GPU").partition(".")[0]
    found = [
        *_memory_symptoms(health, index),
        *(xid_symptom(xid) for xid in health.xids or {} if xid not in HARMLESS),
        *_slowdown_symptoms(health),
        *_limit_symptoms(health, index),
        *_link_symptoms(health),
        *_repeated_symptoms(health),
        *(trouble_symptom(worker, trouble) for trouble in health.trouble),
    ]
    if health.told_no_more:
        whats = " and ".join(health.told_no_more)
        found.append(_not_known(f"it told {whats}, and no more at the end: {_LOST_SIGHT}"))
    elif _is_blind(health) and not health.trouble:
        found.append(_not_known("it tells neither memory errors nor Xids: its health is not known"))
    return found


def symptoms_now(record: Record) -> list[Symptom]:
    """What one look shows and no run is judged by: errors of before, clocks of this moment."""
    counters, sample = record.counters or Counters(), record.sample or Telemetry()
    found = []
    if count := counters.ecc_uncorrected:
        figure = f"{count} uncorrected memory errors since the driver was loaded"
        found.append(Symptom(Severity.MONITOR, figure, "reset it when idle"))
    if counters.fabric_ready is False:
        figure = "the NVLink fabric has not taken it in"
        cure = "see Fabric in `nvidia-smi -q`, and `systemctl status nvidia-fabricmanager`"
        found.append(Symptom(Severity.MONITOR, figure, cure))
    held = throttle_reasons(sample.clocks_event_reasons or 0)
    if reasons := _telling(reason for reason in held if reason in SLOWDOWNS):
        figure = f"{', '.join(reasons)}: its clocks are held back now"
        found.append(Symptom(Severity.MONITOR, figure, "check its cooling and its power supply"))
    return found


_LOST_SIGHT = "its health from then on is not known"


def _not_known(figure: str) -> Symptom:
    return Symptom(Severity.MONITOR, figure, "see what `nvidia-smi -q` says", CauseClass.UNKNOWN)


def _is_blind(health: Health) -> bool:
    """Whether no figure was reported that could condemn the GPU: that is not a healthy one."""
    remap = health.remap_pending, health.remap_failed
    return (health.ecc_uncorrected_new, *remap, health.xids) == (None,) * 4


def slow_symptom(slow: Slow, samples: Sequence[Telemetry]) -> Symptom:
    """`samples`: of its GPU while it was slow, as far as there are any."""
    figure = ", ".join([str(slow), *_said_then(samples)])
    return Symptom(Severity.MONITOR, figure, _LOOK_FOR, word="speed")


_LOOK_FOR = "look for heat, limits of power and clocks, and other work on it"


def _said_then(samples: Sequence[Telemetry]) -> Iterator[str]:
    clocks = [sample.sm_mhz for sample in samples if sample.sm_mhz is not None]
    if clocks:
        most = max((sample.sm_max_mhz or 0 for sample in samples), default=0)
        yield f"at {median_low(clocks):,}{f' of {most:,}' if most else ''} MHz"
    heats = [sample.temperature_c for sample in samples if sample.temperature_c is not None]
    if heats:
        yield f"{max(heats)} C"
    seen = Counter(
        reason for each in samples for reason in throttle_reasons(each.clocks_event_reasons or 0)
    )
    held = [reason for reason in seen if 2 * seen[reason] >= len(samples)]
    yield from _telling(reason for reason in held if reason in (*SLOWDOWNS, POWER_CAP))


def _telling(reasons: Iterable[str]) -> list[str]:
    """Without those that another one of them explains."""
    found = list(reasons)
    implied_by = {reason: SLOWDOWNS[reason].implied_by for reason in found if reason in SLOWDOWNS}
    return [reason for reason in found if not set(found) & set(implied_by.get(reason, ()))]


def throttle_reasons(bits: int) -> list[str]:
    """Why clocks are held back, from the bits of nvmlClocksEventReason*."""
    return [reason for bit, reason in _REASONS.items() if bits & bit]


def _memory_symptoms(health: Health, index: str) -> Iterator[Symptom]:
    # The severities are DCGM's (dcgm_errors.c), but for a pending remap: NVIDIA's memory error
    # management asks for a reset there and lets work go on until then.
    reset = f"end what runs on it, then `nvidia-smi --gpu-reset -i {index}` or reboot"
    if count := health.ecc_uncorrected_new:
        figure = f"{count} new uncorrected memory errors (ECC) during this run"
        cure = f"distrust its results; {reset}; if they come back, have the board replaced"
        yield Symptom(Severity.ISOLATE, figure, cure)
    if health.remap_failed:
        figure = "a row of its memory could not be remapped"
        yield Symptom(Severity.ISOLATE, figure, "have the board replaced")
    if health.remap_pending:
        yield Symptom(Severity.RESET, "a row of its memory waits to be remapped", reset)
    if count := health.remapped_new:
        figure = f"{count} newly remapped rows of its memory during this run"
        yield Symptom(Severity.MONITOR, figure, _IF_MORE)
    if count := health.ecc_corrected_new:
        figure = f"{count} new corrected memory errors (ECC) during this run"
        yield Symptom(Severity.MONITOR, figure, _IF_MORE)


_IF_MORE = "watch its memory; if they become more from run to run, have the board replaced"


def _slowdown_symptoms(health: Health) -> Iterator[Symptom]:
    hottest = health.temperature_max_c
    up_to = "" if hottest is None else f" (up to {hottest} C)"
    for reason, percent in health.slowed_percent.items():
        figure = f"{reason} for {percent:g} % of the run{up_to}"
        yield Symptom(Severity.MONITOR, figure, SLOWDOWNS[reason].cure)


def _limit_symptoms(health: Health, index: str) -> Iterator[Symptom]:
    """Limits that nobody needs for a healthy GPU, and that training is slower by."""
    limit, default = health.power_limit_w, health.power_default_limit_w
    if limit and default and limit < default * _LOW_LIMIT:
        figure = f"power limit {limit:g} W of {default:g} W by default"
        cure = f"`nvidia-smi -i {index} -pl {default:g}` sets it"
        yield Symptom(Severity.MONITOR, figure, cure)
    clock, most = health.sm_min_mhz, health.sm_max_mhz
    if clock and most and clock < most * _LOW_CLOCK:
        held = [reason for reason in health.throttled_percent or {} if reason in _SET_BY_PEOPLE]
        why = f"held back by {', '.join(held)}" if held else "and NVML gives no reason"
        figure = f"SM clock {clock} of {most} MHz under load, {why}"
        cure = f"`nvidia-smi -i {index} -rgc` and `-rac` reset clocks that were set by hand"
        yield Symptom(Severity.MONITOR, figure, cure)


_SET_BY_PEOPLE = ("application clocks", "sync boost", "display clocks")


def _link_symptoms(health: Health) -> Iterator[Symptom]:
    slow = []
    if _is_below(health.pcie_gen_min, health.pcie_max_gen):
        slow.append(f"generation {health.pcie_gen_min} of {health.pcie_max_gen}")
    # Narrow in every sample is too narrow, whatever the load.
    widths = filter(None, (health.pcie_width_min, health.pcie_width))
    if _is_below(width := min(widths, default=None), health.pcie_max_width):
        slow.append(f"width x{width} of x{health.pcie_max_width}")
    if slow:
        yield Symptom(Severity.MONITOR, f"PCIe link at {', '.join(slow)}", _RESEAT)


def _repeated_symptoms(health: Health) -> Iterator[Symptom]:
    """Links whose errors were mended by sending again."""
    replays, minutes = health.pcie_replays_new or 0, max(1.0, health.counted_s / 60)
    if replays > REPLAYS_PER_MINUTE * minutes:
        figure = f"{replays} PCIe replays during this run"
        yield Symptom(Severity.MONITOR, figure, _RESEAT)
    if count := health.nvlink_errors_new:
        figure = f"{count} NVLink errors during this run"
        yield Symptom(Severity.MONITOR, figure, "check bridges and seating")


_RESEAT = "reseat the board, check riser and slot"


def _is_below(value: int | None, most: int | None) -> bool:
    """Whether both are known (0 is not) and there is more to have."""
    return bool(value and most and value < most)


def trouble_symptom(worker: str, trouble: Trouble) -> Symptom:
    """`worker`: the one with this GPU; empty: NVML itself."""
    if trouble.code is None:
        figure = f"telemetry ended: {trouble.text}"
        return Symptom(Severity.MONITOR, figure, _LOST_SIGHT, CauseClass.UNKNOWN)
    number = worker.removeprefix("GPU").partition(".")[0]
    cure = cure_for(trouble.code, int(number) if number else None)
    effect = "telemetry of it ends" if trouble.lost else "telemetry has a gap"
    figure = f"{trouble.call}: {trouble.text} (NVML {trouble.code})"
    severity = _severity_of(trouble)
    cause_class = CauseClass.UNKNOWN if severity is Severity.MONITOR else CauseClass.HARDWARE
    return Symptom(severity, figure, f"{effect}; {cure}", cause_class)


def _severity_of(trouble: Trouble) -> Severity:
    """A failed call condemns a GPU only where NVML says that the GPU is lost or needs a reset."""
    if trouble.call.startswith("nvmlInit"):
        return Severity.MONITOR
    # The probe knew this UUID a moment ago.
    is_gone = trouble.code == NOT_FOUND and trouble.call == "nvmlDeviceGetHandleByUUID"
    if trouble.code == GPU_IS_LOST or is_gone:
        return Severity.ISOLATE
    return Severity.RESET if trouble.code == RESET_REQUIRED else Severity.MONITOR


def _percent(part: float, whole: float) -> float:
    return min(100.0, round(100 * part / whole, 2)) if whole > 0 else 0.0
