"""The supervisor as a process: signals to it, its own death, its terminal."""

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.contain import processes
from model_check.utils.requests import TO_STOP
from model_check.utils.worker_env import RUN_TAG
from tests.launcher.supervise.lab import (
    ROOT,
    Lab,
    Launch,
    OwnProcess,
    is_alive,
    python,
    sh,
    wait_until_dead,
)

SLEEP = sh("echo $$ > $LAB/sleep.pid; echo up; exec sleep 1000")
STUBBORN = python(
    "import signal, os\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "open(os.environ['LAB'] + '/stubborn.pid', 'w').write(f'{os.getpid()}\\n')\n"
    "print('up', flush=True)\n"
    "while True: signal.pause()"
)
FAMILY = sh(
    "sleep 1000 & echo $! > $LAB/child.pid\n"
    "setsid sh -c 'trap \"\" TERM; echo $$ > $LAB/session.pid; exec sleep 1000' &\n"
    "(setsid sh -c '(sleep 1000 & echo $! > $LAB/fork.pid)' &) &\n"
    "for name in child session fork; do "
    "until [ -s $LAB/$name.pid ]; do sleep 0.02; done; done\n"
    "echo $$ > $LAB/leader.pid; echo up; exec sleep 1000"
)


def signal_when_up(run: OwnProcess, signum: signal.Signals) -> None:
    run.wait_for("[W0] up")
    run.process.send_signal(signum)


@pytest.mark.parametrize("signum", TO_STOP)
def test_a_signal_ends_the_run_with_128_plus_its_number(
    lab: Lab, launch: Launch, signum: signal.Signals
) -> None:
    run = launch(FAMILY)
    signal_when_up(run, signum)
    pids = lab.pids()
    # The TERM-ignoring escapee makes it last until the grace is over: a second signal ends that.
    run.wait_for("received")
    run.process.send_signal(signal.SIGINT)
    run.process.send_signal(signal.SIGQUIT)
    assert run.wait() == 128 + signum
    assert run.outcome["culprits"] == []
    assert run.outcome["workers"][0]["stopped_by_us"]
    assert len(pids) == 4
    assert not [pid for pid in pids.values() if is_alive(pid)]


def test_ctrl_c_at_a_terminal_reaches_the_workers_once_and_as_sigterm(
    lab: Lab, launch: Launch
) -> None:
    master, slave = pty.openpty()
    worker = sh(
        "trap 'echo int >> $LAB/heard' INT; trap 'echo term >> $LAB/heard; exit 0' TERM; "
        "echo $$ > $LAB/w.pid; while :; do sleep 0.02; done"
    )
    # Who opens a terminal as the leader of a session without one is in its foreground.
    prefix = ("/bin/sh", "-c", 'exec "$@" < "$0"', os.ttyname(slave))
    run = launch(worker, prefix=prefix, stdout=slave)
    while not lab.pids():
        os.sched_yield()
    os.write(master, b"\x03")
    assert run.wait() == 130
    assert (lab.dir / "heard").read_text() == "term\n"
    os.close(slave)
    os.close(master)


def test_a_second_ctrl_c_kills_at_once(lab: Lab, launch: Launch) -> None:
    run = launch(STUBBORN, grace_s=1000.0)
    signal_when_up(run, signal.SIGINT)
    run.wait_for("SIGINT received")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    assert run.outcome["workers"][0]["returncode"] == -9


def test_ten_ctrl_c_in_a_row_leave_nobody_and_no_traceback(lab: Lab, launch: Launch) -> None:
    run = launch(STUBBORN, grace_s=1000.0)
    signal_when_up(run, signal.SIGINT)
    run.wait_for("SIGINT received")
    for _ in range(10):
        run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    assert "Traceback" not in (lab.dir / "launcher.log").read_text()


def test_a_worker_that_ignores_sigterm_gets_the_same_grace_when_we_are_told_to_end(
    lab: Lab, launch: Launch
) -> None:
    run = launch(STUBBORN, grace_s=0.2)
    signal_when_up(run, signal.SIGTERM)
    assert run.wait() == 143
    assert run.outcome["workers"][0]["returncode"] == -9


def test_everybody_dies_when_the_supervisor_is_killed(lab: Lab, launch: Launch) -> None:
    run = launch(FAMILY, STUBBORN)
    run.wait_for("up")
    run.wait_for("up")
    pids = lab.pids()
    assert len(pids) == 5
    run.process.kill()
    wait_until_dead(list(pids.values()))
    run.wait()  # its terminal ends, too: the guardian does not hold it


def test_a_killed_supervisor_whose_workers_still_start_leaves_nobody(
    lab: Lab, launch: Launch
) -> None:
    run = launch(*[sh("echo $$ > $LAB/$$.pid; exec sleep 1000")] * 12)
    while not lab.pids():
        os.sched_yield()
    run.process.kill()
    run.wait()  # every worker and the guardian are past holding anything
    wait_until_dead(list(lab.pids().values()))


def test_a_supervisor_below_a_killed_supervisor_takes_its_workers_along(
    lab: Lab, launch: Launch
) -> None:
    (lab.dir / "inner").mkdir()
    limits = {"grace_s": 1000.0, "silence_s": 0}
    plan = {"dir": str(lab.dir / "inner"), "limits": limits, "commands": [FAMILY]}
    run = launch((sys.executable, str(Path(__file__).with_name("driver.py")), json.dumps(plan)))
    run.wait_for("[W0] [W0] up")
    pids = lab.pids()
    assert len(pids) == 4
    run.process.kill()
    wait_until_dead(list(pids.values()))


def test_a_killed_guardian_harms_no_run(lab: Lab, launch: Launch) -> None:
    run = launch(sh("trap 'exit 0' USR1; echo up; while :; do sleep 0.02; done"))
    run.wait_for("[W0] up")
    os.kill(run.guardian, signal.SIGKILL)
    run.process.send_signal(signal.SIGUSR1)
    assert run.wait() == 0


def test_a_stopped_guardian_harms_no_run(lab: Lab, launch: Launch) -> None:
    run = launch(sh("trap 'exit 0' USR1; echo up; while :; do sleep 0.02; done"))
    run.wait_for("[W0] up")
    guardian = run.guardian
    os.kill(guardian, signal.SIGSTOP)
    run.process.send_signal(signal.SIGUSR1)
    assert run.wait() == 0
    assert not is_alive(guardian)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1])
def test_what_a_whole_job_is_sent_does_not_end_the_guardian(
    lab: Lab, launch: Launch, signum: signal.Signals
) -> None:
    run = launch(FAMILY)
    run.wait_for("[W0] up")
    os.kill(run.guardian, signum)
    run.process.kill()
    wait_until_dead(list(lab.pids().values()))


@pytest.fixture(params=["led", "leaderless"])
def stranger(lab: Lab, request: pytest.FixtureRequest) -> Iterator[int]:
    """The pid of a daemon from before the run that starts what it is asked to, with the asker's
    environment, in its own session and group (as batch systems and terminal servers do). It leads
    them, or has forked twice, so that their leader is dead."""
    serves = (
        "echo $$ > $LAB/daemon; until [ -s $LAB/tag ]; do sleep 0.02; done; "
        f"{RUN_TAG}=$(cat $LAB/tag) sleep 1000 & "
        "echo $! > $LAB/guest.pid; wait; exec sleep 1000"
    )
    env = {**os.environ, "LAB": str(lab.dir), "SERVES": serves}
    start = {"led": 'exec sh -c "$SERVES"', "leaderless": 'sh -c "$SERVES" &'}[request.param]
    leader = subprocess.Popen(sh(start), env=env, start_new_session=True)
    if request.param == "leaderless":
        leader.wait()
    while not (lab.dir / "daemon").exists() or not (lab.dir / "daemon").read_text():
        os.sched_yield()
    daemon = int((lab.dir / "daemon").read_text())
    born = processes.read_process(daemon)
    while born and processes.now_ticks() <= born.started_ticks:
        os.sched_yield()
    yield daemon
    os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()
    wait_until_dead([daemon])


ASKS = (
    f"echo ${RUN_TAG} > $LAB/tag; "
    "until grep -qs sleep /proc/$(cat $LAB/guest.pid)/cmdline; do sleep 0.02; done; echo up; "
)


def test_a_guest_in_a_strangers_session_is_ended_and_the_stranger_is_not(
    lab: Lab, launch: Launch, stranger: int
) -> None:
    assert launch(sh(f"{ASKS} exit 3")).wait() == 3
    assert not is_alive(lab.pids()["guest"])
    assert is_alive(stranger)


def test_a_guardian_spares_the_strangers_session_too(
    lab: Lab, launch: Launch, stranger: int
) -> None:
    run = launch(sh(f"{ASKS} exec sleep 1000"))
    run.wait_for("[W0] up")
    guardian = run.guardian
    run.process.kill()
    wait_until_dead([lab.pids()["guest"], guardian])
    assert is_alive(stranger)


def test_workers_die_with_a_supervisor_whose_guardian_was_killed_before(
    lab: Lab, launch: Launch
) -> None:
    run = launch(STUBBORN)
    run.wait_for("[W0] up")
    os.kill(run.guardian, signal.SIGKILL)
    run.process.kill()
    wait_until_dead(list(lab.pids().values()))


@pytest.mark.parametrize("num_started", [1, 5])
def test_a_ctrl_c_while_the_workers_start_starts_no_more_and_leaves_nobody(
    lab: Lab, launch: Launch, num_started: int
) -> None:
    run = launch(*[sh("echo $$ > $LAB/$$.pid; exec sleep 1000")] * 40)
    while len(lab.pids()) < num_started:
        os.sched_yield()
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    assert len(run.outcome["workers"]) == 40
    assert not [pid for pid in lab.pids().values() if is_alive(pid)]


def test_signals_of_every_kind_during_the_teardown_change_neither_code_nor_grace(
    lab: Lab, launch: Launch
) -> None:
    deaf = sh("trap '' TERM; trap 'echo usr1; exit 0' USR1; echo up; while :; do sleep 0.02; done")
    run = launch(deaf, grace_s=1000.0)
    signal_when_up(run, signal.SIGTERM)
    run.wait_for("SIGTERM received")
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGCONT, signal.SIGUSR1):
        run.process.send_signal(signum)
    assert run.wait() == 143
    assert lab.log("w0").endswith(b"usr1\n"), "the second SIGTERM killed it"


def test_stops_and_continues_that_follow_each_other_end_with_a_running_run(
    lab: Lab, launch: Launch
) -> None:
    run = launch(sh("trap 'exit 0' USR1; echo up; while :; do sleep 0.02; done"), is_job=True)
    run.wait_for("[W0] up")
    for _ in range(50):
        run.process.send_signal(signal.SIGTSTP)
        run.process.send_signal(signal.SIGCONT)
    run.process.send_signal(signal.SIGUSR1)
    assert run.wait() == 0


def test_nohup_is_honoured(lab: Lab, launch: Launch) -> None:
    run = launch(
        sh("trap 'echo noticed; exit 0' USR1; echo up; while :; do sleep 0.02; done"),
        prefix=("/bin/sh", "-c", "trap '' HUP; exec \"$@\"", "sh"),
    )
    signal_when_up(run, signal.SIGHUP)
    run.process.send_signal(signal.SIGUSR1)
    assert run.wait() == 0
    assert lab.log("w0").endswith(b"noticed\n")


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGUSR2])
def test_usr1_is_passed_on_and_workers_that_then_end_well_are_a_success(
    lab: Lab, launch: Launch, signum: signal.Signals
) -> None:
    name = signum.name.removeprefix("SIG")
    worker = sh(f"trap 'echo checkpoint; exit 0' {name}; echo up; while :; do sleep 0.02; done")
    run = launch(worker, worker)
    run.wait_for("up")
    run.wait_for("up")
    run.process.send_signal(signum)
    assert run.wait() == 0
    assert lab.log("w0").endswith(b"checkpoint\n")
    assert lab.log("w1").endswith(b"checkpoint\n")


def test_stop_and_continue_pass_to_the_workers(lab: Lab, launch: Launch) -> None:
    run = launch(
        python(  # not a shell: its vfork makes it wait in state D for a child that is stopped
            "import os, signal, sys\n"
            "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))\n"
            "open(os.environ['LAB'] + '/w.pid', 'w').write(f'{os.getpid()}\\n')\n"
            "print('up', flush=True)\n"
            "while True: signal.pause()"
        ),
        is_job=True,
    )
    signal_when_up(run, signal.SIGTSTP)
    os.waitpid(run.process.pid, os.WUNTRACED)  # we have stopped ourselves, after the workers
    (worker,) = lab.pids().values()
    while (row := processes.read_process(worker)) and row.state != "T":
        os.sched_yield()  # the kernel delivers it when the worker runs next
    run.process.send_signal(signal.SIGCONT)
    run.process.send_signal(signal.SIGUSR1)
    assert run.wait() == 0


def test_a_terminal_that_nobody_reads_delays_nothing(lab: Lab, launch: Launch) -> None:
    code = "import sys\nfor i in range(10000): print('x' * 999)\nsys.exit(7)"
    reader, writer = os.pipe()
    run = launch(python(code), SLEEP, stdout=writer)
    os.close(writer)
    assert run.wait() == 7
    os.close(reader)
    assert lab.log("w0") == (b"x" * 999 + b"\n") * 10000
    assert run.outcome["dropped_lines"] > 0


def test_a_closed_terminal_does_not_end_the_run(lab: Lab, launch: Launch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    run = launch(
        sh("i=0; while [ $i -lt 1000 ]; do echo $i; i=$((i+1)); done; exit 3"), stdout=writer
    )
    os.close(writer)
    assert run.wait() == 3
    assert lab.log("w0") == b"".join(b"%d\n" % i for i in range(1000))


def test_a_start_without_descriptors_left_takes_the_started_ones_down(
    lab: Lab, launch: Launch
) -> None:
    limit = ("/bin/sh", "-c", 'ulimit -n 40; exec "$@"', "sh")
    run = launch(*[sh("echo up; exec sleep 1000")] * 12, prefix=limit)
    assert run.wait() == 70
    assert "EMFILE" in run.outcome["reason"]
    assert "a fault of this host; `run.sh doctor`" in run.outcome["reason"]
    assert not run.outcome.get("culprits")
    assert any(record["stopped_by_us"] for record in run.outcome["workers"])


def test_the_guardian_and_the_launcher_leave_torch_alone() -> None:
    code = (
        "import sys, launcher.supervise.supervisor, launcher.contain.guardian\n"
        "print([m for m in ('torch', 'numpy', 'transformers', 'asyncio') if m in sys.modules])"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    seen = subprocess.run((sys.executable, "-c", code), env=env, capture_output=True, check=True)
    assert seen.stdout == b"[]\n"
