"""What a process is doing: by its own stacks, and as the kernel tells without its help (threads,
their states, what they wait for).

Reads only what never waits for the process: `cmdline` and `environ` take a lock that a stuck
process may hold.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from launcher.contain import processes
from launcher.contain.processes import Process

MAX_LINES = 512
"""Of one worker: the loop that asks has other things to do."""
_NUM_CALLS = 3
_BUSY = 0.5
"""Of the time: a thread that ran so long is at work."""
_THREAD = re.compile(r"^(?=Current thread 0x|Thread )", re.M)
_FAULTHANDLER = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\S+) in (?P<name>.*)$', re.M)
_PY_SPY = re.compile(r"^    (?P<name>\S+) \((?P<file>.*):(?P<line>\d+)\)$", re.M)
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in a wait that no signal ends",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "dead",
    "X": "dead",
}


def catches(pid: int, signum: int) -> bool:
    """Whether the process has a handler for this signal now; False when that can't be read."""
    found = re.search(rb"^SigCgt:\s*([0-9a-f]+)", processes.read_proc(pid, "status"), re.M)
    return found is not None and bool(int(found[1], 16) >> (signum - 1) & 1)


def is_python(pid: int) -> bool:
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith("python")
    except OSError:  # gone, or another user's
        return False


def state_of(tid: int) -> str:
    """Of a thread, or of a process by its main one: `state D (in a wait that no signal ends) in
    nfs_wait`."""
    row = processes.read_process(tid)
    if row is None:
        return "gone"
    return f"state {row.state} ({_STATES.get(row.state, '?')}){processes.where_waiting(tid)}"


class Work(NamedTuple):
    """What the scheduler counted of a thread since its start."""

    ran_ns: int
    waited_ns: int
    """It could have run, and waited for a processor."""

    @property
    def busy_ns(self) -> int:
        return self.ran_ns + self.waited_ns


_NOTHING = Work(0, 0)


def work_of(pid: int) -> dict[int, Work]:
    """Of each thread of a process; those of which the kernel tells nothing are left out."""
    told = ((tid, processes.read_proc(tid, "schedstat").split()) for tid in _tids(pid))
    return {tid: Work(*map(int, counts[:2])) for tid, counts in told if len(counts) == 3}


def work_of_all(pid: int) -> dict[int, Work]:
    """The same of a process and all that it has started."""
    found, todo = dict[int, Work](), [pid]
    while todo:
        work = work_of(todo.pop())
        found |= work
        todo += (child for tid in work for child in processes.children(tid))
    return found


def is_awake(tids: Iterable[int]) -> bool:
    """Whether one of these threads runs, waits for a core, or for a disk."""
    rows = map(processes.read_process, tids)
    return any(row.state in "RD" for row in rows if row is not None)


def work_since(before: dict[int, Work], now: dict[int, Work]) -> dict[int, Work]:
    """Of each thread that was there before."""
    pairs = ((tid, before[tid], now[tid]) for tid in before.keys() & now.keys())
    return {tid: Work(*(b - a for a, b in zip(was, now_, strict=True))) for tid, was, now_ in pairs}


def running_thread(pid: int, work: dict[int, Work], time_s: float) -> int | None:
    """The thread that ran most, of those at work for half of the time or more; None where that is
    the main thread, or one that ran less than twice as long. (On a busy machine all threads that
    wake up wait for processors: only what they ran tells them apart.)"""
    ran = {tid: w.ran_ns for tid, w in work.items() if w.busy_ns >= _BUSY * time_s * 1e9}
    most = max(ran, key=lambda tid: ran[tid], default=pid)
    main = work.get(pid, _NOTHING)
    return most if most != pid and ran[most] >= 2 * main.ran_ns else None


def innermost_calls(text: str) -> str | None:
    """`wait (threading.py:324) < get (queue.py:180)`: the last calls, the latest first, from the
    text of faulthandler or py-spy: of the main thread, or of the thread that holds the GIL, where
    the text tells which does. None: there is no stack in it."""
    blocks = [part for part in _THREAD.split(text) if _THREAD.match(part)]
    heads = [(block, block.partition("\n")[0]) for block in blocks]
    holds = [block for block, head in heads if "+gil" in head]
    named = [block for block, head in heads if '"MainThread"' in head]
    for block in (*holds, *named, *reversed(blocks)):  # faulthandler writes the oldest thread last
        if (calls := _calls(block)) is not None:
            return calls
    return None


def current_calls(text: str) -> str | None:
    """The last calls of the thread that answered, from the text of faulthandler."""
    blocks = [part for part in _THREAD.split(text) if part.startswith("Current thread")]
    return _calls(blocks[0]) if blocks else None


def _calls(block: str) -> str | None:
    found = [*_FAULTHANDLER.finditer(block), *_PY_SPY.finditer(block)]
    return " < ".join(map(_brief, found[:_NUM_CALLS])) if found else None


def _brief(frame: re.Match[str]) -> str:
    return f"{frame['name']} ({frame['file'].rpartition('/')[2]}:{frame['line']})"


def describe(processes: Sequence[Process]) -> str:
    """The threads of these processes, a line each, with the kernel's stack for those in state D."""
    lines = (line for process in processes for line in _threads(process.pid))
    told = [*islice(lines, MAX_LINES), *(["and more"] if next(lines, None) else [])]
    return "".join(f"{line}\n" for line in told)


def _threads(pid: int) -> Iterator[str]:
    tids = _tids(pid)
    yield f"pid {pid} ({_name(pid)}): {state_of(pid)}, {len(tids)} threads"
    for tid in tids:
        if tid != pid:
            yield f"  {name_of_thread(tid)}: {state_of(tid)}"
        if (row := processes.read_process(tid)) is not None and row.state == "D":
            stack = processes.read_proc(tid, "stack").decode(errors="replace")
            yield from (f"    {frame}" for frame in stack.splitlines())


def _tids(pid: int) -> list[int]:
    try:
        return sorted(map(int, os.listdir(f"/proc/{pid}/task")))
    except OSError:  # gone
        return []


def name_of_thread(tid: int) -> str:
    """`thread 4712 (pt_autograd_0)`."""
    return f"thread {tid} ({_name(tid)})"


def _name(tid: int) -> str:
    return processes.read_proc(tid, "comm").decode(errors="replace").strip()
