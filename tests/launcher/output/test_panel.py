"""A panel stays below the lines, is drawn in its place, and goes without a trace."""

import os
import pty
import struct
import termios
from collections.abc import Iterator
from fcntl import ioctl
from typing import Any

import pytest

from launcher.output.panel import Draw, Panel, can_have_one, other_lines
from launcher.output.printer import Printer
from tests.screen import Screen


@pytest.fixture
def fd() -> Iterator[int]:
    ours, theirs = pty.openpty()
    resize(theirs, 80, 24)
    yield theirs
    os.close(ours)
    os.close(theirs)


def resize(fd: int, columns: int, rows: int) -> None:
    ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time is time to draw."""
    monkeypatch.setattr("launcher.output.panel.REDRAW_S", 0.0)


def shown(panel: Panel, screen: Screen, data: bytes = b"") -> list[str]:
    screen.write(panel.below(data).decode())
    panel.wrote()
    return screen.lines


def showing(fd: int, draw: Draw) -> Panel:
    panel = Panel(fd)
    panel.show(draw)
    return panel


def test_lines_stand_above_it_and_it_is_drawn_in_its_place(fd: int) -> None:
    drawn = [["a 1", "b 1"], ["a 2"], ["a 3", "b 3", "c 3"]]
    panel, screen = showing(fd, lambda columns, rows: drawn.pop(0)), Screen()
    assert shown(panel, screen, b"first\n") == ["first", "a 1", "b 1", ""]
    assert shown(panel, screen, b"second\n") == ["first", "second", "a 2", ""]
    assert shown(panel, screen) == ["first", "second", "a 3", "b 3", "c 3", ""]
    drawn.append(["never seen"])
    panel.hide()
    assert shown(panel, screen, b"last\n") == ["first", "second", "last", ""]


def test_nothing_is_written_where_nothing_is_new(fd: int) -> None:
    panel = showing(fd, lambda columns, rows: ["the same"])
    assert panel.below(b"")
    panel.wrote()
    assert panel.below(b"") == b""


def test_a_terminal_that_became_narrower_has_broken_its_lines(fd: int) -> None:
    panel = showing(fd, lambda columns, rows: ["\x1b[32m" + "x" * columns + "\x1b[0m"])
    panel.below(b"")
    panel.wrote()
    resize(fd, 40, 24)
    assert b"\x1b[2A" in panel.below(b"")


def test_it_has_the_size_of_the_terminal_less_a_row_for_the_cursor(fd: int) -> None:
    panel, screen = showing(fd, lambda columns, rows: [f"{columns} x {rows}"]), Screen()
    assert shown(panel, screen) == ["80 x 23", ""]
    resize(fd, 20, 24)
    assert shown(panel, screen) == [""]
    resize(fd, 80, 0)
    assert shown(panel, screen) == [""]


def test_one_that_cannot_be_drawn_says_why_and_hides_no_line(fd: int) -> None:
    def draw(columns: int, rows: int) -> list[str]:
        raise ValueError("\x1b[2J\n\udc80")

    panel, screen = showing(fd, draw), Screen()
    first, told, end = shown(panel, screen, b"a line\n")
    assert (first, end) == ("a line", "")
    assert told.startswith("no live table: ValueError: ")


def test_whoever_was_stopped_draws_anew(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    panel = showing(fd, lambda columns, rows: ["the same"])
    panel.below(b"")
    panel.wrote()
    assert b"A\x1b[J" in panel.below(b"a line\n")
    panel.wrote()
    monkeypatch.setattr("time.monotonic", lambda at=panel._awake_at + 60: at)
    assert b"A\x1b[J" not in panel.below(b"a line\n")


def test_what_stands_on_a_terminal_that_another_program_has_is_left_alone(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-Z and `bg`: the shell has written below the panel."""
    panel, screen = showing(fd, lambda columns, rows: ["a panel"]), Screen()
    shown(panel, screen)
    monkeypatch.setattr("os.tcgetpgrp", lambda fd: os.getpgrp() + 1)
    assert shown(panel, screen, b"a line\n") == ["a panel", "a line", ""]
    assert not panel.has_place


def test_a_write_that_took_long_is_no_sleep(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-S, and Ctrl-Q."""
    panel, screen = showing(fd, lambda columns, rows: ["a panel"]), Screen()
    shown(panel, screen)
    screen.write(panel.below(b"one\n").decode())
    monkeypatch.setattr("time.monotonic", lambda at=panel._awake_at + 60: at)
    panel.wrote()
    assert shown(panel, screen, b"two\n") == ["one", "two", "a panel", ""]


def test_the_lines_of_steps_are_those_of_the_panel() -> None:
    others = ["Trained 5 steps: loss 9", "Step by step", "[full] Saved step_5.pt"]
    steps = ["Step [3/12] | Loss: 9.0", "Details [3/12] | x", "[full] [CPU0] Speed [3/12] | x"]
    assert other_lines([*steps, *others]) == others


@pytest.mark.parametrize("term", ["dumb", "", None])
def test_a_terminal_that_cannot_move_its_cursor_has_none(
    fd: int, term: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert can_have_one(fd)
    monkeypatch.setenv("TERM", term) if term is not None else monkeypatch.delenv("TERM")
    assert not can_have_one(fd)


class Terminal:
    """It shows a printer's panel while it is open."""

    def __init__(self, columns: int = 80, *, is_plain: bool = False) -> None:
        self.ours, self.theirs = pty.openpty()
        resize(self.theirs, columns, 24)
        self.printer = Printer(self.theirs, is_plain=is_plain)
        self.got = ""

    def draw(self, columns: int, rows: int) -> list[str]:
        return ["the table"]

    def until_shown(self) -> None:
        while "the table" not in self.got:
            self.got += os.read(self.ours, 1 << 16).decode()

    def lines(self) -> list[str]:
        """All that stands there in the end."""
        assert self.printer.close(60)
        screen = Screen()
        screen.write(self.got + os.read(self.ours, 1 << 16).decode())
        os.close(self.ours)
        os.close(self.theirs)
        return screen.lines


STEP = ["[GPU0] Step [1/2] | Loss: 9.0"]
OTHERS = ["[GPU0] a word", "[GPU0] Step [2/2] | Loss: 9.0", ""]


@pytest.mark.parametrize(
    ("how", "lines"),
    [
        ({}, OTHERS),
        ({"is_plain": True}, [*STEP, *OTHERS]),
        # That of a container without a person tells no size.
        ({"columns": 0}, [*STEP, *OTHERS]),
    ],
    ids=["shown", "plain", "no size"],
)
def test_the_lines_of_steps_are_left_out_while_it_is_shown(
    how: dict[str, Any], lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal(**how)
    with terminal.printer.showing(terminal.draw):
        if not how:
            terminal.until_shown()
        terminal.printer.lines("[GPU0] ", ["Step [1/2] | Loss: 9.0", "a word"])
    terminal.printer.lines("[GPU0] ", ["Step [2/2] | Loss: 9.0"])
    assert terminal.lines() == lines


def test_a_terminal_that_goes_ends_the_printing_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    with terminal.printer.showing(terminal.draw):
        terminal.until_shown()
        os.close(terminal.ours)
        terminal.printer.lines("[GPU0] ", ["a word"])
    assert terminal.printer.close(60)
    assert terminal.printer.dropped_lines == 0
    os.close(terminal.theirs)


def test_a_terminal_that_blocks_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-S: lines queue up, and what is shown goes no further."""
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    resize(theirs, 80, 24)
    termios.tcflow(theirs, termios.TCOOFF)
    printer = Printer(theirs)
    with printer.showing(lambda columns, rows: ["the table"]):
        printer.lines("[GPU0] ", ["a word"])
    assert not printer.close(0.1)
    termios.tcflow(theirs, termios.TCOON)
    os.close(ours)
    os.close(theirs)


def test_a_second_one_takes_the_place_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    with terminal.printer.showing(terminal.draw):
        terminal.until_shown()
    with terminal.printer.showing(lambda columns, rows: ["the second"]):
        while "the second" not in terminal.got:
            terminal.got += os.read(terminal.ours, 1 << 16).decode()
        screen = Screen()
        screen.write(terminal.got)
        assert screen.lines == ["the second", ""]
    assert terminal.lines() == [""]
