"""A worker that misbehaves as its arguments say, and keeps books of what it did.

`mischief.py NAME ACTION...`, an action being `verb` or `verb:argument`. The books lie in the
working directory: `pids` (who was started), `ends` (how a worker meant to end and when, written
just before), and how many bytes were surely written. Standard library only, few imports: it starts
in milliseconds.
"""

import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator

FOREVER_S = 1000
CHUNK_BYTES = 1 << 16
HUGE_EVENT_BYTES = 3 << 20
NUL_PIECES = 200
"""Of CHUNK_BYTES: 13 MB, which a supervisor reads and escapes for about a second."""
NOBODY = 65534
REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def payload(verb: str, amount: int) -> list[bytes]:
    """What an action writes, in the pieces in which it writes them. Never a zero byte: those are
    counted apart, as the children write them, too."""
    match verb:
        case "say":
            return [b"line %d \xe6\x90\x8d\n" % i for i in range(amount)]
        case "bars":
            return [b"\r%3d%% [%s]" % (i, b"#" * i) for i in range(amount)]
        case "binary":
            return [bytes(i * 7 % 255 + 1 for i in range(amount))]
        case "half":
            return ["損".encode()[:2] + b" no newline \x1b[31m"]
        case "flood":
            return [b"flood " * (CHUNK_BYTES // 6) + b"\n"] * amount
    return []


def event_bytes(kind: str) -> list[bytes]:
    """What an `events` action sends."""
    stamp = time.monotonic_ns()
    match kind:
        case "beats":
            return [b'{"kind":"beat","t":%d}\n' % stamp] * 20
        case "garbage":
            return [b"\xff\x00{]\n", b'{"kind":"no such kind"}\n', b"\n\n"]
        case "torn":
            return [b'{"kind":"step","step":3,"lo']
        case "huge":
            return [b"x" * CHUNK_BYTES] * (HUGE_EVENT_BYTES // CHUNK_BYTES)
        case "nan":
            return [
                b'{"kind":"nonfinite","t":%d,"step":1,"where":"loss",'
                b'"loss":"nan","grad_norm":"nan"}\n' % stamp
            ]
    return [b'{"kind":"done","t":%d,"exit_code":%d}\n' % (stamp, int(kind))]


class Books:
    """What one process tells the test, through files that outlive it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def enter(self, role: str) -> None:
        with open("/proc/self/stat") as file:
            started_ticks = file.read().rpartition(")")[2].split()[19]
        _append("pids", f"{self._name} {role} {os.getpid()} {started_ticks}\n")

    def will_end(self, returncode: int) -> None:
        _append("ends", f"{self._name} {returncode} {time.monotonic()}\n")

    def counter(self, what: str) -> Callable[[int], None]:
        """Keeps a number of bytes: `count(total)`."""
        fd = os.open(f"{self._name}.{what}", os.O_WRONLY | os.O_CREAT, 0o666)
        return lambda total: (os.pwrite(fd, b"%20d" % total, 0), None)[1]


def _append(path: str, line: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.write(fd, line.encode())
    os.close(fd)


class Worker:
    """Does one action after another."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._books = Books(name)
        self._books.enter("leader")
        self._count = {1: self._books.counter("written")}
        self._totals = {1: 0}
        self._events_fd = int(os.environ.get("MODEL_CHECK_EVENTS_FD", "-1"))
        if self._events_fd >= 0:
            self._count[self._events_fd] = self._books.counter("sent")
            self._totals[self._events_fd] = 0

    def act(self, verb: str, argument: str) -> None:
        match verb:
            case "say" | "bars" | "binary" | "half" | "flood":
                self._write(1, payload(verb, int(argument or 0)))
            case "events" if self._events_fd >= 0:
                self._write(self._events_fd, event_bytes(argument))
            case "close":
                self._count.pop(1, None)
                give_up_output()
            case "deaf":
                for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                    signal.signal(signum, signal.SIG_IGN)
            case "courteous":
                for signum in REQUESTS:
                    signal.signal(signum, lambda number, _: self._exit(128 + number))
            case "polite":
                signal.signal(signal.SIGTERM, lambda *_: self._exit(int(argument)))
            case "nuls":
                write_nuls(Books(f"{self._name}.self"), int(argument))
            case "child":
                start_child(self._name, argument.split("+"))
            case "nap":
                time.sleep(int(argument) / 1000)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "exit":
                self._exit(int(argument))
            case "die":
                self._die(int(argument))
            case "stay":
                time.sleep(FOREVER_S)

    def _write(self, fd: int, pieces: list[bytes]) -> None:
        if fd not in self._count:
            return
        for piece in pieces:
            while piece:
                written = os.write(fd, piece)
                self._totals[fd] += written
                self._count[fd](self._totals[fd])
                piece = piece[written:]

    def _exit(self, code: int) -> None:
        self._books.will_end(code)
        os._exit(code)

    def _die(self, signum: int) -> None:
        self._books.will_end(-signum)
        if signum not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)


def start_child(name: str, ways: list[str]) -> None:
    """A child with these ways: `session`, `orphan`, `deaf`, `quiet`, `bare`, `shell`, `chatter`,
    `nuls`, `hop`, `leap`, `setuid`; it stays for ever but for `brief`."""
    if os.fork() != 0:
        return
    if "session" in ways:
        os.setsid()
    if "orphan" in ways and os.fork() != 0:
        os._exit(0)
    books = Books(f"{name}.{os.getpid()}")
    books.enter("child")
    for signum in REQUESTS:  # without the handlers of a courteous worker
        signal.signal(signum, signal.SIG_DFL)
    if "deaf" in ways:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "quiet" in ways:
        give_up_output()
    if "setuid" in ways and os.geteuid() == 0:
        os.setresuid(NOBODY, NOBODY, NOBODY)
    _live(ways, books)
    os._exit(0)


def _live(ways: list[str], books: Books) -> None:
    if "bare" in ways:
        os.execve("/bin/sleep", ["sleep", str(FOREVER_S)], {})
    if "shell" in ways:
        script = f"sleep {FOREVER_S} & setsid sleep {FOREVER_S} & trap '' INT; wait; wait"
        os.execv("/bin/sh", ["sh", "-c", script])
    if "chatter" in ways:
        _chatter(books)
    if "nuls" in ways:
        write_nuls(books, NUL_PIECES)
    if "hop" in ways or "leap" in ways:
        _hop(leaves_group="leap" in ways)
    time.sleep(0.02 if "brief" in ways else FOREVER_S)


def give_up_output() -> None:
    """To the supervisor the same as closing it; to us, no file of ours becomes descriptor 1."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    os.close(devnull)


def _chatter(books: Books) -> None:
    for _ in _zeros(books, 400, 100):
        time.sleep(0.001)


def write_nuls(books: Books, num_pieces: int) -> None:
    """As quickly as they are read."""
    for _ in _zeros(books, num_pieces, CHUNK_BYTES):
        pass


def _zeros(books: Books, num_pieces: int, num_bytes: int) -> Iterator[None]:
    """Write so many pieces of so many zero bytes, and keep count of those that somebody reads."""
    is_heard = stat.S_ISFIFO(os.fstat(1).st_mode)
    count, total = books.counter("zeros"), 0
    for _ in range(num_pieces):
        total += os.write(1, bytes(num_bytes)) * is_heard
        count(total)
        yield


def _hop(leaves_group: bool) -> None:
    """Run ahead of whoever looks for us: a new pid every few milliseconds, and a new session."""
    for _ in range(2000):
        time.sleep(0.003)
        if os.fork() != 0:
            os._exit(0)
        if leaves_group:
            os.setsid()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback, and children have it, too
    name, *actions = sys.argv[1:]
    worker = Worker(name)
    for action in actions:
        verb, _, argument = action.partition(":")
        worker.act(verb, argument)
    worker.act("exit", "0")


if __name__ == "__main__":
    main()
