"""A worker told its failure, and the others may share it: real processes, while the run waits."""

import os
import re
import signal

import pytest

from launcher.verdict.observer import SETTLE_S
from model_check.events import Done, encode
from tests.deadline import DEADLINE_S
from tests.launcher.supervise.lab import (
    Lab,
    Launch,
    OwnProcess,
    python,
    sh,
    wait_until_dead,
)

FAILED = encode(Done(t=1, exit_code=7, error="out of memory"))
TELLS = (
    "import os, time\n"
    "PEER = os.environ['LAB'] + '/peer.pid'\n"
    "while not (os.path.exists(PEER) and os.path.getsize(PEER)): time.sleep(0.01)\n"
    f"os.write(int(os.environ['MODEL_CHECK_EVENTS_FD']), {FAILED!r})\n"
    "raise SystemExit(7)"
)
PEER = "echo $$ > $LAB/peer.pid; exec sleep 1000"
STUBBORN = "trap '' TERM INT; echo $$ > $LAB/peer.pid; while :; do sleep 1000; done"


def settling(launch: Launch, peer: str = PEER, settle_s: float = SETTLE_S) -> OwnProcess:
    run = launch(python(TELLS), sh(peer), constants={"policy.SETTLE_S": settle_s})
    line = run.wait_for("to come further, or to fail there, too")
    assert re.search(r"W0 failed before its first step: \d+ s at most for W1 ", line)
    return run


def test_ctrl_c_ends_the_wait_and_twice_kills(lab: Lab, launch: Launch) -> None:
    run = settling(launch, STUBBORN, DEADLINE_S)
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
    run = settling(launch, settle_s=DEADLINE_S)
    run.process.kill()
    wait_until_dead(list(lab.pids().values()))


def test_who_fails_in_the_same_way_ends_the_wait(lab: Lab, launch: Launch) -> None:
    shares = (
        "import os, time\nopen(os.environ['LAB'] + '/peer.pid', 'w').write(f'{os.getpid()}\\n')\n"
        "while not os.path.exists(os.environ['LAB'] + '/go'): time.sleep(0.01)\n"
        f"os.write(int(os.environ['MODEL_CHECK_EVENTS_FD']), {FAILED!r})\n"
        "time.sleep(1000)"
    )
    run = launch(python(TELLS), python(shares), constants={"policy.SETTLE_S": DEADLINE_S})
    run.wait_for("to come further, or to fail there, too")
    (lab.dir / "go").touch()
    assert run.wait() == 7
    assert run.outcome["culprits"] == ["W0"]
