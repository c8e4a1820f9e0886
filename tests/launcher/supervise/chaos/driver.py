"""A process that supervises one round after another: plans come in, results go out, one a line.

One process for many rounds, so that what a round leaves behind in it (a descriptor, a child, a
thread, a handler) is seen; the test starts another one when a round has killed it.
"""

import json
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from launcher.contain import processes
from launcher.output.printer import Printer
from launcher.plan import WorkerSpec
from launcher.supervise.policy import Limits
from launcher.supervise.supervisor import Supervisor

SENT_TO_US = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP),
)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for signum in SENT_TO_US:  # `nohup` or a background job around us must not change a round
        signal.signal(signum, signal.SIG_DFL)
    # As launcher.run does: between two supervisors, signals wait.
    signal.pthread_sigmask(signal.SIG_BLOCK, SENT_TO_US)
    print("ready", flush=True)
    for line in sys.stdin:
        while signal.sigtimedwait(SENT_TO_US, 0):
            pass  # it was meant for the round before
        print(json.dumps(run_round(json.loads(line))), flush=True)


class Recorder(Printer):
    """Keeps what is said, and when (monotonic seconds)."""

    def __init__(self, fd: int, launcher_log: Path) -> None:
        super().__init__(fd, launcher_log)
        self.said: list[tuple[float, str]] = []

    def say(self, text: str) -> None:
        self.said.append((time.monotonic(), text))
        super().say(text)


def run_round(plan: dict[str, Any]) -> dict[str, Any]:
    before = _belongings()
    os.chdir(plan["dir"])  # marks everybody who is started
    run_dir = Path(plan["dir"])
    terminal, reader = _open_terminal(plan["terminal"])
    printer = Recorder(terminal, run_dir / "launcher.log")
    printer.say("as launcher.run does: its thread starts while signals are blocked")
    specs = [_spec(name, argv, plan) for name, argv in plan["commands"].items()]
    limits = Limits(plan["grace_s"], plan["silence_s"])
    outcome = Supervisor(specs, limits, printer).run()
    printer.close(0 if reader is not None else 30)
    if reader is not None:
        os.close(reader)  # frees the printer's thread
        printer.close(30)
    os.close(terminal)
    os.chdir("/")
    after = _belongings()
    told = msgspec.to_builtins(outcome)
    seen = {"before": before, "after": after, "said": printer.said}
    return {"outcome": told | told["end"], **seen}


def _spec(name: str, argv: list[str], plan: dict[str, Any]) -> WorkerSpec:
    stem = Path(plan["dir"]) / name
    events = stem.with_suffix(".events") if name in plan["with_events"] else None
    return WorkerSpec(name, tuple(argv), dict(os.environ), stem.with_suffix(".log"), events)


def _open_terminal(kind: str) -> tuple[int, int | None]:
    """Where to print, and the end from which nobody reads."""
    if kind == "file":
        return os.open("terminal", os.O_WRONLY | os.O_CREAT | os.O_APPEND), None
    if kind == "tty":
        return os.open("/dev/tty", os.O_WRONLY), None
    reader, writer = os.pipe()
    if kind == "blocked":
        return writer, reader
    os.close(reader)
    return writer, None


def _belongings() -> dict[str, Any]:
    """What this process has, and has to have again after a round."""
    return {
        "descriptors": sorted(os.listdir("/proc/self/fd")),
        "children": processes.children(os.getpid()),
        "threads": threading.active_count(),
        "handlers": [repr(signal.getsignal(n)) for n in range(1, 32)],
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    }


if __name__ == "__main__":
    main()
