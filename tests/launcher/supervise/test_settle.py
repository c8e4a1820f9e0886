"""A worker told its failure, and the others may share it: real processes, while the run waits."""

import os
import signal

import pytest

from model_check.events import Done, encode
from tests.launcher.supervise.lab import Lab, Launch, OwnProcess, python, sh, wait_until_dead

FAILED = encode(Done(t=1, exit_code=7, error="out of memory"))
TELLS = (
    "import os, time\n"
    "while not os.path.exists(os.environ['LAB'] + '/peer.pid'): time.sleep(0.01)\n"
    f"os.write(int(os.environ['MODEL_CHECK_EVENTS_FD']), {FAILED!r})\n"
    "raise SystemExit(7)"
)
PEER = "echo $$ > $LAB/peer.pid; exec sleep 1000"
STUBBORN = "trap '' TERM INT; echo $$ > $LAB/peer.pid; while :; do sleep 1000; done"


def settling(launch: Launch, peer: str = PEER) -> OwnProcess:
    run = launch(python(TELLS), sh(peer))
    line = run.wait_for("to come further, or to fail there, too")
    assert "W0 failed before its first step: 5 s at most for W1 " in line
    return run


def test_ctrl_c_ends_the_wait_and_twice_kills(lab: Lab, launch: Launch) -> None:
    run = settling(launch, STUBBORN)
    run.process.send_signal(signal.SIGINT)
    run.wait_for("SIGINT received: stopping 1")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    wait_until_dead(list(lab.pids().values()))


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_the_first_stays_the_first_whatever_becomes_of_its_peer(
    lab: Lab, launch: Launch, signum: int
) -> None:
    run = settling(launch)
    os.kill(lab.pids()["peer"], signum)
    assert run.wait() == 7
    assert run.outcome["culprits"] == ["W0"]
    wait_until_dead(list(lab.pids().values()))


def test_a_launcher_that_is_killed_meanwhile_leaves_nobody(lab: Lab, launch: Launch) -> None:
    run = settling(launch)
    run.process.kill()
    wait_until_dead(list(lab.pids().values()))


def test_who_fails_in_the_same_way_ends_the_wait(lab: Lab, launch: Launch) -> None:
    shares = (
        "import os, time\nopen(os.environ['LAB'] + '/peer.pid', 'w').write(f'{os.getpid()}\\n')\n"
        "while not os.path.exists(os.environ['LAB'] + '/go'): time.sleep(0.01)\n"
        f"os.write(int(os.environ['MODEL_CHECK_EVENTS_FD']), {FAILED!r})\n"
        "time.sleep(1000)"
    )
    run = launch(python(TELLS), python(shares))
    run.wait_for("to come further, or to fail there, too")
    (lab.dir / "go").touch()
    assert run.wait() == 7
    assert run.outcome["culprits"] == ["W0"]
