"""The page of a run of several rounds, which leads to the page of each. Pure."""

from collections.abc import Iterator
from datetime import datetime

from launcher.report.page.markup import SIGNS, badge, document, facts, section, table, text
from launcher.verdict.rounds import Round, RoundsResult, WorkerRounds
from model_check.utils.words import listed

_COLUMNS = ("worker", "rounds", "failed", "share", "95 % bound", "steps repeated", "GPU")


def rounds_page(result: RoundsResult) -> str:
    """The whole document."""
    who = listed(result.culprits) or f"{len(result.workers)} workers"
    title = f"{result.verdict}: {who}, {len(result.rounds)} rounds on {result.run.get('host', '')}"
    return document(title, _parts(result, title))


def _parts(result: RoundsResult, title: str) -> Iterator[str]:
    yield f'<header class="{result.verdict}"><h1>{SIGNS[result.verdict]} {text(title)}</h1>'
    if drill := result.run.get("drill"):
        yield f'<p class="drill">DRILL: {text(drill)} was injected; these faults are not real</p>'
    yield from facts(_facts(result))
    yield "</header>"
    yield from section("Workers", table(_COLUMNS, map(_row, result.workers)))
    yield from section("Rounds", _rounds(result.rounds))


def _facts(result: RoundsResult) -> Iterator[tuple[str, str]]:
    yield "what", text(result.summary)
    if result.max_rate is not None:
        bound = f"errors in fewer than {result.max_rate:.2%} of steps (95 %)"
        yield "not shown", text(f"{bound}: {result.compared_steps:,} were compared")
    if started_at := result.run.get("started_at"):
        yield "started", text(datetime.fromisoformat(started_at).isoformat(timespec="seconds"))
    yield "command", text(" ".join(result.run.get("command", [])))
    yield "exit code", text(result.exit_code)


def _row(worker: WorkerRounds) -> tuple[str, ...]:
    rate = "" if worker.rate is None else f"{worker.rate:.0%}"
    bound = "" if worker.max_rate is None else f"< {worker.max_rate:.0%}"
    counts = (str(worker.rounds), str(len(worker.failed)), rate, bound)
    return (
        worker.name,
        *counts,
        f"{worker.repeated_steps:,}",
        (worker.gpu or {}).get("uuid") or "",
    )


def _rounds(rounds: list[Round]) -> Iterator[str]:
    yield "<ul>"
    for each in rounds:
        link = f'<a href="{text(each.name)}/report.html">{text(each.name)}</a>'
        yield f"<li>{link} {badge(each.verdict)} {text(each.summary)} ({text(each.exit_code)})</li>"
    yield "</ul>"
