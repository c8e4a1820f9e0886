"""The nodes of a job as their launchers see them: real sockets on loopback."""

import signal
from collections.abc import Iterator

import pytest

from launcher.nodes.messages import Join
from launcher.nodes.nodes import Nodes
from launcher.verdict.record import RunEnd
from model_check.utils.slurm import SlurmStep
from tests.deadline import DEADLINE_S
from tests.launcher.nodes.test_link import Lab

NAMES = ("n1", "n2")


def nodes_at(port: int, number: int, address: str = "127.0.0.1") -> Nodes:
    step = SlurmStep("1.0", number, len(NAMES), len(NAMES), NAMES, port)
    join = Join(number, "1.0", NAMES[number], "", "host", ["CPU0"], "cpu")
    nodes = Nodes(step, join, address, port, 5.0)
    nodes.open(DEADLINE_S)
    return nodes


@pytest.fixture
def pair() -> Iterator[tuple[Nodes, Nodes]]:
    port = Lab().port
    pair = (nodes_at(port, 0), nodes_at(port, 1))
    assert pair[0].meet()[0].num_ranks == pair[1].meet()[0].num_ranks == 2
    yield pair
    for nodes in pair:
        nodes._link.close()


def test_a_request_before_the_start_is_a_request_on_every_node(pair: tuple[Nodes, Nodes]) -> None:
    first, second = pair
    asked = RunEnd(reason="SIGTERM received", exit_code=143, requests=(signal.SIGTERM,))
    assert second.concluded(asked) == asked
    end = first.concluded(RunEnd(reason="SIGTERM received", exit_code=0))
    assert (end.exit_code, end.is_by_signal, end.requests) == (143, True, (signal.SIGTERM,))


@pytest.fixture
def asked() -> Iterator[None]:
    """SIGTERM has come, and waits for an answer."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    signal.raise_signal(signal.SIGTERM)
    yield
    signal.sigtimedwait([signal.SIGTERM], 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def test_a_request_to_a_node_that_is_done_ends_those_that_are_not(
    pair: tuple[Nodes, Nodes], asked: None
) -> None:
    first, second = pair
    assert second.concluded(RunEnd(exit_code=0)).exit_code == 143
    end = first.concluded(RunEnd(exit_code=0))
    assert (end.exit_code, end.is_by_signal, end.reason) == (143, True, "n2: SIGTERM received")


def test_a_request_when_all_are_done_ends_nothing(pair: tuple[Nodes, Nodes], asked: None) -> None:
    first, second = pair
    first.concluded(RunEnd(exit_code=0, is_deadline=True))  # it does not wait for the others
    end = second.concluded(RunEnd(exit_code=0))
    assert (end.exit_code, end.requests) == (0, ())


def test_a_launcher_that_breaks_is_told_as_gone(pair: tuple[Nodes, Nodes]) -> None:
    first, second = pair
    second._link.close()
    end = first.concluded(RunEnd(reason=None, exit_code=0))
    assert (end.reason, end.exit_code) == (
        "node n2 is gone: its launcher ended without a word: no GPU is to blame",
        1,
    )


def test_ranks_meet_where_the_first_node_was_reached() -> None:
    """Its own name may mean loopback to it; here it is `localhost`, and an address."""
    port = Lab().port
    first, second = nodes_at(port, 0, "localhost"), nodes_at(port, 1)
    assert first.meet()[0].num_ranks == second.meet()[0].num_ranks == 2
    assert first.address == "127.0.0.1"
    for nodes in (first, second):
        nodes._link.close()
