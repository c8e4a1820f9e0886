"""Which places this run uses: the GPUs that were asked for, or CPU slots where there is no GPU."""

from collections.abc import Mapping, Sequence
from functools import cached_property

from msgspec import Struct

from launcher.gpus.broken import broken_wanted
from launcher.gpus.choose import auto_count, check_selector, choose, describe_choice, why_busy
from launcher.gpus.probe import BrokenGpu, Gpu, GpuProbe, Snapshot
from launcher.gpus.reservation import Reservation, holders, look_auto, reserve, reserve_auto
from launcher.gpus.visible import order_note, visible
from launcher.plan import Place, cpu_places, gpu_places
from model_check.config.fields import all_fields
from model_check.config.load import Loaded
from model_check.errors import ConfigError, NoGpuError, UsageError

NO_GPU_WANTED = ("", "-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES by which a person says: no GPU."""


class Machine:
    """The GPUs of this machine: asked once, and only when something depends on them."""

    def __init__(self, probe: GpuProbe, environ: Mapping[str, str]) -> None:
        self._probe = probe
        self._mask = environ.get("CUDA_VISIBLE_DEVICES")
        self._order = environ.get("CUDA_DEVICE_ORDER")

    @cached_property
    def snapshot(self) -> Snapshot:
        return self._probe.snapshot()

    @cached_property
    def visible(self) -> list[Gpu]:
        """What CUDA_VISIBLE_DEVICES leaves, in its order."""
        return visible(self.snapshot.gpus, self._mask)

    def fresh_visible(self) -> list[Gpu]:
        """The same, asked again: memory and processes change."""
        return visible(self._probe.snapshot().gpus, self._mask)

    def has_gpu(self) -> bool:
        """Whether there is a GPU to use. Raises NoGpuError where there should be one and is none:
        a health check must not pass the CPU of a box that lost its GPUs."""
        if not self.visible and (broken := self.broken("all")):
            raise NoGpuError(f"{broken[0].why} (--device cpu trains without)")
        has_driver = self.snapshot.driver_version is not None
        if not self.visible and has_driver and self._mask not in NO_GPU_WANTED:
            raise NoGpuError(f"{self.why_no_gpu()} (--device cpu trains without)")
        return bool(self.visible)

    def broken(self, selector: str) -> list[BrokenGpu]:
        """The GPUs that cannot answer and that `selector` wants."""
        return broken_wanted(selector, self._mask, self.snapshot)

    def notes(self) -> list[str]:
        """What a person should know of the GPUs here."""
        note = order_note(self.snapshot.gpus, self._mask, self._order)
        left_out = [f"left out: {gpu.why}" for gpu in self.snapshot.broken]
        return [*self.snapshot.notes, *left_out, *([note] if note else [])]

    def why_no_gpu(self) -> str:
        if self.snapshot.gpus:
            return f"CUDA_VISIBLE_DEVICES={self._mask!r} hides all {len(self.snapshot.gpus)} GPUs"
        return self.snapshot.reason or "no GPU found"


class Picked(Struct, frozen=True):
    """The places of a run, and in words why these."""

    places: tuple[Place, ...]
    why: str
    groups: Mapping[str, str]
    """Worker -> the kind of device it runs on: equals are compared bit for bit."""
    notes: tuple[str, ...] = ()
    """What a person should know before the start: a line each."""
    driver_version: str | None = None
    cuda_driver_version: str | None = None
    reservation: Reservation | None = None
    """Holds the GPUs for this launcher until the process ends."""


def pick(loaded: Loaded, machine: Machine, *, hold: bool) -> Picked:
    """Choose (and with `hold` reserve) what the settings ask for. Raises UsageError, NoGpuError."""
    check_selector(loaded.settings.launch.gpus)
    _refuse_contradictions(loaded, machine)
    if loaded.device == "cpu":
        return _pick_cpu(loaded, machine)
    return _pick_gpus(loaded, machine, hold=hold)


def _refuse_contradictions(loaded: Loaded, machine: Machine) -> None:
    sources = loaded.sources
    if loaded.device == "cuda":
        if not machine.has_gpu():
            raise NoGpuError(f"--device cuda: {machine.why_no_gpu()} (--device cpu trains without)")
        if _asked(loaded, "launch.workers"):
            raise UsageError(
                f"{sources['launch.workers']}: launch.workers counts CPU workers, and this run "
                "uses GPUs: choose them with --gpus, or say --device cpu"
            )
    else:
        _refuse_without_gpus(loaded, machine)


def _refuse_without_gpus(loaded: Loaded, machine: Machine) -> None:
    """A run on the CPU that was told which GPUs to use, or how."""
    for name in ("launch.gpus", "launch.require_idle", "launch.fail_on_health"):
        if not _asked(loaded, name):
            continue
        asked = f"{loaded.sources[name]}: GPUs were asked for ({name} = {loaded.value(name)!r}), "
        if loaded.settings.system.device == "cpu":
            raise ConfigError(f"{asked}but system.device is cpu: give one of the two")
        raise NoGpuError(
            f"{asked}but there is none: {machine.why_no_gpu()} (--device cpu instead trains "
            "without; run.sh doctor looks at the machine)"
        )


def _pick_cpu(loaded: Loaded, machine: Machine) -> Picked:
    places = cpu_places(loaded.settings.launch.workers)
    asked = loaded.settings.system.device == "cpu"
    why = "system.device is cpu" if asked else machine.why_no_gpu()
    return Picked(tuple(places), why, dict.fromkeys((place.name for place in places), "cpu"))


def _pick_gpus(loaded: Loaded, machine: Machine, *, hold: bool) -> Picked:
    selector = loaded.settings.launch.gpus
    auto = auto_count(selector) is not None
    _refuse_blind_health(loaded)
    if broken := machine.broken(selector):
        raise NoGpuError(f"{broken[0].why} (--gpus with the others runs without it)")
    reservation: Reservation | None = None
    notes: list[str] = []
    if hold and auto:
        gpus, reservation = reserve_auto(selector, machine.fresh_visible)
    elif auto:
        gpus = look_auto(selector, machine.visible)
    else:
        gpus = choose(selector, machine.visible, machine.snapshot.gpus)
        reservation = reserve(gpus) if hold else None
        if not hold:
            notes = holders(gpus)
    if loaded.settings.launch.require_idle:
        _require_idle(gpus)
    if auto:
        notes += [describe_choice(gpu) for gpu in gpus]
    else:
        notes += [f"{gpu.label} is busy: {why}" for gpu in gpus if (why := why_busy(gpu))]
    return Picked(
        places=tuple(gpu_places(gpus)),
        why=", ".join(f"{gpu.label} {gpu.name}" for gpu in gpus),
        groups={gpu.label: f"{gpu.name} {_whole_gib(gpu)}" for gpu in gpus},
        notes=(*machine.notes(), *notes),
        driver_version=machine.snapshot.driver_version,
        cuda_driver_version=machine.snapshot.cuda_driver_version,
        reservation=reservation,
    )


def _refuse_blind_health(loaded: Loaded) -> None:
    launch = loaded.settings.launch
    if launch.fail_on_health and launch.telemetry_interval_s == 0:
        raise ConfigError(
            f"{loaded.sources['launch.telemetry_interval_s']}: launch.telemetry_interval_s = 0 "
            "leaves launch.fail_on_health nothing to judge by: give one of the two"
        )


def _require_idle(gpus: Sequence[Gpu]) -> None:
    busy = [f"{gpu.label} is busy: {why}" for gpu in gpus if (why := why_busy(gpu))]
    if busy:
        raise NoGpuError(
            f"launch.require_idle: {'; '.join(busy)} (choose others with --gpus, or share them "
            "without --require-idle)"
        )


def _asked(loaded: Loaded, name: str) -> bool:
    """Whether a person wants this value. A file that repeats the default (the config.json of an
    earlier run does) asks for nothing."""
    source = loaded.sources[name]
    return all_fields()[name].default != loaded.value(name) or source.startswith(("--", name))


def _whole_gib(gpu: Gpu) -> str:
    """Boards of one model differ by a few MiB that the driver takes."""
    return "unknown memory" if gpu.total_mib is None else f"{round(gpu.total_mib / 1024)} GiB"
