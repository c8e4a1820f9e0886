"""The page of a run of several rounds, which leads to the page of each. Pure."""

import shlex
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from launcher.report.page.render import Link, rendered
from launcher.report.page.tables import filled
from launcher.verdict.rounds import Round, RoundsResult, WorkerRounds
from model_check.utils.project_files import PROGRAM
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
        workers=filled(zip(_COLUMNS, *map(_row, result.workers), strict=True)),
        rounds=[_round(each, result) for each in result.rounds],
        command=f"{PROGRAM} {shlex.join(result.run.get('command', []))}",
    )


def _answers(result: RoundsResult) -> Iterator[tuple[str, Any]]:
    yield "do now", result.do_now
    yield "what", result.summary
    yield "which", listed(result.culprits)
    yield "since", next((each.name for each in result.rounds if each.exit_code), None)
    if result.max_rate is not None:
        bound = f"errors in fewer than {result.max_rate:.2%} of steps (95 %)"
        yield "not shown", f"{bound}: {result.compared_steps:,} were compared"
    if started_at := result.run.get("started_at"):
        yield "started", datetime.fromisoformat(started_at).isoformat(" ", "seconds")
    yield "exit code", str(result.exit_code)


def _round(one: Round, result: RoundsResult) -> tuple[Any, ...]:
    """What the head of the page says of it does not stand here again."""
    said = "as above" if one.summary in result.summary else one.summary
    return (Link(one.name, f"{one.name}/report.html"), one.verdict, str(one.exit_code), said)


def _row(worker: WorkerRounds) -> tuple[str, ...]:
    rate = "" if worker.rate is None else f"{worker.rate:.0%}"
    bound = "" if worker.max_rate is None else f"< {worker.max_rate:.0%}"
    counts = (str(worker.rounds), str(len(worker.failed)), rate, bound)
    uuid = (worker.gpu or {}).get("uuid") or ""
    return (worker.name, *counts, f"{worker.repeated_steps:,}", uuid)
