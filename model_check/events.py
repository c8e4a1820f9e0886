"""What a worker tells the outside: one JSON object a line, typed, used by the worker and by the
supervisor.

Floats that are compared travel as hex text (`float.hex`), never as decimal text; NaN and
infinities are the strings "nan", "inf", "-inf", which `float.fromhex` reads back. Times are
CLOCK_MONOTONIC nanoseconds: comparable between processes of one machine.
"""

import socket
import time
from typing import Annotated, Literal, Protocol

import msgspec

SCHEMA = 1
"""Of the lines; a worker's first event says it."""

STACKS_SIGNAL = "stacks_signal"
"""In a phase's detail: the number of the signal at which the worker writes its stacks."""

PhaseName = Literal["import", "build", "compile", "train", "eval", "save"]
Scalar = str | int | float | bool | None


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", omit_defaults=True):
    t: int = 0
    """CLOCK_MONOTONIC, nanoseconds; stamped by the writer."""


class Phase(_Event, frozen=True, kw_only=True, tag="phase"):
    """The worker enters a phase: each has its own idea of how long silence is normal."""

    name: PhaseName
    detail: dict[str, Scalar] = {}


# What `float.hex()` writes, within the range of a double: anything else would fail its reader.
ExactFloat = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^(nan|-?inf|-?0x[01](\.[0-9a-f]{1,13})?p"
        r"(\+(\d{1,3}|10[01]\d|102[0-3])|-(\d{1,3}|10[0-6]\d|107[0-4])))$"
    ),
]
Natural = Annotated[int, msgspec.Meta(ge=0)]
ExitCode = Annotated[int, msgspec.Meta(ge=0, le=255)]


class Step(_Event, frozen=True, kw_only=True, tag="step"):
    """One finished optimizer step. `loss` and `grad_norm` are exact bits, as `float.hex()`."""

    step: Natural
    loss: ExactFloat
    grad_norm: ExactFloat
    lr: float
    ms: float
    """Wall time of the step, milliseconds."""
    tokens: Natural
    """Tokens that this step trained on, all micro-batches together."""
    fp: dict[str, str] = {}
    """Fingerprints of tensors, hex, by name."""


class Beat(_Event, frozen=True, kw_only=True, tag="beat"):
    """Still alive inside something long."""


class NonFinite(_Event, frozen=True, kw_only=True, tag="nonfinite"):
    """A loss or a gradient that is NaN or infinite."""

    step: Natural
    where: Literal["loss", "gradient"]
    loss: ExactFloat
    grad_norm: ExactFloat
    names: list[str] = []
    """Parameters whose gradients are not finite, in model order."""


class Evidence(_Event, frozen=True, kw_only=True, tag="evidence"):
    """A file that explains a failure."""

    path: str
    what: str


class Note(_Event, frozen=True, kw_only=True, tag="note"):
    """Something a person should know: a fallback, a repair, a warning."""

    text: str


class Done(_Event, frozen=True, kw_only=True, tag="done"):
    """The worker's last word. Without it a worker died without saying why."""

    exit_code: ExitCode
    error: str | None = None
    """The message of the failure, one line or more; None when all went well."""
    steps: int = 0
    loss_first: ExactFloat | None = None
    loss_last: ExactFloat | None = None
    tokens_per_s: float | None = None
    """Over all steps but the first, which pays for warm-up."""
    peak_memory_bytes: int | None = None
    """Peak of the device's allocator, or the peak resident set on a CPU."""


Event = Phase | Step | Beat | NonFinite | Evidence | Note | Done

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def encode(event: Event) -> bytes:
    """One line, newline included; `t` is stamped now when it is 0."""
    if event.t == 0:
        event = msgspec.structs.replace(event, t=time.monotonic_ns())
    return _encoder.encode(event) + b"\n"


def decode(line: bytes) -> Event:
    """Read one line; raises msgspec.DecodeError (ValidationError included) when it is not an
    event."""
    return _decoder.decode(line)


class EventSink(Protocol):
    """Where a worker's events go."""

    def emit(self, event: Event) -> None: ...


class NullSink:
    """A worker alone: nobody listens."""

    def emit(self, event: Event) -> None:
        pass


class SocketSink:
    """The supervisor's end of an inherited socket. A supervisor that is gone never stops the
    training."""

    def __init__(self, fd: int) -> None:
        self._socket: socket.socket | None = socket.socket(fileno=fd)
        self._socket.setblocking(True)

    def emit(self, event: Event) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendall(encode(event))
        except (BrokenPipeError, ConnectionResetError):
            self._socket.close()
            self._socket = None


def open_sink(events_fd: int | None) -> EventSink:
    """The sink for a worker that was given `events_fd` (None: it runs alone)."""
    if events_fd is None:
        return NullSink()
    try:
        return SocketSink(events_fd)
    except (
        OSError
    ):  # the variable was inherited, the socket was not: a child of a worker, or a shell
        return NullSink()
