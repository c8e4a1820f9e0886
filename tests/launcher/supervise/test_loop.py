"""What is ready is served in order of urgency."""

import os
from collections.abc import Iterator
from functools import partial
from itertools import count

import pytest

from launcher.supervise.loop import Loop, Urgency


class Desk:
    """Pipes that a loop watches; `served` names those that it acted on."""

    def __init__(self) -> None:
        # Each look at the clock finds it 0.3 ms later: as if full pipes were read.
        self.loop = Loop(count(0.0, 0.0003).__next__)
        self.served: list[str] = []
        self._fds: list[int] = []

    def pipe(self, name: str, urgency: Urgency) -> tuple[int, int]:
        reader, writer = os.pipe()
        self._fds += [reader, writer]
        self.loop.watch(reader, partial(self.served.append, name), urgency)
        return reader, writer

    def turn(self) -> list[str]:
        self.served.clear()
        self.loop.serve(self.loop.wait(0))
        return list(self.served)

    def close(self) -> None:
        self.loop.close()
        for fd in self._fds:
            os.close(fd)


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.close()


def test_a_death_is_served_before_output_that_came_first(desk: Desk) -> None:
    for name, urgency in (
        ("text", Urgency.OUTPUT),
        ("step", Urgency.EVENT),
        ("end", Urgency.DEATH),
    ):
        os.write(desk.pipe(name, urgency)[1], b"x")
    assert desk.turn() == ["end", "step", "text"]


def test_a_death_does_not_wait_until_all_output_is_read(desk: Desk) -> None:
    _, dies = desk.pipe("end", Urgency.DEATH)
    _, says = desk.pipe("step", Urgency.EVENT)
    for number in range(20):
        os.write(desk.pipe(f"text{number}", Urgency.OUTPUT)[1], b"x")
    ready = desk.loop.wait(0)
    os.write(says, b"x")
    os.write(dies, b"x")
    desk.loop.serve(ready)
    assert 0 < len(desk.served) < 10
    assert desk.turn()[:2] == ["end", "step"]


@pytest.mark.parametrize("urgency", [Urgency.SIGNAL, Urgency.DEATH, Urgency.EVENT])
def test_a_pause_ends_with_whatever_is_not_output(desk: Desk, urgency: Urgency) -> None:
    """It would end after more than a test may take; two deaths in one pause would be one moment."""
    _, says = desk.pipe("text", Urgency.OUTPUT)
    _, writer = desk.pipe("end", urgency)
    os.write(says, b"x")
    desk.loop.pause(0.001)
    os.write(writer, b"x")
    desk.loop.pause(10_000)
    assert desk.turn()[0] == "end"


def test_output_wakes_the_loop(desk: Desk) -> None:
    _, writer = desk.pipe("text", Urgency.OUTPUT)
    os.write(writer, b"x")
    assert [key.data[0] for key in desk.loop.wait(float("inf"))] == [Urgency.OUTPUT]


def test_what_is_unwatched_meanwhile_is_not_served(desk: Desk) -> None:
    reader, writer = desk.pipe("text", Urgency.OUTPUT)
    os.write(writer, b"x")
    ready = desk.loop.wait(0)
    desk.loop.unwatch(reader)
    desk.loop.serve(ready)
    assert desk.served == []
    assert desk.turn() == []


def test_a_wait_may_be_longer_than_the_kernel_can_count(desk: Desk) -> None:
    os.write(desk.pipe("end", Urgency.DEATH)[1], b"x")
    assert len(desk.loop.wait(1e300)) == 1
