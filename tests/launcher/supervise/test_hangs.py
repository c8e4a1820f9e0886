"""A run that hangs: what everybody was doing is saved before anybody is stopped."""

import os
import platform
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher.contain import processes
from launcher.output.printer import Printer
from launcher.supervise.hang import ANSWER_S, find_py_spy
from launcher.supervise.outcome import Outcome
from launcher.supervise.policy import Limits
from launcher.supervise.stacks import Work, work_of, work_since
from launcher.supervise.supervisor import Supervisor
from model_check.events import Event, NonFinite, Phase, Scalar, Step, encode
from tests.deadline import DEADLINE_S
from tests.launcher.supervise.lab import (
    Clock,
    Hears,
    Lab,
    Launch,
    python,
    sh,
    since,
    state_of,
)

ONE = (1.0).hex()
STEP = Step(step=0, loss=ONE, grad_norm=ONE, lr=0.1, ms=1.0, tokens=1)
LIMIT_S = 100.0
PREAMBLE = """
import ctypes, faulthandler, os, signal, sys, threading, time
def offer():
    path = os.environ["LAB"] + "/" + NAME + ".stacks.txt"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.register(signal.SIGRTMIN + 7, file=fd, all_threads=True)
def say():
    os.write(int(os.environ["MODEL_CHECK_EVENTS_FD"]), EVENTS)
def loses_itself(then=say):
    then()
    while True: time.sleep(1000)
print(os.getpid(), file=open(f"{os.environ['LAB']}/{NAME}.pid", "w"))
"""
WorkOfThreads = dict[int, Work]


def worker(name: str, code: str, offered: int | None = signal.SIGRTMIN + 7) -> tuple[str, ...]:
    """A worker that trains, so that its patience is over, and claims to offer its stacks."""
    detail: dict[str, Scalar] = {} if offered is None else {"stacks_signal": offered}
    events = encode(Phase(t=1, name="import", detail=detail)) + encode(STEP)
    return python(f"NAME, EVENTS = {name!r}, {events!r}\n{PREAMBLE}\n{code}")


@dataclass
class Hours:
    """A clock that jumps far beyond every limit once all workers have made a step: as if they had
    been silent for so long, not as if nobody had run (`pause_s`). Then it is held until all have
    answered, and W0 has done enough; when the second question is out, until that is answered."""

    lab: Lab
    num_workers: int
    num_answers: int
    """Of each worker; 0: nobody will answer."""
    then: Callable[[], None]
    """Called before the jump."""
    is_enough: Callable[[WorkOfThreads], bool]

    def __post_init__(self) -> None:
        self.clock = Clock(self._is_held)
        self._missing = self.num_workers
        self._jumped_at: float | None = None
        self._before: WorkOfThreads = {}

    def on_event(self, worker: str, event: Event) -> None:
        self._missing -= isinstance(event, Step)
        if self._missing == 0 and self._jumped_at is None:
            self.then()
            self.clock.now += 3600.0
            self._jumped_at = self.clock.now

    def _is_held(self) -> bool:
        if self._jumped_at is None or self.num_answers == 0:
            return False
        waited_s = self.clock.now - self._jumped_at
        wanted = self.num_answers if waited_s > 0.75 * ANSWER_S else 1
        return waited_s < ANSWER_S and not (self._has_worked() and self._have_answered(wanted))

    def _have_answered(self, num: int) -> bool:
        """The main thread is the last that faulthandler writes."""
        texts = [stacks(self.lab, f"w{n}") for n in range(self.num_workers)]
        return all(text.count("in <module>") >= num for text in texts)

    def _has_worked(self) -> bool:
        """Since the first look: only after it the supervisor asks for the time again."""
        now = work_of(self.lab.pids()["w0"])
        self._before = self._before or (now if stacks(self.lab, "w0") else {})
        return bool(self._before) and self.is_enough(work_since(self._before, now))


def hang(
    lab: Lab,
    *commands: tuple[str, ...],
    answers: int = 1,
    then: Callable[[], None] = lambda: None,
    is_enough: Callable[[WorkOfThreads], bool] = lambda work: True,
) -> tuple[Outcome, str]:
    """How it ended, and the reason in words."""
    hours = Hours(lab, len(commands), answers, then, is_enough)
    fd = os.open(lab.dir / "terminal", os.O_WRONLY | os.O_CREAT)
    printer, specs = Printer(fd), lab.specs(*commands, events=True)
    limits = Limits(30.0, LIMIT_S)
    outcome = Supervisor(
        specs, limits, printer, Hears(hours.on_event), clock=hours.clock, pause_s=float("inf")
    ).run()
    assert printer.close(60)
    os.close(fd)
    assert outcome.end.exit_code == 124
    assert outcome.end.reason is not None
    return outcome, outcome.end.reason


def stacks(lab: Lab, name: str) -> str:
    return lab.text(f"{name}.stacks.txt")


def has_run(seconds: float) -> Callable[[WorkOfThreads], bool]:
    """Whether a thread has."""
    return lambda work: any(thread.ran_ns >= seconds * 1e9 for thread in work.values())


def is_running(lab: Lab, name: str, program: str) -> bool:
    """Whether the process that left this pid runs this program, and waits."""
    pid = lab.pids().get(name, 0)
    command = processes.read_proc(pid, "comm") if pid else b""
    return command == f"{program}\n".encode() and state_of(pid) == "S"


@pytest.fixture
def no_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what a system brings; a developer's environment may have it beside its interpreter."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    if find_py_spy() is not None:
        pytest.skip("py-spy is installed here")


def test_the_stacks_of_all_are_saved_and_the_silent_one_is_told_where_it_hangs(lab: Lab) -> None:
    hangs = (
        "offer(); runs = threading.Event()\n"
        "threading.Thread(target=loses_itself, args=(runs.set,)).start()\n"
        "runs.wait(); loses_itself(say)"
    )
    works = (  # it speaks when the other has been heard: within one wake-up they would be equals
        "offer()\nheard = os.environ['LAB'] + '/w1.events.jsonl'\n"
        "def has_stepped(): return os.path.exists(heard) and '\"step\"' in open(heard).read()\n"
        "while not has_stepped(): time.sleep(0.01)\n"
        "say()\nwhile True: os.write(1, b'tick\\n'); time.sleep(0.05)"
    )
    outcome, reason = hang(lab, worker("w0", works), worker("w1", hangs))
    assert outcome.end.reason is not None
    assert outcome.end.culprits == ("W1",)
    assert "(limit 100 s), in " in reason
    assert "loses_itself (<string>:" in reason
    assert "in <module>" in stacks(lab, "w0")
    assert stacks(lab, "w1").count("in loses_itself") == 2
    assert stacks(lab, "w1").startswith(f"W1\npid {outcome.workers[1].pid} (python")
    assert [record.evidence for record in outcome.workers] == [
        (str(lab.dir / "w0.stacks.txt"),),
        (str(lab.dir / "w1.stacks.txt"),),
    ]
    assert lab.log("w1") == b""
    assert [record.returncode for record in outcome.workers] == [-15, -15]


def test_a_worker_whose_interpreter_does_not_turn_answers_all_the_same(lab: Lab) -> None:
    keeps_the_gil = "pause = ctypes.PyDLL(None).pause\ndef stuck():\n say()\n while True: pause()\n"
    _, reason = hang(lab, worker("w0", keeps_the_gil + "offer(); stuck()"))
    assert "stuck (<string>:" in reason


def test_a_thread_that_runs_and_keeps_the_gil_is_named_not_the_main_one(lab: Lab) -> None:
    code = (
        "import re\noffer()\nturns = []\n"
        "def spins():\n while not turns: time.sleep(0.001)\n"
        " say(); re.match('(a+)+$', 'a' * 64 + 'b')\n"
        "def is_innocent():\n while True: turns.append(1); time.sleep(0.001)\n"
        "threading.Thread(target=spins).start(); is_innocent()"
    )

    def wait_until_it_spins() -> None:
        before = work_of(pid := lab.pids()["w0"])
        while not has_run(0.1)(work_since(before, work_of(pid))):
            os.sched_yield()

    outcome, reason = hang(
        lab, worker("w0", code), answers=2, then=wait_until_it_spins, is_enough=has_run(0.6)
    )
    assert "(limit 100 s), in match (" in reason
    assert " < spins (<string>:" in reason
    named = re.search(
        r", where thread (\d+) \(python\S*\) runs; its main thread is in is_inn", reason
    )
    assert named is not None
    assert int(named[1]) != outcome.workers[0].pid


@pytest.mark.skipif(platform.machine() != "x86_64", reason="two bytes of machine code for x86_64")
def test_a_thread_that_runs_without_python_is_named_beside_the_main_one(lab: Lab) -> None:
    """As those of OpenMP, CUDA and NCCL, which have no stack of Python's."""
    code = (
        "offer(); libc = ctypes.CDLL(None)\n"
        "SPINS = b'\\xeb\\xfe'  # jmp to itself\n"
        "import mmap\n"
        "page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)\n"
        "page.write(SPINS)\n"
        "start = ctypes.addressof(ctypes.c_char.from_buffer(page))\n"
        "thread = ctypes.c_ulong()\n"
        "libc.pthread_create(ctypes.byref(thread), None, ctypes.c_void_p(start), None)\n"
        "loses_itself()"
    )
    _, reason = hang(lab, worker("w0", code), is_enough=has_run(0.6))
    # It may be seen while it still says its step, the last thing before it sleeps.
    assert re.search(
        r", in (say .* < )?loses_itself \(<string>:.*, while thread \d+ \(python\S*\) runs", reason
    )


def test_a_worker_that_cannot_answer_holds_the_teardown_up_for_a_bounded_time(lab: Lab) -> None:
    def freeze() -> None:
        os.kill(lab.pids()["w0"], signal.SIGSTOP)
        os.waitid(os.P_PID, lab.pids()["w0"], os.WSTOPPED | os.WNOWAIT)

    freezable = worker("w0", "offer(); loses_itself()")
    outcome, reason = hang(lab, freezable, answers=0, then=freeze)
    assert re.search(r"no answer within \d+\.\d s: state T \(stopped\)", reason)
    assert "state T (stopped)" in stacks(lab, "w0")
    assert outcome.workers[0].returncode == -15


@pytest.mark.usefixtures("no_py_spy")
@pytest.mark.parametrize("offered", [signal.SIGRTMIN + 7, signal.SIGKILL, signal.SIGUSR1, None])
def test_who_has_no_handler_for_the_signal_is_never_sent_it(lab: Lab, offered: int | None) -> None:
    """It claims to offer its stacks (or a signal of somebody else's), and TERM is what ends it."""
    ends_well = "signal.signal(signal.SIGTERM, lambda *_: os._exit(41))\n"
    code = ends_well + "loses_itself()"
    outcome, reason = hang(lab, worker("w0", code, offered), answers=0)
    assert (outcome.workers[0].returncode, outcome.workers[0].stopped_by_us) == (41, True)
    assert "(limit 100 s), state " in reason


@pytest.mark.usefixtures("no_py_spy")
def test_the_threads_of_a_foreign_command_and_its_children_are_told_by_the_kernel(lab: Lab) -> None:
    waits = sh("echo $$ > $LAB/w0.pid; sleep 1000 & echo $! > $LAB/child.pid; wait")
    clock = since(lambda: is_running(lab, "child", "sleep") and is_running(lab, "w0", "sh"))
    outcome = lab.run(waits, silence_s=1.0, clock=clock)
    assert outcome.end.exit_code == 124
    text = stacks(lab, "w0")
    assert "(sh): state S (sleeping)" in text
    assert "(sleep): state S (sleeping)" in text


SLEEPS = python(
    "import os, time\n"
    "print(os.getpid(), file=open(os.environ['LAB'] + '/w0.pid', 'w'), flush=True)\n"
    "time.sleep(1000)"
)


def until_py_spy(lab: Lab, has_come: Callable[[str], bool]) -> Clock:
    """Held until the worker runs, and again until py-spy has come so far."""

    def is_held() -> bool:
        text = stacks(lab, "w0")
        return "w0" not in lab.pids() or (bool(text) and not has_come(text))

    return Clock(is_held)


def test_py_spy_looks_into_python_processes_that_offered_nothing(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    py_spy = tmp_path / "bin" / "py-spy"
    py_spy.parent.mkdir()
    py_spy.write_text(
        "#!/bin/sh\n"
        'echo "Process $3: python"\n'
        'echo "Thread 0x7F (idle): \\"MainThread\\""\n'
        'echo "    wait (threading.py:324)"\n'
        'echo "    main (train.py:9)"\n'
    )
    py_spy.chmod(0o755)
    monkeypatch.setenv("PATH", f"{py_spy.parent}:/usr/bin:/bin")
    last_line = "main (train.py:9)"
    outcome = lab.run(
        SLEEPS, silence_s=1.0, clock=until_py_spy(lab, lambda text: last_line in text)
    )
    assert f"Process {outcome.workers[0].pid}: python" in stacks(lab, "w0")
    assert outcome.end.reason is not None
    assert "(limit 1 s), in wait (threading.py:324) < main (train.py:9)" in outcome.end.reason
    clock = since(lambda: is_running(lab, "other", "sleep"))
    lab.run(sh("echo $$ > $LAB/other.pid; exec sleep 1000"), silence_s=1.0, clock=clock)
    assert stacks(lab, "w0").count("Process") == 1


def test_a_py_spy_that_hangs_is_killed(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    py_spy = tmp_path / "bin" / "py-spy"
    py_spy.parent.mkdir()
    py_spy.write_text("#!/bin/sh\necho $$ > $LAB/spy.pid\nexec sleep 1000\n")
    py_spy.chmod(0o755)
    monkeypatch.setenv("PATH", f"{py_spy.parent}:/usr/bin:/bin")
    monkeypatch.setenv("LAB", str(lab.dir))
    clock = until_py_spy(lab, lambda text: "spy" in lab.pids())
    outcome = lab.run(SLEEPS, silence_s=0.5, clock=clock)
    assert outcome.end.exit_code == 124
    assert "spy" in lab.pids()  # that it is dead is the lab's own check


def test_a_file_that_cannot_be_written_keeps_no_run_from_ending(lab: Lab) -> None:
    (lab.dir / "w0.stacks.txt").mkdir()
    outcome = lab.run(sh("exec sleep 1000"), silence_s=0.5)
    assert outcome.end.exit_code == 124
    assert outcome.workers[0].evidence == ()
    assert sum("can't be saved in" in line for line in lab.shown) == 1


def test_a_run_that_does_not_hang_leaves_no_empty_files(lab: Lab) -> None:
    lab.run(worker("w0", "offer(); say()"), events=True)
    assert not (lab.dir / "w0.stacks.txt").exists()


def test_an_exit_code_124_of_its_own_is_no_hang(lab: Lab) -> None:
    outcome = lab.run(sh("exec sleep 1000"), sh("exit 124"))
    assert outcome.end.exit_code == 124
    assert [record.evidence for record in outcome.workers] == [(), ()]
    assert not list(lab.dir.glob("*.stacks.txt"))


def test_ctrl_c_cuts_the_evidence_short(lab: Lab, launch: Launch) -> None:
    code = "offer(); say(); os.kill(os.getpid(), signal.SIGSTOP)"
    running = launch(worker("w0", code), silence_s=1.0, constants={"hang.ANSWER_S": DEADLINE_S})
    running.wait_for("saving what everybody is doing")
    os.kill(running.process.pid, signal.SIGINT)
    assert running.wait() == 124
    assert f"no answer within {DEADLINE_S}" not in running.outcome["reason"]


def test_a_worker_that_falls_silent_with_its_evidence_ends_as_its_nan(lab: Lab) -> None:
    """It ignores SIGTERM, too, as one whose GPU does not answer."""
    nan = NonFinite(t=1, step=0, where="loss", loss="nan", grad_norm="nan")
    events = encode(nan) + encode(Phase(t=2, name="save"))
    code = (
        "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"os.write(int(os.environ['MODEL_CHECK_EVENTS_FD']), {events!r})\n"
        "while True: time.sleep(1000)"
    )
    fd = os.open(lab.dir / "terminal", os.O_WRONLY | os.O_CREAT)
    printer, specs = Printer(fd), lab.specs(python(code), sh("exec sleep 1000"), events=True)
    limits = Limits(grace_s=0.1, silence_s=300.0, evidence_s=0.2)
    outcome = Supervisor(specs, limits, printer).run()
    printer.close()
    os.close(fd)
    assert (outcome.end.exit_code, outcome.end.culprits) == (20, (specs[0].name,))
    assert "fell silent" in str(outcome.end.reason)
    assert not outcome.end.is_hang


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(1)"])
def test_a_worker_that_dies_with_its_evidence_ends_as_its_nan(lab: Lab, end: str) -> None:
    nan = encode(NonFinite(t=1, step=0, where="loss", loss="nan", grad_norm="nan"))
    code = f"os.write(int(os.environ['MODEL_CHECK_EVENTS_FD']), {nan!r}); {end}"
    outcome = lab.run(python(f"import os, signal; {code}"), sh("exec sleep 1000"), events=True)
    assert (outcome.end.exit_code, outcome.end.culprits) == (20, ("W0",))
