"""The scripted trainer sends the events of a real one: the same kinds, with the same fields."""

import json
from pathlib import Path
from typing import Any

import pytest

from model_check.events import decode
from tests.e2e.conftest import Launcher, launcher_in

NORM = "layers.0.attention_norm.weight"
SAVES = ("training.save_interval=2", "training.save_last=true")
FAULTS = {
    "none": ("--workers=1", *SAVES, "data.validation=held_out=0.2", "training.eval_interval=2"),
    # So many steps that both are stopped before their last one.
    "other bits": ("--workers=2", "--max-steps=1000", f"debug.drill=flip_gradient@2:CPU0:{NORM}:3"),
    "changed state": ("--workers=1", f"debug.drill=flip@2:CPU0:{NORM}:3"),
    "not finite": ("--workers=1", "debug.drill=nan@2"),
    "a failure": ("--workers=1", "debug.drill=raise@2"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_it_tells_what_a_real_trainer_tells(
    tmp_path: Path, token_cache: Path, scripted: Launcher, fault: str
) -> None:
    real = launcher_in(tmp_path / "real", token_cache)
    told = [told_by(run(*FAULTS[fault]).directory, "cpu0") for run in (real, scripted)]
    if fault == "changed state":  # it may be asked before it ends, or not
        told = [{each for each in found if "'vectors'" not in each} for found in told]
    assert told[0] == told[1]


def told_by(directory: Path, worker: str = "cpu1") -> set[str]:
    """The events of a worker: of each its kind, its fields, and the fields of what it holds. When
    an answer comes, and whether a wait lasts a second, is a matter of time: no order, and no
    beats."""
    lines = (directory / f"{worker}.events.jsonl").read_bytes().splitlines()
    for line in lines:
        decode(line)
    events = [json.loads(line) for line in lines]
    return {repr(shape(event)) for event in events if event["kind"] != "beat"}


def shape(event: dict[str, Any]) -> tuple[Any, ...]:
    name = event["name"] if event["kind"] == "phase" else None
    held = {key: sorted(event[key]) for key in ("detail", "origin") if key in event}
    return event["kind"], name, sorted(event), held, sorted(event.get("fp", {}))
