"""Ranks that share a model save it, each its part, and any number of ranks goes on from there."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from model_check.engine.checkpoint import read_checkpoint
from model_check.engine.state import Resumable
from tests.engine.test_ranks import Job, job, nursery  # noqa: F401 (fixtures)

COMMON = {"training__global_batch_size": 8, "training__max_grad_norm": 0.5}
FSDP = {"launch__mode": "fsdp"}


def resumed(found: dict[str, Any]) -> str:
    (line,) = (line for line in found["lines"] if re.match(r"Resumed with \d", line))
    return line


def test_what_ranks_save_goes_on_in_any_other_way(job: Job, tmp_path: Path) -> None:  # noqa: F811
    """2 ranks that share, 2 that do not, 4 as two copies, 1, beside one process, in float64. And
    others begin with its weights."""
    (alone,) = job(1, **COMMON, training__max_steps=9)
    place = tmp_path / "place" / "checkpoints"
    saving = {"training__save_interval": 1, "training__keep_last": 2, "training__save_last": "true"}
    whole = job(2, **COMMON, **FSDP, **saving, training__max_steps=5, training__async_save="true")
    saved = next(tmp_path.glob("job*/checkpoints/step_4")).parent
    assert sorted(path.name for path in saved.iterdir()) == ["last", "step_4", "step_5"]
    state = read_checkpoint(saved / "step_5", Resumable)
    for name, weight in whole[0]["weights"].items():
        assert torch.equal(state["model"][name], weight)
    assert len(state["rng_of_ranks"]) == 2
    place.mkdir(parents=True)
    shutil.copytree(saved / "step_4", place / "step_4")

    def go_on(num_ranks: int, max_steps: int, **changes: Any) -> list[dict[str, Any]]:
        common = {"training__save_last": "true", "training__resume": "auto", **COMMON, **changes}
        return job(num_ranks, where="place", **common, training__max_steps=max_steps)

    again = go_on(2, 5, **FSDP, training__save_last="false")
    assert not any("not bit for bit" in line for line in again[0]["lines"])
    for one, other in zip(whole, again, strict=True):
        assert other["losses"] == one["losses"][4:]
        assert all(torch.equal(w, other["weights"][name]) for name, w in one["weights"].items())
    ddp = go_on(2, 6)[0]
    assert resumed(ddp).startswith("Resumed with 2 ranks what 2 ranks (shard 2) trained: weights ")
    assert (place / "last.pt").is_file()
    hsdp = go_on(4, 7, **FSDP, launch__fsdp__shard_size=2)[0]
    told = resumed(hsdp)
    assert told.startswith("Resumed with 4 ranks (replicate 2, shard 2) what 2 ranks trained: ")
    assert told.endswith("; each rank has the first one's random states")
    assert (place / "last" / "manifest.json").is_file()
    (one,) = go_on(1, 9)
    assert resumed(one).startswith("Resumed with 1 rank what 4 ranks (replicate 2, shard 2) ")
    losses = [*ddp["losses"], *hsdp["losses"], *one["losses"]]
    assert losses == pytest.approx(alone["losses"][4:], abs=1e-10)
    # A rate so small that the weights stay what they began with.
    still = {"training__max_steps": 1, "training__learning_rate": 1e-30}
    begun = job(2, **COMMON, **FSDP, **still, model__init_from=str(saved / "step_5"))[0]
    assert all(torch.equal(w, begun["weights"][name]) for name, w in whole[0]["weights"].items())
