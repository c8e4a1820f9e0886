"""A report is a function of the run directory: what is said of each run of the corpus is what was
said of it before, byte for byte. Where a sentence changes on purpose: `tests/corpus/make.sh`."""

import pytest

from tests.corpus.said import RUNS, SAID, say_again


@pytest.mark.parametrize("name", sorted(path.name for path in RUNS.iterdir()))
def test_what_is_said_of_a_run_is_a_function_of_its_directory(name: str) -> None:
    said = say_again(name)
    before = {f: path.read_text() for f in SAID if (path := RUNS / name / f).exists()}
    assert said == before
