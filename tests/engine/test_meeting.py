"""Where ranks find each other: who may not meet there, and who waits there in vain."""

import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from model_check.dist import meeting
from model_check.dist.meeting import open_store, wait_for_all
from model_check.errors import ConfigError
from model_check.utils.worker_env import RankEnv
from tests.deadline import DEADLINE_S
from tests.ports import free_port

FIRST = RankEnv(
    rank=0, world_size=2, local_rank=0, local_world_size=2, address="127.0.0.1", port=0, job="1.0"
)


def second_of(first: RankEnv, **changes: Any) -> RankEnv:
    return replace(first, rank=1, local_rank=1, **changes)


def test_a_port_that_somebody_has_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        env = replace(FIRST, port=other.getsockname()[1])
        with pytest.raises(ConfigError, match=rf"^MASTER_PORT = {env.port}: rank 0 cannot listen"):
            open_store(env, DEADLINE_S)


def test_a_name_that_nobody_knows_is_told_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meeting, "_RESOLVE_S", -1.0)
    env = second_of(FIRST, address="no-such-node.invalid", port=free_port())
    with pytest.raises(ConfigError, match=r"MASTER_ADDR = no-such-node.invalid: this machine can"):
        open_store(env, DEADLINE_S)


def test_a_rank_that_meets_another_job_is_told_so_and_does_not_join_it() -> None:
    first = replace(FIRST, port=free_port())
    store = open_store(first, DEADLINE_S)
    store.set("model-check/0", f"here {first.job}")
    stranger = second_of(first, job="2.0")
    with pytest.raises(ConfigError, match="the ranks of another job meet there"):
        wait_for_all(open_store(stranger, DEADLINE_S), stranger, DEADLINE_S)
    assert not store.check(["model-check/1"])


def test_ranks_of_a_restart_by_torchrun_do_not_meet_those_before_it() -> None:
    """They share its port."""
    first = replace(FIRST, port=free_port())
    before = open_store(first, DEADLINE_S)
    before.set("model-check/0", "here")
    after = open_store(second_of(first, is_by_torchrun=True, attempt=1), DEADLINE_S)
    assert not after.check(["model-check/0"])


class Asked(Exception):
    """A signal came."""


@pytest.fixture
def wait_until_asked() -> Iterator[Callable[[RankEnv], None]]:
    """A rank waits for the others, and a request comes soon."""

    def raise_it(*_: object) -> None:
        raise Asked

    def wait(env: RankEnv) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        wait_for_all(open_store(env, DEADLINE_S), env, DEADLINE_S)

    before = signal.signal(signal.SIGALRM, raise_it)
    yield wait
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_alone_hears_a_request_to_end(
    wait_until_asked: Callable[[RankEnv], None], rank: int
) -> None:
    first = replace(FIRST, port=free_port())
    with pytest.raises(Asked):
        wait_until_asked(first if rank == 0 else second_of(first))
