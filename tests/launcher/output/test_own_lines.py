"""Our own lines on a real terminal: they fit, and tell the verdict by its colour."""

import fcntl
import os
import pty
import struct
import termios
from collections.abc import Iterator

import pytest

from launcher.output.printer import LAUNCHER_PREFIX, Printer

LONG = "FAIL: CPU1 failed first: non-finite gradient at step 3, first in layers.1.feed_forward.w2"


class Terminal:
    def __init__(self, columns: int) -> None:
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def shown(self, text: str, prefix: str | None = None) -> list[str]:
        """What it is sent when the launcher says `text`, or a child whose lines have `prefix`."""
        printer = Printer(self.slave)
        if prefix is None:
            printer.say(text)
        else:
            printer.lines(prefix, [text])
        assert printer.close(60)
        return os.read(self.master, 1 << 16).decode().splitlines()


@pytest.fixture
def terminal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal(getattr(request, "param", 80))
    yield terminal
    os.close(terminal.master)
    os.close(terminal.slave)


@pytest.mark.parametrize("terminal", [80, 60, 132], indirect=True)
def test_a_long_line_is_broken_between_words_and_indented(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    columns = os.get_terminal_size(terminal.slave).columns
    lines = terminal.shown(LONG)
    assert max(map(len, lines)) <= columns
    assert all(line.startswith("[launcher]   ") for line in lines[1:])
    told = " ".join(line.removeprefix("[launcher] ").strip() for line in lines)
    assert told == LONG


def test_what_prepares_the_data_speaks_as_the_launcher_and_a_worker_does_not(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert terminal.shown(LONG, LAUNCHER_PREFIX) == terminal.shown(LONG)
    assert terminal.shown(LONG, "[GPU3] ") == [f"[GPU3] {LONG}"]


def test_a_path_runs_over_alone_on_its_line(terminal: Terminal) -> None:
    path = "/" + "x" * 100
    assert terminal.shown(f"logs and report: {path}") == [
        "[launcher] logs and report:",
        f"[launcher]   {path}",
    ]


@pytest.mark.parametrize("terminal", [0, 1], indirect=True)
def test_a_terminal_without_a_size_gets_lines_all_the_same(terminal: Terminal) -> None:
    """As one of 80 columns."""
    assert terminal.shown("one two") == ["[launcher] one two"]
    words = "word " * 13
    assert terminal.shown(words) == [f"[launcher] {words}"]


def test_the_verdict_has_a_colour_and_other_words_have_none(terminal: Terminal) -> None:
    assert terminal.shown("FAIL: PASSED, no-PASS, PASS") == [
        "[launcher] \x1b[1;31mFAIL\x1b[0m: PASSED, no-PASS, \x1b[32mPASS\x1b[0m"
    ]


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_person_can_have_it_without_colours(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert terminal.shown("FAIL: r") == ["[launcher] FAIL: r"]


def test_a_pipe_gets_whole_lines_without_colours() -> None:
    reader, writer = os.pipe()
    printer = Printer(writer)
    printer.say(LONG)
    assert printer.close(60)
    assert os.read(reader, 1 << 16).decode() == f"[launcher] {LONG}\n"
    os.close(reader)
    os.close(writer)


def test_a_word_within_a_path_keeps_its_colour(terminal: Terminal) -> None:
    text = "logs: /tmp/PASS/x and x/FAIL"
    assert terminal.shown(text) == [f"[launcher] {text}"]
