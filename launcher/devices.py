"""Which places this run uses: the GPUs that were asked for, or CPU slots where there is no GPU."""

from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cached_property

from msgspec import Struct

from launcher.gpus.choose import (
    auto_count,
    broken_needed,
    check_selector,
    choose,
    describe_choices,
    why_busy,
    why_not_idle,
)
from launcher.gpus.codes import MISSING, WITHOUT
from launcher.gpus.probe import BrokenGpu, Gpu, GpuProbe, Snapshot
from launcher.gpus.reservation import Reservation, holders, look_auto, reserve, reserve_auto
from launcher.gpus.visible import Mask, names_in, order_note, read_mask, titles, visible
from launcher.plan import Place, cpu_places, gpu_places
from model_check.config.fields import all_fields, given_by
from model_check.config.load import Loaded
from model_check.errors import ConfigError, NoGpuError, UsageError

NO_GPU_VALUES = ("", "-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES that a person sets to use no GPU."""


class Machine:
    """The GPUs of this machine. NVML is asked once, and only when something depends on them."""

    def __init__(self, probe: GpuProbe, environ: Mapping[str, str]) -> None:
        self._probe = probe
        self.mask_value = environ.get("CUDA_VISIBLE_DEVICES")
        self._order = environ.get("CUDA_DEVICE_ORDER")

    @cached_property
    def snapshot(self) -> Snapshot:
        return self._probe.snapshot()

    @cached_property
    def mask(self) -> Mask:
        return read_mask(self.snapshot.gpus, self.mask_value)

    @property
    def visible(self) -> list[Gpu]:
        """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order."""
        return self.mask.devices

    def fresh_visible(self) -> list[Gpu]:
        """`visible`, asked again: memory and processes change."""
        return visible(self._probe.snapshot().gpus, self.mask_value)

    def has_gpu(self) -> bool:
        """Whether there is a GPU to use. Raises NoGpuError on a machine whose GPUs are lost: a
        health check must not pass the CPU of such a machine."""
        if not self.visible and (broken := self.broken("all")):
            raise NoGpuError(f"{broken[0].why}; {WITHOUT}")
        has_driver = self.snapshot.driver_version is not None
        if not self.visible and has_driver and self.mask_value not in NO_GPU_VALUES:
            raise NoGpuError(f"{self.why_no_gpu()}; {WITHOUT}")
        return bool(self.visible)

    def broken(self, selector: str, expect_gpus: int | None = None) -> list[BrokenGpu]:
        """The GPUs that a run of these settings needs and that do not answer."""
        return broken_needed(selector, expect_gpus, self.mask_value, self.snapshot)

    def notes(self) -> list[str]:
        """What a person should know of the GPUs here."""
        left_out = [f"left out: {gpu.why}" for gpu in self.snapshot.broken]
        of_mask = (self.mask.lacks, self.mask.ignores, self.order_note())
        return [*self.snapshot.notes, *left_out, *filter(None, of_mask)]

    def order_note(self) -> str | None:
        """A line when the numbers in CUDA_VISIBLE_DEVICES could mean other GPUs to CUDA."""
        return order_note(self.snapshot.gpus, self.mask_value, self._order)

    def unused_mask(self) -> str | None:
        """A line for a run on the CPU whose environment names GPUs, on a machine without a driver.
        Slurm and containers leave such a mask there, so it is no error. None: it names none."""
        if self.snapshot.driver_version is not None or not names_in(self.mask_value or "")[0]:
            return None
        return (
            f"CUDA_VISIBLE_DEVICES={self.mask_value!r} names GPUs, and this run uses none "
            "(--device cuda refuses to run without)"
        )

    def why_no_gpu(self) -> str:
        if self.snapshot.gpus and self.mask.lacks:
            return self.mask.lacks
        if self.snapshot.gpus:
            return (
                f"CUDA_VISIBLE_DEVICES={self.mask_value!r} hides all {len(self.snapshot.gpus)} GPUs"
            )
        return self.snapshot.reason or "no GPU found"


class Picked(Struct, frozen=True):
    """The places of a run, and in words why these."""

    places: tuple[Place, ...]
    why: str
    notes: tuple[str, ...] = ()
    """What a person should know before the start: a line each."""
    snapshot: Snapshot = Snapshot()
    """The GPUs of the machine, where some are used."""
    reservation: Reservation | None = None
    """Holds the GPUs for this launcher until the process ends."""


_ASK_FOR_NO_GPU = (None, False, (), ("speed",))
"""Values of settings about GPUs. Who is slower than its equals is told of CPU workers, too."""


class Hold(Enum):
    """What becomes of the GPUs that are chosen."""

    LOOK = "look"
    """Nothing: nobody wants to use them now."""
    TAKE = "take"
    """They are reserved."""


def pick(loaded: Loaded, machine: Machine, hold: Hold) -> Picked:
    """Choose what the settings ask for. Raises UsageError, NoGpuError."""
    check_selector(loaded.settings.launch.gpus)
    if loaded.device == "cpu":
        _refuse_without_gpus(loaded, machine)
        return _pick_cpu(loaded, machine)
    if not machine.has_gpu():
        _refuse_without_gpus(loaded, machine)
        source = loaded.sources["system.device"]
        asked = f"{given_by(source, 'system.device')}system.device = cuda"
        asked = f"{source} needs a GPU" if source.startswith("check ") else asked
        raise NoGpuError(
            f"{asked}: {machine.why_no_gpu()}; {WITHOUT}, `bash run.sh doctor` looks at the machine"
        )
    if is_asked_for(loaded, "launch.workers"):
        raise UsageError(
            f"{loaded.sources['launch.workers']}: launch.workers counts CPU workers, and this run "
            "uses GPUs: choose them with --gpus, or say --device cpu"
        )
    return _pick_gpus(loaded, machine, hold)


def _refuse_without_gpus(loaded: Loaded, machine: Machine) -> None:
    """Refuse a run on the CPU whose settings say which GPUs to use, or how."""
    names = ("gpus", "require_idle", "expect_gpus", "fail_on", "fail_on_health")
    for name in (f"launch.{name}" for name in names):
        if not is_asked_for(loaded, name) or loaded.value(name) in _ASK_FOR_NO_GPU:
            continue
        given = given_by(loaded.sources[name], name)
        asked = f"{given}GPUs were asked for ({name} = {loaded.value(name)!r}), "
        if loaded.settings.system.device == "cpu":
            raise ConfigError(f"{asked}but system.device is cpu: give one of the two")
        raise NoGpuError(
            f"{asked}but there is none: {machine.why_no_gpu()}; {WITHOUT}, "
            "`bash run.sh doctor` looks at the machine"
        )


def _pick_cpu(loaded: Loaded, machine: Machine) -> Picked:
    launch = loaded.settings.launch
    places = tuple(cpu_places(launch.workers, launch.first_worker))
    if loaded.settings.system.device == "cpu":
        return Picked(places, "system.device is cpu")
    return Picked(places, machine.why_no_gpu(), tuple(filter(None, [machine.unused_mask()])))


def _pick_gpus(loaded: Loaded, machine: Machine, hold: Hold) -> Picked:
    selector = loaded.settings.launch.gpus
    count = auto_count(selector)
    _refuse_blind_health(loaded)
    _refuse_missing(loaded, machine)
    reservation: Reservation | None = None
    notes = list(_notes_on_settings(loaded, machine))
    looks = [machine.visible]

    def look() -> list[Gpu]:
        looks.append(machine.fresh_visible())
        return looks[-1]

    if count and hold is Hold.TAKE:
        gpus, reservation = reserve_auto(count, look)
    elif count:
        gpus = look_auto(count, machine.visible)
    else:
        gpus = choose(selector, machine.visible, machine.snapshot.gpus)
        reservation = reserve(gpus) if hold is Hold.TAKE else None
        notes += holders(gpus) if hold is Hold.LOOK else []
    busy = [f"{gpu.label} is busy: {why}" for gpu in gpus if (why := why_busy(gpu))]
    not_idle = [why for gpu in gpus if (why := why_not_idle(gpu))]
    if not_idle and loaded.settings.launch.require_idle:
        raise NoGpuError(
            f"launch.require_idle: {'; '.join(not_idle)} (choose others with --gpus, or share them "
            "without --require-idle)"
        )
    notes += describe_choices(gpus, looks[-1]) if count else busy
    return Picked(
        places=tuple(gpu_places(gpus)),
        why=", ".join(f"{gpu.label} {gpu.name}" for gpu in gpus),
        notes=(*machine.notes(), *notes),
        snapshot=machine.snapshot,
        reservation=reservation,
    )


def _refuse_missing(loaded: Loaded, machine: Machine) -> None:
    """Refuse a run that asks for a GPU that is not here, or for all where one is missing.
    `launch.expect_gpus` says how many are all; without it none may be missing. Raises
    NoGpuError."""
    launch, num = loaded.settings.launch, len(machine.visible)
    expected, asked = launch.expect_gpus, auto_count(launch.gpus)
    if expected is not None and num < expected:
        raise NoGpuError(_too_few(f"launch.expect_gpus = {expected}", machine))
    if asked is not None and num < asked:
        raise NoGpuError(_too_few(f"--gpus {launch.gpus}", machine))
    if broken := machine.broken(launch.gpus, expected):
        raise NoGpuError(f"{broken[0].why} (--gpus with the others runs without it)")
    if launch.gpus.strip() == "all" and expected is None and machine.mask.lacks:
        lost = "; ".join([machine.mask.lacks, *machine.snapshot.notes])
        raise NoGpuError(f"{lost} ({MISSING}; launch.expect_gpus={num} runs without it)")


def _too_few(asked: str, machine: Machine) -> str:
    broken = (gpu.why for gpu in machine.snapshot.broken)
    losses = [*broken, *machine.snapshot.notes, *filter(None, [machine.mask.lacks])]
    return f"{'; '.join([f'{asked}, found {_found(machine)}', *losses])} ({MISSING})"


def _found(machine: Machine) -> str:
    return f"{len(machine.visible)}: {titles(machine.visible)}" if machine.visible else "none"


def _notes_on_settings(loaded: Loaded, machine: Machine) -> Iterator[str]:
    launch, num = loaded.settings.launch, len(machine.visible)
    if launch.expect_gpus is not None and num > launch.expect_gpus:
        yield f"launch.expect_gpus = {launch.expect_gpus}, found {_found(machine)}"


def _refuse_blind_health(loaded: Loaded) -> None:
    if loaded.settings.launch.telemetry_interval_s > 0:
        return
    for name in ("launch.fail_on", "launch.fail_on_health"):
        interval = "launch.telemetry_interval_s"
        if is_asked_for(loaded, name) and loaded.value(name) not in _ASK_FOR_NO_GPU:
            raise ConfigError(
                f"{given_by(loaded.sources[interval], interval)}{interval} = 0 leaves "
                f"{name} nothing to judge by: give one of the two"
            )


def is_asked_for(loaded: Loaded, name: str) -> bool:
    """Whether a person asked for this value. A file that repeats the default (the config.json of an
    earlier run does) asks for nothing."""
    source = loaded.sources[name]
    return all_fields()[name].default != loaded.value(name) or source.startswith(("--", name))
