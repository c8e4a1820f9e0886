"""Ranks on nodes whose directories are not shared: each has a working directory of its own. They
begin with the same things, or are told that they cannot."""

import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.engine.nursery import Nursery
from tests.engine.test_rank_faults import DDP, FSDP, Job, job, nursery  # noqa: F401 (fixtures)
from tests.engine.test_ranks import _place

BOTH = {"step_2.pt": "step_2", "step_4.pt": "step_4"}
SEEN: list[tuple[dict[str, str], dict[str, str], str, str]] = [
    ({}, {"step_2.pt": "step_2"}, "auto", "/step_2.pt: rank 0 does not see it, others do: "),
    ({"step_2.pt": "step_2"}, {}, "auto", "/step_2.pt: rank 1 does not see it, others do: "),
    ({"step_2.pt": "step_2"}, BOTH, "auto", "/step_4.pt: rank 0 does not see it, others do: "),
    ({"last.pt": "step_4"}, {"last.pt": "step_2"}, "auto", "/last.pt: rank 1 sees another one "),
    ({"last.pt": "step_4"}, {"last.pt": "other_4"}, "/last.pt", "/last.pt: rank 1 sees another "),
    ({}, {"cpu3/last.pt": "step_2"}, "auto", "/cpu3: rank 0 does not see it, others do: "),
    ({"step_2.pt": "step_2"}, {}, "", "/step_2.pt: rank 1 does not see it, others do: "),
    ({"old/step_2.pt": "step_2"}, {}, "/old", "/old: rank 1 does not see it, others do: "),
    ({}, {"step_2.pt": "step_2"}, "/step_2.pt", "/step_2.pt: rank 0 does not see it, others do: "),
    (BOTH, BOTH, "auto", "/step_4.pt 4"),
    ({}, {}, "auto", "nothing"),
]
"""What is on each node's disk, what is asked for, what all ranks say."""


@pytest.fixture
def nodes(tmp_path: Path) -> list[Path]:
    found = [tmp_path / name for name in ("node_0", "node_1")]
    for node in found:
        node.mkdir()
    return found


@pytest.fixture
def made(job: Job, tmp_path: Path) -> Path:  # noqa: F811
    """step_2.pt and step_4.pt of one training, and of one with another seed other_4.pt."""
    place = tmp_path / "made"
    place.mkdir()
    for name, seed in (("made", 42), ("other", 43)):
        node = tmp_path / f"{name}_{seed}"
        node.mkdir()
        job(2, **DDP, nodes=[node] * 2, training__save_interval=2, system__seed=seed)
        for path in (node / "checkpoints").glob("step_*.pt"):
            shutil.copy(path, place / path.name.replace("step", "step" if name == "made" else name))
    return place


def lay(disk: Path, files: dict[str, str], made: Path) -> None:
    """`files`: their names -> which of those that were made."""
    for name, of in files.items():
        (disk / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(made / f"{of}.pt", disk / name)


def test_ranks_go_on_from_what_all_of_them_see_or_not_at_all(
    nursery: Nursery,  # noqa: F811
    nodes: list[Path],
    made: Path,
) -> None:
    asked = []
    for number, (*disks, which, _) in enumerate(SEEN):
        for node, files in zip(nodes, disks, strict=True):
            (node / "disk" / str(number)).mkdir(parents=True)
            lay(node / "disk" / str(number), files, made)
        asked.append("auto" if which == "auto" else f"disk/{number}{which}")
    plan = {"program": "tests.engine.find_each", "asked": asked, "nodes": list(map(str, nodes))}
    outputs = [node / "output.txt" for node in nodes]
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        environments = [_place(rank, 2, place) for rank in range(2)]
        codes = nursery.train(plan, environments, place, outputs)
    assert codes == [0, 0], [output.read_text() for output in outputs]
    for number, (*_, words) in enumerate(SEEN):
        told = [output.read_text().splitlines()[number] for output in outputs]
        start = words if words == "nothing" else f"disk/{number}{words}"
        assert [line[: len(start)] for line in told] == [start, start], told


@pytest.mark.parametrize("mode", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_ranks_that_begin_with_different_weights_are_refused(
    job: Job,  # noqa: F811
    nodes: list[Path],
    made: Path,
    mode: dict[str, Any],
) -> None:
    for node, of in zip(nodes, ("step_4", "other_4"), strict=True):
        lay(node, {"first.pt": of}, made)
    ranks = job(2, nodes=nodes, **mode, model__init_from="first.pt")
    for rank in ranks:
        assert rank.code == 2
        assert "rank 1 begins with other first weights than rank 0: model.init_fr" in rank.error


def test_ranks_that_begin_with_different_data_are_refused(job: Job) -> None:  # noqa: F811
    for rank in job(2, **DDP, data=["one", "another"]):
        assert rank.code == 2
        assert "rank 1 begins with other data than rank 0: share data.cache_dir" in rank.error


def test_a_directory_of_checkpoints_that_one_node_alone_sees_is_told_at_the_start(
    job: Job,  # noqa: F811
    nodes: list[Path],
) -> None:
    first, _ = job(2, nodes=nodes, **DDP, training__max_steps=1)
    assert any(
        line.startswith("checkpoints: rank 1 does not see it: no job goes on")
        for line in first.lines
    )
