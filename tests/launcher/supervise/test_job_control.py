"""Ctrl-Z: under a shell with job control the run stops and goes on with it; where nobody could
continue it, the stop is discarded, as the kernel does for a program that does nothing about it."""

import os
import pty
import signal
import subprocess
import termios
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from launcher.contain import processes
from tests.deadline import DEADLINE_S
from tests.launcher.supervise.lab import (
    Lab,
    Launch,
    OwnProcess,
    is_alive,
    python,
    sh,
    state_of,
    wait_until_stopped,
)

CTRL_C, CTRL_Z = b"\x03", b"\x1a"
GOES_ON = "SIGTSTP received: no shell is above that could continue this run, so it goes on"
WORKER = sh("trap 'exit 0' USR1; echo $$ > $LAB/w.pid; echo up; while :; do sleep 0.02; done")
# Not a shell: its vfork makes it wait in state D for a child that is stopped.
SLEEPER = python(
    "import os, signal, sys\n"
    "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))\n"
    "open(os.environ['LAB'] + '/w.pid', 'w').write(f'{os.getpid()}\\n')\n"
    "while True: signal.pause()"
)
OPENS_TERMINAL = ("/bin/sh", "-c", 'exec "$@" < "$0" 2> "$0"')
"""Whoever opens a terminal as the leader of a session without one is in its foreground."""


@dataclass
class Terminal:
    """Our end of a pseudo terminal, which is read all the time."""

    master: int
    slave: int
    shown: str = ""
    grew: threading.Condition = field(default_factory=threading.Condition)

    @property
    def name(self) -> str:
        return os.ttyname(self.slave)

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def wait_for(self, text: str) -> None:
        with self.grew:
            assert self.grew.wait_for(lambda: text in self.shown, DEADLINE_S), self.shown

    def read(self) -> None:
        while data := os.read(self.master, 4096):
            with self.grew:
                self.shown += data.decode(errors="replace")
                self.grew.notify_all()
                if "\0" in self.shown:
                    return


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal(*pty.openpty())
    reader = threading.Thread(target=terminal.read)
    reader.start()
    yield terminal
    os.write(terminal.slave, b"\0")
    reader.join()
    os.close(terminal.master)
    os.close(terminal.slave)


def wait_until_told(lab: Lab, run: OwnProcess, text: str) -> None:
    """Fails when the supervisor stops, or ends, instead."""
    while text not in (lab.dir / "launcher.log").read_text():
        assert state_of(run.process.pid) not in "TZX", "it stopped"
        os.sched_yield()


def wait_for_worker(lab: Lab) -> int:
    while "w" not in lab.pids():
        os.sched_yield()
    return lab.pids()["w"]


@pytest.mark.parametrize("way", [OPENS_TERMINAL, ("/bin/sh", "-c", '"$@" < "$0"; exit $?')])
def test_a_ctrl_z_without_a_shell_above_is_discarded_and_ctrl_c_ends_the_run(
    lab: Lab, launch: Launch, terminal: Terminal, way: tuple[str, ...]
) -> None:
    """`ssh -t host run.sh`, `docker exec -it`, a window of tmux: the leader of the session is the
    launcher, or a shell without job control that waits for it."""
    run = launch(WORKER, prefix=(*way, terminal.name), stdout=terminal.slave)
    worker = wait_for_worker(lab)
    terminal.type(CTRL_Z)
    wait_until_told(lab, run, GOES_ON)
    assert state_of(worker) != "T"
    terminal.type(CTRL_C)
    run.wait()
    assert run.outcome["exit_code"] == 130
    assert not is_alive(worker)


def test_a_ctrl_z_under_a_shell_with_job_control_stops_all_and_fg_continues_all(
    lab: Lab, launch: Launch, terminal: Terminal
) -> None:
    """bash itself: it sees a stop by SIGTSTP (128+20), and continues the job."""
    shell = 'set -m; "$@"; echo "stopped: $?"; until [ -e $LAB/go ]; do sleep 0.02; done; fg'
    prefix = (*OPENS_TERMINAL, terminal.name, "/bin/bash", "-c", shell, "bash")
    run = launch(SLEEPER, prefix=prefix, stdout=terminal.slave)
    worker = wait_for_worker(lab)
    launcher = processes.read_process(worker).ppid  # type: ignore[union-attr]
    terminal.type(CTRL_Z)
    terminal.wait_for("stopped: 148")
    wait_until_stopped(launcher, worker)
    (lab.dir / "go").touch()
    while state_of(launcher) == "T" or state_of(worker) == "T":
        os.sched_yield()
    os.kill(launcher, signal.SIGUSR1)
    assert run.wait() == 0
    assert GOES_ON not in (lab.dir / "launcher.log").read_text()


@pytest.mark.parametrize("program", [(), ("nohup",), ("setsid", "--wait")])
def test_a_stop_that_is_sent_to_an_orphaned_group_is_discarded(
    lab: Lab, launch: Launch, program: tuple[str, ...]
) -> None:
    run = launch(WORKER, prefix=program)
    worker = wait_for_worker(lab)
    launcher = processes.read_process(worker).ppid  # type: ignore[union-attr]
    os.kill(launcher, signal.SIGTSTP)
    wait_until_told(lab, run, GOES_ON)
    os.kill(launcher, signal.SIGUSR1)
    assert run.wait() == 0
    assert GOES_ON in (lab.dir / "launcher.log").read_text()


def test_a_ctrl_z_while_the_workers_start_is_discarded_where_nobody_could_continue_them(
    lab: Lab, launch: Launch
) -> None:
    run = launch(*[sh("echo $$ > $LAB/$$.pid; trap 'exit 0' USR1; while :; do sleep 1; done")] * 12)
    while not lab.pids():
        os.sched_yield()
    run.process.send_signal(signal.SIGTSTP)
    wait_until_told(lab, run, GOES_ON)
    while len(lab.pids()) < 12:
        os.sched_yield()
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143


def test_a_stop_while_the_workers_start_stops_those_that_have_and_cont_starts_the_rest(
    lab: Lab, launch: Launch
) -> None:
    waits = python(
        "import os, time\n"
        "open(os.environ['LAB'] + f'/{os.getpid()}.pid', 'w').write(f'{os.getpid()}\\n')\n"
        "while True: time.sleep(0.01)"
    )
    run = launch(*[waits] * 12, is_job=True)
    while not lab.pids():
        os.sched_yield()
    run.process.send_signal(signal.SIGTSTP)
    os.waitpid(run.process.pid, os.WUNTRACED)
    wait_until_stopped(run.process.pid, *lab.pids().values())
    run.process.send_signal(signal.SIGCONT)
    while len(lab.pids()) < 12:
        os.sched_yield()
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143


def test_a_launcher_in_the_background_of_a_terminal_that_stops_writers_goes_on(
    lab: Lab, launch: Launch, terminal: Terminal
) -> None:
    """`stty tostop`: SIGTTOU stops who writes in the background. The printer's thread blocks it, so
    the kernel lets it write."""
    mode = termios.tcgetattr(terminal.slave)
    mode[3] |= termios.TOSTOP
    termios.tcsetattr(terminal.slave, termios.TCSANOW, mode)
    shell = 'set -m; "$@" & wait $!'
    prefix = (*OPENS_TERMINAL, terminal.name, "/bin/bash", "-c", shell, "bash")
    run = launch(sh("echo in the background; exit 5"), prefix=prefix, stdout=terminal.slave)
    assert run.wait() == 5
    terminal.wait_for("[W0] in the background")


def test_the_kernel_and_we_agree_on_who_could_be_continued(tmp_path: Path) -> None:
    """Each process raises SIGTSTP in itself, which the kernel discards or not."""
    code = (
        "import os, signal, sys\n"
        "from launcher.contain.processes import is_orphaned\n"
        "print(is_orphaned(os.getpgrp()), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGTSTP)\n"
        "print('not stopped', flush=True)\n"
    )
    root = str(Path(__file__).parents[3])
    for is_job in (True, False):
        with subprocess.Popen(
            (*python("import sys; sys.path.append(sys.argv[1]); exec(sys.argv[2])"), root, code),
            stdout=subprocess.PIPE,
            start_new_session=not is_job,
            process_group=0 if is_job else None,
        ) as process:
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status) == is_job
            if is_job:
                os.kill(process.pid, signal.SIGCONT)
            assert process.stdout is not None
            assert process.stdout.read().startswith(b"False" if is_job else b"True")
            if not is_job:  # reaped above
                process.returncode = os.waitstatus_to_exitcode(status)
