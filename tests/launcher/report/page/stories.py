"""Runs as a page is made of them."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from launcher.report.page.story import Story
from launcher.verdict.record import RunRecord
from launcher.verdict.results import RunResult, Verdict, WorkerResult


def record(*names: str, **more: Any) -> RunRecord:
    values: dict[str, Any] = {
        "command": ["--max-steps", "<b>3</b>"],
        "started_at": datetime(2026, 11, 23, 5, tzinfo=UTC),
        "started_ns": 0,
        "pid": 1,
        "cwd": "/root",
        "host": "node17",
        "kernel": "6.1",
        "python": "3.12.3",
        "preset": "cpu",
        "device": "cpu",
        "mode": "replicate",
        "drill": None,
        "steps": 3,
        "workers": list(names),
        "groups": dict.fromkeys(names, "cpu"),
        "not_compared": None,
        "versions": {},
        "gpus": {},
    }
    return RunRecord(**values | more)


def story(
    *names: str, directory: Path = Path("/run"), drill: str | None = None, **more: Any
) -> Story:
    return Story(directory=directory, record=record(*names, drill=drill), **more)


def worker(name: str, verdict: Verdict = Verdict.PASS, **more: Any) -> WorkerResult:
    values: dict[str, Any] = {
        "cause": None,
        "steps": 3,
        "loss_first": 9.0,
        "loss_last": 8.0,
        "tokens_per_s": None,
        "peak_memory_bytes": None,
        "duration_s": 1.0,
        "returncode": 0,
    }
    return WorkerResult(name=name, verdict=verdict, **values | more)


def result(*workers: WorkerResult, verdict: Verdict = Verdict.PASS, **more: Any) -> RunResult:
    values: dict[str, Any] = {
        "exit_code": 0,
        "summary": "",
        "culprits": [],
        "disagreement": None,
        "leftovers": [],
        "dropped_lines": 0,
        "run": msgspec.to_builtins(record(*(worker.name for worker in workers))),
    }
    return RunResult(verdict=verdict, workers=list(workers), **values | more)
