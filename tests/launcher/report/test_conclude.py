"""Which dossiers of a run are compared with which."""

import json
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from launcher.report.conclude import conclude
from launcher.verdict.disagreement import Disagreement
from launcher.verdict.live import Watch
from launcher.verdict.record import RunEnd
from model_check.events import Break
from model_check.forensics.dossier import write_dossier
from tests.launcher.verdict.test_judge import RECORD, ended

NAMES = ("CPU0", "CPU1", "CPU2")


def keep(
    directory: Path,
    worker: str,
    *,
    of_step: int,
    state_after: int,
    value: float,
    kind: str = "difference",
) -> None:
    about = {"worker": worker, "run": "r", "kind": kind}
    path = directory / "dossier" / worker.lower()
    tensors = [("weights/w", torch.full((4,), value))]
    told = about | {"step": of_step, "state_after": state_after}
    write_dossier(path, told, tensors, guilty=[], most_bytes=100)


def differ(step: int, odd: str, *others: str) -> Disagreement:
    return Disagreement(step, "loss", dict.fromkeys(others, (0.5).hex()) | {odd: (0.6).hex()})


def concluded(
    directory: Path, *found: Disagreement, watch: Watch | None = None
) -> dict[str, list[str]]:
    """Worker -> its evidence, below the dossiers."""
    watch = watch or Watch(dict.fromkeys(NAMES, "cpu"), max_lead=2)
    end = RunEnd(exit_code=21, disagreement=next(iter(found), None), further=found[1:])
    record = replace(RECORD, end=end, ended=tuple(map(ended, NAMES)))
    conclude(record, watch, directory.absolute())
    root = directory.absolute() / "dossier"
    return {
        name: [str(Path(each.path).relative_to(root)) for each in facts.evidence]
        for name, facts in watch.all_facts.items()
    }


def difference(directory: Path, worker: str) -> dict[str, Any]:
    path = directory / "dossier" / worker.lower() / "difference.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_a_suspect_is_compared_with_one_that_became_a_suspect_later_and_never_after(
    tmp_path: Path,
) -> None:
    keep(tmp_path, "CPU1", of_step=1, state_after=7, value=1.5)
    keep(tmp_path, "CPU0", of_step=1, state_after=7, value=1.0)
    keep(tmp_path, "CPU0", of_step=9, state_after=12, value=2.5)
    keep(tmp_path, "CPU2", of_step=9, state_after=12, value=2.0)
    found = concluded(tmp_path, differ(1, "CPU1", "CPU0", "CPU2"), differ(9, "CPU0", "CPU2"))
    assert difference(tmp_path, "CPU1")["peer"] == "CPU0"
    assert difference(tmp_path, "CPU1")["tensors"]["weights/w"]["first"][0]["peer_value"] == 1.0
    assert difference(tmp_path, "CPU0")["peer"] == "CPU2"
    assert found["CPU0"] == ["cpu0/earlier1/manifest.json", "cpu0/difference.json"]


def test_of_equal_states_that_of_the_same_fault_is_compared(tmp_path: Path) -> None:
    keep(tmp_path, "CPU1", of_step=1, state_after=7, value=1.5)
    for of_step in (1, 2):
        keep(tmp_path, "CPU2", of_step=of_step, state_after=7, value=float(of_step))
    concluded(tmp_path, differ(1, "CPU1", "CPU0", "CPU2"))
    found = difference(tmp_path, "CPU1")
    assert (found["peer"], found["not_comparable"]) == ("CPU2", None)
    assert found["tensors"]["weights/w"]["first"][0]["peer_value"] == 1.0


def test_a_suspect_without_a_healthy_one_beside_it_is_compared_with_nobody(tmp_path: Path) -> None:
    for worker in ("CPU0", "CPU1"):
        keep(tmp_path, worker, of_step=1, state_after=7, value=1.5)
    found = concluded(tmp_path, differ(1, "CPU1", "CPU0", "CPU2"), differ(2, "CPU0", "CPU2"))
    assert found == {"CPU0": [], "CPU1": [], "CPU2": []}


def test_a_state_that_changed_by_itself_is_never_that_of_a_healthy_one(tmp_path: Path) -> None:
    """It was right when the update of step 4 left it: that is the state after five steps, too."""
    for worker, value, kind in (("CPU1", 1.5, "break"), ("CPU2", 1.0, "difference")):
        keep(tmp_path, worker, of_step=5, state_after=5, value=value, kind=kind)
    watch = Watch(dict.fromkeys(NAMES, "cpu"), max_lead=2)
    watch.on_event("CPU1", Break(step=5, quantity="weights", tensor="w", since=4))
    found = concluded(tmp_path, watch=watch)
    assert difference(tmp_path, "CPU1")["peer"] == "CPU2"
    assert found == {"CPU0": [], "CPU1": ["cpu1/difference.json"], "CPU2": []}


def test_a_gpu_of_another_kind_is_no_peer(tmp_path: Path) -> None:
    for worker in ("CPU0", "CPU1", "CPU2"):
        keep(tmp_path, worker, of_step=1, state_after=7, value=1.5 if worker == "CPU1" else 1.0)
    watch = Watch({"CPU0": "old", "CPU1": "new", "CPU2": "new"}, max_lead=2)
    concluded(tmp_path, differ(1, "CPU1", "CPU2"), watch=watch)
    assert difference(tmp_path, "CPU1")["peer"] == "CPU2"
