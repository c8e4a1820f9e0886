"""Moments by the device's own clock, and what a step keeps it busy. Nothing waits for it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

_CPU = torch.device("cpu")


class Moment(Protocol):
    """Seconds of a clock, or a place in a GPU's stream: one minus an earlier one is seconds."""

    def __sub__(self, earlier: Any, /) -> float: ...


@dataclass(frozen=True)
class GpuMoment:
    """When the work that was enqueued before it is done. One minus an earlier one, once both are
    over: seconds."""

    event: torch.cuda.Event

    def __sub__(self, earlier: "GpuMoment") -> float:
        return float(earlier.event.elapsed_time(self.event)) / 1000


def moment(
    device: torch.device, clock: Callable[[], float] = time.monotonic, *, awaited: bool = False
) -> Moment:
    """Now: on a CPU by `clock`, on a GPU in its stream. `awaited`: the host will wait for it."""
    if device.type != "cuda":
        return clock()
    # Not blocking, it would be waited for by spinning: a whole core of each worker.
    event = torch.cuda.Event(enable_timing=True, blocking=awaited)  # type: ignore[no-untyped-call]
    event.record()
    return GpuMoment(event)


class Busy:
    """A stretch of work, from the making of this object to `end`. On a GPU: the time between two
    events in its stream. On a CPU: the CPU time of all threads of this process, which a neighbour
    that takes the cores does not lengthen."""

    def __init__(self, device: torch.device = _CPU) -> None:
        self._device = device
        self._began = moment(device, time.process_time)
        self._ended: Moment | None = None

    def end(self) -> None:
        """The work is enqueued; a later call lengthens it."""
        self._ended = moment(self._device, time.process_time)

    @property
    def is_on_gpu(self) -> bool:
        return self._device.type == "cuda"

    @property
    def ms(self) -> float | None:
        """Milliseconds; on a GPU once the work is done. None: it has not ended."""
        return None if self._ended is None else (self._ended - self._began) * 1000


class Waited:
    """How long a rank waits, from the making of this object to `end`, while others catch up: on a
    CPU by the clock on the wall."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began = moment(device)
        self._ended = self._began

    def end(self) -> None:
        self._ended = moment(self._device)

    @property
    def ms(self) -> float:
        """Milliseconds; on a GPU once the work is done."""
        return (self._ended - self._began) * 1000
