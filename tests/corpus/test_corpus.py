"""A report is a function of the run directory: what is said of each run of the corpus is what was
said of it before, byte for byte. Where a sentence changes on purpose: `tests/corpus/make.sh`."""

from pathlib import Path

import pytest

from tests.corpus.said import FLEET, RUNS, SAID, say_again, say_of_fleet


@pytest.mark.parametrize("name", sorted(path.name for path in RUNS.iterdir()))
def test_what_is_said_of_a_run_is_a_function_of_its_directory(name: str) -> None:
    assert say_again(name) == before(RUNS / name)


def test_what_is_said_of_a_fleet_is_a_function_of_its_runs() -> None:
    assert say_of_fleet() == before(FLEET)


def before(directory: Path) -> dict[str, str]:
    return {f: path.read_text() for f in SAID if (path := directory / f).exists()}
