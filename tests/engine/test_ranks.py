"""The ranks of a job, each in a process of its own, beside one process with all their batches."""

import itertools
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from model_check.utils import worker_env
from tests.engine.nursery import Nursery

NUM_STEPS = 10
Found = dict[str, Any]
Job = Callable[..., list[Found]]


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def job(tmp_path: Path, nursery: Nursery) -> Job:
    """Train in so many ranks; what each of them found."""

    def train(
        num_ranks: int,
        dtype: str = "float64",
        where: str = "",
        traced: bool = False,
        **changes: Any,
    ) -> list[Found]:
        directory = tmp_path / (where or f"job{len(list(tmp_path.iterdir()))}")
        directory.mkdir(exist_ok=True)
        out = str(directory / "found")
        plan = {"dtype": dtype, "traced": traced, "changes": changes, "out": out}
        outputs = [directory / f"output.{rank}.txt" for rank in range(num_ranks)]
        with socket.socket() as place:
            place.bind(("127.0.0.1", 0))
            environments = [_place(rank, num_ranks, place) for rank in range(num_ranks)]
            codes = nursery.train(plan, environments, place, outputs)
        assert codes == [0] * num_ranks, [output.read_text() for output in outputs]
        return [torch.load(directory / f"found.{rank}.pt") for rank in range(num_ranks)]

    return train


def _place(rank: int, num_ranks: int, place: socket.socket) -> dict[str, str]:
    if num_ranks == 1:
        return {}
    return {
        worker_env.RANK: str(rank),
        worker_env.LOCAL_RANK: str(rank),
        worker_env.WORLD_SIZE: str(num_ranks),
        worker_env.MASTER_ADDR: "127.0.0.1",
        worker_env.MASTER_PORT: str(place.getsockname()[1]),
        worker_env.STORE_FD: str(place.fileno()) if rank == 0 else "",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def furthest(one: Found, other: Found) -> float:
    """The largest difference of a weight, a loss or a norm."""
    weights = [
        float((weight - other["weights"][name]).abs().max())
        for name, weight in one["weights"].items()
    ]
    pairs = [
        abs(mine - theirs)
        for what in ("losses", "norms")
        for mine, theirs in zip(one[what], other[what], strict=True)
    ]
    return max(weights + pairs)


@pytest.mark.parametrize(
    ("dtype", "most", "jobs"), [("float64", 1e-10, (2, 4)), ("float32", 2e-5, (2,))]
)
def test_ranks_train_what_one_process_trains_with_their_batches(
    job: Job, dtype: str, most: float, jobs: tuple[int, ...]
) -> None:
    """With accumulation, unequal masks and a norm that is clipped."""
    common = {
        "training__max_steps": NUM_STEPS,
        "training__learning_rate": 1e-2,
        "training__max_grad_norm": 0.5,
        "training__global_batch_size": 16,
        "debug__fingerprints": "off",
    }
    (alone,) = job(1, dtype, **common)
    assert max(alone["norms"]) > 0.5  # clipped
    assert alone["losses"][0] - alone["losses"][-1] > 0.1  # it learns
    for rank in itertools.chain.from_iterable(job(size, dtype, **common) for size in jobs):
        assert furthest(alone, rank) <= most
        assert rank["tokens"] == alone["tokens"]
        assert len(rank["losses"]) == NUM_STEPS


def test_ranks_agree_to_the_bit_and_say_what_is_their_own(job: Job) -> None:
    changes = {"training__max_steps": 3, "training__grad_accum_nums": 2}
    ranks = job(2, "float32", **changes, debug__fingerprints="full")
    first, second = ranks
    assert first["losses"] == second["losses"]
    assert first["norms"] == second["norms"]
    assert all(
        torch.equal(weight, second["weights"][name]) for name, weight in first["weights"].items()
    )
    assert first["prints"] == second["prints"]
    assert {"weights", "exp_avg", "gradients"} <= set(first["prints"][1])
    assert not {"forward", "backward"} & set(first["prints"][0])  # each reads batches of its own
    assert first["repeated"] == second["repeated"] == [True, None, None]
    own = [[float.fromhex(loss) for loss in rank["own"]] for rank in ranks]
    assert own[0] != own[1]
    for step, loss in enumerate(first["losses"]):
        assert own[0][step] + own[1][step] == pytest.approx(loss, rel=1e-6)


def test_the_last_bits_do_not_hang_on_where_a_run_was_resumed(job: Job) -> None:
    """DDP sorts gradients into other buckets after its first pass: three ranks add in another order
    then."""
    changes = {"model__hidden_size": 64, "training__grad_accum_nums": 2}
    whole = job(3, "float32", training__max_steps=6, **changes)
    job(3, "float32", "half", training__max_steps=3, training__save_last="true", **changes)
    rest = job(3, "float32", "half", training__max_steps=6, training__resume="auto", **changes)
    for one, other in zip(whole, rest, strict=True):
        assert one["losses"][3:] == other["losses"]
        assert all(torch.equal(w, other["weights"][name]) for name, w in one["weights"].items())


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_another_number_of_ranks_goes_on_and_says_that_bits_differ(
    job: Job, before: int, after: int
) -> None:
    common = {"training__global_batch_size": 8, "debug__fingerprints": "off"}
    whole = job(before, training__max_steps=6, **common)[0]
    job(before, where="half", training__max_steps=3, training__save_last="true", **common)
    rest = job(after, where="half", training__max_steps=6, training__resume="auto", **common)[0]
    assert any(f"with {after} rank" in line and "not bit for bit" in line for line in rest["lines"])
    for mine, theirs in zip(whole["losses"][3:], rest["losses"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-10)


def test_one_rank_prints_the_steps(job: Job) -> None:
    first, second = job(2, "float32", training__max_steps=2)
    assert any(line.startswith("Step [0/2]") for line in first["lines"])
    assert second["lines"] == []
