"""The page of a run of several rounds, which leads to the page of each. Pure."""

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from launcher.report.page.render import rendered
from launcher.verdict.rounds import RoundsResult, WorkerRounds
from model_check.utils.words import listed

_COLUMNS = ("worker", "rounds", "failed", "share", "95 % bound", "steps repeated", "GPU")


def rounds_page(result: RoundsResult) -> str:
    """The whole document."""
    who = listed(result.culprits) or f"{len(result.workers)} workers"
    many = f"{len(result.rounds)} rounds"
    return rendered(
        "rounds.html",
        title=f"{result.verdict}: {who}, {many} on {result.run.get('host', '')}",
        verdict=result.verdict,
        drill=result.run.get("drill"),
        answers=list(_answers(result)),
        columns=_COLUMNS,
        rows=list(map(_row, result.workers)),
        rounds=result.rounds,
    )


def _answers(result: RoundsResult) -> Iterator[tuple[str, Any]]:
    yield "what", result.summary
    yield "do now", result.do_now
    if result.max_rate is not None:
        bound = f"errors in fewer than {result.max_rate:.2%} of steps (95 %)"
        yield "not shown", f"{bound}: {result.compared_steps:,} were compared"
    if started_at := result.run.get("started_at"):
        yield "started", datetime.fromisoformat(started_at).isoformat(timespec="seconds")
    yield "command", " ".join(result.run.get("command", []))
    yield "exit code", str(result.exit_code)


def _row(worker: WorkerRounds) -> tuple[str, ...]:
    rate = "" if worker.rate is None else f"{worker.rate:.0%}"
    bound = "" if worker.max_rate is None else f"< {worker.max_rate:.0%}"
    counts = (str(worker.rounds), str(len(worker.failed)), rate, bound)
    uuid = (worker.gpu or {}).get("uuid") or ""
    return (worker.name, *counts, f"{worker.repeated_steps:,}", uuid)
