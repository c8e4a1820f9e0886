"""Compile the stand-in for libnvidia-ml.so.1, and write the scenarios that drive it.

Use: `environment(build(directory), scenario_file)` is what a fresh process needs to see the GPUs of
`scenario_file`; the loader reads LD_LIBRARY_PATH at a process's start, so it must be a fresh one.
"""

import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.deadline import DEADLINE_S

SOURCE = Path(__file__).with_name("nvml_fake.c")
SONAME = "libnvidia-ml.so.1"
FLAGS = ("-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
HANG = -1
"""The milliseconds of a `delay` that never ends."""


def build(target_dir: Path) -> Path:
    """Compile into `target_dir`: the directory to put on LD_LIBRARY_PATH."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    assert compiler, "the NVML tests need a C compiler (gcc or cc)"
    command = [compiler, *FLAGS, "-fvisibility=hidden", f"-Wl,-soname,{SONAME}"]
    command += ["-o", str(target_dir / SONAME), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    return target_dir


def environment(library_dir: Path, scenario_file: Path) -> dict[str, str]:
    """This process's environment, plus what makes a child see the fake GPUs and no mask."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    return env | {
        "LD_LIBRARY_PATH": str(library_dir),
        "NVML_FAKE_SCENARIO": str(scenario_file),
    }


@dataclass(frozen=True)
class FakeGpu:
    """One GPU, or one MIG instance of a GPU. None: the call answers NOT_SUPPORTED."""

    uuid: str
    name: str = "NVIDIA H100 80GB HBM3"
    bus_id: str | None = None
    total_mib: int | None = 81559
    reserved_mib: int | None = 551
    used_mib: int | None = 4
    utilization: int | None = 0
    temperature: int | None = 31
    compute_mode: int | None = 0
    mig_mode: int | None = None
    cpus: str | None = None
    """64-bit words of the CPU mask, lowest first: `0xff 0x0`."""
    processes: Sequence[tuple[int, int]] = ()
    """(pid, MiB); -1 MiB: not available."""
    migs: Sequence["FakeGpu | None"] = ()
    """By slot; None: an empty slot."""
    more: dict[str, int | str] = field(default_factory=dict)
    """Further keys of nvml_fake.c: power_mw, clock_sm, clocks_event_reasons, ecc_corrected, ..."""


def fake_uuid(index: int) -> str:
    """A UUID that differs from its neighbours' in the first digits."""
    digits = f"{0x5D1C92AB + index * 0x11111111 & 0xFFFFFFFF:08x}"
    return f"GPU-{digits}-0000-4000-8000-{index:012x}"


def fake_gpu(index: int, **fields: object) -> FakeGpu:
    """GPU `index` of a usual box; `fields` as of FakeGpu."""
    defaults: dict[str, object] = {
        "uuid": fake_uuid(index),
        "bus_id": f"00000000:{0x1B + index:02X}:00.0",
    }
    return FakeGpu(**(defaults | fields))  # type: ignore[arg-type]


def fake_mig(index: int, slot: int, **fields: object) -> FakeGpu:
    """MIG instance `slot` of GPU `index`: what such a handle answers, no more."""
    defaults: dict[str, object] = {
        "uuid": f"MIG-{index:04x}{slot:04x}-0000-5000-8000-000000000000",
        "name": "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "total_mib": 9984,
        "reserved_mib": 0,
        "used_mib": 12,
        "utilization": None,
        "temperature": None,
        "compute_mode": None,
    }
    return FakeGpu(**(defaults | fields))  # type: ignore[arg-type]


def scenario(
    gpus: Iterable[FakeGpu],
    rules: Iterable[str] = (),
    driver: str = "570.124.06",
    cuda: int | None = 12080,
) -> str:
    """The text of a scenario file. `rules`: `fault ...`, `delay ...`, `crash ...` lines (`fault`,
    `delay` and `crash` below write them)."""
    lines = [f"driver {driver}"] if driver else []
    lines += [f"cuda {cuda}"] if cuda is not None else []
    for gpu in gpus:
        lines += ["gpu", *_device_lines(gpu)]
        for slot, instance in enumerate(gpu.migs):
            if instance is not None:
                lines += [f"mig {slot}", *_device_lines(instance)]
    return "\n".join([*lines, *rules]) + "\n"


def fault(function: str, device: int | str, code: int, nth: int | str = 0) -> str:
    """`function` (without its nvml prefix, or "*") returns `code` on `device` (2, "2/1", "-", "*").

    `nth`: only at that call; "5+": from the fifth on; 0: always.
    """
    return f"fault {function} {device} {code} {nth}"


def delay(function: str, device: int | str, ms: int, nth: int = 0) -> str:
    """`function` takes `ms` milliseconds on `device`; HANG: it never returns."""
    return f"delay {function} {device} {ms} {nth}"


def xid(gpu: int, code: int, after_ms: int = 0) -> str:
    """The driver reports Xid `code` of a GPU whose `event_types` has bit 8, so long after its
    start."""
    return f"xid {gpu} {code} {after_ms}"


def crash(function: str, device: int | str) -> str:
    """`function` ends the calling process by SIGSEGV."""
    return f"crash {function} {device}"


def _device_lines(gpu: FakeGpu) -> list[str]:
    plain = ("uuid", "name", "bus_id", "total_mib", "reserved_mib", "used_mib", "utilization")
    plain += ("temperature", "compute_mode", "mig_mode", "cpus")
    values = {key: getattr(gpu, key) for key in plain} | gpu.more
    lines = [f"set {key} {value}" for key, value in values.items() if value is not None]
    return lines + [f"process {pid} {mib}" for pid, mib in gpu.processes]
