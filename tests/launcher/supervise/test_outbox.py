"""What a worker is still to be told, over a real socket."""

import socket

from launcher.output.streams import Stream
from launcher.supervise.outbox import Outbox
from model_check.events import AskVectors, Credit, Dump, decode_command


def test_evidence_of_each_fault_is_asked_for_before_a_worker_may_go_on() -> None:
    first, second = Dump(step=7, of_step=1), Dump(step=7, of_step=2)
    ask = AskVectors(step=3)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        outbox = Outbox()
        for command in (Credit(step=6), first, Credit(step=7), ask, second):
            outbox.put(command)
        assert not outbox.send()  # it is not started yet
        outbox.stream = Stream(ours.fileno(), lambda _data: None, lambda: None)
        assert outbox.send()
        told = [decode_command(line) for line in theirs.recv(1 << 16).splitlines()]
    assert told == [first, second, Credit(step=7), ask]
