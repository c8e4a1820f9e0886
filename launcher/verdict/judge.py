"""A run that is over -> a verdict for each worker and for the run. Pure."""

from collections.abc import Callable, Mapping, Sequence

from msgspec import convert
from msgspec.structs import replace

from launcher.verdict.facts import WorkerFacts
from launcher.verdict.findings import Finding, Findings, findings_of, is_unordered
from launcher.verdict.past import TRANSIENT, EarlierFaults
from launcher.verdict.record import Case, WorkerEnd
from launcher.verdict.results import (
    INNOCENT,
    Decision,
    Judgement,
    RunResult,
    SplitResult,
    Verdict,
    WorkerResult,
)
from launcher.verdict.rules import Kind
from launcher.verdict.scope import what_one_showed
from launcher.verdict.summary import summary
from launcher.verdict.symptoms import (
    gpu_findings,
    odd_by_symptoms,
    summary_with_gpus,
    with_gpus,
)
from model_check.errors import (
    EXIT_DISAGREEMENT,
    EXIT_INTERNAL,
    EXIT_PASS,
    EXIT_UNNAMED,
    EXIT_UNPROVEN,
    EXIT_USAGE,
)

_NAMES_NOBODY = (Verdict.INCONCLUSIVE, Verdict.INVALID)
_ORDER = list(Kind)
Recall = Callable[[Sequence[str]], Mapping[str, EarlierFaults]]
"""Workers -> those of them whose GPUs had transient faults in earlier runs."""


def judge(case: Case, recall: Recall = lambda names: {}) -> Judgement:
    """The whole verdict.

    What proves nothing is never a PASS: a trainer that ends well without all its steps, or a
    process that could not be killed, is INCONCLUSIVE and exit code 70; one that was asked to end
    early, or had nothing left to do, is INCONCLUSIVE and exit code 0. A failure that every worker
    shares, or every one of a kind, blames no GPU, nor does a tie. A worker that ended by a signal
    which we got, too, was stopped. `recall`: what the history of their GPUs holds of the workers
    that have just had a transient fault.
    """
    own = findings_of(case)
    by_workers = resolve(case, own)
    gpus = gpu_findings(case, by_workers, own)
    decision = with_gpus(case, by_workers, own, gpus)
    rows = [_row(case, worker, own[worker.name]) for worker in case.workers]
    text, explained = summary(case, by_workers.verdict, rows)
    deciding = _deciding(case, by_workers, own, gpus)
    seen = _seen_before(own, deciding, recall)
    end = case.end
    result = RunResult(
        verdict=decision.verdict,
        exit_code=decision.exit_code,
        summary=summary_with_gpus(case, text, by_workers, decision, gpus),
        culprits=decision.culprits,
        disagreement=end.disagreement,
        further=list(end.further),
        replays=list(end.replays),
        workers=[_with_gpu(case, row, own, gpus, deciding | seen) for row in rows],
        leftovers=list(end.leftovers),
        dropped_lines=end.dropped_lines,
        run=case.record.asked,
        golden=case.record.golden,
        elsewhere=end.elsewhere,
    )
    last_errors = {worker.name: f": {worker.last_error}" for worker in case.workers}
    quoted = {n for n in own if n in explained and own[n].values.get("said") == last_errors[n]}
    # The summary does not tell of earlier runs.
    unexplained = {row.name for row in rows if row.verdict not in INNOCENT} - {*explained}
    return Judgement(result, unexplained | seen.keys(), quoted, case.is_training)


def _deciding(case: Case, decision: Decision, own: Findings, gpus: Findings) -> dict[str, Finding]:
    """Of each worker the finding that decides its row. A hard symptom does, whatever the worker
    did; any other, where it passed. Nothing is known against one that differs from the one whose
    health tells that it is odd."""
    deciding = dict(own)
    for name, found in gpus.items():
        if found.kind is Kind.GPU_FAULT or own[name].rule.verdict is Verdict.PASS:
            deciding[name] = found
    odd = odd_by_symptoms(case, decision, gpus)
    if odd is not None and case.end.disagreement is not None:
        cleared = Finding(Kind.CLEARED, {"odd": odd})
        deciding |= dict.fromkeys(case.end.disagreement.bits.keys() - {odd}, cleared)
    return deciding


def _seen_before(own: Findings, deciding: Findings, recall: Recall) -> dict[str, Finding]:
    """A transient fault is watched; the second one of a GPU takes it out of service."""
    transient = [
        name
        for name, found in deciding.items()
        if (found.classed[0], own[name].values.get("repeat")) == TRANSIENT
    ]
    earlier = recall(transient) if transient else {}
    return {
        name: Finding(Kind.SEEN_BEFORE, {"cause": own[name].sentence, "earlier": earlier[name]})
        for name in transient
        if name in earlier
    }


def resolve(case: Case, findings: Findings) -> Decision:
    """The verdict and the exit code of a run are those of the finding that decides it; of several
    the first in the order of the table."""
    end = case.end
    named = dict.fromkeys([*end.culprits, *case.suspects])
    cleared = [n for n, found in findings.items() if found.rule.verdict in _NAMES_NOBODY]
    culprits = [name for name in named if name not in cleared]
    verdict, exit_code = _decided(case, findings)
    return Decision(verdict, exit_code, culprits)


def _decided(case: Case, findings: Findings) -> tuple[Verdict, int]:
    end, every = case.end, list(findings.values())
    if software := _of_software(case, findings):
        return _as(_first(software))
    if not end.is_by_bits or end.tied:
        blamed = [findings[name] for name in (*end.culprits, *end.tied) if name in findings]
        return _by_process(case, blamed), end.exit_code
    if case.differs:
        found = [findings[name].rule.verdict for name in case.suspects if name in findings]
        bits = Verdict.SUSPECT if case.suspects else Verdict.INCONCLUSIVE
        code = EXIT_DISAGREEMENT if case.suspects else EXIT_UNNAMED
        return Verdict.FAIL if Verdict.FAIL in found else bits, code
    if end.exit_code != EXIT_PASS:
        return _by_process(case, []), end.exit_code
    open_ = [found for found in every if found.kind is not Kind.PASSED]
    verdict, code = _as(_first(open_)) if open_ else (Verdict.PASS, EXIT_PASS)
    if end.is_deadline and verdict is Verdict.INCONCLUSIVE:
        return verdict, EXIT_UNPROVEN
    if end.leftovers and verdict in (Verdict.PASS, Verdict.INCONCLUSIVE):
        return Verdict.INCONCLUSIVE, EXIT_INTERNAL
    return verdict, code


def _of_software(case: Case, findings: Findings) -> list[Finding]:
    """Nothing can be compared, or no device is the reason of what differs."""
    invalid = {n: f for n, f in findings.items() if f.rule.verdict is Verdict.INVALID}
    kinds = (Kind.STATE_CHANGED_ALIKE, Kind.UNLIKE_GOLDEN, Kind.STARTS_DIFFER)
    alike = [f for f in invalid.values() if f.kind in kinds]
    varies = any(each.is_software for each in case.end.replays) and {*invalid} >= {*case.suspects}
    return list(invalid.values()) if varies or case.end.exit_code == EXIT_USAGE else alike


def _by_process(case: Case, blamed: Sequence[Finding]) -> Verdict:
    """Of a run that a worker, another node or a request ended."""
    end, first = case.end, _first(blamed) if blamed else None
    is_shared = all(found.rule.of_run for found in blamed)
    if first is not None and first.rule.of_run is not None and (is_shared or not end.tied):
        return first.rule.of_run
    if end.tied:
        return Verdict.INCONCLUSIVE
    if first is not None and first.rule.verdict is Verdict.SUSPECT:
        return Verdict.SUSPECT
    if end.elsewhere is not None and end.is_by_bits:
        return Verdict.SUSPECT if end.elsewhere.worker else Verdict.INCONCLUSIVE
    is_named = end.culprits or (end.elsewhere is not None and end.elsewhere.worker)
    return Verdict.FAIL if is_named or end.is_by_bits else Verdict.INCONCLUSIVE


def _first(findings: Sequence[Finding]) -> Finding:
    return min(findings, key=lambda found: _ORDER.index(found.kind))


def _as(finding: Finding) -> tuple[Verdict, int]:
    """What the table says of a run that it decides, and that no process ended."""
    rule = finding.rule
    verdict = rule.of_run or rule.verdict
    verdict = Verdict.INCONCLUSIVE if verdict is Verdict.STOPPED else verdict
    said = finding.values.get("exit_code", EXIT_INTERNAL)
    return verdict, said if rule.exit_code is None else rule.exit_code


def _row(case: Case, worker: WorkerEnd, finding: Finding) -> WorkerResult:
    facts, rule, kind = case.all_facts[worker.name], finding.rule, finding.kind
    verdict = rule.verdict
    if verdict is Verdict.FAIL and is_unordered(case, worker):
        verdict = Verdict.INCONCLUSIVE
    ended_by_itself = verdict is Verdict.FAIL or kind is Kind.NO_HOST_MEMORY
    ended_by_itself |= kind is Kind.FAILED_ALIKE and facts.done is None
    is_quoted = (ended_by_itself and not finding.is_of_replays) or worker.name in case.end.tied
    done, (cause_class, severity) = facts.done, rule.classed
    return WorkerResult(
        name=worker.name,
        verdict=verdict,
        kind=kind.name.lower(),
        cause=finding.sentence or None,
        steps=facts.num_steps,
        loss_first=_number(facts.loss_first),
        loss_last=_number(facts.loss_last),
        tokens_per_s=done.tokens_per_s if done else None,
        peak_memory_bytes=done.peak_memory_bytes if done else None,
        duration_s=round(worker.duration_s, 3),
        waiting=None if facts.waiting is None else round(facts.waiting, 4),
        returncode=worker.returncode,
        gpu=case.record.gpus.get(worker.name),
        detail=facts.detail,
        validation=_validation(facts),
        notes=[*facts.notes, *_shown_beside(case, facts)],
        evidence=[*(item.path for item in facts.evidence), *worker.evidence],
        last_lines=list(worker.last_lines) if is_quoted else [],
        cause_class=cause_class,
        severity=severity,
        repeat=finding.values.get("repeat"),
        trace=facts.tracer.trace if facts.tracer else None,
    )


def _with_gpu(
    case: Case, row: WorkerResult, own: Findings, gpus: Findings, deciding: Findings
) -> WorkerResult:
    """The row of a worker with what is known of its GPU, and as the finding that decides it has
    it."""
    symptoms = gpus[row.name].symptoms if row.name in gpus else ()
    row = replace(
        row,
        telemetry=case.healths.get(row.name),
        slow=case.slow[row.name][0] if row.name in case.slow else None,
        warnings=[f"{row.name}: {symptom}" for symptom in symptoms if not symptom.is_hard],
        symptoms=[str(symptom) for symptom in symptoms if symptom.is_hard],
    )
    found = deciding[row.name]
    if found is own[row.name]:
        return row
    verdict = found.rule.verdict
    if found.kind is Kind.SEEN_BEFORE:  # how grave it is changes, not what happened
        verdict = Verdict.FAIL if row.symptoms else row.verdict
    cause_class, severity = found.classed
    return replace(
        row,
        verdict=verdict,
        kind=found.kind.name.lower(),
        cause=found.sentence or None,
        cause_class=cause_class,
        severity=severity,
    )


def _shown_beside(case: Case, facts: WorkerFacts) -> list[str]:
    """What a training shows of its device: the summary of a check tells it."""
    shows = case.is_training and case.end.exit_code == EXIT_PASS
    return [what_one_showed(facts, None)] if shows else []


def _validation(facts: WorkerFacts) -> list[SplitResult]:
    return [
        replace(convert(event, SplitResult, from_attributes=True), loss=_number(event.loss))
        for event in facts.evaluations.values()
    ]


def _number(bits: str | None) -> float | str | None:
    """JSON has no NaN: what is not finite stays text."""
    if bits is None or bits in ("nan", "inf", "-inf"):
        return bits
    return float.fromhex(bits)
