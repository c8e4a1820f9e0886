"""What GPUs this machine has and how busy they are: the values, the seam, and the NVML probe."""

import json
import subprocess
import time
from contextlib import closing
from typing import NamedTuple, Protocol

import msgspec
from msgspec import Struct

from launcher.gpus.codes import WITHOUT
from launcher.gpus.nvml import ANSWER, ON_GPU
from launcher.gpus.nvml_child import KILL_WAIT_S, Call, NvmlChild
from model_check.errors import InternalError, NoGpuError, describe_exit

START_DEADLINES = 6
"""So many times the deadline of one call for the first GPU and what comes before it. Each further
one has a deadline of its own: a GPU without persistence mode takes seconds to wake up."""


class GpuProcess(NamedTuple):
    """A compute process on a GPU, as the driver sees it."""

    pid: int
    """In the driver's pid namespace: inside a container it may name nothing."""
    used_mib: int | None


class Gpu(Struct, frozen=True):
    """One device that a process can be pinned to, at one moment. None: NVML does not say (N/A).

    With MIG enabled the GPU itself cannot be used: its instances can, and each is a `Gpu` with the
    index of its parent and a UUID of its own.
    """

    index: int
    """NVML's, which is PCI bus order; not CUDA's own default order."""
    uuid: str
    """`GPU-…`, or `MIG-…` for an instance."""
    name: str
    pci_bus_id: str = ""
    serial: str | None = None
    """Of the board, as its label shows it; a MIG instance has its parent's."""
    total_mib: int | None = None
    used_mib: int | None = None
    reserved_mib: int | None = None
    """The driver's own share; None: an old driver, which counts it as used."""
    utilization_percent: int | None = None
    temperature_c: int | None = None
    compute_mode: str | None = None
    """One of `nvml.COMPUTE_MODES`."""
    processes: tuple[GpuProcess, ...] | None = None
    cpus: frozenset[int] = frozenset()
    """Cores of its NUMA node that this process may use; empty: unknown."""
    mig_enabled: bool = False
    mig_devices: tuple["Gpu", ...] = ()
    mig_index: int | None = None
    """Slot of a MIG instance on its parent; None: a whole GPU."""

    @property
    def free_mib(self) -> int | None:
        if self.total_mib is None or self.used_mib is None:
            return None
        return self.total_mib - self.used_mib - (self.reserved_mib or 0)

    @property
    def label(self) -> str:
        """`GPU3`, or `GPU3.1` for a MIG instance: unique in a snapshot, as worker names must be."""
        return f"GPU{self.index}" + ("" if self.mig_index is None else f".{self.mig_index}")

    @property
    def title(self) -> str:
        """How messages call it: `GPU 3 (GPU-5d1c92ab)`."""
        return f"{self.label.replace('GPU', 'GPU ', 1)} ({self.uuid[:12]})"


class BrokenGpu(Struct, frozen=True):
    """A GPU that NVML counts and that cannot answer: lost, in need of a reset, or hanging."""

    index: int
    why: str
    """The whole message, with the cure."""


class Snapshot(Struct, frozen=True):
    """All GPUs of the machine at one moment, in PCI order, whatever CUDA_VISIBLE_DEVICES says."""

    driver_version: str | None = None
    cuda_driver_version: str | None = None
    """The newest CUDA that the driver serves, `12.8`."""
    gpus: tuple[Gpu, ...] = ()
    broken: tuple[BrokenGpu, ...] = ()
    reason: str | None = None
    """Why there is no GPU; None when there are some."""
    notes: tuple[str, ...] = ()
    """Lines for a person, such as of a GPU that this process may not open."""


_decoder: msgspec.json.Decoder[Snapshot | str] = msgspec.json.Decoder(Snapshot | str)


class GpuProbe(Protocol):
    """Where the launcher learns about GPUs."""

    def snapshot(self) -> Snapshot:
        """The GPUs as they are now; none, with a reason, on a machine without an NVIDIA driver.

        Raises NoGpuError when the driver is there and cannot answer for any GPU.
        """
        ...


class NvmlProbe:
    """The GPUs as NVML sees them. No call may take longer than `deadline_s`, all of them no longer
    than `most_s`."""

    def __init__(self, deadline_s: float = 5.0, most_s: float = float("inf")) -> None:
        self._deadline_s = deadline_s
        self._most_s = most_s
        self._given_up: dict[int, BrokenGpu] = {}
        """GPUs about which a call never returned, or crashed: they are never asked again."""

    def snapshot(self) -> Snapshot:
        began = time.monotonic()
        while True:
            try:
                snapshot = self._ask(began)
                break
            except _NoAnswer as failed:
                if failed.index is None or time.monotonic() >= self._end(began, failed.index):
                    whys = [*(gpu.why for gpu in self._given_up.values()), str(failed)]
                    raise NoGpuError(f"{'; '.join(whys)} ({WITHOUT})") from None
                self._given_up[failed.index] = BrokenGpu(failed.index, str(failed))
        broken = {gpu.index: gpu for gpu in snapshot.broken} | self._given_up
        in_order = tuple(broken[index] for index in sorted(broken))
        if not snapshot.gpus and in_order:
            raise NoGpuError(f"{in_order[0].why} ({WITHOUT})")
        return msgspec.structs.replace(snapshot, broken=in_order)

    def _end(self, began: float, index: int | None) -> float:
        """Until when all calls up to those about GPU `index` may take, monotonic seconds."""
        return began + min(self._most_s, self._deadline_s * (START_DEADLINES + (index or 0)))

    def _ask(self, began: float) -> Snapshot:
        """What a new child reports of all GPUs but those that were given up.

        Raises _NoAnswer, and NoGpuError when NVML as a whole cannot be used.
        """
        skipped, last_words = json.dumps([*self._given_up]), ""
        with closing(_start(skipped)) as child:
            while (lines := self._wait_for_lines(child, began)) is not None:
                for line in lines:
                    if line.startswith(ANSWER):
                        answer = _decoder.decode(line.removeprefix(ANSWER))
                        if isinstance(answer, Snapshot):
                            return answer
                        raise NoGpuError(answer)
                    last_words = line.decode(errors="replace").strip() or last_words
            raise _died(child, last_words)

    def _wait_for_lines(self, child: NvmlChild, all_began: float) -> list[bytes] | None:
        """What the child says next; None: it closed its output. Raises _NoAnswer when a call takes
        too long, or all of them since `all_began` (monotonic seconds)."""
        while True:
            call, now = child.in_flight(), time.monotonic()
            end = self._end(all_began, _gpu_of(call))
            # Before the first call it is only Python starting.
            until = min(end, (call.began if call else now) + self._deadline_s)
            if child.is_readable(until - now):
                return child.read_lines()
            is_late = call is not None or time.monotonic() >= end
            if is_late and child.in_flight() == call:
                raise self._too_slow(call, end, all_began)

    def _too_slow(self, call: Call | None, end: float, all_began: float) -> "_NoAnswer":
        if call is None:
            text = "NVML was not asked: its reader did not start; is this machine overloaded?"
            return _NoAnswer(text, None)
        if end < call.began + self._deadline_s:
            text = f"NVML is too slow: {end - all_began:.0f} s did not suffice up to {call.name}; "
            return _NoAnswer(f"{text}see `dmesg | grep -i -e nvrm -e xid`", call)
        return _NoAnswer(
            f"the NVIDIA driver hangs: {call.name} did not return within {self._deadline_s:g} s; "
            "see `dmesg | grep -i -e nvrm -e xid`, then reset the GPU or reboot",
            call,
        )


def _start(skipped: str) -> NvmlChild:
    """Raises InternalError where the machine has no process or descriptor left."""
    try:
        return NvmlChild("launcher.gpus.nvml", skipped, stderr=subprocess.STDOUT)
    except OSError as error:
        why = f"its reader cannot be started ({error.strerror})"
        raise InternalError(f"NVML was not asked: {why}") from error


class _NoAnswer(Exception):
    """The child went silent, or died; the text says in which call."""

    def __init__(self, text: str, call: Call | None) -> None:
        super().__init__(text)
        self.index = _gpu_of(call)
        """The GPU that the call was about; None: NVML as a whole."""


def _gpu_of(call: Call | None) -> int | None:
    """The index of the GPU that a call is about; None: NVML as a whole."""
    _, is_about_gpu, index = (call.name if call else "").partition(ON_GPU)
    return int(index) if is_about_gpu else None


def _died(child: NvmlChild, last_words: str) -> Exception:
    """The child ended without an answer: by a signal it was the driver's library, else our code."""
    returncode, call = child.wait(KILL_WAIT_S), child.in_flight()
    where = call.name if call else "its start"
    if returncode is not None and returncode >= 0:
        how = describe_exit(returncode)
        return InternalError(f"the reader of NVML failed in {where} ({how}): {last_words}")
    how = "closed its output" if returncode is None else describe_exit(returncode)
    text = f"NVML broke in {where} ({how}); `nvidia-smi` likely fails too: reinstall the driver or "
    return _NoAnswer(f"{text}reboot", call)
