"""What telemetry says of a GPU during a run: the figures, and the symptoms they are. Pure."""

from collections import Counter

from msgspec import Struct, field

from launcher.gpus.cures import WITHOUT, cure_for
from launcher.telemetry.xids import HARMLESS, xid_symptom
from launcher.verdict.health import Health
from launcher.verdict.severity import CauseClass, Severity, Symptom
from model_check.events import Counters, GpuEvent, Telemetry, Trouble, Watched, Xid

SLOW_PERCENT = 1.0
"""A GPU that is slowed down for less of a run is not worth a word."""
MIN_SAMPLES = 3
"""A share of fewer samples, or a link that was seen less often under load, proves nothing."""
_LOADED_PERCENT = 10
_COUNTER_SLACK = 1.1
_GPU_IS_LOST, _RESET_REQUIRED, _NOT_FOUND = 15, 16, 6
_COUNTED = (
    "energy_mj",
    "power_violation_ns",
    "thermal_violation_ns",
    "sw_thermal_ns",
    "hw_thermal_ns",
    "power_brake_ns",
    "ecc_corrected",
    "ecc_uncorrected",
    "ecc_corrected_total",
    "ecc_uncorrected_total",
    "pcie_replays",
    "nvlink_errors",
)
"""The members of Counters that only grow."""
_UNCORRECTED = ("ecc_uncorrected", "ecc_uncorrected_total")
"""Each counts what the other does, from another beginning on."""
_CONDEMNING = {
    **dict.fromkeys(_UNCORRECTED, "memory errors"),
    **dict.fromkeys(("remap_pending", "remap_failed"), "remapped rows"),
}
"""The members of Counters that could condemn a GPU, and how messages call them."""

_COOL = "check its fans, the air flow and the temperature of the room"
_SLOWDOWNS = (
    # what, the counter of its time, its bit of the clocks' event reasons, what to do
    ("hardware thermal slowdown", "hw_thermal_ns", 0x40, _COOL),
    ("software thermal slowdown", "sw_thermal_ns", 0x20, _COOL),
    (
        "power brake",
        "power_brake_ns",
        0x80,
        "the power supply asks for it: check it, and its cables",
    ),
    ("hardware slowdown", None, 0x08, f"heat or power: {_COOL}, and the power supply"),
)
_REASONS = {
    0x01: "idle",
    0x02: "application clocks",
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
    0x100: "display clocks",
}


class Record(Struct):
    """What was told of one GPU so far, in bounded memory."""

    is_lost: bool = False
    _first: Counters | None = None
    _last: Counters | None = None
    _told: dict[str, int] = field(default_factory=dict)
    """Each member of Counters as it was told last: a GPU in trouble may tell it no more."""
    _gained: dict[str, int] = field(default_factory=dict)
    _xids: Counter[int] = field(default_factory=Counter)
    _troubles: list[Trouble] = field(default_factory=list)
    _num_samples: int = 0
    _num_loaded: int = 0
    _reasons: Counter[int] = field(default_factory=Counter)
    _num_reasons: int = 0
    _max: dict[str, float] = field(default_factory=dict)
    _sums: dict[str, tuple[float, int]] = field(default_factory=dict)
    _latest: Telemetry | None = None

    def record(self, event: GpuEvent) -> None:
        match event:
            case Telemetry():
                self._sample(event)
            case Counters():
                self._first, self._last = self._first or event, event
                self._count(event)
            case Xid():
                self._xids[event.xid] += 1
            case Watched():
                pass
            case Trouble():
                self._troubles.append(event)
                self.is_lost = self.is_lost or event.lost

    def _count(self, counters: Counters) -> None:
        """A counter that began anew gained what it shows."""
        for name in counters.__struct_fields__:
            value = getattr(counters, name)
            if value is None:
                continue
            before = self._told.get(name)
            self._told[name] = value
            if before is not None and name in _COUNTED:
                gained = value - before if value >= before else value
                self._gained[name] = self._gained.get(name, 0) + gained

    def _sample(self, sample: Telemetry) -> None:
        self._num_samples += 1
        self._latest = sample
        busy = sample.utilization_percent is None or sample.utilization_percent >= _LOADED_PERCENT
        self._num_loaded += sample.utilization_percent is not None and busy
        for name in ("temperature_c", "memory_temperature_c", "power_w", "memory_used_mib"):
            self._highest(name, getattr(sample, name))
        self._highest("pcie_gen", sample.pcie_gen)
        self._highest("pcie_width", sample.pcie_width)
        self._mean("power_w", sample.power_w)
        self._mean("utilization_percent", sample.utilization_percent)
        self._mean("sm_mhz", sample.sm_mhz if busy else None)
        if sample.clocks_event_reasons is not None:
            self._num_reasons += 1
            self._reasons.update(bit for bit in _REASONS if sample.clocks_event_reasons & bit)

    def _highest(self, name: str, value: float | None) -> None:
        if value is not None:
            self._max[name] = max(value, self._max.get(name, value))

    def _mean(self, name: str, value: float | None) -> None:
        if value is not None:
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + value, count + 1

    def num_seen(self, xid: int) -> int:
        """How often this Xid came so far."""
        return self._xids[xid]

    @property
    def sample(self) -> Telemetry | None:
        """The latest."""
        return self._latest

    @property
    def counters(self) -> Counters | None:
        """The latest."""
        return self._last

    # -- what it comes down to

    def health(self) -> Health | None:
        """None: nothing was told at all."""
        if not (self._num_samples or self._last or self._troubles or self._xids):
            return None
        latest, told = self._latest or Telemetry(), self._told.get
        return Health(
            samples=self._num_samples,
            samples_loaded=self._num_loaded,
            temperature_max_c=self._whole("temperature_c"),
            memory_temperature_max_c=self._whole("memory_temperature_c"),
            power_mean_w=self._mean_power(),
            power_max_w=self._max.get("power_w"),
            power_limit_w=latest.power_limit_w,
            sm_mean_mhz=self._average("sm_mhz"),
            sm_max_mhz=latest.sm_max_mhz,
            memory_mhz=latest.memory_mhz,
            utilization_mean_percent=self._average("utilization_percent"),
            memory_used_max_mib=self._whole("memory_used_mib"),
            throttled_percent=self._throttled(),
            slowed_percent=self._slowed(),
            power_violation_percent=self._percent_of_time("power_violation_ns"),
            thermal_violation_percent=self._percent_of_time("thermal_violation_ns"),
            ecc_corrected_new=self._new("ecc_corrected"),
            ecc_uncorrected_new=self._new_uncorrected(),
            ecc_corrected_total=told("ecc_corrected_total"),
            ecc_uncorrected_total=told("ecc_uncorrected_total"),
            remapped_corrected=told("remapped_corrected"),
            remapped_uncorrected=told("remapped_uncorrected"),
            remap_pending=self._state("remap_pending"),
            remap_failed=self._state("remap_failed"),
            pcie_gen=self._whole("pcie_gen"),
            pcie_max_gen=told("pcie_max_gen"),
            pcie_width=self._whole("pcie_width"),
            pcie_max_width=told("pcie_max_width"),
            pcie_replays_new=self._new("pcie_replays"),
            nvlink_errors_new=self._new("nvlink_errors"),
            xids=dict(self._xids) if self._xids or told("watches_xids") else None,
            told_no_more=self._told_no_more(),
            trouble=list(self._troubles),
        )

    def _whole(self, name: str) -> int | None:
        value = self._max.get(name)
        return None if value is None else int(value)

    def _average(self, name: str) -> float | None:
        total, count = self._sums.get(name, (0.0, 0))
        return round(total / count, 1) if count else None

    def _new(self, name: str) -> int | None:
        """What a counter gained; None: it was not told twice."""
        return self._gained.get(name)

    def _new_uncorrected(self) -> int | None:
        """The larger gain: errors since load are forgotten in a reset, those of the board's life
        are not, and a device may tell only one of the two."""
        gains = (self._new(name) for name in _UNCORRECTED)
        return max((gain for gain in gains if gain is not None), default=None)

    def _told_no_more(self) -> list[str]:
        """One count of the errors that was told until the end is enough."""
        at_the_end = self._last or Counters()
        ended = [
            name for name in _CONDEMNING if name in self._told and getattr(at_the_end, name) is None
        ]
        is_counted = any(name in self._gained and name not in ended for name in _UNCORRECTED)
        untold = [name for name in ended if not (is_counted and name in _UNCORRECTED)]
        return list(dict.fromkeys(_CONDEMNING[name] for name in untold))

    def _state(self, name: str) -> bool | None:
        value = self._told.get(name)
        return None if value is None else bool(value)

    @property
    def _seconds(self) -> float:
        """Between the first and the last counters."""
        return ((self._last.t - self._first.t) / 1e9) if self._first and self._last else 0.0

    def _mean_power(self) -> float | None:
        energy_mj = self._new("energy_mj")
        if energy_mj and self._seconds >= 1:  # the energy counter moves a few times a second
            return round(energy_mj / 1000 / self._seconds, 1)
        return self._average("power_w")

    def _percent_of_time(self, name: str) -> float | None:
        """None also for a counter that ran faster than time: the numbers of NVML's fields changed
        between drivers, so it may count something else."""
        gained_s = (self._new(name) or 0) / 1e9
        is_told = self._new(name) is not None and gained_s <= self._seconds * _COUNTER_SLACK
        return _percent(gained_s, self._seconds) if is_told else None

    def _throttled(self) -> dict[str, float] | None:
        if not self._num_reasons:
            return None
        shares = (
            (_REASONS[bit], _percent(n, self._num_reasons)) for bit, n in self._reasons.items()
        )
        return dict(sorted(shares, key=lambda item: -item[1]))

    def _slowed(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for what, counter, bit, _ in _SLOWDOWNS:
            counted = self._percent_of_time(counter) if counter else None
            seen = _percent(self._reasons[bit], self._num_reasons)
            percent = max(counted or 0.0, seen if self._reasons[bit] >= MIN_SAMPLES else 0.0)
            is_said_by_its_cause = counter is None and found
            if percent >= SLOW_PERCENT and not is_said_by_its_cause:
                found[what] = percent
        return found


def symptoms(worker: str, health: Health | None) -> list[Symptom]:
    """What is wrong with a worker's GPU, or not known of it. None: nothing was told."""
    if health is None:
        return [_not_known("nothing was heard of it: its health is not known")]
    index = worker.removeprefix("GPU").partition(".")[0]
    found = [
        *_memory_symptoms(health, index),
        *(xid_symptom(xid) for xid in health.xids or {} if xid not in HARMLESS),
        *_speed_symptoms(health),
        *(trouble_symptom(worker, trouble) for trouble in health.trouble),
    ]
    if health.told_no_more:
        whats = " and ".join(health.told_no_more)
        found.append(_not_known(f"it told {whats}, and no more at the end: {_LOST_SIGHT}"))
    elif _tells_no_fault(health) and not health.trouble:
        found.append(_not_known("it tells neither memory errors nor Xids: its health is not known"))
    return found


_LOST_SIGHT = "its health from then on is not known"


def _not_known(figure: str) -> Symptom:
    return Symptom(Severity.MONITOR, figure, "see what `nvidia-smi -q` says", CauseClass.UNKNOWN)


def _tells_no_fault(health: Health) -> bool:
    """Whether no figure was told that could condemn it. Not told is not healthy."""
    figures = (
        health.ecc_uncorrected_new,
        health.remap_pending,
        health.remap_failed,
        health.xids,
    )
    return all(figure is None for figure in figures)


def throttle_reasons(bits: int) -> list[str]:
    """Why clocks are held back, from the bits of nvmlClocksEventReason*."""
    return [reason for bit, reason in _REASONS.items() if bits & bit]


def _memory_symptoms(health: Health, index: str) -> list[Symptom]:
    # The severities are DCGM's (dcgm_errors.c), but for a pending remap: NVIDIA's memory error
    # management asks for a reset there and lets work go on until then.
    reset = f"end what runs on it, then `nvidia-smi --gpu-reset -i {index}` or reboot"
    found = []
    if count := health.ecc_uncorrected_new:
        figure = f"{count} new uncorrected memory errors (ECC) during this run"
        cure = f"distrust its results; {reset}; if they come back, have the board replaced"
        found.append(Symptom(Severity.ISOLATE, figure, cure))
    if health.remap_failed:
        figure = "a row of its memory could not be remapped"
        found.append(Symptom(Severity.ISOLATE, figure, "have the board replaced"))
    if health.remap_pending:
        found.append(Symptom(Severity.RESET, "a row of its memory waits to be remapped", reset))
    return found


def _speed_symptoms(health: Health) -> list[Symptom]:
    cures = {what: cure for what, _, _, cure in _SLOWDOWNS}
    found = [
        Symptom(
            Severity.MONITOR, f"{what} for {percent:g} % of the run{_hottest(health)}", cures[what]
        )
        for what, percent in health.slowed_percent.items()
    ]
    slow = []
    is_known = health.pcie_gen and health.pcie_max_gen and health.samples_loaded >= MIN_SAMPLES
    if is_known and (health.pcie_gen or 0) < (health.pcie_max_gen or 0):  # an idle link is slower
        slow.append(f"generation {health.pcie_gen} of {health.pcie_max_gen}")
    if health.pcie_width and health.pcie_max_width and health.pcie_width < health.pcie_max_width:
        slow.append(f"width x{health.pcie_width} of x{health.pcie_max_width}")
    if slow:
        cure = "reseat the board, check riser and slot"
        found.append(Symptom(Severity.MONITOR, f"PCIe link at {', '.join(slow)}", cure))
    return found


def _hottest(health: Health) -> str:
    return "" if health.temperature_max_c is None else f" (up to {health.temperature_max_c} C)"


def trouble_symptom(worker: str, trouble: Trouble) -> Symptom:
    """`worker`: whose GPU; empty: NVML itself."""
    if trouble.code is None:
        figure = f"telemetry ended: {trouble.text}"
        return Symptom(Severity.MONITOR, figure, _LOST_SIGHT, CauseClass.UNKNOWN)
    number = worker.removeprefix("GPU").partition(".")[0]
    cure = cure_for(trouble.code, int(number) if number else None).removesuffix(f" ({WITHOUT})")
    effect = "telemetry of it ends" if trouble.lost else "telemetry has a gap"
    figure = f"{trouble.call}: {trouble.text} (NVML {trouble.code})"
    severity = _severity_of(trouble)
    cause_class = CauseClass.UNKNOWN if severity is Severity.MONITOR else CauseClass.HARDWARE
    return Symptom(severity, figure, f"{effect}; {cure}", cause_class)


def _severity_of(trouble: Trouble) -> Severity:
    """What NVML cannot tell condemns a GPU only where NVML says that the GPU is lost."""
    if trouble.call.startswith("nvmlInit"):
        return Severity.MONITOR
    # The probe knew this UUID a moment ago.
    is_gone = trouble.code == _NOT_FOUND and trouble.call == "nvmlDeviceGetHandleByUUID"
    if trouble.code == _GPU_IS_LOST or is_gone:
        return Severity.ISOLATE
    return Severity.RESET if trouble.code == _RESET_REQUIRED else Severity.MONITOR


def _percent(part: float, whole: float) -> float:
    return min(100.0, round(100 * part / whole, 2)) if whole > 0 else 0.0
