"""Events keep exact bits over the wire, and training goes on when the supervisor is gone."""

import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import msgspec
import pytest

from model_check.events import (
    Done,
    EventSink,
    Evidence,
    NonFinite,
    Phase,
    Step,
    decode,
    encode,
)

STEP = Step(step=7, loss=(0.1).hex(), grad_norm="nan", lr=1e-5, ms=412.3, tokens=8192)


@pytest.mark.parametrize(
    "event",
    [
        STEP,
        Phase(name="build", detail={"device": "H100", "num_parameters": 5, "amp": True}),
        NonFinite(step=1, where="gradient", loss="0x1p+0", grad_norm="inf", names=["a"]),
        Done(exit_code=20, error="two\nlines"),
    ],
)
def test_an_event_comes_back_as_it_was_and_is_one_line(event: object) -> None:
    line = encode(event)  # type: ignore[arg-type]
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert msgspec.structs.replace(decode(line), t=0) == event


def test_a_path_of_any_bytes_is_told_escaped() -> None:
    sent = decode(encode(Evidence(path=os.fsdecode(b"/b\xff"), what="checkpoint")))
    assert isinstance(sent, Evidence)
    assert sent.path == "/b\\udcff"


def test_the_time_is_stamped_once() -> None:
    first = decode(encode(STEP))
    assert first.t > 0
    assert decode(encode(first)).t == first.t


def test_floats_travel_bit_for_bit() -> None:
    sent = decode(encode(STEP))
    assert isinstance(sent, Step)
    assert float.fromhex(sent.loss) == 0.1
    assert float.fromhex("nan") != float.fromhex(sent.grad_norm)


def step_with(**values: object) -> bytes:
    fields = {"kind": "step", "step": 0, "loss": "nan", "grad_norm": "nan", "lr": 0.0, "ms": 0.0}
    return json.dumps(fields | {"tokens": 1} | values).encode()


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"[]",
        b'{"kind": "stepp"}',
        b'{"kind": "step"}',
        step_with(loss="zzz"),
        step_with(loss="0x1p+99999"),
        step_with(loss="0x1p+1024"),
        step_with(grad_norm="1.5"),
        step_with(step=-1),
        step_with(tokens=-5),
        step_with(step=10**309),
        step_with(tokens=2**53),
        step_with(ms=1e300),
        step_with(wait_ms=-1.0),
        b'{"kind": "phase", "name": "train", "detail": {"first_step": 1%s}}' % (b"0" * 309),
        b'{"kind": "done", "exit_code": 256}',
        b'{"kind": "done", "exit_code": -5}',
    ],
)
def test_what_is_no_event_is_refused(line: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(line)


@pytest.mark.parametrize(
    "value", [0.0, -0.0, 0.1, -1.5, 5e-324, 1.7976931348623157e308, float("nan"), float("-inf")]
)
def test_every_float_is_a_valid_bit_pattern(value: float) -> None:
    event = decode(step_with(loss=value.hex()))
    assert isinstance(event, Step)
    assert float.fromhex(event.loss).hex() == value.hex()


def test_a_sink_goes_on_when_the_supervisor_is_gone() -> None:
    ours, theirs = socket.socketpair()
    sink = EventSink(theirs.detach())
    sink.emit(STEP)
    assert isinstance(decode(ours.recv(65536)), Step)
    ours.close()
    sink.emit(STEP)
    sink.emit(STEP)


def test_a_sink_waits_for_a_reader_that_is_busy() -> None:
    """Whoever made the socket non-blocking: its two ends share that with whoever inherits them."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    sink = EventSink(theirs.detach())
    long = Phase(name="build", detail={"long": "x" * (1 << 22)})
    with ThreadPoolExecutor(1) as pool, ours:
        read = pool.submit(lambda: b"".join(iter(lambda: ours.recv(1 << 16), b"")))
        with closing(sink):
            sink.emit(long)
        assert json.loads(read.result())["detail"] == long.detail


def test_an_inherited_number_without_its_socket_is_no_sink() -> None:
    closed = os.open(os.devnull, os.O_RDONLY)
    os.close(closed)
    EventSink(closed).emit(STEP)
    EventSink(None).emit(STEP)
