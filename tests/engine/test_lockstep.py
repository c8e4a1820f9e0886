"""A real socket between a worker and whoever commands it."""

import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

import pytest

from launcher.verdict.live import Watch
from model_check.engine.stop import StopSignal
from model_check.events import (
    AskVectors,
    Beat,
    Command,
    Credit,
    Done,
    Dump,
    Event,
    EventSink,
    Finished,
    Go,
    Kept,
    Step,
    Vectors,
    decode,
    encode_command,
)
from model_check.hooks import lockstep
from model_check.hooks.lockstep import SupervisorClient
from tests.deadline import DEADLINE_S
from tests.engine.conftest import Run, Trained, at_first, signalled

Train = Callable[..., Trained]


@dataclass
class Line:
    """Both ends: a worker's commands, and who gives them."""

    ours: socket.socket
    lines: BinaryIO
    """What comes from the worker."""
    stop: StopSignal
    sink: EventSink
    client: SupervisorClient = field(init=False)
    answer: Callable[[int], Vectors] = lambda step: Vectors(step=step)
    keep: Callable[[Dump, int], None] = lambda dump, num_done: None

    def __post_init__(self) -> None:
        self.client = SupervisorClient(
            self.sink,
            self.stop,
            on_notice=True,
            answer=lambda step: self.answer(step),
            keep=lambda dump, num_done: self.keep(dump, num_done),
        )

    def say(self, *commands: Command) -> None:
        self.ours.sendall(b"".join(map(encode_command, commands)))

    def close(self) -> None:
        self.lines.close()
        self.ours.close()

    def heard(self) -> Event:
        return decode(self.lines.readline())


@pytest.fixture
def line() -> Iterator[Line]:
    ours, theirs = socket.socketpair()
    ours.settimeout(DEADLINE_S)
    stop, sink = StopSignal(), EventSink(theirs.detach())
    with ours, ours.makefile("rb") as lines, stop.installed(), stop.heeded(), stop.deferred():
        yield Line(ours, lines, stop, sink)
    sink.close()


def test_a_worker_that_was_never_given_credit_waits_for_nothing(line: Line) -> None:
    line.client.wait_for_permit(10**9)
    line.client.wait_for_release()


def test_a_worker_that_is_held_begins_no_second_step_before_it_heard_of_credit() -> None:
    """Its supervisor may stand still while it imports."""
    ours, theirs = socket.socketpair()
    held = SupervisorClient(EventSink(theirs.detach(), is_held=True), StopSignal(), on_notice=False)
    assert not held.may_begin(1)
    ours.sendall(encode_command(Credit(step=1)))
    assert held.may_begin(1)
    assert not held.may_begin(2)
    ours.close()
    assert held.may_begin(2)


def test_without_a_supervisor_nobody_waits() -> None:
    alone = SupervisorClient(EventSink(None), StopSignal(), on_notice=False)
    assert alone.may_begin_soon(0)
    alone.wait_for_permit(0)
    alone.wait_for_release()


def test_no_step_begins_without_credit(line: Line) -> None:
    line.say(Credit(step=1))
    assert [line.client.may_begin(step) for step in range(4)] == [True, True, False, False]
    line.say(Credit(step=2), Credit(step=3))
    assert line.client.may_begin(3)


def test_a_command_in_pieces_and_garbage_between_are_no_trouble(line: Line) -> None:
    text = encode_command(Credit(step=0)) + b'\0\xff\n{"kind": "credit", "step": -1e9}\n[]\n'
    line.ours.sendall(text + encode_command(Credit(step=5))[:-4])
    assert not line.client.may_begin(1)
    line.ours.sendall(encode_command(Credit(step=5))[-4:])
    assert line.client.may_begin(5)


def test_who_waits_beats_and_answers(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep, "BEAT_S", 0.01)
    line.answer = lambda step: Vectors(step=step, fp={"loss": {"loss": "1"}})
    line.say(Credit(step=0))

    def command() -> None:
        assert isinstance(line.heard(), Beat)
        line.say(AskVectors(step=7))
        while not isinstance(event := line.heard(), Vectors):
            assert isinstance(event, Beat)
        answers.append(event)
        line.say(Credit(step=1))

    answers: list[Vectors] = []
    thread = threading.Thread(target=command)
    thread.start()
    line.client.wait_for_permit(1)
    thread.join()
    assert [(event.step, event.fp) for event in answers] == [(7, {"loss": {"loss": "1"}})]


def test_a_worker_keeps_its_state_for_each_fault_that_it_was_asked_for(line: Line) -> None:
    kept: list[tuple[int, int]] = []
    line.keep = lambda dump, num_done: kept.append((dump.of_step, num_done))
    line.say(Dump(step=8, of_step=2), Dump(step=7, of_step=1))
    for num_done in (6, 7, 8):
        line.client.tell_done(num_done)
        line.client.serve()
    assert kept == [(1, 7), (2, 8)]
    told = [line.heard() for _ in kept]
    assert [(e.of_step, e.step) for e in told if isinstance(e, Kept)] == kept


def test_who_keeps_another_way_is_told_what_comes_first_and_answers_meanwhile(line: Line) -> None:
    line.keep = lambda dump, num_done: pytest.fail("kept all the same")
    first, second = Dump(step=3, of_step=1), Dump(step=5, of_step=4)
    line.say(Credit(step=9), AskVectors(step=4), second, first)
    assert line.client.wait_for_dump() == first
    assert isinstance(line.heard(), Vectors)


def test_who_nobody_asks_waits_for_no_dump(line: Line) -> None:
    assert line.client.wait_for_dump() is None  # it is held by nobody
    line.say(Credit(step=9))
    assert line.client.may_begin(9)
    threading.Thread(target=line.close).start()
    assert line.client.wait_for_dump() is None


def test_a_worker_stays_at_its_end_until_it_may_go(line: Line) -> None:
    line.say(Credit(step=0))
    line.client.tell_finished()

    def command() -> None:
        assert isinstance(line.heard(), Finished)
        assert isinstance(line.heard(), Beat)  # it stays
        line.say(Go())

    thread = threading.Thread(target=command)
    thread.start()
    line.client.wait_for_release()
    thread.join()


def test_when_the_supervisor_is_gone_all_goes_on(line: Line) -> None:
    line.say(Credit(step=0))
    assert not line.client.may_begin(1)
    threading.Thread(target=line.close).start()
    line.client.wait_for_permit(1)
    line.client.wait_for_release()
    assert line.sink.fd is None


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("comes", ["before", "meanwhile"])
def test_a_signal_ends_a_wait(
    line: Line, monkeypatch: pytest.MonkeyPatch, signum: int, comes: str
) -> None:
    """Without a beat: only the signal wakes it."""
    monkeypatch.setattr(lockstep, "BEAT_S", 3600.0)
    line.say(Credit(step=0))
    assert not line.client.may_begin(1)

    def send() -> None:
        while comes == "meanwhile" and not _is_asleep():
            os.sched_yield()
        os.kill(os.getpid(), signum)

    sender = threading.Thread(target=send)
    if comes == "before":
        send()
    else:
        sender.start()
    line.client.wait_for_permit(1)
    line.client.wait_for_release()
    assert line.stop.asked(on_notice=True)


def _is_asleep() -> bool:
    """Whether the main thread of this process waits in poll."""
    with open(f"/proc/self/task/{os.getpid()}/syscall") as file:
        return file.read().split()[0] in ("7", "73", "271")  # poll, ppoll (arm64), ppoll


def test_a_signal_that_was_heard_before_does_not_make_a_later_wait_spin(line: Line) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    fd = line.sink.fd
    assert fd is not None
    line.stop.wait(fd, DEADLINE_S)
    poller = threading.Timer(0.0, lambda: line.say(Go()))
    poller.start()
    line.stop.wait(fd, DEADLINE_S)
    assert line.sink.commands() == [Go()]


def test_a_worker_whose_numbers_come_late_does_not_wait_for_itself(
    tiny_run: Callable[..., Run],
) -> None:
    """As on a GPU, whose steps are told one late, with a lead of one step: two trainers take turns
    in the eyes of the launcher, which hears each event of the one from both."""
    ours, theirs = socket.socketpair()
    ours.settimeout(DEADLINE_S)
    watch = Watch({"CPU0": "cpu", "CPU1": "cpu"}, max_lead=1)

    def command() -> None:
        with ours, ours.makefile("rb") as events:
            ours.sendall(b"".join(encode_command(c) for w, c in watch.commands() if w == "CPU0"))
            for text in events:
                for worker in ("CPU0", "CPU1"):
                    watch.on_event(worker, decode(text))
                mine = [c for worker, c in watch.commands() if worker == "CPU0"]
                ours.sendall(b"".join(map(encode_command, mine)))

    sink = EventSink(theirs.detach())
    thread = threading.Thread(target=command)
    thread.start()
    fd = sink.fd
    assert fd is not None
    select.select([fd], [], [], DEADLINE_S)  # the first credit is there
    run = tiny_run(lag=1, sink=sink, launch__max_lead=1)()
    sink.close()
    thread.join()
    assert watch.agreement.agreed_steps == {"CPU0": 4, "CPU1": 4}
    assert run.meter.num_steps == 4


def test_a_trainer_begins_no_step_beyond_its_credit_and_ends_at_a_signal(train: Train) -> None:
    worker = train(commands=[Credit(step=1)], on_event=signalled(Beat, signal.SIGTERM))
    assert worker.exit_code == 128 + signal.SIGTERM
    assert [event.step for event in worker.events if isinstance(event, Step)] == [0, 1]


def test_a_trainer_stays_after_its_last_step_until_it_may_go(train: Train) -> None:
    def let_go(ours: socket.socket) -> None:
        ours.sendall(encode_command(Go()))

    worker = train(commands=[Credit(step=100)], on_event=at_first(Beat, let_go))
    assert worker.exit_code == 0
    kinds = [type(event) for event in worker.events]
    assert kinds.index(Finished) < kinds.index(Beat) < kinds.index(Done)


def test_a_trainer_that_is_stopped_after_its_last_step_has_ended_well(train: Train) -> None:
    worker = train(commands=[Credit(step=100)], on_event=signalled(Beat, signal.SIGTERM))
    assert worker.exit_code == 0


def test_a_trainer_whose_supervisor_dies_trains_to_its_end(train: Train) -> None:
    def die(ours: socket.socket) -> None:
        ours.shutdown(socket.SHUT_RDWR)

    worker = train(commands=[Credit(step=1)], on_event=at_first(Beat, die))
    assert worker.exit_code == 0
    assert "Step [3/4]" in worker.output
