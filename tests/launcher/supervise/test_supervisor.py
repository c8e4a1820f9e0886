"""Real workers, one supervisor, in this process: how runs end."""

import errno
import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path
from unittest import mock

import pytest
from msgspec.structs import replace

from launcher.output.printer import Printer
from launcher.plan import WorkerSpec
from launcher.supervise.outcome import Outcome
from launcher.supervise.policy import Limits
from launcher.supervise.supervisor import Supervisor
from launcher.supervise.worker import Spawned, SpawnError, Worker, spawn
from launcher.verdict.record import RunEnd, Stop
from model_check.events import Beat, Done, Event, NonFinite, Phase, Step, encode
from model_check.utils import secrets
from tests.launcher.supervise.lab import (
    Lab,
    Launch,
    Observe,
    is_alive,
    python,
    sh,
    since,
    state_of,
)

SLEEP = sh("echo up; exec sleep 1000")
IGNORES_TERM = python(
    "import signal, os\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "open(os.environ['LAB'] + '/stubborn.pid', 'w').write(f'{os.getpid()}\\n')\n"
    "while True: signal.pause()"
)
SAYS = (
    "import os, sys, time, ast\n"
    "fd = int(os.environ['MODEL_CHECK_EVENTS_FD'])\n"
    "os.write(fd, ast.literal_eval(sys.argv[1]))\n"
)


def wait_for(path: str) -> str:
    """Shell: until a peer has made this file. A test's own deadline is the limit."""
    return f"until [ -s $LAB/{path} ]; do sleep 0.02; done; "


def test_everybody_well_is_zero(lab: Lab) -> None:
    outcome = lab.run(sh("echo a"), sh("echo b"))
    assert outcome.end == RunEnd(exit_code=0)
    assert sorted(lab.shown) == ["[W0] a", "[W1] b"]
    assert [r.returncode for r in outcome.workers] == [0, 0]
    assert not any(r.stopped_by_us for r in outcome.workers)


def test_an_exit_code_stays_as_it_was_and_its_peers_are_stopped_not_failed(lab: Lab) -> None:
    outcome = lab.run(SLEEP, SLEEP, sh("echo last words; exit 7"))
    assert outcome.end.exit_code == 7
    assert outcome.end.reason is not None
    assert outcome.end.culprits == ("W2",)
    *peers, culprit = outcome.workers
    assert all(peer.stopped_by_us for peer in peers)
    assert (culprit.returncode, culprit.stopped_by_us) == (7, False)
    assert culprit.last_lines == ("last words",)
    assert culprit.duration_s > 0
    told = [
        line for line in lab.shown if line.startswith("[launcher] W2 failed first: exit code 7")
    ]
    assert len(told) == 1


def test_a_killed_worker_is_137(lab: Lab) -> None:
    outcome = lab.run(SLEEP, sh("kill -9 $$"))
    assert outcome.end.exit_code == 137
    assert outcome.workers[1].returncode == -9


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace(lab: Lab) -> None:
    outcome = lab.run(IGNORES_TERM, sh(wait_for("stubborn.pid") + "exit 3"), grace_s=0.2)
    assert outcome.end.exit_code == 3
    assert (outcome.workers[0].returncode, outcome.workers[0].stopped_by_us) == (-9, True)
    assert any("so SIGKILL: W0" in line for line in lab.shown)


def test_the_grace_lets_a_worker_finish_its_checkpoint(lab: Lab) -> None:
    saves = sh(
        "trap 'sleep 0.3; echo saved > $LAB/checkpoint; exit 0' TERM; echo $$ > $LAB/saver.pid; "
        "while :; do sleep 0.02; done"
    )
    outcome = lab.run(saves, sh(wait_for("saver.pid") + "exit 1"))
    assert (lab.dir / "checkpoint").read_text() == "saved\n"
    assert outcome.workers[0].stopped_by_us


def test_a_stopped_worker_is_woken_to_hear_sigterm(lab: Lab) -> None:
    stopped = sh(
        "trap 'echo bye; exit 0' TERM; echo $$ > $LAB/frozen.pid; kill -STOP $$; sleep 1000"
    )
    is_stopped = "grep -q '^State:.T' /proc/$(cat $LAB/frozen.pid)/status"
    fails = f"{wait_for('frozen.pid')} until {is_stopped}; do sleep 0.02; done; exit 1"
    outcome = lab.run(stopped, sh(fails))
    assert outcome.workers[0].last_lines == ("bye",)


def test_everybody_hears_sigterm_once(lab: Lab) -> None:
    counts = (
        "import os, signal, sys, time\n"
        "path = os.environ['LAB'] + '/' + sys.argv[1]\n"
        "fd = os.open(path + '.heard', os.O_WRONLY | os.O_CREAT | os.O_APPEND)\n"
        "signal.signal(signal.SIGTERM, lambda *_: os.write(fd, b'x'))\n"
        "open(path + '.pid', 'w').write(f'{os.getpid()}\\n')\n"
        "while os.fstat(fd).st_size == 0: time.sleep(0.01)\n"
        "time.sleep(0.3)"
    )
    names = ("leader", "helper", "escaped")
    leader, helper, escaped = (shlex.join(python(counts, name)) for name in names)
    wait = "".join(wait_for(f"{name}.pid") for name in names)
    lab.run(sh(f"{helper} & setsid {escaped} & exec {leader}"), sh(wait + "exit 1"))
    heard = {name: (lab.dir / f"{name}.heard").read_text() for name in names}
    assert heard == dict.fromkeys(names, "x")


HIDERS = {
    "child": "sleep 1000 & echo $! > $LAB/child.pid",
    "deaf_child": "(trap '' TERM; echo 1; exec sleep 1000) & echo $! > $LAB/deaf.pid",
    "session": "setsid sh -c 'echo $$ > $LAB/session.pid; exec sleep 1000' &",
    "double_fork": "(setsid sh -c '(echo $$ > $LAB/sh.pid; exec sleep 1000) &' &) &",
    "no_environment": "env -i LAB=$LAB setsid sh -c 'echo $$ > $LAB/bare.pid; exec sleep 1000' &",
}


@pytest.mark.parametrize("how", HIDERS)
@pytest.mark.parametrize("leader_ends", ["exit 0", "exit 5", "exec sleep 1000"])
def test_no_descendant_outlives_a_run(lab: Lab, how: str, leader_ends: str) -> None:
    ready = 'until [ -n "$(cat $LAB/*.pid 2>/dev/null)" ]; do sleep 0.02; done; '
    outcome = lab.run(
        sh(f"{HIDERS[how]}\n {ready} {leader_ends}"),
        sh(ready + f"exit {'0' if leader_ends == 'exit 0' else '5'}"),
        grace_s=0.3,
    )
    assert outcome.end.exit_code == (0 if leader_ends == "exit 0" else 5)
    assert outcome.end.leftovers == ()
    assert not [pid for pid in lab.pids().values() if is_alive(pid)]


def test_a_grandchild_that_holds_the_pipe_does_not_delay_the_news_of_a_death(lab: Lab) -> None:
    outcome = lab.run(SLEEP, sh("trap '' TERM; sleep 1000 & exit 9"), grace_s=0.2)
    assert outcome.end.exit_code == 9


def test_a_worker_that_closes_its_output_is_still_awaited(lab: Lab) -> None:
    outcome = lab.run(sh("echo a; exec >&- 2>&-; sleep 0.3; exit 4"))
    assert outcome.end.exit_code == 4
    assert lab.log("w0") == b"a\n"


def test_a_log_has_exactly_the_bytes_that_were_written(lab: Lab) -> None:
    code = (
        "import os, sys\n"
        "parts = bytes(range(256)) * 300, b'\\n\\r 1%\\r 2%', '損'.encode()[:2], b' partial'\n"
        "for part in parts:\n"
        "    while part: part = part[os.write(1, part):]\n"
    )
    lab.run(python(code))
    expected = bytes(range(256)) * 300 + b"\n\r 1%\r 2%" + "損".encode()[:2] + b" partial"
    assert lab.log("w0") == expected
    terminal = (lab.dir / "terminal").read_bytes()
    assert all(line.startswith(b"[W0] ") for line in terminal.splitlines())
    assert not set(terminal) & (set(range(32)) - {9, 10})
    assert terminal.endswith(b" partial\n")


def test_standard_error_is_merged_in_order(lab: Lab) -> None:
    lab.run(sh("echo 1; echo 2 >&2; echo 3"))
    assert lab.log("w0") == b"1\n2\n3\n"


def test_a_full_log_disk_does_not_end_a_run(lab: Lab) -> None:
    spec = lab.spec("W0", sh("echo a; sleep 0.1; echo b"))
    full = WorkerSpec("W0", spec.argv, spec.env, Path("/dev/full"))
    assert lab.supervise([full]).end.exit_code == 0
    assert [line for line in lab.shown if line.startswith("[W0]")] == ["[W0] a", "[W0] b"]
    assert sum("No space left" in line for line in lab.shown) == 1


def test_a_file_that_may_not_grow_does_not_end_a_run(lab: Lab, launch: Launch) -> None:
    """EFBIG and SIGXFSZ, to us as to a full disk's ENOSPC and an EIO."""
    writes = sh("i=0; while [ $i -lt 400 ]; do echo $i of many lines; i=$((i+1)); done; exit 4")
    run = launch(writes, prefix=("/bin/sh", "-c", 'ulimit -f 4; exec "$@"', "sh"))
    seen = run.process.stdout.read().decode() if run.process.stdout else ""
    assert run.wait() == 4
    assert seen.count("File too large; the run goes on") == 1
    assert "[W0] 399 of many lines" in seen
    assert 0 < len(lab.log("w0")) < 4096


def test_a_log_directory_that_vanishes_does_not_end_a_run(lab: Lab) -> None:
    (logs := lab.dir / "logs").mkdir()
    # A log is opened behind the start of its worker.
    is_open = "until [ -e $LAB/logs/w0.log ]; do sleep 0.01; done"
    code = f"{is_open}; echo early; rm -r $LAB/logs; echo late; exit 6"
    spec = replace(
        lab.spec("W0", sh(code), events=True),
        log_path=logs / "w0.log",
        events_path=logs / "w0.events.jsonl",
        stacks_path=logs / "w0.stacks.txt",
    )
    outcome = lab.supervise([spec])
    assert outcome.end.exit_code == 6
    assert outcome.workers[0].last_lines == ("early", "late")
    assert "[W0] late" in lab.shown
    assert sum("was deleted during the run: 11 bytes are lost" in line for line in lab.shown) == 1


def test_a_worker_that_somebody_stopped_is_a_hang(lab: Lab) -> None:
    stops = sh("echo $$ > $LAB/w.pid; echo up; kill -STOP $$; sleep 1000")
    clock = since(lambda: any(state_of(pid) == "T" for pid in lab.pids().values()))
    outcome = lab.run(stops, silence_s=0.5, grace_s=0.3, clock=clock)
    assert outcome.end.exit_code == 124
    assert outcome.end.reason is not None
    assert "state T (stopped)" in outcome.end.reason
    assert outcome.workers[0].stopped_by_us


def test_a_command_that_does_not_exist_is_127_and_takes_the_others_down(lab: Lab) -> None:
    outcome = lab.run(SLEEP, ("no-such-command", "x"), SLEEP)
    assert outcome.end.exit_code == 127
    assert outcome.end.reason is not None
    assert outcome.end.culprits == ("W1",)
    assert "could not start: ENOENT: no-such-command: No such file" in outcome.end.reason
    assert outcome.workers[1].spawn_error is not None


def test_a_commands_own_127_is_not_taken_for_a_failed_start(lab: Lab) -> None:
    outcome = lab.run(sh("exit 127"))
    assert outcome.end.exit_code == 127
    assert outcome.workers[0].spawn_error is None
    assert outcome.end.reason is not None
    assert "failed first: exit code 127" in outcome.end.reason


def test_a_file_that_is_no_program_is_126(lab: Lab) -> None:
    script = lab.dir / "script"
    script.write_text("echo hi\n")
    assert lab.run((str(script),)).end.exit_code == 126
    script.chmod(0o755)
    outcome = lab.run((str(script),))
    assert outcome.end.exit_code == 126
    assert outcome.end.reason is not None
    assert "ENOEXEC" in outcome.end.reason


def test_a_missing_interpreter_is_told_apart_from_a_missing_script(lab: Lab) -> None:
    script = lab.dir / "script"
    script.write_text("#!/no/such/python\n")
    script.chmod(0o755)
    outcome = lab.run((str(script),))
    assert outcome.end.reason is not None
    assert "the interpreter that its #! line names does not" in outcome.end.reason


def test_a_process_that_cannot_be_made_is_70_and_takes_the_others_down(lab: Lab) -> None:
    def spawn_once(spec: WorkerSpec, run_tag: str, cgroup_fd: int | None) -> Spawned:
        if spec.name == "W1":
            raise SpawnError("no process for it", OSError(errno.EAGAIN, "no more of them"))
        return spawn(spec, run_tag, cgroup_fd)

    fd = os.open(lab.dir / "terminal", os.O_WRONLY | os.O_CREAT)
    printer = Printer(fd)
    specs = lab.specs(SLEEP, SLEEP, SLEEP)
    outcome = Supervisor(specs, Limits(9, 0), printer, spawn=spawn_once).run()
    assert printer.close(60)
    os.close(fd)
    assert outcome.end.exit_code == 70
    assert outcome.workers[0].stopped_by_us
    assert outcome.workers[2].pid is None
    assert any("EAGAIN" in line for line in lab.shown)


def test_a_worker_gets_its_environment_and_nothing_else_of_ours(lab: Lab) -> None:
    spec = lab.spec("W0", ("/usr/bin/env", "-0"), events=True)
    lab.supervise([spec])
    seen = dict(line.split("=", 1) for line in lab.log("w0").decode().split("\0") if line)
    assert seen.pop("MODEL_CHECK_EVENTS_FD").isdigit()
    assert len(seen.pop("MODEL_CHECK_RUN_TAG")) == 32
    assert seen == dict(spec.env)


def test_a_worker_starts_clean(lab: Lab) -> None:
    code = (
        "import os, signal, resource\n"
        "soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "print(soft == hard, os.getsid(0) == os.getpid(), sorted(os.sched_getaffinity(0)))\n"
        "print(signal.pthread_sigmask(signal.SIG_BLOCK, []), os.readlink('/proc/self/fd/0'))\n"
        "print(sorted(int(fd) for fd in os.listdir('/proc/self/fd'))[:3])\n"
        "lines = [line.split(':\\t', 1) for line in open('/proc/self/status')]\n"
        "status = dict(line for line in lines if len(line) == 2)\n"
        "print(int(status['SigBlk'], 16), int(status['SigIgn'], 16) & (1 << signal.SIGUSR1 - 1))\n"
    )
    cpu = min(os.sched_getaffinity(0))
    spec = lab.spec("W0", python(code))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])
    ignored = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        lab.supervise([WorkerSpec("W0", spec.argv, spec.env, spec.log_path, cpus=frozenset({cpu}))])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGUSR1, ignored)
    assert lab.log("w0").decode().splitlines() == [
        f"True True [{cpu}]",
        "set() /dev/null",
        "[0, 1, 2]",
        "0 0",
    ]


def test_a_silent_worker_is_a_hang(lab: Lab) -> None:
    talks = sh(f"{wait_for('w1.log')} while :; do echo tick; sleep 0.05; done")
    clock = since(lambda: "tick" in lab.text("w0.log"))  # it was heard after the other
    outcome = lab.run(talks, sh("echo up; exec sleep 1000"), silence_s=1.0, clock=clock)
    assert outcome.end.exit_code == 124
    assert outcome.end.reason is not None
    assert outcome.end.culprits == ("W1",)
    assert re.search(r"W1 silent for \d+ s \(limit 1 s\)", outcome.end.reason)


def test_a_pause_of_the_whole_machine_is_nobodys_silence(lab: Lab) -> None:
    """A frozen container, a virtual machine that was paused: the clock went on, nobody ran."""
    paused = lab.dir / "paused"
    speaks = sh(
        f"echo before; touch {paused}; echo after; until [ -e $LAB/go ]; do sleep 0.01; done"
    )
    silent = sh(f"until [ -e {paused} ]; do sleep 0.01; done; sleep 0.3; touch $LAB/go")

    def clock() -> float:
        return time.monotonic() + (1000 if paused.exists() else 0)

    outcome = lab.supervise(lab.specs(speaks, silent), silence_s=30.0, clock=clock)
    assert outcome.end == RunEnd(exit_code=0)


def test_a_worker_that_ends_well_long_before_the_others_is_told_once(lab: Lab) -> None:
    fd = os.open(lab.dir / "terminal", os.O_WRONLY | os.O_CREAT)
    printer = Printer(fd)
    told = "until grep -q 'still running' $LAB/terminal; do sleep 0.02; done; sleep 0.2"
    specs = lab.specs(sh("exit 0"), sh(told))
    assert Supervisor(specs, Limits(9, 0, early_s=0.1), printer).run().end.exit_code == 0
    assert printer.close(60)
    os.close(fd)
    (line,) = lab.shown
    assert re.fullmatch(
        r"\[launcher\] W0 ended with exit code 0 after \d+\.\d s; still running: W1", line
    )


def test_events_reach_the_observer_the_file_and_the_reason(lab: Lab) -> None:
    heard: list[tuple[str, Event]] = []

    def observe(worker: str, event: Event) -> None:
        heard.append((worker, event))

    events = [Phase(t=1, name="build"), Done(t=2, exit_code=20, error="loss is NaN")]
    data = b"".join(map(encode, events))
    code = SAYS + "os.write(fd, b'garbage\\n'); sys.exit(20)"
    outcome = lab.run(python(code, repr(data)), events=True, observe=observe)
    assert heard == [("W0", events[0]), ("W0", events[1])]
    assert (lab.dir / "w0.events.jsonl").read_bytes() == data + b"garbage\n"
    assert outcome.end.exit_code == 20
    assert outcome.end.reason is not None
    assert outcome.end.reason.endswith(": loss is NaN")
    assert sum("can't be read" in line for line in lab.shown) == 1


@pytest.mark.parametrize(
    "line", [b'{"kind":"done","exit_code":0,"error":"\xff"}', b'{"kind":"done","x":' + b"[" * 9999]
)
def test_an_event_that_no_worker_of_ours_would_send_ends_no_run(lab: Lab, line: bytes) -> None:
    code = SAYS + f"os.write(fd, {line!r} + b'\\n')"
    outcome = lab.run(python(code, repr(encode(Beat(t=1)))), events=True)
    assert outcome.end.exit_code == 0
    assert (lab.dir / "w0.events.jsonl").read_bytes().endswith(line + b"\n")
    assert sum("can't be read" in line for line in lab.shown) == 1


def test_what_is_quoted_of_a_worker_is_masked_before_it_is_cut(lab: Lab) -> None:
    secret, room = "in the middle of it", "x" * 1994
    code = SAYS + f"print({room + secret!r}); print('one two\\nthree')"
    garbage = b"y" * 190 + secret.encode() + b"\n"
    with mock.patch.dict(os.environ, {"A_PASS": secret, "B_PASS": "one two\nthree"}):
        secrets.look_again()
        outcome = lab.run(python(code, repr(garbage)), events=True)
    secrets.look_again()
    assert outcome.workers[0].last_lines == (f"{room}***", "***")
    assert f"{room}{secret}" in (lab.dir / "w0.log").read_text()
    (complaint,) = [line for line in lab.shown if "can't be read" in line]
    assert "y***'; it stays" in complaint


def test_an_observer_can_end_a_run(lab: Lab, stop_on_first_event: Observe) -> None:
    code = SAYS + "time.sleep(1000)"
    argv = python(code, repr(encode(Beat(t=1))))
    outcome = lab.run(argv, argv, events=True, observe=stop_on_first_event)
    assert outcome.end.exit_code == 21
    started = [record for record in outcome.workers if record.pid is not None]
    assert started  # on a busy machine the first event comes before the second worker starts
    assert all(record.stopped_by_us for record in started)


def test_events_keep_their_order_when_one_of_them_ends_the_run(lab: Lab) -> None:
    """Its worker is dead by then, and more wait in the socket than one read takes."""
    heard: list[int] = []

    def observe(worker: str, event: Event) -> Stop | None:
        while not (pids := lab.pids()) or is_alive(pids["w"]):
            os.sched_yield()
        heard.append(event.t)
        return Stop("enough", 21, (worker,)) if event.t == 1 else None

    code = (
        SAYS
        + 'line = \'{"kind": "note", "t": %d, "text": "\' + \'x\' * 100 + \'"}\\n\'\n'
        + "os.write(fd, ''.join(line % i for i in range(1000)).encode())\n"
        + "open(os.environ['LAB'] + '/w.pid', 'w').write(f'{os.getpid()}\\n')"
    )
    outcome = lab.run(python(code, "b''"), events=True, observe=observe)
    assert outcome.end.exit_code == 21
    assert heard == list(range(1000))


def test_an_observer_that_breaks_leaves_nobody_behind(lab: Lab) -> None:
    def break_down(worker: str, event: Event) -> None:
        raise ZeroDivisionError

    code = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        + SAYS
        + "open(os.environ['LAB'] + '/w.pid', 'w').write(f'{os.getpid()}\\n')\n"
        "os.write(fd, ast.literal_eval(sys.argv[1])); time.sleep(1000)"
    )
    with pytest.raises(ZeroDivisionError):
        lab.run(python(code, repr(encode(Beat(t=1)))), events=True, observe=break_down)
    assert not [pid for pid in lab.pids().values() if is_alive(pid)]


def test_the_one_that_said_it_failed_is_blamed_though_it_died_last(lab: Lab) -> None:
    """W0 announces its failure, W1 dies of it at once, W0 only then."""
    said = encode(Done(t=0, exit_code=20, error="loss is NaN"))
    stamps = SAYS.replace("(sys.argv[1])", "(sys.argv[1]) % time.monotonic_ns()")
    announces = python(
        stamps + "open(os.environ['LAB'] + '/said', 'w').write('x')\ntime.sleep(1000)",
        repr(re.sub(rb'"t":\d+', b'"t":%d', said)),
    )
    outcome = lab.run(announces, sh(wait_for("said") + "exit 1"), events=True)
    assert outcome.end.reason is not None
    assert outcome.end.culprits == ("W0",)
    assert outcome.end.exit_code == 20
    assert "loss is NaN" in outcome.end.reason


def test_many_workers_quickly(lab: Lab) -> None:
    outcome = lab.run(*[sh("i=0; while [ $i -lt 200 ]; do echo line $i; i=$((i+1)); done")] * 24)
    assert outcome.end.exit_code == 0
    lines = b"".join(b"line %d\n" % i for i in range(200))
    assert all(lab.log(f"w{i}") == lines for i in range(24))


def test_handlers_and_subreaper_are_as_before_so_a_second_run_works(lab: Lab) -> None:
    before = [signal.getsignal(n) for n in range(1, 32)]
    assert lab.run(sh("exit 3")).end.exit_code == 3
    assert lab.run(sh("exit 0")).end.exit_code == 0
    assert [signal.getsignal(n) for n in range(1, 32)] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_exit_codes_survive_an_inherited_ignored_sigchld(lab: Lab) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert lab.run(sh("exit 7")).end.exit_code == 7
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_other_children_of_this_program_are_left_alone(lab: Lab) -> None:
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as mine:
        lab.run(sh("exit 7"))
        assert mine.poll() is None
        mine.kill()
        assert mine.wait() == -9


def test_a_worker_tells_its_life_in_its_repr(lab: Lab) -> None:
    spec = lab.spec("GPU3", SLEEP)
    worker = Worker(spec.name, spec=spec)
    assert repr(worker) == "<Worker GPU3 planned>"
    spawned = spawn(spec, "tag")
    worker.has_started(spawned, 0)
    pid = worker.pid
    assert repr(worker) == f"<Worker GPU3 pid {pid} running>"
    worker.stop(signal.SIGTERM)
    assert repr(worker) == f"<Worker GPU3 pid {pid} stopping>"
    os.waitid(os.P_PIDFD, spawned.pidfd, os.WEXITED | os.WNOWAIT)
    assert worker.check_exit(41.2, 1)
    worker.release()
    assert repr(worker) == f"<Worker GPU3 pid {pid} stopped by us (SIGTERM) after 41.2 s>"
    os.close(spawned.output_fd)
    os.close(spawned.report_fd)


def test_a_step_after_a_nan_takes_the_word_back(lab: Lab) -> None:
    worker = Worker("GPU3", spec=lab.spec("GPU3", SLEEP))
    nan = NonFinite(t=5, step=1, where="loss", loss="nan", grad_norm="nan")
    worker.hear(nan, 10)
    assert worker.confession is not None
    step = Step(t=6, step=2, loss="0x1p0", grad_norm="0x1p0", lr=0.1, ms=1.0, tokens=1)
    worker.hear(step, 11)
    assert worker.confession is None


def test_patience_ends_with_the_first_step_and_returns_with_a_save(lab: Lab) -> None:
    worker = Worker("GPU3", spec=lab.spec("GPU3", SLEEP, events=True))
    step = Step(t=6, step=0, loss="0x1p0", grad_norm="0x1p0", lr=0.1, ms=1.0, tokens=1)
    patience = []
    for event in (Phase(name="train"), step, Phase(name="save"), Phase(name="train"), Beat()):
        worker.hear(event, time.monotonic())
        patience.append(worker.patient_phase)
    assert patience == ["train, before its first step", None, "save", None, None]


def test_one_long_step_makes_nobody_more_patient(lab: Lab) -> None:
    worker, seen = Worker("GPU3", spec=lab.spec("GPU3", SLEEP, events=True)), []
    for number, ms in enumerate([9000.0, 1000.0, 1000.0, 60_000.0, *[2000.0] * 9]):
        loss = "0x1p0"
        step = Step(t=6, step=number, loss=loss, grad_norm=loss, lr=0.1, ms=ms, tokens=1)
        worker.hear(step, time.monotonic())
        seen.append(worker.step_s)
    assert (seen[0], seen[2], seen[-1]) == (9, 1, 2)
    assert max(seen[2:]) <= 5


def test_a_command_without_events_gets_no_extra_patience(lab: Lab) -> None:
    assert Worker("GPU3", spec=lab.spec("GPU3", SLEEP)).patient_phase is None


def test_limits_of_any_length_keep_the_code_of_who_failed(lab: Lab) -> None:
    outcome = lab.run(sh("exit 3"), SLEEP, grace_s=1e300, silence_s=3e6)
    assert outcome.end.exit_code == 3


TAKES_USR1 = python(
    "import os, signal, sys\n"
    "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))\n"
    f"{SAYS}"
    "while True: signal.pause()",
    repr(encode(Phase(name="import"))),
)


def test_a_signal_waits_until_a_worker_has_announced_that_it_can_take_it(lab: Lab) -> None:
    (spec,) = lab.specs(TAKES_USR1, events=True)
    fd = os.open(lab.dir / "terminal", os.O_WRONLY | os.O_CREAT)
    printer = Printer(fd, lab.dir / "launcher.log")
    try:
        specs = [replace(spec, announces_itself=True)]
        prepared = Outcome(RunEnd(exit_code=0), kept_signals=(signal.SIGUSR1,))
        outcome = Supervisor(specs, Limits(5, 0), printer, after=prepared).run()
    finally:
        printer.close()
        os.close(fd)
    assert outcome.workers[0].returncode == 0


def test_a_signal_for_later_is_kept_and_told_once(lab: Lab) -> None:
    tell = "import os, signal\nfor _ in range(2): os.kill(os.getppid(), signal.SIGUSR1)"
    fd = os.open(lab.dir / "terminal", os.O_WRONLY | os.O_CREAT)
    printer = Printer(fd, lab.dir / "launcher.log")
    try:
        outcome = Supervisor(
            lab.specs(python(tell)), Limits(5, 0), printer, keep_signals=True
        ).run()
    finally:
        printer.close()
        os.close(fd)
    assert (outcome.end.exit_code, outcome.kept_signals) == (0, (signal.SIGUSR1,))
    assert lab.shown.count("[launcher] SIGUSR1 received: it is passed on when the workers run") == 1
