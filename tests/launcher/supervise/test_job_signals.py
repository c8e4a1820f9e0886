"""Signals to a whole job: whoever sends them signals one process after the other, in any order."""

import os
import signal
import time
from collections.abc import Callable

import pytest

from launcher.contain import processes
from launcher.supervise.outcome import Outcome
from launcher.verdict.record import RunEnd
from model_check.events import Beat, Done, Event, encode
from tests.launcher.supervise.lab import (
    Lab,
    Launch,
    OwnProcess,
    is_alive,
    python,
    sh,
    wait_until_dead,
    wait_until_stopped,
)

TO_END = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU]
NOTICES = [signal.SIGUSR1, signal.SIGUSR2]
PREAMBLE = """
import os, resource, signal, sys, time
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
LAB = os.environ["LAB"]
def wait_for(path):
    while not os.path.exists(f"{LAB}/{path}"): time.sleep(0.005)
def touch(path):
    open(f"{LAB}/{path}", "w").close()
def say(event):
    os.write(int(os.environ["MODEL_CHECK_EVENTS_FD"]), event)
def die(signum):
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
def state(pid):
    return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]
"""
WAYS = {
    "by the signal": "die({0})",
    "with 128+N": "os._exit(128 + {0})",
    "having announced 128+N": "say(b'{1}'); os._exit(128 + {0})",
}


def worker(code: str) -> tuple[str, ...]:
    return python(PREAMBLE + code)


def end_by(signum: int, way: str) -> str:
    """The code of a worker that ends as this signal asks, once its pid is known."""
    done = encode(Done(t=0, exit_code=128 + signum)).decode().replace("\n", "\\n")
    register = "print(os.getpid(), file=open(LAB + '/first.pid', 'w'), flush=True)\n"
    return register + WAYS[way].format(int(signum), done)


def then_signal_us(signum: int) -> tuple[str, ...]:
    """A worker that signals its supervisor as soon as the first worker is dead."""
    return worker(
        "wait_for('first.pid')\n"
        "while not (pid := open(LAB + '/first.pid').read().strip()): time.sleep(0.005)\n"
        "while state(pid) != 'Z': time.sleep(0.005)\n"
        f"os.kill(os.getppid(), {int(signum)})\n"
        "time.sleep(1000)"
    )


def supervise(lab: Lab, *commands: tuple[str, ...]) -> Outcome:
    """Time stands still once the first worker has its pid: no hold ends by itself."""
    stopped_at: list[float] = []

    def clock() -> float:
        now = time.monotonic()
        if (lab.dir / "first.pid").exists():
            stopped_at.append(now)
        return stopped_at[0] if stopped_at else now

    return lab.supervise(lab.specs(*commands, events=True), clock=clock)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("signum", TO_END)
def test_a_worker_that_got_the_signal_before_us_is_not_blamed(
    lab: Lab, signum: signal.Signals, way: str
) -> None:
    outcome = supervise(lab, worker(end_by(signum, way)), then_signal_us(signum))
    reason, requests = f"{signum.name} received", outcome.end.requests
    assert outcome.end == RunEnd(reason=reason, exit_code=128 + signum, requests=requests)
    assert outcome.end.exit_code == 128 + signum
    assert outcome.end.requests == (signum,)


@pytest.mark.parametrize("signum", NOTICES)
def test_a_notice_that_ended_a_worker_before_it_came_to_us_is_nobodys_fault(
    lab: Lab, signum: signal.Signals
) -> None:
    outcome = supervise(lab, worker(end_by(signum, "by the signal")), then_signal_us(signum))
    assert outcome.end.reason is not None
    assert outcome.end.reason.startswith(f"{signum.name} received, which ended W0")
    assert (outcome.end.exit_code, outcome.end.culprits) == (128 + signum, ())


@pytest.mark.parametrize("signum", NOTICES)
def test_a_command_without_a_handler_that_we_passed_a_notice_on_to_is_not_blamed(
    lab: Lab, launch: Launch, signum: signal.Signals
) -> None:
    run = launch(sh("echo up; exec sleep 1000"))
    run.wait_for("[W0] up")
    run.process.send_signal(signum)
    assert run.wait() == 128 + signum
    end = run.outcome
    assert (end["reason"], end["culprits"]) == (f"{signum.name} received, which ended W0", [])


@pytest.mark.parametrize("way", WAYS)
def test_who_alone_was_sent_a_signal_is_blamed_with_its_own_time(lab: Lab, way: str) -> None:
    outcome = lab.run(worker("time.sleep(1000)"), worker(end_by(signal.SIGTERM, way)), events=True)
    assert outcome.end.reason is not None
    assert (outcome.end.exit_code, outcome.end.culprits) == (143, ("W1",))
    first = outcome.workers[1]
    assert f"after {first.duration_s:.1f} s" in outcome.end.reason


def test_a_failure_after_it_changes_nothing_while_the_first_death_is_held(lab: Lab) -> None:
    """W1 may have failed as it was asked to end, or of W0's death."""
    after = "wait_for('first.pid')\nwhile state(open(LAB + '/first.pid').read().strip()) != 'Z': "
    fails = worker(after + "time.sleep(0.005)\ntouch('failed')\nos._exit(1)")
    signals_us = worker(
        "wait_for('failed')\ntime.sleep(0.1)\n"
        f"os.kill(os.getppid(), {int(signal.SIGTERM)})\ntime.sleep(1000)"
    )
    first = worker(end_by(signal.SIGTERM, "by the signal"))
    outcome = supervise(lab, first, fails, signals_us)
    requests = outcome.end.requests
    assert outcome.end == RunEnd(reason="SIGTERM received", exit_code=143, requests=requests)


class Busy:
    """Occupies the supervisor with W1 until W0 has said `Beat` and is dead: it finds both at once,
    and hears W0's last words, which is when it does `meanwhile`."""

    def __init__(self, lab: Lab, meanwhile: Callable[[], None]) -> None:
        self._lab = lab
        self._meanwhile = meanwhile

    def on_event(self, worker: str, event: Event) -> None:
        if worker == "W1" and isinstance(event, Beat):
            (self._lab.dir / "busy").touch()
            while not (pids := self._lab.pids()) or is_alive(pids["first"]):
                os.sched_yield()
        elif isinstance(event, Beat):
            self._meanwhile()


BEATS = f"say({encode(Beat(t=1))!r})\n"
AT_ONCE = (
    "wait_for('busy')\n"
    + BEATS
    + "print(os.getpid(), file=open(LAB + '/first.pid', 'w'), flush=True)\nos._exit(7)"
)


def test_a_signal_that_came_since_we_woke_up_is_read_before_the_verdict(lab: Lab) -> None:
    busy = Busy(lab, meanwhile=lambda: os.kill(os.getpid(), signal.SIGTERM))
    commands = [worker(AT_ONCE), worker(BEATS + "time.sleep(1000)")]
    outcome = lab.run(*commands, events=True, observe=busy.on_event)
    requests = outcome.end.requests
    assert outcome.end == RunEnd(reason="SIGTERM received", exit_code=143, requests=requests)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_supervisor_short_of_cpu_blames_nobody(lab: Lab, launch: Launch, is_first: bool) -> None:
    """It sees its own signal and all deaths at once."""
    run = launch(*[sh("echo $$ > $LAB/$$.pid; exec sleep 1000")] * 2)
    while len(pids := list(lab.pids().values())) < 2:
        os.sched_yield()
    signal_all_at_once(run, signal.SIGTERM, pids, is_first)
    assert run.wait() == 143
    assert run.outcome["reason"] == "SIGTERM received"


def signal_all_at_once(
    run: OwnProcess, signum: signal.Signals, pids: list[int], is_first: bool = True
) -> None:
    """The supervisor is stopped until all of `pids` are dead, and its own signal waits."""
    run.process.send_signal(signal.SIGSTOP)
    wait_until_stopped(run.process.pid)
    if is_first:
        run.process.send_signal(signum)
    for pid in pids:
        os.kill(pid, signum)
    wait_until_dead(pids)
    if not is_first:
        run.process.send_signal(signum)
    run.process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("num_started", [1, 3, 6])
def test_a_job_that_is_ended_while_its_workers_start_blames_nobody(
    lab: Lab, launch: Launch, num_started: int
) -> None:
    """Some of them are trampolines still."""
    run = launch(*[sh("exec sleep 1000")] * 8)
    while len(processes.children(run.process.pid)) < 1 + num_started:
        os.sched_yield()
    run.process.send_signal(signal.SIGSTOP)
    _guardian, *started = processes.children(run.process.pid)
    signal_all_at_once(run, signal.SIGTERM, started)
    assert run.wait() == 143
    assert run.outcome["reason"] == "SIGTERM received"


def test_what_a_whole_job_is_sent_at_its_start_does_not_end_the_guardian(
    lab: Lab, launch: Launch
) -> None:
    run = launch(
        sh("trap '' TERM; echo $$ > $LAB/w.pid; setsid sleep 1000 & echo $! > $LAB/c.pid; wait")
    )
    while not (children := processes.children(run.process.pid)):
        os.sched_yield()
    guardian = children[0]  # the first child of all
    for signum in TO_END + NOTICES:
        os.kill(guardian, signum)
    while len(lab.pids()) < 2:
        os.sched_yield()
    assert run.guardian == guardian
    assert is_alive(guardian)
    run.process.kill()
    wait_until_dead(list(lab.pids().values()))


def test_a_signal_after_all_have_ended_well_only_hurries(lab: Lab, launch: Launch) -> None:
    """The last worker's end was the run's; what it left behind is being ended."""
    left = "trap 'echo 1 > $LAB/asked' TERM; echo $$ > $LAB/left.pid; while :; do sleep 0.02; done"
    run = launch(sh(f"({left}) & until [ -s $LAB/left.pid ]; do sleep 0.02; done"), grace_s=1000.0)
    while not (lab.dir / "asked").exists():
        os.sched_yield()
    for signum in (signal.SIGINT, signal.SIGQUIT):
        run.process.send_signal(signum)
    assert run.wait() == 0
    assert run.outcome["reason"] is None


@pytest.mark.parametrize("signum", TO_END)
def test_a_signal_that_finds_all_workers_ended_well_changes_nothing(
    lab: Lab, signum: signal.Signals
) -> None:
    """It is read before their deaths are, and is too late all the same."""

    def signal_us_when_all_are_dead(name: str, event: Event) -> None:
        if name == "W0":
            while len(pids := lab.pids()) < 2 or any(map(is_alive, pids.values())):
                os.sched_yield()
            os.kill(os.getpid(), signum)

    ends_well = "print(os.getpid(), file=open(f'{LAB}/{NAME}.pid', 'w'), flush=True)\nos._exit(0)"
    # Our supervisor starts nobody while it waits for both.
    first = f"NAME = 'w0'\nwait_for('w1.pid')\n{BEATS}{ends_well}"
    second = f"NAME = 'w1'\n{ends_well}"
    outcome = lab.run(
        worker(first), worker(second), events=True, observe=signal_us_when_all_are_dead
    )
    assert outcome.end == RunEnd(exit_code=0, requests=(signum,))
    assert [row.returncode for row in outcome.workers] == [0, 0]
    told = f"[launcher] {signum.name} received when all workers had ended well: too late"
    assert told in lab.shown


def test_a_signal_that_finds_one_worker_at_work_stops_the_run(lab: Lab) -> None:
    def signal_us_when_the_first_is_dead(name: str, event: Event) -> None:
        while not (pids := lab.pids()) or is_alive(pids["first"]):
            os.sched_yield()
        os.kill(os.getpid(), signal.SIGTERM)

    first = worker(BEATS + end_by(0, "with 128+N").replace("128 + 0", "0"))
    outcome = lab.run(
        first, sh("exec sleep 1000"), events=True, observe=signal_us_when_the_first_is_dead
    )
    assert outcome.end == RunEnd(reason="SIGTERM received", exit_code=143, requests=(15,))


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_when_the_preparation_has_ended_well_starts_no_training(
    lab: Lab, launch: Launch, signum: signal.Signals
) -> None:
    """What the preparer left behind is being ended: nothing of that run is left to stop."""
    left = "trap 'echo 1 > $LAB/asked' TERM; echo $$ > $LAB/left.pid; "
    left += "until [ -e $LAB/go ]; do sleep 0.02; done"
    prepares = sh(f"({left}) & until [ -s $LAB/left.pid ]; do sleep 0.02; done")
    run = launch(prepares, then=[sh("touch $LAB/trains")], grace_s=1000.0)
    while not (lab.dir / "asked").exists():
        os.sched_yield()
    run.process.send_signal(signum)
    (lab.dir / "go").touch()
    assert run.wait() == 128 + signum
    assert run.outcome["reason"] == f"{signum.name} received"
    assert not (lab.dir / "trains").exists()


def test_what_was_ignored_on_purpose_is_ignored_by_the_workers_too(
    lab: Lab, launch: Launch
) -> None:
    """`nohup`, a job in the background of a script: sent to the whole job, they end nobody."""
    run = launch(
        sh("trap 'exit 0' USR1; echo $$ > $LAB/w.pid; echo up; while :; do sleep 0.02; done"),
        prefix=("/bin/sh", "-c", "trap '' HUP INT QUIT; exec \"$@\"", "sh"),
    )
    run.wait_for("[W0] up")
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        for pid in (lab.pids()["w"], run.process.pid):
            os.kill(pid, signum)
    run.process.send_signal(signal.SIGUSR1)
    assert run.wait() == 0


def test_a_word_that_was_written_since_we_woke_up_keeps_its_own_time(lab: Lab) -> None:
    """W0 and its death are found at once. While we hear it out, W1 speaks, then W0's child does."""

    def hear_both() -> None:
        (lab.dir / "go").touch()
        while not (lab.dir / "W0.said").exists():
            os.sched_yield()

    fails = (
        "import json\n"
        "def fails(code):\n"
        "    event = {'kind': 'done', 't': time.monotonic_ns(), 'exit_code': code}\n"
        "    say(json.dumps(event).encode() + b'\\n')\n"
    )
    later = "if os.fork() == 0:\n    wait_for('W1.said')\n    fails(7)\n    touch('W0.said')\n"
    later += "    os._exit(0)\n" + AT_ONCE
    earlier = BEATS + "wait_for('go')\nfails(9)\ntouch('W1.said')\ntime.sleep(1000)"
    commands = [worker(fails + later), worker(fails + earlier)]
    outcome = lab.run(*commands, events=True, observe=Busy(lab, hear_both).on_event)
    assert outcome.end.reason is not None
    assert (outcome.end.culprits, outcome.end.exit_code) == (("W1",), 9)
