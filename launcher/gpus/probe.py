"""What GPUs this machine has and how busy they are: the values, the seam, and the NVML probe.

NVML is asked in a child process (`launcher.gpus.nvml`), never in this one: a driver that hangs
in the kernel cannot be interrupted, and a process with a thread in there cannot even exit; a driver
library that crashes must not take the supervisor along.
"""

import json
import os
import selectors
import subprocess
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, Literal, NamedTuple, Protocol

from msgspec import Struct

from launcher.gpus.cures import WITHOUT, cure_for
from model_check.errors import InternalError, NoGpuError, describe_exit
from model_check.utils.child import child_command

ComputeMode = Literal["default", "exclusive_thread", "prohibited", "exclusive_process"]

ANSWER = b"= "
CALL = b"> "
SUBJECT = " on GPU "
"""How the child's lines begin: the answer as JSON, or the name of the call it is about to make,
then the GPU that it is about, if any."""
TOTAL_DEADLINES = 6
"""All calls together may take this many times the deadline of one: a GPU that wakes up without
persistence mode takes a second or two, and a box has eight of them."""
KILL_WAIT_S = 1.0


class GpuProcess(NamedTuple):
    """A compute process on a GPU, as the driver sees it."""

    pid: int
    """In the driver's pid namespace: inside a container it may name nothing."""
    used_mib: int | None


class Gpu(Struct, frozen=True):
    """One device a process can be pinned to, at one moment. None is always "not told" (N/A).

    With MIG enabled the GPU itself cannot be used: its instances can, and each is a `Gpu` with the
    index of its parent and a UUID of its own.
    """

    index: int
    """NVML's, which is PCI bus order; not CUDA's own default order."""
    uuid: str
    """`GPU-…`, or `MIG-…` for an instance."""
    name: str
    pci_bus_id: str = ""
    total_mib: int | None = None
    used_mib: int | None = None
    reserved_mib: int | None = None
    """The driver's own share; None: an old driver, which counts it as used."""
    utilization_percent: int | None = None
    temperature_c: int | None = None
    compute_mode: ComputeMode | None = None
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
    """What a person should know, such as a GPU that this process may not touch."""


class GpuProbe(Protocol):
    """Where the launcher learns about GPUs."""

    def snapshot(self) -> Snapshot:
        """The GPUs as they are now; none, with a reason, on a machine without an NVIDIA driver.

        Raises NoGpuError when the driver is there and cannot answer for any GPU.
        """
        ...


class NvmlProbe:
    """The GPUs as NVML sees them. No call may take longer than `deadline_s`."""

    def __init__(self, deadline_s: float = 5.0) -> None:
        self._deadline_s = deadline_s
        self._given_up: dict[int, BrokenGpu] = {}
        """Those about which a call never returned, or crashed: never asked again."""

    def snapshot(self) -> Snapshot:
        end = time.monotonic() + self._deadline_s * TOTAL_DEADLINES
        while True:
            try:
                answer = self._ask(end)
                break
            except _NoAnswer as failed:
                if failed.index is None or time.monotonic() >= end:
                    raise NoGpuError(f"{failed} ({WITHOUT})") from None
                self._given_up[failed.index] = BrokenGpu(failed.index, str(failed))
        if "failure" in answer:
            raise NoGpuError(_describe(**answer["failure"]))
        return self._snapshot(answer["snapshot"])

    def _ask(self, end: float) -> dict[str, Any]:
        """What a new child tells of all but those that were given up. Raises _NoAnswer."""
        limit_s = self._deadline_s * (TOTAL_DEADLINES + 1)
        with _child(limit_s, self._given_up) as (child, output):
            conversation = _Conversation(self._deadline_s)
            conversation.hear(output, end)
            if conversation.answer is None:
                raise _died(child, conversation)
            answer: dict[str, Any] = json.loads(conversation.answer)
            return answer

    def _snapshot(self, fields: dict[str, Any]) -> Snapshot:
        gpus = tuple(_gpu(gpu) for gpu in fields.pop("gpus", ()))
        broken = {failure["index"]: _broken(failure) for failure in fields.pop("broken", ())}
        broken |= self._given_up
        if not gpus and broken:
            raise NoGpuError(f"{broken[min(broken)].why} ({WITHOUT})")
        in_order = tuple(broken[index] for index in sorted(broken))
        return Snapshot(gpus=gpus, broken=in_order, notes=tuple(fields.pop("notes", ())), **fields)


class _NoAnswer(Exception):
    """The child said nothing more, or died; the text says in which call."""

    def __init__(self, text: str, index: int | None) -> None:
        super().__init__(text)
        self.index = index
        """The GPU that the call was about; None: NVML as a whole."""


class _Conversation:
    """Listens to the child line by line, and knows which call is in flight."""

    def __init__(self, deadline_s: float) -> None:
        self.answer: bytes | None = None
        self.in_flight: str | None = None
        self.last_words = ""
        self._deadline_s = deadline_s
        self._pending = b""

    @property
    def index(self) -> int | None:
        """The GPU that the call in flight is about."""
        _, is_about, index = (self.in_flight or "").partition(SUBJECT)
        return int(index) if is_about else None

    def hear(self, output: IO[bytes], end: float) -> None:
        """Until the answer or the end. Raises _NoAnswer when a call takes too long, or all of them
        last until `end` (monotonic seconds)."""
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            while self.answer is None:
                patience_s = end - time.monotonic()
                if self.in_flight is not None:  # before the first call it is only Python starting
                    patience_s = min(patience_s, self._deadline_s)
                if patience_s <= 0 or not selector.select(patience_s):
                    raise _NoAnswer(self._too_slow(), self.index)
                chunk = os.read(output.fileno(), 1 << 16)
                if not chunk:
                    return
                self._take(chunk)

    def _take(self, chunk: bytes) -> None:
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        for line in lines:
            if line.startswith(CALL):
                self.in_flight = line.removeprefix(CALL).decode()
            elif line.startswith(ANSWER):
                self.answer = line.removeprefix(ANSWER)
            elif line.strip():
                self.last_words = line.decode(errors="replace").strip()

    def _too_slow(self) -> str:
        if self.in_flight is None:
            return "NVML was not asked: its reader did not start; is this machine overloaded?"
        return (
            f"the NVIDIA driver hangs: {self.in_flight} did not return within "
            f"{self._deadline_s:g} s; see `dmesg | grep -i -e nvrm -e xid`, then reset the GPU or "
            "reboot"
        )


@contextmanager
def _child(
    limit_s: float, skipped: Collection[int]
) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """The process that reads NVML; dead, or given up, on leaving."""
    child = subprocess.Popen(
        child_command("launcher.gpus.nvml", str(limit_s), json.dumps([*skipped])),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # a Ctrl-C is ours to answer
    )
    assert child.stdout is not None
    try:
        with child.stdout as output:
            yield child, output
    finally:
        child.kill()
        with suppress(subprocess.TimeoutExpired):  # stuck in the kernel: not even SIGKILL ends it
            child.wait(KILL_WAIT_S)


def _died(child: subprocess.Popen[bytes], conversation: _Conversation) -> Exception:
    """The child ended without an answer: by a signal it was the driver's library, else our code."""
    with suppress(subprocess.TimeoutExpired):
        child.wait(KILL_WAIT_S)
    where, words = conversation.in_flight or "its start", conversation.last_words
    if child.returncode is not None and child.returncode >= 0:
        how = describe_exit(child.returncode)
        return InternalError(f"the reader of NVML failed in {where} ({how}): {words}")
    how = "closed its output" if child.returncode is None else describe_exit(child.returncode)
    text = f"NVML broke in {where} ({how}); `nvidia-smi` likely fails too: reinstall the driver or "
    return _NoAnswer(f"{text}reboot", conversation.index)


def _describe(call: str, code: int | None, text: str, index: int | None, bus_id: str | None) -> str:
    where = "NVML" if index is None else f"GPU {index}"
    where += f", PCI {bus_id}" if bus_id else ""
    number = "" if code is None else f" (NVML {code})"
    return f"{where} cannot be used: {call}: {text}{number}; {cure_for(code, index)}"


def _broken(failure: dict[str, Any]) -> BrokenGpu:
    return BrokenGpu(failure["index"], _describe(**failure))


def _gpu(fields: dict[str, Any]) -> Gpu:
    processes = fields.pop("processes")
    return Gpu(
        processes=None if processes is None else tuple(GpuProcess(*p) for p in processes),
        cpus=frozenset(fields.pop("cpus")),
        mig_devices=tuple(_gpu(device) for device in fields.pop("mig_devices", ())),
        **fields,
    )
