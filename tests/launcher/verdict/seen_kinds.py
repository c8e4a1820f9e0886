"""A plugin of pytest: writes the kinds of findings that no test produced into the file
$UNSEEN_KINDS."""

import os
from pathlib import Path
from typing import Any

import pytest

from launcher.verdict import judge
from launcher.verdict.results import Judgement
from launcher.verdict.rules import Kind

unseen = {kind.name.lower() for kind in Kind}
_judge = judge.judge


def _noted(*arguments: Any) -> Judgement:
    found = _judge(*arguments)
    unseen.difference_update(row.kind or "" for row in found.result.workers)
    return found


@pytest.hookimpl
def pytest_sessionstart() -> None:
    judge.judge = _noted


@pytest.hookimpl
def pytest_sessionfinish() -> None:
    Path(os.environ["UNSEEN_KINDS"]).write_text("\n".join(sorted(unseen)))
