"""The README names what a run leaves."""

from pathlib import Path

from model_check.utils.checkpoint_names import BEST, ERROR, LAST


def test_the_readme_names_every_checkpoint_that_a_run_may_leave() -> None:
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    left_behind = readme.partition("## What a run leaves behind")[2].partition("\n## ")[0]
    assert [name for name in (LAST, BEST, ERROR) if name not in left_behind] == []
