"""What a step keeps its device busy, by the device's own clock. Nothing waits for it."""

import time
from collections.abc import Callable

import torch

_CPU = torch.device("cpu")


class Busy:
    """A stretch of work, from the making of this object to `end`. On a GPU: the time between two
    events in its stream. On a CPU: the CPU time of all threads of this process, which a neighbour
    that takes the cores does not lengthen."""

    def __init__(self, device: torch.device = _CPU) -> None:
        self._device = device
        self._began = _now(device)
        self._ended: float | torch.cuda.Event | None = None

    def end(self) -> None:
        """The work is enqueued; a later call lengthens it."""
        self._ended = _now(self._device)

    @property
    def is_on_gpu(self) -> bool:
        return self._device.type == "cuda"

    @property
    def ms(self) -> float | None:
        """Milliseconds; on a GPU once the work is done. None: it has not ended."""
        if isinstance(self._ended, float) and isinstance(self._began, float):
            return self._ended - self._began
        if isinstance(self._ended, torch.cuda.Event):
            return float(self._began.elapsed_time(self._ended))  # type: ignore[union-attr]
        return None


class Waited:
    """How long a rank waits, from the making of this object to `end`, while others catch up: on a
    CPU by the clock on the wall."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began = _now(device, time.perf_counter)
        self._ended = self._began

    def end(self) -> None:
        self._ended = _now(self._device, time.perf_counter)

    @property
    def ms(self) -> float:
        """Milliseconds; on a GPU once the work is done."""
        if isinstance(self._ended, float) and isinstance(self._began, float):
            return self._ended - self._began
        return float(self._began.elapsed_time(self._ended))  # type: ignore[union-attr,arg-type]


def _now(
    device: torch.device, clock: Callable[[], float] = time.process_time
) -> float | torch.cuda.Event:
    """Milliseconds by `clock`, or an event in the GPU's stream."""
    if device.type != "cuda":
        return clock() * 1000
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
