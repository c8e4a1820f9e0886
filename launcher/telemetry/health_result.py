"""A verdict and what telemetry said of the GPUs -> the verdict with both. Pure."""

from collections.abc import Collection, Mapping, Sequence

import msgspec

from launcher.telemetry.health import symptoms
from launcher.verdict.health import Health
from launcher.verdict.results import RunResult, Verdict, WorkerResult
from launcher.verdict.severity import Symptom, worst
from model_check.errors import EXIT_HEALTH, EXIT_INTERNAL, EXIT_PASS

_LETS_PASS = "launch.fail_on lets it pass"
Healths = Mapping[str, Health | None]
"""Of the workers that were to be watched; None: nothing was told of its GPU."""
Symptoms = Mapping[str, list[Symptom]]
"""Worker -> what is wrong with its GPU, or not known of it; a worker without any is not in it."""


def with_health(result: RunResult, healths: Healths, fail_on: Collection[str]) -> RunResult:
    """The result with each worker's telemetry.

    A hard symptom fails its GPU's row, whatever the row was; any other makes a PASS a WARN. The
    run ends with exit code 22 for a severity that `fail_on` holds, unless it failed otherwise.
    """
    told = _told(result, healths)
    workers = [
        _row(msgspec.structs.replace(worker, telemetry=healths.get(worker.name)), told)
        for worker in result.workers
    ]
    decided = _decided(result, told, fail_on)
    summary = "; ".join([decided.summary, *_remarks(result, decided, told, healths)])
    return msgspec.structs.replace(decided, summary=summary, workers=workers)


def _told(result: RunResult, healths: Healths) -> Symptoms:
    """A run that failed before anything was heard of its GPUs has nothing to say of them."""
    told = {
        worker.name: symptoms(worker.name, healths[worker.name])
        for worker in result.workers
        if worker.name in healths and (healths[worker.name] or _is_open(result))
    }
    return {name: found for name, found in told.items() if found}


def _is_open(result: RunResult) -> bool:
    """Nothing decided how the run ended. Exit code 70 without a culprit: nothing is proven."""
    unproven = result.exit_code == EXIT_INTERNAL and not result.culprits
    return result.exit_code == EXIT_PASS or unproven


def _row(worker: WorkerResult, told: Symptoms) -> WorkerResult:
    found = told.get(worker.name, [])
    hard = [symptom for symptom in found if symptom.is_hard]
    soft = [f"{worker.name}: {symptom}" for symptom in found if not symptom.is_hard]
    worker = msgspec.structs.replace(worker, warnings=soft, symptoms=list(map(str, hard)))
    if hard:
        has_cause = worker.verdict not in (Verdict.PASS, Verdict.STOPPED)
        cause = worker.cause if has_cause else _sentence(hard)
        return _graded(msgspec.structs.replace(worker, verdict=Verdict.FAIL, cause=cause), hard)
    if soft and worker.verdict is Verdict.PASS:
        return _graded(msgspec.structs.replace(worker, verdict=Verdict.WARN), found)
    return worker


def _graded(worker: WorkerResult, found: Sequence[Symptom]) -> WorkerResult:
    gravest = worst(found)
    return msgspec.structs.replace(
        worker, cause_class=gravest.cause_class, severity=gravest.severity
    )


def _decided(result: RunResult, told: Symptoms, fail_on: Collection[str]) -> RunResult:
    """The result with the hard symptoms in its summary, and failed by those that `fail_on` holds:
    its culprits are the GPUs that have one, and they come first.

    A run that failed otherwise stays what it is: its exit code is that of its first culprit.
    """
    held = {name: found for name, found in told.items() if _is_held(found, fail_on)}
    hard = {name: found for name, found in told.items() if worst(found).is_hard}
    if held and _is_open(result):
        makes = [] if held.keys() & hard.keys() else ["launch.fail_on makes this a failure"]
        before = [] if result.verdict is Verdict.PASS else [result.summary]
        others = {name: found for name, found in hard.items() if name not in held}
        passes = [f"{_sentences(others)}; {_LETS_PASS}"] if others else []
        return msgspec.structs.replace(
            result,
            verdict=Verdict.FAIL,
            exit_code=EXIT_HEALTH,
            summary="; ".join([_sentences(held), *makes, *before, *passes]),
            culprits=list(held),
        )
    if not hard:
        return result
    summary = f"{result.summary}; {_sentences(hard)}"
    if result.verdict is not Verdict.PASS:
        return msgspec.structs.replace(result, summary=summary)
    summary += f"; {_LETS_PASS}"
    return msgspec.structs.replace(result, verdict=Verdict.WARN, summary=summary)


def _is_held(found: Sequence[Symptom], fail_on: Collection[str]) -> bool:
    return any(symptom.severity.lower() in fail_on for symptom in found)


def _remarks(result: RunResult, decided: RunResult, told: Symptoms, healths: Healths) -> list[str]:
    """What else a person should know of the GPUs of a run that nothing but a GPU failed."""
    if result.exit_code != EXIT_PASS:
        return []
    remarks = []
    soft = [
        name
        for name, found in told.items()
        for symptom in found
        if not symptom.is_hard and name not in decided.culprits
    ]
    if soft:
        whom = ", ".join(dict.fromkeys(soft))
        remarks.append(f"{len(soft)} warning{'' if len(soft) == 1 else 's'} about {whom}")
    if any(worker.gpu is not None and worker.name not in healths for worker in result.workers):
        remarks.append("nobody watched the health of the GPUs (launch.telemetry_interval_s = 0)")
    return remarks


def _sentences(told: Symptoms) -> str:
    """One for each GPU; those with the same symptoms share it."""
    names: dict[str, list[str]] = {}
    for name, found in told.items():
        names.setdefault(_sentence(found), []).append(name)
    return "; ".join(f"{', '.join(whose)}: {text}" for text, whose in names.items())


def _sentence(found: Sequence[Symptom]) -> str:
    """Its figures (the hard ones, where there are some), and what to do about the gravest: each of
    many memory errors would ask for the same reset."""
    gravest = worst(found)
    figures = [symptom.figure for symptom in found if symptom.is_hard == gravest.is_hard]
    return str(msgspec.structs.replace(gravest, figure=", ".join(figures)))
