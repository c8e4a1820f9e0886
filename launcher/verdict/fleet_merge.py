"""Many runs -> one answer: what is wrong in each, what only their comparison shows, the gravest of
it. Pure, but for the events that it asks for."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from launcher.verdict.fleet import (
    Figures,
    Finding,
    FleetInput,
    FleetResult,
    FleetRun,
    FleetWorker,
    Group,
    Place,
    Seen,
)
from launcher.verdict.fleet_bits import Comparison, Load, Member
from launcher.verdict.fleet_findings import GRAVEST, Findings, Members, gravity
from launcher.verdict.fleet_speed import speeds
from launcher.verdict.golden import others
from launcher.verdict.results import Verdict, WorkerResult
from launcher.verdict.severity import Severity
from model_check.errors import EXIT_PASS
from model_check.utils.words import few, printable

_LARGEST = 0
_CURES = {Severity.ISOLATE: "Take out of service", Severity.RESET: "Reset"}
_MOST_APART = 8
"""Groups that a line each tells of."""
SettingsOf = Callable[[int], Mapping[str, Any]]


def merged(
    runs: Sequence[FleetInput],
    load: Load,
    settings_of: SettingsOf = lambda run: {},
    notes: Sequence[str] = (),
    *,
    is_fleet: bool = True,
) -> FleetResult:
    """`load`: the events of a worker. `settings_of`: those of a run that decide its steps; empty:
    not known. `is_fleet`: else all are parts of one run."""
    groups = _groups(runs)
    for each in groups:
        each.compared = Comparison(each.members, load).run()
        each.speeds = speeds({m.place: m.trace for m in each.members})
    told = [_told(each, groups[_LARGEST], settings_of) for each in groups]
    findings = sorted(Findings(runs, groups, told, is_fleet=is_fleet).all(), key=gravity)
    worst = next((each for each in findings if each.exit_code), None)
    watched = any(each.verdict is Verdict.WARN for each in findings)
    calm = Verdict.WARN if watched else Verdict.PASS
    return FleetResult(
        verdict=calm if worst is None else worst.verdict,
        exit_code=EXIT_PASS if worst is None else worst.exit_code,
        summary=_summary(runs, findings, told),
        do_now=_do_now(findings),
        findings=findings,
        groups=told,
        notes=[*notes, *_notes(runs, told), *_unlike(groups)],
        runs=_rows(runs, groups, findings),
    )


def _groups(runs: Sequence[FleetInput]) -> list[Members]:
    """The largest first."""
    groups: dict[tuple[Any, ...], Members] = {}
    jobs = _jobs(runs)
    for number, run in enumerate(runs):
        job, attempt = jobs[number]
        for worker in run.workers:
            if run.why_not(worker) is not None or worker.trace is None:
                continue
            key = {**run.key_of(worker), "first_state": worker.trace.began}
            group = groups.setdefault(tuple(key.items()), Members(key))
            first = key["first_step"]
            first = first if isinstance(first, int) else 0
            device = _device(number, run, worker.name)
            voter = job if run.is_job else device
            place = (number, worker.name)
            group.members.append(Member(place, device, voter, attempt, first, worker.trace))
    return sorted(groups.values(), key=lambda each: -len(each.members))


def _jobs(runs: Sequence[FleetInput]) -> list[tuple[str, str]]:
    """Of each run: the devices of all parts of its job, and the first run that is a part of it."""
    parts: dict[Any, list[int]] = {}
    for number, run in enumerate(runs):
        parts.setdefault(run.job or number, []).append(number)
    found: dict[int, tuple[str, str]] = {}
    for numbers in parts.values():
        devices = sorted(_device(n, runs[n], w.name) for n in numbers for w in runs[n].workers)
        found |= dict.fromkeys(numbers, ("+".join(devices), str(numbers[0])))
    return [found[number] for number in range(len(runs))]


def _device(number: int, run: FleetInput, worker: str) -> str:
    """A CPU worker is another one in each run."""
    return run.devices[worker].uuid or f"{number} {worker}"


def _told(group: Members, largest: Members, settings_of: SettingsOf) -> Group:
    run = min(group.runs)
    differing = others(largest.key, group.key)
    if any(other.name == "settings" for other in differing):
        named = others(settings_of(min(largest.runs)), settings_of(run))
        rest = [other for other in differing if other.name != "settings"]
        differing = [*named, *rest] if named else differing
    equal = [member for member in group.members if member.place in group.compared.equal]
    return Group(
        key=group.key,
        workers=len(group.members),
        runs=len(group.runs),
        devices=len(group.devices),
        steps=max(member.trace.steps for member in group.members),
        compared_steps=sum(member.trace.steps for member in equal),
        others=differing,
    )


def name_of(run: FleetInput | FleetRun | Finding) -> str:
    """What people call the machine."""
    return printable(run.node or run.host or PurePath(run.directory).name or run.directory)


def _summary(
    runs: Sequence[FleetInput], findings: Sequence[Finding], groups: Sequence[Group]
) -> str:
    """`1,000 runs, 8,000 workers: 10 with other bits, 5 slow, 3 dead`"""
    num_workers = sum(len(run.workers) for run in runs)
    count = f"{_many(len(runs), 'run')}, {_many(num_workers, 'worker')}"
    parts = list(_counts(findings))
    compared = sum(group.compared_steps for group in groups)
    if not parts:
        same = f", equal bit for bit in {compared:,} steps that were compared" if compared else ""
        parts = [
            f"nothing is wrong{same}" if compared else "nothing is wrong, nothing was compared"
        ]
    return f"{count}: {', '.join(parts)}"


def _do_now(findings: Sequence[Finding]) -> str:
    """A drill asks for nothing."""
    real = [each for each in findings if each.drill is None]
    condemned = [each for each in real if is_condemned(each)]
    parts = [
        f"{form}: {_where([each for each in condemned if each.severity is severity])}."
        for severity, form in _CURES.items()
        if any(each.severity is severity for each in condemned)
    ]
    if parts:
        return f"{' '.join(parts)} The same command with --drain prints what to type."
    if failed := [each for each in real if each.exit_code]:
        return f"See the report of {printable(failed[0].directory)}: it says what to do."
    if watched := [each for each in real if each.verdict is Verdict.WARN]:
        return f"Keep in service, and watch: {_where(watched)}."
    return "Nothing: these are drills." if findings else "Nothing: no GPU stands apart."


def is_condemned(finding: Finding) -> bool:
    """SUSPECT is ISOLATE from the second transient fault of a GPU on."""
    is_named = finding.verdict in (Verdict.FAIL, Verdict.SUSPECT)
    return is_named and finding.severity in _CURES


def _where(findings: Sequence[Finding]) -> str:
    return few(list(dict.fromkeys(f"{name_of(f)} {f.worker or ''}".rstrip() for f in findings)))


def _many(num: int, noun: str) -> str:
    return f"{num:,} {noun}{'s' * (num != 1)}"


_WORDS: Mapping[Seen, str] = {
    "bits": "with other bits",
    "nonfinite": "not finite",
    "slow": "slow",
    "dead": "dead",
    "not compared": "compared with nobody",
}


def _counts(findings: Iterable[Finding]) -> Iterator[str]:
    findings = list(findings)
    for seen, words in _WORDS.items():
        if num := sum(each.seen == seen for each in findings):
            yield f"{num:,} {words}"
    of_runs = Counter(each.verdict for each in findings if each.seen == "run")
    yield from (f"{of_runs[verdict]:,} {verdict}" for verdict in GRAVEST if of_runs[verdict])


def _notes(runs: Sequence[FleetInput], groups: Sequence[Group]) -> Iterator[str]:
    """Which workers stand apart, and why."""
    apart = groups[1 : 1 + _MOST_APART]
    for group in apart:
        many = f"{_many(group.workers, 'worker')} of {_many(group.runs, 'run')}"
        why = "; ".join(map(str, group.others)) or "another group"
        yield f"apart: {many}: {why}"
    if (rest := len(groups) - 1 - len(apart)) > 0:
        yield f"apart: {rest:,} more groups"
    reasons = Counter(reason for run in runs for w in run.workers if (reason := run.why_not(w)))
    for why, num in reasons.items():
        yield f"not compared: {_many(num, 'worker')}: {printable(why)}"
    names = Counter(name_of(run) for run in runs)
    devices = Counter(d.uuid for run in runs for d in run.devices.values() if d.uuid)
    if again := sum(1 for count in devices.values() if count > 1):
        yield f"in several runs, with one vote each: {_many(again, 'GPU')}"
    if twice := [name for name, count in names.items() if count > 1]:
        more = f" and {len(twice) - 1:,} more" if len(twice) > 1 else ""
        yield f"several runs are of a machine of the same name: {twice[0]}{more}"


def _unlike(groups: Sequence[Members]) -> Iterator[str]:
    """Workers that turned out not to be comparable with their group."""
    reasons = Counter(why for each in groups for why in each.compared.unlike.values())
    for why, num in list(reasons.items())[:_MOST_APART]:
        yield f"apart: {_many(num, 'worker')}: {why}"


def _rows(
    runs: Sequence[FleetInput], groups: Sequence[Members], findings: Sequence[Finding]
) -> list[FleetRun]:
    of_run: dict[int, list[Finding]] = {}
    for finding in findings:
        of_run.setdefault(finding.run, []).append(finding)
    group_of = {m.place: at for at, each in enumerate(groups) for m in each.members}
    return [_row(at, run, groups, group_of, of_run.get(at, [])) for at, run in enumerate(runs)]


def _row(
    number: int,
    run: FleetInput,
    groups: Sequence[Members],
    group_of: Mapping[Place, int],
    findings: Sequence[Finding],
) -> FleetRun:
    worst = {}
    for finding in reversed(findings):
        worst[finding.worker] = finding
    workers = []
    for worker in run.workers:
        place, found = (number, worker.name), worst.get(worker.name)
        at = group_of.get(place)
        workers.append(
            FleetWorker(
                name=worker.name,
                verdict=_cleared_or(run, worker.verdict) if found is None else found.verdict,
                severity=None if found is None else found.severity,
                group=at,
                device=run.devices[worker.name],
                figures=_figures(worker),
                speed=None if at is None else groups[at].speeds.speed.get(place),
            )
        )
    verdict = findings[0].verdict if findings else _cleared_or(run, run.result.verdict)
    return FleetRun(
        **{name: getattr(run, name) for name in _SAME},
        scheduler=run.record.scheduler if run.record else None,
        started_at=run.record.started_at if run.record else None,
        duration_s=run.record.duration_s if run.record else None,
        verdict=verdict,
        exit_code=run.result.exit_code,
        summary=run.result.summary,
        workers=workers,
    )


_SAME = ("directory", "path", "page", "host", "node", "drill", "is_dead")


def _figures(worker: WorkerResult) -> Figures:
    return Figures(
        steps=worker.steps,
        duration_s=worker.duration_s,
        tokens_per_s=worker.tokens_per_s,
        peak_memory_bytes=worker.peak_memory_bytes,
        temperature_max_c=worker.telemetry.temperature_max_c if worker.telemetry else None,
    )


def _cleared_or(run: FleetInput, verdict: Verdict) -> Verdict:
    """One that differed from its only peer is cleared where the fleet has its bits: then nothing
    was found of it."""
    is_cleared = verdict is Verdict.INCONCLUSIVE and not run.is_dead
    return Verdict.PASS if is_cleared else verdict
