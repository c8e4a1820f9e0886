"""Ranks that share a model (torch's FSDP2), beside one process with all their batches. How a rank
is started, and what it leaves, is in test_ranks and ranks.py."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import COMPILER
from tests.engine.test_ranks import (  # noqa: F401 (fixtures)
    NUM_STEPS,
    Found,
    Job,
    furthest,
    job,
    nursery,
)

COMMON: dict[str, Any] = {
    "training__max_steps": NUM_STEPS,
    "training__learning_rate": 1e-2,
    "training__max_grad_norm": 0.5,
    "training__global_batch_size": 16,
    "training__eval_interval": 4,
    "data__validation": "val=0.1",
    "debug__fingerprints": "off",
}
"""With accumulation, unequal masks and a norm that is clipped."""
SHARED = {"launch__mode": "fsdp"}
COPIES = SHARED | {"launch__fsdp__shard_size": 2}


def agree(alone: Found, ranks: list[Found], most: float) -> None:
    assert max(alone["norms"]) > 0.5  # clipped
    assert alone["losses"][0] - alone["losses"][-1] > 0.1  # it learns
    assert len(alone["evaluations"]) == 3
    for rank in ranks:
        assert furthest(alone, rank) <= most
        assert rank["tokens"] == alone["tokens"]
        for mine, theirs in zip(rank["evaluations"], alone["evaluations"], strict=True):
            assert float.fromhex(mine) == pytest.approx(float.fromhex(theirs), abs=max(most, 1e-6))


def test_ranks_that_share_a_model_train_what_one_process_trains(job: Job) -> None:  # noqa: F811
    """With fewer rows of a tensor than ranks, too: there is one key head."""
    (alone,) = job(1, **COMMON)
    agree(alone, job(4, **COMMON, **SHARED), 1e-10)
    agree(alone, job(4, **COMMON, **COPIES), 1e-10)


def test_they_do_so_in_float32(job: Job) -> None:  # noqa: F811
    (alone,) = job(1, "float32", **COMMON)
    agree(alone, job(2, "float32", **COMMON, **SHARED), 2e-5)


def test_attention_with_a_memory_and_recomputed_blocks_are_shared_too(
    job: Job,  # noqa: F811
) -> None:
    """A gate has a value a head, so that the third of three ranks holds none of it."""
    kinds = {
        "model__attention": "infini",
        "training__gradient_checkpointing": "true",
        "model__tie_word_embeddings": "true",
        "training__global_batch_size": 12,
    }
    common = COMMON | kinds
    (alone,) = job(1, **common)
    agree(alone, job(3, **common, **SHARED), 1e-10)


def test_where_shards_lie_and_when_they_are_gathered_changes_no_bit(job: Job) -> None:  # noqa: F811
    common = COMMON | SHARED | {"training__max_steps": 3, "debug__fingerprints": "full"}
    plain, _ = job(2, "float32", **common)
    for other in ("cpu_offload=true", "reshard_after_forward=false"):
        name, _, value = other.partition("=")
        found, _ = job(2, "float32", **common, **{f"launch__fsdp__{name}": value})
        for what in ("losses", "norms", "prints"):
            assert found[what] == plain[what], other


def test_products_of_16_bits_stay_near_those_of_a_whole_model(job: Job) -> None:  # noqa: F811
    """Norms in a block are gathered in bfloat16, too."""
    half = {"training__use_amp": "true", "training__max_steps": 5}
    common = COMMON | half
    whole, _ = job(2, "float32", **common)
    shared, _ = job(2, "float32", **common, **SHARED)
    for mine, theirs in zip(shared["losses"], whole["losses"], strict=True):
        assert mine == pytest.approx(theirs, abs=0.02)


def test_weights_from_a_checkpoint_and_gradients_that_are_summed_once_a_step(
    job: Job,  # noqa: F811
    tmp_path: Path,
) -> None:
    job(1, where="first", training__max_steps=1, training__save_last="true")
    weights = tmp_path / "first" / "checkpoints" / "last.pt"
    common = COMMON | {"model__init_from": str(weights), "training__max_steps": 9}
    (alone,) = job(1, **common)
    once = {"launch__fsdp__sync_micro_batches": "false"}
    assert furthest(alone, job(2, **common, **SHARED, **once)[1]) <= 1e-10


def test_ranks_tell_which_shard_they_took_fingerprints_of(job: Job) -> None:  # noqa: F811
    changes = {"training__max_steps": 2, "training__grad_accum_nums": 2}
    ranks = job(4, "float32", **changes, **COPIES, debug__fingerprints="full")
    first, second, copy_of_first, _ = (rank["prints"] for rank in ranks)
    assert first == copy_of_first
    assert first[1]["weights"] != second[1]["weights"]
    assert first[1]["grad_norms"] == second[1]["grad_norms"]
    assert all(rank["repeated"] == [True, None] for rank in ranks)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
@pytest.mark.parametrize("traced", [True, False])
def test_compiled_ranks_train_as_eager_ones(
    job: Job,  # noqa: F811
    mode: str,
    traced: bool,
) -> None:
    if COMPILER is None and not traced:
        pytest.skip("needs a C++ compiler")
    steps = {"training__max_steps": 3, "training__eval_interval": 2}
    common = COMMON | steps
    (eager,) = job(1, "float32", **common)
    compiled = {"training__compile": "true", "launch__mode": mode}
    ranks = job(2, "float32", traced=traced, **common, **compiled)
    assert any(line.startswith("Compiled in") for line in ranks[0]["lines"]), ranks[0]["lines"]
    for rank in ranks:
        assert furthest(eager, rank) <= 2e-5
        assert len(rank["evaluations"]) == 2
        for mine, theirs in zip(rank["evaluations"], eager["evaluations"], strict=True):
            assert float.fromhex(mine) == pytest.approx(float.fromhex(theirs), abs=2e-5)
