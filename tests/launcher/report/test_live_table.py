"""The table of a run while it goes, at all widths."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.page import Case, write_run
from launcher.report.live_table import LiveTable
from launcher.report.progress import watched


@pytest.fixture
def table(tmp_path: Path) -> Iterator[LiveTable]:
    write_run(Case("sick", 8, 100, odd_step=60, xid=79), tmp_path / "run")
    with closing(LiveTable([watched(tmp_path / "run")])) as table:
        yield table


@pytest.mark.parametrize("columns", [40, 60, 80, 99, 100, 120, 200])
def test_no_line_is_wider_than_the_terminal_and_what_is_wrong_is_told(
    table: LiveTable, columns: int
) -> None:
    lines = table.lines(columns, has_colours=False)
    rows = {line.split()[0]: line for line in lines if line.startswith("GPU")}
    assert [*rows] == [f"GPU{number}" for number in range(8)]
    assert max(map(len, rows.values())) <= columns
    notes = " ".join(rows.values())
    assert "Xid 79" in notes
    assert "differs at" in notes or columns < 60


def test_colours_are_for_who_has_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    write_run(Case("sick", 8, 100, xid=79), tmp_path / "run")
    table = LiveTable([watched(tmp_path / "run")])
    assert any("\x1b[1;31m" in line for line in table.lines(120))
    assert not any("\x1b" in line for line in table.lines(120, has_colours=False))
    table.close()


def test_where_not_all_workers_have_room_those_with_something_to_say_come_first(
    tmp_path: Path,
) -> None:
    write_run(Case("many", 64, 20, xid=79), tmp_path / "run")
    with closing(LiveTable([watched(tmp_path / "run")])) as table:
        lines = table.lines(100, 12, has_colours=False)
        assert len(lines) <= 12
        rows = [line.split()[0] for line in lines if line.startswith("GPU")]
        assert (rows[0], len(rows)) == ("GPU6", 7)
        assert "... 57 more workers" in lines
        assert sum(line.startswith("GPU") for line in table.lines(100)) == 64
