"""What to do now, from the table of verdicts: with each GPU, and about the run. Pure."""

import shlex
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from launcher.verdict.nodes import Elsewhere
from launcher.verdict.results import RunResult, Verdict, WorkerResult
from launcher.verdict.rules import (
    COMMAND_AGAIN,
    NOT_AGAIN,
    REPLAY,
    RULE_OPERATIONS_OUT,
    STILL_VARIES,
    Kind,
)
from launcher.verdict.severity import CauseClass, in_words
from model_check.config.drill import worker_of
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
    """A sentence or two for each thing to do, the first in the order of the table first: of the
    culprits, and of whose GPU is condemned; where there are none, of all."""
    found = troubled(result)
    if result.elsewhere is not None and not result.culprits:
        return _see_node(result.elsewhere)
    if not found:
        return _without_trouble(result).rule.advice
    named = [w for w in found if w.name in result.culprits or w.symptoms] or found
    kinds = {worker.name: Kind[str(worker.kind).upper()] for worker in named}
    by_form: dict[str, list[str]] = {}
    for kind in sorted({*kinds.values()}, key=_ORDER.index):
        by_form.setdefault(_form(kind, result), [])
    for worker in result.workers:
        if worker.name in kinds:
            by_form[_form(kinds[worker.name], result)].append(worker.name)
    advice = " ".join(
        form.format(
            who=listed(names),
            first=names[0],
            symptoms=_symptoms([worker for worker in named if worker.name in names]),
            program=PROGRAM,
            directory=shlex.quote(directory),
        )
        for form, names in by_form.items()
    )
    return _unless_drill(advice, result.run, result.verdict, kinds)


def _form(kind: Kind, result: RunResult) -> str:
    form, checked = kind.rule.advice, result.run.get("checked")
    is_deterministic = checked is not None and checked.get("deterministic")
    if kind is Kind.COMMAND_VARIES and is_deterministic:
        return STILL_VARIES
    if kind is Kind.ODD_UNSETTLED and checked is not None and not is_deterministic:
        return f"{RULE_OPERATIONS_OUT} {form}"
    is_job = result.run.get("mode") in JOBS
    return NOT_AGAIN if form.startswith(REPLAY) and (is_job or _is_incomparable(result)) else form


def _is_incomparable(result: RunResult) -> bool:
    return result.run.get("not_compared") is not None


def _see_node(elsewhere: Elsewhere) -> str:
    who = elsewhere.node if elsewhere.worker is None else f"{elsewhere.node}, {elsewhere.worker}"
    return f"See the report of {who}: the job ended there."


def about_rounds(
    results: Sequence[RunResult], verdict: Verdict, odd: Sequence[str], directory: str
) -> str:
    """What to do after rounds. A worker that was named for its bits in two is not one to watch any
    more. `odd`: named by what differs between rounds that all passed."""
    named = Counter(name for result in results for name in _named_for_bits(result))
    twice = [name for name, num_rounds in named.items() if num_rounds > 1]
    failed = next((result for result in results if result.exit_code), None)
    if twice:
        form = Kind.SEEN_BEFORE.rule.advice
        advice = form.format(who=listed(twice), directory=shlex.quote(directory))
    elif failed is not None:
        return failed.do_now
    elif verdict is Verdict.INCONCLUSIVE:
        is_command = results[0].run.get("checked") is not None
        advice = COMMAND_AGAIN if is_command else NOT_AGAIN
    else:
        kinds = {Verdict.INVALID: Kind.VARIES, Verdict.SUSPECT: Kind.ODD_ONCE}
        advice = kinds.get(verdict, Kind.PASSED).rule.advice.format(who=listed(odd))
    return _unless_drill(advice, results[0].run, verdict, [*twice, *odd])


def _named_for_bits(result: RunResult) -> list[str]:
    """The culprits whose hardware computed something else. What NVML tells has its own cure."""
    of_health = {kind.name.lower() for kind in (Kind.GPU_FAULT, Kind.GPU_WARNING)}
    return [
        row.name
        for row in result.workers
        if row.name in result.culprits
        and row.cause_class is CauseClass.HARDWARE
        and row.kind not in of_health
    ]


def _unless_drill(
    advice: str, run: Mapping[str, Any], verdict: Verdict, whom: Collection[str]
) -> str:
    """Another worker than the drill's has a fault of its own."""
    drill = run.get("drill")
    if not drill or verdict is Verdict.PASS or worker_of(drill) not in (None, *whom):
        return advice
    return f"Nothing: this is a drill. Otherwise: {advice}"


def _symptoms(workers: Sequence[WorkerResult]) -> str:
    """The gravest of each GPU, and what to do about it."""
    hard = [f"{worker.name}: {worker.symptoms[0]}" for worker in workers if worker.symptoms]
    soft = [text for worker in workers for text in worker.warnings[:1]]
    return "; ".join(dict.fromkeys(hard or soft))


def _without_trouble(result: RunResult) -> Kind:
    if result.exit_code > EXIT_SIGNAL_BASE:
        return Kind.STOPPED_ON_REQUEST
    return Kind.PASSED if result.verdict is Verdict.PASS else Kind.STOPPED
