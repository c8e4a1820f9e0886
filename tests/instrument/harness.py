"""Runs a script of a person's own as the launcher would: watched, in a process of its own."""

import os
import selectors
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, TypeVar

from model_check.events import (
    Command,
    Credit,
    Event,
    Finished,
    Go,
    Phase,
    Step,
    decode,
    encode_command,
)
from tests.deadline import DEADLINE_S
from tests.instrument.forked import Fork, Forks

ROOT = Path(__file__).parents[2]
SITE = ROOT / "model_check" / "instrument" / "site"
E = TypeVar("E", bound=Event)
Answer = Callable[[Event], list[Command]]


@dataclass
class Ran:
    exit_code: int
    stdout: str
    stderr: str
    events: list[Event] = field(default_factory=list)

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def end(self) -> str:
        """The last line of its output: what it trained."""
        return self.stdout.splitlines()[-1]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """What may not differ between two runs."""
        times = ("t", "ms", "busy_ms")
        return [
            {name: getattr(step, name) for name in Step.__struct_fields__ if name not in times}
            for step in self.of(Step)
        ]


def keep_in_step(event: Event) -> list[Command]:
    """Two steps ahead of the last one, and no wait at the end."""
    match event:
        case Step(step=step):
            return [Credit(step=step + 2)]
        case Finished():
            return [Go()]
    return []


@cache
def forks() -> Forks:
    return Forks({**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"})


def plain(
    script: Path, directory: Path, *command: str, env: Mapping[str, str] | None = None
) -> Ran:
    """As without us. A script is a fork of one Python, a command a process of its own."""
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        environ = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        process = _start(script, command, cwd=directory, env=environ, stdout=out, stderr=err)
        try:
            exit_code = process.wait(DEADLINE_S)
        finally:
            process.kill()
            process.wait()
        return Ran(exit_code, _content(out), _content(err))


def watched(
    script: Path,
    directory: Path,
    *command: str,
    env: Mapping[str, str] | None = None,
    answer: Answer = keep_in_step,
    first: int = 1,
    is_forked: bool = True,
) -> Ran:
    """`directory`: of the run. `first`: the step up to which the worker may go at its start.
    `is_forked`: as in `plain`; False: a test is about how a process starts."""
    ours, theirs = socket.socketpair()
    directory.mkdir(exist_ok=True)
    before = (env or {}).get("PYTHONPATH", "")
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        **(env or {}),
        "PYTHONPATH": f"{SITE}:{before}" if before else str(SITE),
        "PYTHONHASHSEED": "0",
        "MODEL_CHECK_INSTRUMENT": str(ROOT),
        "MODEL_CHECK_EVENTS_FD": str(theirs.fileno()),
        "MODEL_CHECK_WORKER": "CPU0",
        "MODEL_CHECK_RUN_DIR": str(directory),
        "MODEL_CHECK_HELD": "1",
    }
    if not is_forked:
        command = (sys.executable, str(script))
    with ours, TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        process = _start(
            script,
            command,
            cwd=script.parent,
            env=environ,
            stdout=out,
            stderr=err,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        try:
            ours.sendall(encode_command(Credit(step=first)))
            events = _hear(ours, answer)
            exit_code = process.wait(DEADLINE_S)
        finally:
            process.kill()
            process.wait()
        return Ran(exit_code, _content(out), _content(err), events)


def _start(script: Path, command: Sequence[str], **how: Any) -> subprocess.Popen[bytes] | Fork:
    return subprocess.Popen(command, **how) if command else forks().start(script, **how)


def _content(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _hear(ours: socket.socket, answer: Answer) -> list[Event]:
    """Until the worker is gone."""
    events: list[Event] = []
    rest, until = b"", time.monotonic() + DEADLINE_S
    with selectors.DefaultSelector() as selector:
        selector.register(ours, selectors.EVENT_READ)
        while True:
            assert selector.select(until - time.monotonic()), f"silent after {events[-3:]}"
            try:
                data = ours.recv(1 << 16)
            except ConnectionResetError:
                return events
            if not data:
                return events
            *lines, rest = (rest + data).split(b"\n")
            for event in map(decode, lines):
                events.append(event)
                for command in answer(event):
                    try:
                        ours.sendall(encode_command(command))
                    except (BrokenPipeError, ConnectionResetError):
                        return events


def are_calls_alike(one: Ran, other: Ran) -> bool:
    """Whether what both replays called again gave the same bits, as often as both had the time."""
    told = [ran.of(Phase)[-1].detail for ran in (one, other)]
    names = [name for name in told[0].keys() & told[1].keys() if name.startswith("calls bits ")]
    assert names, told
    return all(told[0][name] == told[1][name] for name in names)


def script(directory: Path, text: str, name: str = "train.py") -> Path:
    path = directory / name
    path.write_text(textwrap.dedent(text))
    return path
