"""What to do now, from the table of verdicts: with each GPU, and about the run. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from launcher.verdict.results import RunResult, Verdict, WorkerResult
from launcher.verdict.rules import NOT_AGAIN, REPLAY, Kind
from launcher.verdict.severity import CauseClass, in_words
from model_check.config.ranks import JOBS
from model_check.errors import EXIT_SIGNAL_BASE
from model_check.utils.project_files import PROGRAM
from model_check.utils.words import listed

_TROUBLED = (Verdict.FAIL, Verdict.SUSPECT, Verdict.INVALID, Verdict.INCONCLUSIVE, Verdict.WARN)
_ORDER = list(Kind)


def troubled(result: RunResult) -> list[WorkerResult]:
    """The workers of which there is something to say, the culprits first."""
    found = [worker for worker in result.workers if worker.verdict in _TROUBLED]
    return sorted(
        found,
        key=lambda w: (w.name not in result.culprits, _TROUBLED.index(w.verdict)),
    )


def advised(result: RunResult, directory: str) -> RunResult:
    """With what to do. `directory`: where the run lies."""
    workers = [replace(worker, do_now=_with_worker(worker)) for worker in result.workers]
    return replace(result, workers=workers, do_now=_about_run(result, directory))


def _with_worker(worker: WorkerResult) -> str | None:
    """A worker that was stopped is not in doubt."""
    if worker.verdict is Verdict.STOPPED or worker.severity is None:
        return None
    return in_words(worker.severity, worker.cause_class, worker.repeat)


def _about_run(result: RunResult, directory: str) -> str:
    found = troubled(result)
    if not found:
        return _without_trouble(result).rule.advice
    named = [worker for worker in found if worker.name in result.culprits] or found
    kinds = {worker.name: Kind[str(worker.kind).upper()] for worker in named}
    first = min(named, key=lambda worker: _ORDER.index(kinds[worker.name]))
    form = kinds[first.name].rule.advice
    if form.startswith(REPLAY) and (
        result.run.get("mode") in JOBS or result.run.get("not_compared")
    ):
        form = NOT_AGAIN
    alike = [worker for worker in named if kinds[worker.name].rule.advice == form] or [first]
    advice = form.format(
        who=listed([worker.name for worker in alike]),
        first=first.name,
        symptoms=_symptoms(alike),
        program=PROGRAM,
        directory=directory,
    )
    return _unless_drill(advice, result.run, result.verdict)


def about_rounds(
    results: Sequence[RunResult], verdict: Verdict, odd: Sequence[str], directory: str
) -> str:
    """What to do after rounds. A worker that was named in two is not one to watch any more. `odd`:
    named by what differs between rounds that all passed."""
    named = Counter(name for result in results for name in result.culprits)
    twice = [name for name, rounds in named.items() if rounds > 1 and _is_hardware(name, results)]
    failed = next((result for result in results if result.exit_code), None)
    if twice:
        advice = Kind.SEEN_BEFORE.rule.advice.format(who=listed(twice), directory=directory)
    elif failed is not None:
        return failed.do_now
    elif verdict is Verdict.INCONCLUSIVE:
        advice = NOT_AGAIN
    else:
        kinds = {Verdict.INVALID: Kind.VARIES, Verdict.SUSPECT: Kind.ODD_ONCE}
        advice = kinds.get(verdict, Kind.PASSED).rule.advice.format(who=listed(odd))
    return _unless_drill(advice, results[0].run, verdict)


def _is_hardware(name: str, results: Sequence[RunResult]) -> bool:
    rows = (w for result in results for w in result.workers if w.name == name)
    return any(row.cause_class is CauseClass.HARDWARE for row in rows)


def _unless_drill(advice: str, run: Mapping[str, Any], verdict: Verdict) -> str:
    is_drill = run.get("drill") and verdict is not Verdict.PASS
    return f"Nothing: this is a drill. Otherwise: {advice}" if is_drill else advice


def _symptoms(workers: Sequence[WorkerResult]) -> str:
    """The gravest of each GPU, and what to do about it."""
    hard = [f"{worker.name}: {worker.symptoms[0]}" for worker in workers if worker.symptoms]
    soft = [text for worker in workers for text in worker.warnings[:1]]
    return "; ".join(dict.fromkeys(hard or soft))


def _without_trouble(result: RunResult) -> Kind:
    if result.exit_code > EXIT_SIGNAL_BASE:
        return Kind.STOPPED_ON_REQUEST
    return Kind.PASSED if result.verdict is Verdict.PASS else Kind.STOPPED
