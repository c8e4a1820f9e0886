"""Workers in step: nobody runs away from the slowest, nobody is held by who does not listen."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from launcher.verdict import settling
from launcher.verdict.live import Watch
from launcher.verdict.record import Stop
from model_check.events import Beat, Event, Step, encode
from tests.deadline import DEADLINE_S
from tests.launcher.supervise.lab import (
    Lab,
    Launch,
    OwnProcess,
    python,
    since,
    wait_until_dead,
)

STEPPER = Path(__file__).with_name("stepper.py")


def stepper(num_steps: int, fault: str = "") -> tuple[str, ...]:
    return (sys.executable, str(STEPPER), str(num_steps), *([fault] if fault else []))


class Seen(Watch):
    """Measures the greatest lead; when W0 waits for W1 at `furthest`, W1 may go on."""

    def __init__(self, lab: Lab, max_lead: int = 2, furthest: int = 4) -> None:
        super().__init__(dict.fromkeys(("W0", "W1"), "H100"), max_lead)
        self._go = lab.dir / "go"
        self._furthest = furthest
        self._last = {"W0": -1, "W1": -1}
        self.lead = 0
        self.beats: set[str] = set()
        """Who waited when W0 was there. (At its start each may wait for the other.)"""

    def on_event(self, worker: str, event: Event) -> Stop | None:
        if isinstance(event, Step):
            self._last[worker] = event.step
            self.lead = max(self.lead, self._last["W0"] - self._last["W1"])
        if isinstance(event, Beat) and self._last["W0"] == self._furthest:
            self.beats.add(worker)
            self._go.touch()
        return super().on_event(worker, event)


@pytest.mark.parametrize("max_lead", [1, 2, 5])
def test_a_slow_worker_holds_the_others_a_few_steps_ahead(lab: Lab, max_lead: int) -> None:
    seen = Seen(lab, max_lead, furthest=2 + max_lead)
    outcome = lab.run(stepper(20), stepper(20, "late@3"), events=True, observe=seen)
    assert outcome.end.exit_code == 0
    assert seen.lead == max_lead
    assert seen.agreement.agreed_steps == {"W0": 20, "W1": 20}


def test_a_slow_worker_that_dies_ends_the_run_at_once(lab: Lab) -> None:
    outcome = lab.run(stepper(20), stepper(20, "kill@3"), events=True, observe=Seen(lab))
    assert (outcome.end.exit_code, outcome.end.culprits) == (137, ("W1",))
    waiting, _ = outcome.workers
    assert (waiting.returncode, waiting.stopped_by_us) == (143, True)


def test_the_one_that_hangs_is_blamed_not_those_that_wait_for_it(lab: Lab) -> None:
    seen = Seen(lab)
    commands = (stepper(20), stepper(20, "hang@3"))
    clock = since((lab.dir / "go").exists)
    outcome = lab.run(*commands, events=True, silence_s=1.5, observe=seen, clock=clock)
    assert (outcome.end.exit_code, outcome.end.culprits) == (124, ("W1",))
    assert seen.beats == {"W0"}


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is asked for its vectors has time, on any machine."""
    monkeypatch.setattr(settling, "SETTLE_S", float(DEADLINE_S))


@pytest.mark.usefixtures("patient")
def test_a_difference_in_the_last_step_still_finds_its_witnesses(lab: Lab) -> None:
    """W0 is finished long before W1 takes its last step."""
    seen = Seen(lab, furthest=3)
    outcome = lab.run(stepper(4), stepper(4, "differ@3"), events=True, observe=seen)
    assert outcome.end.exit_code == 23
    assert seen.vectors.keys() == {"W0", "W1"}
    assert all(vectors.fp for vectors in seen.vectors.values())
    assert [worker.returncode for worker in outcome.workers] == [0, 0]


@pytest.mark.usefixtures("patient")
def test_a_difference_is_settled_between_two_steps(lab: Lab) -> None:
    seen = Seen(lab, max_lead=5, furthest=34)
    outcome = lab.run(stepper(1000), stepper(1000, "differ@30"), events=True, observe=seen)
    assert outcome.end.exit_code == 23
    assert seen.vectors.keys() == {"W0", "W1"}
    assert all(facts.num_steps < 1000 for facts in seen.all_facts.values())


@pytest.mark.usefixtures("patient")
def test_one_of_eight_that_differs_is_named(lab: Lab) -> None:
    (lab.dir / "go").touch()
    watch = Watch({f"W{n}": "H100" for n in range(8)}, max_lead=2)
    commands = [stepper(4, "differ@2" if n == 6 else "") for n in range(8)]
    outcome = lab.run(*commands, events=True, observe=watch)
    assert (outcome.end.exit_code, outcome.end.culprits) == (21, ("W6",))
    assert watch.vectors.keys() == {f"W{n}" for n in range(8)}


def says_steps(num_steps: int, loss: float = 1.0, then: str = "") -> tuple[str, ...]:
    """A worker that never reads its socket."""
    line = Step(t=1, step=123456, loss=loss.hex(), grad_norm=(1.0).hex(), lr=0.1, ms=1.0, tokens=1)
    code = (
        f"import os, time\nline = {encode(line)!r}\n"
        "fd = int(os.environ['MODEL_CHECK_EVENTS_FD'])\n"
        f"for step in range({num_steps}):\n"
        "    text = line.replace(b'123456', b'%d' % step)\n"
        "    while text: text = text[os.write(fd, text):]\n"
    )
    return python(code + then)


def test_workers_that_never_read_hold_nobody_up(lab: Lab) -> None:
    """So many credits do not fit into a socket."""
    watch = Watch(dict.fromkeys(("W0", "W1"), "H100"), max_lead=2)
    outcome = lab.run(says_steps(5000), says_steps(5000), events=True, observe=watch)
    assert outcome.end.exit_code == 0
    assert watch.agreement.agreed_steps == {"W0": 5000, "W1": 5000}


def test_a_difference_is_told_although_nobody_answers(lab: Lab) -> None:
    sleeps = "time.sleep(1000)"
    watch = Watch(dict.fromkeys(("W0", "W1"), "H100"), max_lead=2)
    commands = (says_steps(1, then=sleeps), says_steps(1, 2.0, then=sleeps))
    outcome = lab.run(*commands, events=True, observe=watch)
    assert outcome.end.exit_code == 23
    assert watch.vectors == {}


def wait_for_beat(lab: Lab) -> None:
    """Until W0 waits for W1, two steps ahead."""
    until = time.monotonic() + DEADLINE_S
    while '"beat"' not in lab.text("w0.events.jsonl").partition('"step":4')[2]:
        assert time.monotonic() < until
        time.sleep(0.01)


def waiting_run(lab: Lab, launch: Launch) -> OwnProcess:
    run = launch(stepper(20), stepper(20, "late@3"), in_step=True)
    wait_for_beat(lab)
    return run


def test_a_launcher_that_is_killed_takes_those_that_wait_along(lab: Lab, launch: Launch) -> None:
    run = waiting_run(lab, launch)
    (worker, other) = workers_of(run)
    run.process.send_signal(signal.SIGKILL)
    wait_until_dead([worker, other])


def workers_of(run: OwnProcess) -> list[int]:
    children = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text()
    return [int(pid) for pid in children.split() if int(pid) != run.guardian]


def test_a_launcher_that_is_stopped_and_continued_goes_on(lab: Lab, launch: Launch) -> None:
    run = waiting_run(lab, launch)
    os.kill(run.process.pid, signal.SIGSTOP)
    (lab.dir / "go").touch()
    os.kill(run.process.pid, signal.SIGCONT)
    assert run.wait() == 0


def test_a_ctrl_c_ends_those_that_wait(lab: Lab, launch: Launch) -> None:
    run = waiting_run(lab, launch)
    run.process.send_signal(signal.SIGINT)
    (lab.dir / "go").touch()
    assert run.wait() == 130
    assert [worker["returncode"] for worker in run.outcome["workers"]] == [143, 143]
