"""What a process is doing: by its own stacks, and as the kernel tells without its help (threads,
their states, what they wait for).

Reads only what never waits for the process: `cmdline` and `environ` take a lock that a stuck
process may hold.
"""

import os
import re
from collections.abc import Iterator, Sequence
from itertools import islice

from launcher.contain import processes
from launcher.contain.processes import Process

MAX_LINES = 512
"""Of one worker: the loop that asks has other things to do."""
_NUM_CALLS = 3
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


def innermost_calls(text: str) -> str | None:
    """`wait (threading.py:324) < get (queue.py:180)`: the main thread's last calls, the latest
    first, from the text of faulthandler or py-spy. None: there is no stack in it."""
    blocks = [part for part in _THREAD.split(text) if _THREAD.match(part)]
    named = [block for block in blocks if '"MainThread"' in block.partition("\n")[0]]
    for block in (*named, *reversed(blocks)):  # faulthandler writes the oldest thread last
        found = [*_FAULTHANDLER.finditer(block), *_PY_SPY.finditer(block)]
        if found:
            return " < ".join(map(_brief, found[:_NUM_CALLS]))
    return None


def _brief(frame: re.Match[str]) -> str:
    return f"{frame['name']} ({frame['file'].rpartition('/')[2]}:{frame['line']})"


def describe(processes: Sequence[Process]) -> str:
    """The threads of these processes, a line each, with the kernel's stack for those in state D."""
    lines = (line for process in processes for line in _threads(process.pid))
    told = [*islice(lines, MAX_LINES), *(["and more"] if next(lines, None) else [])]
    return "".join(f"{line}\n" for line in told)


def _threads(pid: int) -> Iterator[str]:
    try:
        tids = sorted(map(int, os.listdir(f"/proc/{pid}/task")))
    except OSError:
        tids = []
    yield f"pid {pid} ({_name(pid)}): {state_of(pid)}, {len(tids)} threads"
    for tid in tids:
        if tid != pid:
            yield f"  thread {tid} ({_name(tid)}): {state_of(tid)}"
        if (row := processes.read_process(tid)) is not None and row.state == "D":
            stack = processes.read_proc(tid, "stack").decode(errors="replace")
            yield from (f"    {frame}" for frame in stack.splitlines())


def _name(tid: int) -> str:
    return processes.read_proc(tid, "comm").decode(errors="replace").strip()
