"""Which directories beside a worker's own hold checkpoints of other workers."""

import os
from pathlib import Path

import pytest

from model_check.engine.saving.checkpoint_files import directories_beside
from model_check.utils.checkpoint_names import BEST, ERROR, LAST


@pytest.mark.parametrize("name", ["gpu3", "gpu3.1", "gpu0.12", "cpu1"])
def test_checkpoints_of_every_kind_of_worker_are_found_beside_ones_own(
    tmp_path: Path, name: str
) -> None:
    """A worker on a MIG slice is named GPU3.1."""
    (tmp_path / name).mkdir()
    checkpoint = tmp_path / name / "last.pt"
    checkpoint.touch()
    os.utime(checkpoint, (100, 100))
    (tmp_path / "gpu3_notes").mkdir()
    assert directories_beside(tmp_path / "gpu7", "GPU7", before=200.0) == [tmp_path / name]


def test_the_readme_names_every_checkpoint_that_a_run_may_leave() -> None:
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    left_behind = readme.partition("## What a run leaves behind")[2].partition("\n## ")[0]
    assert [name for name in (LAST, BEST, ERROR) if name not in left_behind] == []
