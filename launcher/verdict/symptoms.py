"""What telemetry and speed tell of the GPUs of a run that is over: findings beside those of its
workers, and what they do to its verdict. Pure."""

from collections.abc import Iterator, Sequence

from launcher.verdict.findings import Finding, Findings
from launcher.verdict.record import Case
from launcher.verdict.results import INNOCENT, Decision, Verdict
from launcher.verdict.rules import Kind
from launcher.verdict.severity import CauseClass, Symptom, worst
from launcher.verdict.summary import called, names_by_text
from model_check.errors import (
    EXIT_DISAGREEMENT,
    EXIT_HEALTH,
    EXIT_INTERNAL,
    EXIT_PASS,
    EXIT_UNNAMED,
    EXIT_UNPROVEN,
)

_LETS_PASS = "launch.fail_on lets it pass"


def gpu_findings(case: Case, decision: Decision, own: Findings) -> dict[str, Finding]:
    """Of the workers whose GPU has a symptom. A run that failed before anything was reported of its
    GPUs has nothing to say of them. `decision`, `own`: of what the workers did."""
    is_open = _is_open(decision, own)
    gpus: dict[str, Finding] = {}
    for name, of_worker in own.items():
        is_told = is_open or case.healths.get(name) is not None
        symptoms = [*case.symptoms.get(name, ())] if is_told else []
        symptoms += [case.slow[name][1]] if name in case.slow else []
        if symptoms:
            gpus[name] = _finding(of_worker, symptoms)
    return gpus


def with_gpus(case: Case, decision: Decision, own: Findings, gpus: Findings) -> Decision:
    """A run fails of the symptoms that launch.fail_on holds, unless it failed otherwise. Where two
    workers differ, a hard symptom of one of them tells which is odd."""
    may_fail = _is_open(decision, own) or decision.exit_code == EXIT_UNPROVEN
    if may_fail and (failing := _failing(case, gpus)):
        return Decision(Verdict.FAIL, EXIT_HEALTH, [*failing])
    if (odd := odd_by_symptoms(case, decision, gpus)) is not None:
        return Decision(Verdict.FAIL, EXIT_DISAGREEMENT, [odd])
    if _hard(gpus) and decision.verdict is Verdict.PASS:
        return Decision(Verdict.WARN, decision.exit_code, decision.culprits)
    return decision


def odd_by_symptoms(case: Case, decision: Decision, gpus: Findings) -> str | None:
    """The one of two workers that differ whose GPU has a hard symptom. None: both have one, or
    neither. Of more, the others would differ without it, too."""
    if decision.exit_code != EXIT_UNNAMED or case.end.disagreement is None:
        return None
    differing = case.end.disagreement.bits
    condemned = [name for name in differing if name in _hard(gpus)]
    return condemned[0] if len(differing) == 2 and len(condemned) == 1 else None


def summary_with_gpus(
    case: Case, text: str, before: Decision, after: Decision, gpus: Findings
) -> str:
    """`text`: the summary without the symptoms; `before`, `after`: the decisions without and with
    them."""
    parts, hard, is_well = [text], _hard(gpus), before.verdict is Verdict.PASS
    # A worker's own exit code may be the same.
    fails = after.exit_code == EXIT_HEALTH != before.exit_code
    if fails:
        parts = [*_why_failed(case, gpus), *([] if is_well else [text])]
        hard = {name: found for name, found in hard.items() if name not in after.culprits}
    if hard:
        parts.append(_sentences(hard))
        parts += [_LETS_PASS] if fails or is_well else []
    if (odd := odd_by_symptoms(case, before, gpus)) is not None:
        parts.append(f"the health of {odd} tells that it is the odd one")
    # Any other end has a cause of its own, and warnings would only hide it.
    if before.exit_code == EXIT_PASS:
        parts += [*_warnings(case, after, gpus), *_unwatched(case)]
    return "; ".join(parts)


def _finding(own: Finding, symptoms: Sequence[Symptom]) -> Finding:
    """A worker that failed keeps its cause."""
    if not worst(symptoms).is_hard:
        return Finding(Kind.GPU_WARNING, {}, symptoms)
    is_well = own.rule.verdict in INNOCENT
    cause = _sentence(symptoms) if is_well else own.sentence
    return Finding(Kind.GPU_FAULT, {"symptoms": cause}, symptoms)


def _is_open(decision: Decision, own: Findings) -> bool:
    """Nothing decided how the run ended. Exit code 70 without a culprit: nothing is proven, unless
    this host is the cause."""
    is_of_host = any(found.rule.classed[0] is CauseClass.HOST for found in own.values())
    is_unproven = decision.exit_code == EXIT_INTERNAL and not decision.culprits
    return decision.exit_code == EXIT_PASS or (is_unproven and not is_of_host)


def _hard(gpus: Findings) -> dict[str, Finding]:
    return {name: found for name, found in gpus.items() if found.kind is Kind.GPU_FAULT}


def _failing(case: Case, gpus: Findings) -> dict[str, Finding]:
    """Those that launch.fail_on holds."""
    words = {
        name: {symptom.word or symptom.severity.lower() for symptom in found.symptoms}
        for name, found in gpus.items()
    }
    return {name: gpus[name] for name in gpus if words[name].intersection(case.fail_on)}


def _why_failed(case: Case, gpus: Findings) -> Iterator[str]:
    failing = _failing(case, gpus)
    yield _sentences(failing)
    if not _hard(failing):
        yield "launch.fail_on makes this a failure"


def _warnings(case: Case, decision: Decision, gpus: Findings) -> Iterator[str]:
    """How many there are, and about which GPU, or how many: a line each names them."""
    counts = {
        name: num
        for name, found in gpus.items()
        if name not in decision.culprits
        and (num := sum(not symptom.is_hard for symptom in found.symptoms))
    }
    if counts:
        num, everyone = sum(counts.values()), [worker.name for worker in case.workers]
        whose = "all" if len(counts) == len(everyone) else f"{len(counts)} of"
        who = f"{whose} {called(everyone, everyone)}" if len(counts) > 1 else next(iter(counts))
        yield f"{num} warning{'' if num == 1 else 's'} about {who}"


def _unwatched(case: Case) -> Iterator[str]:
    on_gpus = [worker.name for worker in case.workers if worker.name in case.record.gpus]
    if not case.healths.keys() >= {*on_gpus}:
        yield "nobody watched the health of the GPUs (launch.telemetry_interval_s = 0)"


def _sentences(gpus: Findings) -> str:
    """One for each GPU; those with the same symptoms share it."""
    sharing = names_by_text((name, _sentence(found.symptoms)) for name, found in gpus.items())
    return "; ".join(f"{', '.join(names)}: {text}" for text, names in sharing.items())


def _sentence(symptoms: Sequence[Symptom]) -> str:
    """Its figures (the hard ones, where there are some), and what to do about the gravest: each of
    many memory errors would ask for the same reset."""
    gravest = worst(symptoms)
    figures = [symptom.figure for symptom in symptoms if symptom.is_hard == gravest.is_hard]
    return str(Symptom(gravest.severity, ", ".join(figures), gravest.cure))
