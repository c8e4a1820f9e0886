"""Writes a RunResult for people and machines: report.json and report.html."""

from pathlib import Path

import msgspec

from launcher import run_dir
from launcher.report.page import page
from launcher.verdict.results import RunResult


def write(result: RunResult, directory: Path) -> None:
    """report.json and report.html, each whole or not at all. Raises StorageError."""
    run_dir.write(directory / "report.json", msgspec.to_builtins(result))
    run_dir.write(directory / "report.html", page(result))
