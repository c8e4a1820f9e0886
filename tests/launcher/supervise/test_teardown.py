"""The bound that holds when even SIGKILL has no effect."""

import os
import signal

from launcher.contain.processes import Family
from launcher.supervise.teardown import REAP_S, Stage, Teardown
from launcher.supervise.worker import Worker, spawn
from tests.launcher.supervise.lab import Lab, sh


class Unkillable(Worker):
    """As a process in state D: signals change nothing."""

    def stop(self, signum: signal.Signals) -> None:
        pass


def test_a_process_that_cannot_be_killed_is_named_and_left(lab: Lab) -> None:
    spec = lab.spec("GPU3", sh("exec sleep 1000"))
    worker = Unkillable(spec.name, spec=spec)
    spawned = spawn(spec, "tag-of-nobody")
    worker.has_started(spawned, 0)
    said: list[str] = []
    family = Family("tag-of-nobody", 1 << 60, None, 0, frozenset())
    teardown = Teardown([worker], family, said.append)
    stages = []
    teardown.begin(now=100.0, grace_s=10.0)
    for now in (109.9, 110.0, 110.0 + REAP_S - 0.1, 110.0 + REAP_S):
        teardown.advance(now)
        stages.append(teardown.stage)
    assert stages == [Stage.ASKED, Stage.KILLED, Stage.KILLED, Stage.OVER]
    assert teardown.leftovers == (worker.pid,)
    assert said[0] == "still alive, so SIGKILL: GPU3"
    assert said[1].startswith(f"SIGKILL has no effect on pid {worker.pid} (state ")
    os.kill(spawned.process.pid, signal.SIGKILL)
    spawned.process.wait()
    worker.release()
    for fd in (spawned.output_fd, spawned.report_fd):
        os.close(fd)
