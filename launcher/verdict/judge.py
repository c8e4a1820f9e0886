"""A run that is over -> a verdict for each worker and for the run. Pure."""

from collections.abc import Mapping

from msgspec import Struct, convert
from msgspec.structs import replace

from launcher.verdict.findings import OF_BITS, Finding, findings_of, is_unordered, last_error
from launcher.verdict.record import Case, WorkerEnd
from launcher.verdict.results import Judgement, RunResult, SplitResult, Verdict, WorkerResult
from launcher.verdict.rules import Kind
from launcher.verdict.scope import what_one_showed
from launcher.verdict.steps import History
from launcher.verdict.summary import summary
from model_check.errors import EXIT_INTERNAL, EXIT_PASS, EXIT_UNPROVEN

_INNOCENT = (Verdict.PASS, Verdict.STOPPED)
_NAMES_NOBODY = (Verdict.INCONCLUSIVE, Verdict.INVALID)
_ORDER = list(Kind)


class Decision(Struct, frozen=True):
    """What a run comes down to."""

    verdict: Verdict
    exit_code: int
    culprits: list[str]
    """All that are named, whoever ended the run first: its exit code is that one's."""


def judge(case: Case) -> Judgement:
    """The whole verdict.

    What proves nothing is never a PASS: a trainer that ends well without all its steps, or a
    process that could not be killed, is INCONCLUSIVE and exit code 70; one that was asked to end
    early, or had nothing left to do, is INCONCLUSIVE and exit code 0. A failure that every worker
    shares, or every one of a kind, blames no GPU, nor does a tie. A worker that ended by a signal
    which we got, too, was stopped.
    """
    findings = findings_of(case)
    rows = [_row(case, worker, findings[worker.name]) for worker in case.workers]
    decision = resolve(case, findings)
    text, explained = summary(case, decision.verdict, rows)
    end = case.end
    result = RunResult(
        verdict=decision.verdict,
        exit_code=decision.exit_code,
        summary=text,
        culprits=decision.culprits,
        disagreement=end.disagreement,
        further=list(end.further),
        replays=list(end.replays),
        workers=rows,
        leftovers=list(end.leftovers),
        dropped_lines=end.dropped_lines,
        run=case.record.asked,
        golden=case.record.golden,
        elsewhere=end.elsewhere,
    )
    quoted = {
        worker.name
        for worker in case.workers
        if worker.name in explained
        and findings[worker.name].facts.get("said") == f": {last_error(worker)}"
    }
    unexplained = {row.name for row in rows if row.verdict not in _INNOCENT}
    return Judgement(result, unexplained.difference(explained), quoted, case.is_training)


def resolve(case: Case, findings: Mapping[str, Finding]) -> Decision:
    """The verdict and the exit code of a run are those of the finding that decides it; of several
    the first in the order of the table."""
    end = case.end
    named = dict.fromkeys([*end.culprits, *case.suspects])
    culprits = [
        name
        for name in named
        if name not in findings or findings[name].rule.verdict not in _NAMES_NOBODY
    ]
    first = min(_deciding(case, findings), key=lambda f: _ORDER.index(f.kind), default=None)
    if first is None:
        return Decision(_without_a_finding(case), end.exit_code or _code(case, None), culprits)
    verdict = first.rule.of_run or first.rule.verdict
    if (end.tied and first.rule.of_run is None) or verdict is Verdict.STOPPED:
        verdict = Verdict.INCONCLUSIVE
    is_of_process = end.exit_code not in OF_BITS or first.rule.exit_code is None
    if is_of_process and end.exit_code != EXIT_PASS and verdict is not Verdict.INVALID:
        return Decision(verdict, end.exit_code, culprits)
    exit_code = _code(case, first)
    return Decision(verdict, exit_code, culprits)


def _deciding(case: Case, findings: Mapping[str, Finding]) -> list[Finding]:
    """What tells why the run ended as it did; nothing: it passed, or nobody here is to blame."""
    end, every = case.end, list(findings.values())
    of_software = [f for f in every if f.rule.verdict is Verdict.INVALID]
    if end.exit_code not in OF_BITS:
        blamed = [findings[name] for name in (*end.culprits, *end.tied) if name in findings]
        return blamed or of_software
    if of_bits := [f for f in every if f.rule.exit_code in OF_BITS[1:]] + of_software:
        return of_bits
    return [f for f in every if f.kind is not Kind.PASSED] if end.elsewhere is None else []


def _without_a_finding(case: Case) -> Verdict:
    """Another node ended the job, or nobody is to blame."""
    end = case.end
    if end.elsewhere is not None and end.elsewhere.worker is not None:
        return Verdict.SUSPECT if end.exit_code in OF_BITS else Verdict.FAIL
    if end.culprits:  # none of our workers: the preparer
        return Verdict.FAIL
    return Verdict.INCONCLUSIVE if end.exit_code != EXIT_PASS or end.leftovers else Verdict.PASS


def _code(case: Case, finding: Finding | None) -> int:
    """Of a run that no process ended: that of the finding, else that which a worker announced."""
    if case.end.is_deadline and finding is not None and case.end.exit_code == EXIT_PASS:
        return EXIT_UNPROVEN
    if finding is not None and finding.rule.exit_code is not None and not case.end.leftovers:
        return finding.rule.exit_code
    if finding is None and not case.end.leftovers:
        return EXIT_PASS
    said = [history.done.exit_code for history in case.histories.values() if history.done]
    return next((code for code in said if code != EXIT_PASS), EXIT_INTERNAL)


def _row(case: Case, worker: WorkerEnd, finding: Finding) -> WorkerResult:
    history, rule, kind = case.histories[worker.name], finding.rule, finding.kind
    verdict = rule.verdict
    if verdict is Verdict.FAIL and is_unordered(case, worker):
        verdict = Verdict.INCONCLUSIVE
    ended_by_itself = verdict is Verdict.FAIL or kind is Kind.NO_HOST_MEMORY
    ended_by_itself |= kind is Kind.FAILED_ALIKE and history.done is None
    is_quoted = (ended_by_itself and not finding.is_of_replays) or worker.name in case.end.tied
    done, (cause_class, severity) = history.done, rule.classed
    return WorkerResult(
        name=worker.name,
        verdict=verdict,
        kind=kind.name.lower(),
        cause=finding.sentence or None,
        steps=history.num_steps,
        loss_first=_number(history.loss_first),
        loss_last=_number(history.loss_last),
        tokens_per_s=done.tokens_per_s if done else None,
        peak_memory_bytes=done.peak_memory_bytes if done else None,
        duration_s=round(worker.duration_s, 3),
        waiting=None if history.waiting is None else round(history.waiting, 4),
        returncode=worker.returncode,
        gpu=case.record.gpus.get(worker.name),
        detail=history.detail,
        validation=_validation(history),
        notes=[*history.notes, *_shown_beside(case, history)],
        evidence=[*(item.path for item in history.evidence), *worker.evidence],
        last_lines=list(worker.last_lines) if is_quoted else [],
        cause_class=cause_class,
        severity=severity,
        repeat=finding.facts.get("repeat"),
        trace=history.tracer.trace if history.tracer else None,
    )


def _shown_beside(case: Case, history: History) -> list[str]:
    """What a training shows of its device: the summary of a check tells it."""
    shows = case.is_training and case.end.exit_code == EXIT_PASS
    return [what_one_showed(history, None)] if shows else []


def _validation(history: History) -> list[SplitResult]:
    return [
        replace(convert(event, SplitResult, from_attributes=True), loss=_number(event.loss))
        for event in history.evaluations.values()
    ]


def _number(bits: str | None) -> float | str | None:
    """JSON has no NaN: what is not finite stays text."""
    if bits is None or bits in ("nan", "inf", "-inf"):
        return bits
    return float.fromhex(bits)
