"""A terminal that is slow, gone, shared: nobody waits for it."""

import os
import re
import resource
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from launcher.output.printer import Printer
from tests.deadline import DEADLINE_S


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    with suppress(OSError):  # the test closed the terminal
        os.close(reader)
    for thread in threading.enumerate():
        if thread.name == "printer":  # its write now fails; the next test may get its fd's number
            thread.join(DEADLINE_S)
    os.close(writer)


def read_all(fd: int) -> bytes:
    """Until the writer is closed; in a thread of its own, since the writer may wait for us."""
    data = b""
    while chunk := os.read(fd, 65536):
        data += chunk
    return data


def test_lines_come_out_whole_and_in_order(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    printer = Printer(writer)
    printer.lines("[GPU0] ", ["a", "b"])
    printer.lines("[GPU1] ", ["c"])
    printer.say("two\nlines \x1b[31m")
    assert printer.close(60)
    expected = b"[GPU0] a\n[GPU0] b\n[GPU1] c\n[launcher] two\n[launcher] lines \\x1b[31m\n"
    assert os.read(reader, 4096) == expected


def test_a_terminal_that_nobody_reads_blocks_nobody_and_loses_are_counted(
    pipe: tuple[int, int],
) -> None:
    reader, writer = pipe
    printer = Printer(writer)
    line = "x" * 1000
    for _ in range(20_000):
        printer.lines("[GPU0] ", [line])
    assert printer.dropped_lines > 3000
    assert not printer.close(timeout_s=0.01)
    os.set_blocking(reader, False)
    os.read(reader, 1 << 20)  # lets the thread go on, and end when the pipe is closed


def test_a_slow_terminal_is_told_how_many_lines_it_missed(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    printer = Printer(writer)
    for _ in range(20_000):
        printer.lines("[GPU0] ", ["x" * 1000])
    printer.say("the end")
    assert printer.dropped_lines > 0
    seen: list[bytes] = []
    drain = threading.Thread(target=lambda: seen.append(read_all(reader)))
    drain.start()
    assert printer.close(timeout_s=60)
    os.close(writer)
    drain.join()
    os.dup2(reader, writer)  # so that the fixture finds it open
    *lines, last = seen[0].decode().splitlines()
    assert last == "[launcher] the end"
    notice = re.compile(
        r"\[launcher\] terminal too slow: (\d+) lines not shown; the logs have them"
    )
    told = [int(match[1]) for line in lines if (match := notice.fullmatch(line))]
    assert sum(told) == printer.dropped_lines  # one notice a gap
    assert len(lines) - len(told) + sum(told) == 20_000


def test_our_own_last_word_fits_when_the_workers_lines_no_longer_do(
    pipe: tuple[int, int],
) -> None:
    _, writer = pipe
    printer = Printer(writer)
    while not printer.dropped_lines:
        printer.lines("[GPU0] ", ["x" * 1000])
    dropped = printer.dropped_lines
    printer.say("GPU3 failed first")
    assert printer.dropped_lines == dropped
    assert not printer.close(timeout_s=0)
    os.close(pipe[0])


@pytest.mark.root
@pytest.mark.parametrize("num_bytes", [10, 1 << 16])
def test_what_no_thread_can_write_is_written_at_the_end(
    pipe: tuple[int, int], num_bytes: int
) -> None:
    """A user with as many processes as are granted, from the first line to the last."""
    reader, writer = pipe
    if (pid := os.fork()) == 0:
        os.setresuid(65534, 65534, 65534)
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
        printer = Printer(writer)
        printer.say("x" * num_bytes)
        printer.say("the supervisor cannot start")
        os._exit(0 if printer.close(60) else 1)
    os.close(writer)
    shown = read_all(reader)
    os.dup2(reader, writer)  # so that the fixture finds it open
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert shown.splitlines()[-1] == b"[launcher] the supervisor cannot start"


def test_a_terminal_that_takes_nothing_is_given_up_without_a_thread_too(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Printer, "_start_thread", lambda printer: None)
    printer = Printer(pipe[1])
    printer.say("x" * (1 << 20))
    assert not printer.close(timeout_s=0.05)


def test_a_closed_terminal_makes_it_quiet(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    os.close(reader)
    printer = Printer(writer)
    for _ in range(100):
        printer.lines("[GPU0] ", ["x" * 1000])
    assert printer.close(timeout_s=60)
    assert printer.dropped_lines == 0


def test_a_terminal_that_somebody_made_non_blocking_gets_everything(
    pipe: tuple[int, int],
) -> None:
    reader, writer = pipe
    os.set_blocking(writer, False)
    printer = Printer(writer)
    for i in range(500):
        printer.lines("", [f"{i:0999d}"])
    received = b""
    while len(received) < 500_000:
        received += os.read(reader, 1 << 20)
    assert printer.close(timeout_s=60)
    assert [int(line) for line in received.split()] == list(range(500))


def test_our_own_lines_are_kept_in_our_own_log(tmp_path: Path, pipe: tuple[int, int]) -> None:
    printer = Printer(pipe[1], tmp_path / "launcher.log")
    printer.say("GPU3 failed first")
    printer.note("only here")
    printer.close()
    shown, noted = (tmp_path / "launcher.log").read_text().splitlines()
    assert shown.endswith("Z GPU3 failed first")
    assert noted.endswith("Z only here")
    assert os.read(pipe[0], 4096) == b"[launcher] GPU3 failed first\n"
