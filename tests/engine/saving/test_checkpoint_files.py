"""docs/files.md names what a run leaves."""

from pathlib import Path

from model_check.utils.checkpoint_names import BEST, ERROR, LAST


def test_the_page_of_files_names_every_checkpoint_that_a_run_may_leave() -> None:
    page = (Path(__file__).parents[3] / "docs" / "files.md").read_text()
    assert [name for name in (LAST, BEST, ERROR) if name not in page] == []
