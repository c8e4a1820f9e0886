"""What ranks of several nodes meet in one step blames none of them, in whatever order their
launchers hear of it: real workers, real links on loopback."""

from collections.abc import Callable, Iterator

import pytest

from launcher.output.printer import Printer
from launcher.supervise.policy import Limits
from launcher.supervise.supervisor import Supervisor
from launcher.verdict.record import RunEnd, Stop
from model_check.errors import EXIT_NON_FINITE, EXIT_PEER_LOST
from model_check.events import Done, encode
from tests.deadline import DEADLINE_S
from tests.launcher.nodes.test_link import Lab as Ports
from tests.launcher.nodes.test_nodes import nodes_at
from tests.launcher.supervise.lab import Lab, python

LIMITS = Limits(grace_s=10, silence_s=0, is_job=True, num_distant=1)
WAITS = (
    "import os, time\nwhile not os.path.exists(os.environ['LAB'] + '/heard'): time.sleep(0.01)\n"
)
Ends = Callable[[Done], RunEnd]


@pytest.fixture
def ends(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    """How the first node's part ends, whose rank tells its own end when its launcher has heard of
    the NaN on the second node, not before."""
    port = Ports().port
    first, second = nodes_at(port, 0), nodes_at(port, 1)
    first.meet()
    second.meet()
    stop = first.stop

    def heard() -> Stop | None:
        (lab.dir / "heard").touch()
        return stop()

    def run(told: Done) -> RunEnd:
        second.tell_failure("CPU0", None, "it met a NaN or Inf", EXIT_NON_FINITE)
        while stop() is None:
            first._wait(lambda: stop() is not None)
        monkeypatch.setattr(first, "stop", heard)
        tells = (
            f"os.write(int(os.environ['MODEL_CHECK_EVENTS_FD']), {encode(told)!r})\n"
            f"raise SystemExit({told.exit_code})"
        )
        specs = [lab.spec("CPU0", python(WAITS + tells), events=True)]
        printer = Printer(1, lab.dir / "launcher.log")
        try:
            outcome = Supervisor(specs, LIMITS, printer, other_nodes=first).run()
        finally:
            assert printer.close(DEADLINE_S)
        return first.concluded(outcome.end)

    yield run
    for nodes in (first, second):
        nodes._link.close()


def test_what_a_rank_here_meets_too_is_no_fault_of_the_other_node(ends: Ends) -> None:
    end = ends(Done(t=1, exit_code=EXIT_NON_FINITE, error="a NaN"))
    assert (end.exit_code, end.elsewhere) == (EXIT_NON_FINITE, None)


def test_a_rank_that_lost_the_failed_one_names_it(ends: Ends) -> None:
    end = ends(Done(t=1, exit_code=EXIT_PEER_LOST, error="another rank", peer_lost=True))
    assert end.exit_code == EXIT_NON_FINITE
    assert end.elsewhere is not None
    assert (end.elsewhere.node, end.elsewhere.worker) == ("n2", "CPU0")
