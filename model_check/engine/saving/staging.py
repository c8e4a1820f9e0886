"""The copy of a state that is written while training goes on: in one buffer of host memory, which
every save fills again."""

import math
import mmap
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 64
_PAGE = mmap.PAGESIZE
Place = tuple[object, ...]


class Staging:
    """On a GPU the buffer is page-locked, and filled by a stream of its own: the next step computes
    meanwhile, and its update waits (`Staged.done`). We have never run that.

    The pages stay: a save that takes fresh ones waits for the kernel to zero them. torch's own
    page-locked memory is not used, since it rounds sizes up to a power of two.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer: mmap.mmap | None = None
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._is_locked = False

    def copy(self, state: Mapping[str, Any]) -> "Staged":
        """What the last call gave is overwritten. Raises MemoryError."""
        places = dict(_tensors(state))
        views = dict(zip(places, self._views(list(places.values())), strict=True))
        if self._stream is not None:  # before it is entered: inside, it is the current one itself
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.no_grad(), torch.cuda.stream(self._stream):  # None: none is entered
            for place, tensor in places.items():
                views[place].copy_(tensor, non_blocking=self._is_locked)
            done = None if self._stream is None else self._stream.record_event()
        return Staged(_replaced(state, views), done)

    def close(self) -> None:
        """Give the memory back; nothing of it may be used any more."""
        if self._buffer is not None and self._is_locked:
            _cuda().cudaHostUnregister(_address(self._buffer))
        self._buffer, self._is_locked = None, False

    def _views(self, tensors: list[Tensor]) -> Iterator[Tensor]:
        """One for each, with a storage of its own: a checkpoint holds each by itself."""
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + math.ceil(size / _ALIGNMENT) * _ALIGNMENT)
        buffer = self._at_least(starts[-1])
        for start, tensor in zip(starts, tensors, strict=False):
            if tensor.numel() == 0:
                yield torch.empty(tensor.shape, dtype=tensor.dtype)
                continue
            view = torch.frombuffer(buffer, dtype=tensor.dtype, count=tensor.numel(), offset=start)
            yield view.view(tensor.shape)

    def _at_least(self, num_bytes: int) -> mmap.mmap:
        if self._buffer is None or len(self._buffer) < num_bytes:
            self.close()
            try:
                self._buffer = mmap.mmap(-1, max(_PAGE, num_bytes))
            except OSError as error:
                raise MemoryError(f"no {num_bytes / 2**30:.1f} GiB of host memory") from error
            if self._stream is not None:
                status = _cuda().cudaHostRegister(_address(self._buffer), len(self._buffer), 0)
                # Where it may not be locked (a limit of the container) copies are only slower.
                self._is_locked = int(status) == 0
        return self._buffer


class Staged:
    """A state on the CPU, which training does not change; tensors that share memory still do."""

    def __init__(self, state: Any, done: torch.cuda.Event | None) -> None:
        self._state, self.done = state, done
        """`done`: on the device, when all of it is copied; None: it is."""

    def wait(self) -> Any:
        """The state, when it is whole."""
        if self.done is not None:
            self.done.synchronize()
        return self._state


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _address(buffer: mmap.mmap) -> int:
    return torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()


def _place(tensor: Tensor) -> Place:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _tensors(value: Any) -> Iterator[tuple[Place, Tensor]]:
    if isinstance(value, Tensor):
        yield _place(value), value.detach()
    elif isinstance(value, (Mapping, list, tuple)):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(inner)


def _replaced(value: Any, views: Mapping[Place, Tensor]) -> Any:
    if isinstance(value, Mapping):
        return {name: _replaced(inner, views) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_replaced(inner, views) for inner in value)
    return views[_place(value)] if isinstance(value, Tensor) else value
