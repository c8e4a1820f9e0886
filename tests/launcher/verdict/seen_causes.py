"""A plugin of pytest: writes the causes that no test produced into the file $UNSEEN_CAUSES."""

import os
from pathlib import Path

import pytest

from launcher.verdict import judge
from launcher.verdict.findings import Finding
from launcher.verdict.record import Case
from launcher.verdict.rules import Kind

OF_GPUS = {Kind.GPU_FAULT, Kind.GPU_WARNING, Kind.CLEARED, Kind.SEEN_BEFORE}
"""Of telemetry and history: test_health.py, test_past.py."""
unseen = {kind.name for kind in {*Kind} - OF_GPUS}
_findings_of = judge.findings_of


def _noted(case: Case) -> dict[str, Finding]:
    found = _findings_of(case)
    unseen.difference_update(finding.kind.name for finding in found.values())
    return found


@pytest.hookimpl
def pytest_sessionstart() -> None:
    judge.findings_of = _noted


@pytest.hookimpl
def pytest_sessionfinish() -> None:
    Path(os.environ["UNSEEN_CAUSES"]).write_text("\n".join(sorted(unseen)))
