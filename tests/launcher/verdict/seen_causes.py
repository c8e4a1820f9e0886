"""A plugin of pytest: writes the causes that no test produced into the file $UNSEEN_CAUSES."""

import os
from pathlib import Path

import pytest

from launcher.verdict import judge
from launcher.verdict.causes import Cause
from launcher.verdict.record import Case

unseen = {cause.name for cause in Cause}
_causes_of = judge.causes_of


def _noted(case: Case) -> list[judge.Found]:
    found = _causes_of(case)
    unseen.difference_update(cause.name for cause, _ in found)
    return found


@pytest.hookimpl
def pytest_sessionstart() -> None:
    judge.causes_of = _noted


@pytest.hookimpl
def pytest_sessionfinish() -> None:
    Path(os.environ["UNSEEN_CAUSES"]).write_text("\n".join(sorted(unseen)))
