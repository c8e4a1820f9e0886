"""What a step took becomes its events, when its numbers have come to the host."""

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from model_check.forensics.checksums import NUM_KEPT, Change, ChecksumVector
from model_check.instrument.finite import LeafSums, as_told
from model_check.instrument.sink import PlainSink
from model_check.instrument.update import Updated, WatchedUpdate
from model_check.utils.words import few

_NUM_NAMED = 64
EXIT_NONFINITE = 20


@dataclass
class Pending:
    """A step whose numbers are on their way to the host."""

    event: dict[str, Any]
    update: WatchedUpdate
    updated: Updated
    numbers: list[Tensor]
    """The fingerprints, the norms of the gradients, the losses."""
    arrived: torch.cuda.Event | None
    leaves: LeafSums | None
    """None: a scale of its loss skips steps that are not finite."""

    @property
    def on_gpu(self) -> bool:
        return self.arrived is not None


class StepLog:
    def __init__(self, sink: PlainSink) -> None:
        self._sink = sink
        self._pending: deque[Pending] = deque()
        self._kept: deque[ChecksumVector] = deque(maxlen=NUM_KEPT)
        self._has_told_writes = False
        self.has_ended = False
        """The script was ended: a gradient was not finite."""
        self._is_broken = False
        """Its state changed by itself: that is why it is not finite later."""

    def take(self, pending: Pending) -> None:
        """A step late on a GPU, so that it always has work. Raises SystemExit where a gradient is
        not finite."""
        self._pending.append(pending)
        self.emit(keep=int(pending.on_gpu))

    def emit(self, keep: int) -> None:
        """All that are pending, but the latest `keep`."""
        while len(self._pending) > keep:
            pending = self._pending.popleft()
            if pending.arrived is not None:
                pending.arrived.synchronize()
            values, norms, *losses = pending.numbers
            step = pending.event["step"]
            vector = replace(pending.updated.vector, values=values, step=step)
            self._kept.append(vector)
            rng = pending.event.pop("rng")
            loss = _hex(sum(losses[0].tolist())) if losses else None
            norm = math.sqrt(sum(norm * norm for norm in norms.tolist()))
            change = pending.update.changed(vector)
            self._is_broken |= change is not None and _is_flip(change, pending.updated.written)
            if not (math.isfinite(norm) or self._is_broken or pending.leaves is None):
                self._end_at_nonfinite(pending, loss, _hex(norm), norms.isfinite().tolist())
            fp = vector.roll_ups | rng
            told = {"loss": loss, "grad_norm": _hex(norm), "fp": fp, "taken": vector.taken}
            self._sink.emit("step", **pending.event, **told)
            if unread := pending.update.unread():
                self._sink.emit("note", text=f"no fingerprint is taken of {few(unread)}")
            if change is not None:
                self.judge(change, pending.updated.written)

    def _end_at_nonfinite(
        self, pending: Pending, loss: str | None, grad_norm: str, are_finite: list[bool]
    ) -> None:
        """The script ends: what it would train on is lost."""
        self.has_ended = True
        step, names = pending.event["step"], pending.updated.names
        bad = [name for name, is_finite in zip(names, are_finite, strict=True) if not is_finite]
        found = pending.leaves.origin(bad) if pending.leaves else None
        origin = {} if found is None else {"origin": as_told(found)}
        numbers = {"loss": loss, "grad_norm": grad_norm, "names": bad[:_NUM_NAMED]}
        self._sink.emit("nonfinite", step=step, where="gradient", **numbers, **origin)
        born = "" if found is None else f", born in {found.module}"
        error = f"step {step}: non-finite gradient{born}"
        self._sink.emit("done", exit_code=EXIT_NONFINITE, error=error, steps=step)
        raise SystemExit(EXIT_NONFINITE)

    def judge(self, change: Change, written: frozenset[str]) -> None:
        """A script may change its state, too: by operators, which count versions, or past them,
        which is not one flipped bit."""
        if _is_flip(change, written):
            self._is_broken = True
            self._sink.emit("break", **change._asdict())
        elif not self._has_told_writes:
            self._has_told_writes = True
            names = f"{change.num_tensors} tensors of its state, first {change.tensor}"
            self._sink.emit(
                "note", text=f"the script itself changes {names}, before step {change.step}"
            )

    def tell_vectors(self, step: int) -> None:
        found = next((vector for vector in self._kept if vector.step == step), None)
        told = {} if found is None else {"fp": found.as_told(), "sizes": found.sizes}
        self._sink.emit("vectors", step=step, **told)


def on_host(numbers: list[Tensor]) -> tuple[list[Tensor], torch.cuda.Event | None]:
    """Returns them, and what has happened when they are there."""
    if numbers[0].device.type != "cuda":
        return numbers, None
    numbers = [_on_its_way(x) for x in numbers]
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    return numbers, arrived


def _is_flip(change: Change, written: frozenset[str]) -> bool:
    is_written = change.quantity == "weights" and change.tensor in written
    return bool(change.found) and change.num_tensors == 1 and not is_written


def _hex(value: float) -> str:
    return value.hex() if math.isfinite(value) else str(value)


def _on_its_way(values: Tensor) -> Tensor:
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
