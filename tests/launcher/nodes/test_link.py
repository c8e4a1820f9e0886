"""The launchers of a job tell each other what they know: real sockets on loopback, and threads."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
from msgspec.structs import replace

from launcher.nodes import leader
from launcher.nodes.follower import Follower
from launcher.nodes.leader import MAX_STRANGERS, Leader, places_to_listen
from launcher.nodes.link import Link
from launcher.nodes.messages import (
    MAX_LINE_BYTES,
    Bits,
    Failure,
    Heartbeat,
    Join,
    JoinRejected,
    Leave,
    Message,
    Ready,
    WorkersExited,
    decode,
    encode,
)
from model_check.errors import ConfigError
from model_check.events import Step
from tests.deadline import DEADLINE_S
from tests.ports import free_port

NAMES = ("n1", "n2", "n3")


def join(node: int, job: str = "1.0", kind: str | None = "cpu") -> Join:
    return Join(node, job, NAMES[node], "", "host", ["CPU0"], kind)


class Lab:
    def __init__(self) -> None:
        self.port = free_port()
        self.links: list[Link] = []

    def link(
        self,
        node: int,
        job: str = "1.0",
        limit_s: float = DEADLINE_S,
        first: Join | None = None,
    ) -> Link:
        make = Leader if node == 0 else Follower
        link = make(first or join(node, job), NAMES, "127.0.0.1", self.port)
        link.start(limit_s, time.monotonic() + DEADLINE_S)
        self.links.append(link)
        return link


@pytest.fixture
def lab() -> Iterator[Lab]:
    lab = Lab()
    yield lab
    for link in lab.links:
        link.close()


def said(link: Link, kind: type[Message], count: int = 1) -> list[Message]:
    """When it is there."""

    def found() -> list[Message]:
        return [message for message in [*link.log] if isinstance(message, kind)]

    assert link.wait(lambda: len(found()) >= count, DEADLINE_S), link.log
    return found()


def failure(node: int) -> Failure:
    return Failure(node, "CPU0", 3, "exit code 7", 7)


def lost(node: int, why: str) -> Failure:
    return Failure(node, None, None, f"node {NAMES[node]} {why}", 1, is_own=False)


def step(number: int, weights: str = "a") -> Step:
    bits = {"step": number, "loss": "0x1p+0", "grad_norm": "0x1p+0", "fp": {"weights": weights}}
    return Step(**bits, lr=0.1, ms=1.0, tokens=1)


def test_all_have_one_log_in_one_order(lab: Lab) -> None:
    links = [lab.link(node) for node in range(3)]
    for link in links:
        said(link, Join, 3)
    for node, link in enumerate(links):
        link.say(failure(node))
    orders = [said(link, Failure, 3) for link in links]
    assert orders[0] == orders[1] == orders[2]


def test_who_comes_late_reads_what_was_said(lab: Lab) -> None:
    first, second = lab.link(0), lab.link(1)
    second.say(failure(1))
    said(first, Failure)
    third = lab.link(2)
    assert said(third, Failure) == [failure(1)]


def test_who_leaves_without_a_word_is_gone_for_all(lab: Lab) -> None:
    links = [lab.link(node) for node in range(3)]
    for link in links:
        said(link, Join, 3)
    links[2].close()
    for link in links[:2]:
        assert said(link, Leave) == [Leave(2)]
        assert said(link, Failure) == [lost(2, "is gone: its launcher ended without a word")]


def test_who_leaves_when_its_workers_are_gone_has_not_failed(lab: Lab) -> None:
    first, second = lab.link(0), lab.link(1)
    said(second, Join, 2)
    second.say(WorkersExited(1))
    second.close()
    assert said(first, Leave) == [Leave(1)]
    assert not any(isinstance(message, Failure) for message in first.log)


def test_a_node_that_is_silent_is_named_with_its_seconds(lab: Lab) -> None:
    """It joins, and then says nothing. It may come again."""
    first = lab.link(0, limit_s=0.5)
    with socket.create_connection(("127.0.0.1", lab.port)) as mute:
        mute.sendall(encode(join(1)))
        assert said(first, Leave) == [Leave(1, goes_on=True)]
    (silent,) = said(first, Failure)
    assert isinstance(silent, Failure)
    assert silent.cause.startswith("node n2 not heard for ")


DEEP = encode(join(1)).replace(b'"settings":{}', b'"settings":{"a":' + b"[" * 100_000)
"""A line that only looks like one of ours."""
NOISES = {
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "JSON": b"{}\n",
    "a long line": b"x" * (MAX_LINE_BYTES + 2),
    "no greeting, twice": encode(Heartbeat()) * 2,
    "greetings of another job": encode(join(1, job="2.0")) * 3,
    "a node that is none": encode(Join(7, "1.0", "n8")) * 2,
    "a node by another name": encode(Join(1, "1.0", "n8")),
    "deep": DEEP,
    "no UTF-8": b"\xff\xfe\x00\n",
}


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_strangers_change_nothing(lab: Lab, noise: bytes) -> None:
    first = lab.link(0)
    with socket.create_connection(("127.0.0.1", lab.port)) as stranger:
        stranger.sendall(noise)
        stranger.settimeout(DEADLINE_S)
        try:
            while stranger.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass
    second = lab.link(1)
    said(second, Join, 2)
    assert not [message for message in first.log if isinstance(message, Failure)]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first node waits for a greeting as long as a test may take: who has to go, makes
    place."""
    monkeypatch.setattr(leader, "ANSWER_S", 2.0 * DEADLINE_S)


@pytest.mark.usefixtures("patient")
def test_a_crowd_of_strangers_keeps_no_node_out(lab: Lab) -> None:
    """Each has begun a line, and does not end it."""
    first = lab.link(0)
    with ExitStack() as crowd:
        strangers = []
        for _ in range(MAX_STRANGERS + len(NAMES) + 20):
            stranger = socket.create_connection(("127.0.0.1", lab.port))
            strangers.append(crowd.enter_context(stranger))
            stranger.sendall(b'{"type":')
        second = lab.link(1)
        said(second, Join, 2)
        strangers[0].settimeout(DEADLINE_S)
        with suppress(ConnectionResetError):  # nobody has read what it said
            assert strangers[0].recv(1) == b"", "the oldest makes place, long before it is due"
    assert [type(message) for message in first.log] == [Join, Join]


@pytest.mark.usefixtures("patient")
def test_strangers_that_make_place_while_they_talk_change_nothing(lab: Lab) -> None:
    """In one reading: a connection too many, and a word of the oldest, which has to go."""
    first = lab.link(0)
    place = ("127.0.0.1", lab.port)
    with ExitStack() as crowd:

        def connect() -> socket.socket:
            return crowd.enter_context(socket.create_connection(place))

        oldest, *strangers = [connect() for _ in range(MAX_STRANGERS + len(NAMES) + 1)]
        oldest.settimeout(DEADLINE_S)
        assert oldest.recv(1) == b"", "all are there"
        with turned_off(first):
            strangers.append(connect())
            for stranger in strangers:
                stranger.send(b"x")
        second = lab.link(1)
        said(second, Join, 2)
    assert [type(message) for message in first.log] == [Join, Join]


@contextmanager
def turned_off(link: Link) -> Iterator[None]:
    """Its thread stands still, between two readings."""
    stands, goes_on = threading.Event(), threading.Event()

    def stand() -> None:
        stands.set()
        goes_on.wait(DEADLINE_S)

    link._loop.call_soon_threadsafe(stand)
    assert stands.wait(DEADLINE_S)
    yield
    goes_on.set()


@pytest.mark.parametrize(
    "lie",
    [
        failure(2),
        Bits(2, step(1)),
        Leave(77),
        JoinRejected("go away"),
        join(1),
    ],
    ids=lambda lie: type(lie).__name__,
)
def test_a_node_speaks_for_itself_alone(lab: Lab, lie: Message) -> None:
    first = lab.link(0)
    with socket.create_connection(("127.0.0.1", lab.port)) as liar:
        liar.sendall(encode(join(1)) + encode(lie))
        assert said(first, Leave) == [Leave(1)]
    assert first.log[2:] == [lost(1, "is gone: it said what no launcher says"), Leave(1)]


def test_a_node_that_never_stops_talking_is_cut_off(lab: Lab) -> None:
    first = lab.link(0)
    with socket.create_connection(("127.0.0.1", lab.port)) as chatty:
        chatty.sendall(encode(join(1)) + encode(Ready(1, "data")) * 1000)
        assert said(first, Leave) == [Leave(1)]
    assert len(first.log) < 50


def test_a_leader_whose_name_means_loopback_to_itself_is_heard_elsewhere() -> None:
    """As on Debian, whose /etc/hosts has 127.0.1.1 for the name of the machine."""
    assert places_to_listen("n1", "127.0.1.1") == [""]
    assert places_to_listen("n1", "::1") == ["::"]
    assert places_to_listen("n1", "10.0.0.1") == ["n1", ""]
    assert places_to_listen("127.0.0.1", "127.0.0.1") == ["127.0.0.1", ""]
    assert places_to_listen("127.0.1.1", "127.0.1.1") == ["127.0.1.1", ""]
    assert places_to_listen("localhost", "127.0.0.1") == ["localhost", ""]


def test_an_address_that_nobody_knows_is_one_line() -> None:
    link = Leader(join(0), NAMES, "no-such-node.invalid", 29_500)
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        link.start(5.0, time.monotonic() + DEADLINE_S)


def test_a_launcher_of_another_job_is_refused(lab: Lab) -> None:
    lab.link(0)
    other = lab.link(1, job="2.0")
    (refused,) = said(other, Failure)
    assert "the nodes of job 1.0 meet there, this is 2.0; set MASTER_PORT" in str(refused)


def test_a_port_that_is_taken_is_one_line(lab: Lab) -> None:
    with (
        socket.create_server(("127.0.0.1", lab.port)),
        pytest.raises(ConfigError, match="free port"),
    ):
        lab.link(0)


REFUSED = "batch_size = 0"


def refused(node: int) -> Join:
    return Join(node, "1.0", NAMES[node], failure=Failure(node, None, None, REFUSED, 2))


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_does_not_come_tells_why_and_is_not_waited_for(lab: Lab, node: int) -> None:
    links = [lab.link(each, first=refused(each) if each == node else None) for each in range(3)]
    for link in links:
        assert said(link, Failure)[0] == Failure(node, None, None, REFUSED, 2)
        assert Leave(node) in said(link, Leave)


def test_nobody_says_twice_that_it_does_not_come(lab: Lab) -> None:
    first = lab.link(0)
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", lab.port)) as refused_one:
            refused_one.sendall(encode(refused(1)))
            assert refused_one.makefile().readline()
    assert [type(message) for message in first.log] == [Join, Failure, Leave]


@pytest.mark.parametrize(
    "line",
    [
        b'{"type":"Hello","node":1,"job":"1.0","name":"n2","version":"0.1","new":[1]}',
        b'{"type":"Greetings","node":1,"job":"1.0","name":"n2"}',
        encode(replace(join(1), version="0.1")).strip(),
    ],
    ids=["fewer fields", "another word", "another version"],
)
def test_a_launcher_of_another_version_ends_the_job_on_both_sides(lab: Lab, line: bytes) -> None:
    first = lab.link(0)
    with socket.create_connection(("127.0.0.1", lab.port)) as other:
        other.sendall(line + b"\n")
        answer = decode(other.makefile("rb").readline())
    assert isinstance(answer, JoinRejected)
    assert answer.is_final
    assert answer.why.startswith("n1 runs Model Check another version, and n2 ")
    (failure,) = said(first, Failure)
    assert isinstance(failure, Failure)
    assert (failure.node, failure.cause, failure.exit_code) == (1, answer.why, 2)


def test_a_node_that_may_not_come_heeds_it_at_once(lab: Lab) -> None:
    lab.link(0)
    other = lab.link(1, first=replace(join(1), version="0.1"))
    why = "n1 runs Model Check another version, and n2 0.1: install the same on all nodes"
    assert said(other, Failure) == [Failure(1, None, None, why, 2, is_own=False)]


@pytest.mark.parametrize("node", [0, 1])
def test_a_fault_in_the_thread_is_told_here_and_there(lab: Lab, node: int) -> None:
    links = [lab.link(0), lab.link(1)]
    for link in links:
        said(link, Join, 2)

    def fail(_: float) -> None:
        raise KeyError("odd")

    links[node]._check = fail  # type: ignore[method-assign]
    broken = said(links[node], Failure)[0]
    assert isinstance(broken, Failure)
    assert (broken.node, broken.exit_code, broken.is_own) == (node, 70, False)
    assert broken.cause.endswith("in the link between the launchers: KeyError: 'odd'")
    assert "Traceback" in str(links[node].fault)
    assert said(links[1 - node], Failure)[0] == broken


def compared(lab: Lab, *weights: str, kinds: tuple[str | None, ...]) -> list[Link]:
    """Links of nodes that have told one step."""
    links = [lab.link(node, first=join(node, kind=kind)) for node, kind in enumerate(kinds)]
    said(links[0], Join, len(kinds))
    for node, each in enumerate(weights):
        links[node].say(Bits(node, step(4, each)))
        links[node].say(Ready(node, "told"))
    said(links[0], Ready, len(kinds))
    return links


def test_nodes_that_agree_are_counted_once_all_have_told_it(lab: Lab) -> None:
    leader = compared(lab, "a", "a", kinds=("h100", "h100"))[0]
    assert isinstance(leader, Leader)
    assert leader.num_agreed == 1


def test_the_outlier_of_three_nodes_is_named_with_its_only_worker(lab: Lab) -> None:
    for link in compared(lab, "a", "b", "a", kinds=("h100",) * 3):
        cause = "other weights than 2 other nodes at step 4"
        assert said(link, Failure) == [Failure(1, "CPU0", 4, cause, 21, is_own=False)]


def test_of_two_nodes_that_differ_none_is_named(lab: Lab) -> None:
    link = compared(lab, "a", "b", kinds=("h100",) * 2)[1]
    cause = "n1 and n2 differ in their weights at step 4, and none is in the majority"
    assert said(link, Failure) == [Failure(0, None, 4, cause, 23, is_own=False)]


@pytest.mark.parametrize("kinds", [("h100", "a100"), (None, None)])
def test_nodes_of_different_kinds_may_round_differently(
    lab: Lab, kinds: tuple[str | None, ...]
) -> None:
    leader = compared(lab, "a", "b", kinds=kinds)[0]
    assert isinstance(leader, Leader)
    assert leader.num_agreed == 0
    assert not any(isinstance(message, Failure) for message in leader.log)
