"""What is wrong in a fleet, worker by worker: what its run has found, and what only the comparison
with other runs shows. Pure."""

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from launcher.verdict.fleet import (
    Compared,
    Device,
    Finding,
    FleetInput,
    Group,
    OddBits,
    Place,
    Seen,
)
from launcher.verdict.fleet_bits import Member
from launcher.verdict.fleet_speed import Speeds
from launcher.verdict.results import INNOCENT, RunResult, Verdict, WorkerResult
from launcher.verdict.severity import CauseClass, Repeat, Severity
from model_check.errors import (
    EXIT_DISAGREEMENT,
    EXIT_HEALTH,
    EXIT_NON_FINITE,
    EXIT_PASS,
    EXIT_UNNAMED,
    EXIT_UNPROVEN,
    EXIT_USAGE,
)

GRAVEST = (
    *(Verdict.FAIL, Verdict.SUSPECT, Verdict.INCONCLUSIVE, Verdict.INVALID, Verdict.STOPPED),
    *(Verdict.WARN, Verdict.PASS),
)
"""From the gravest to the least, of findings of the same severity."""
_OF_BITS = (EXIT_DISAGREEMENT, EXIT_UNNAMED)


class Members(Struct):
    """A group, and what its comparison has shown."""

    key: dict[str, Any]
    members: list[Member] = field(default_factory=list)
    compared: Compared = field(default_factory=Compared)
    speeds: Speeds = Speeds({}, {})

    @property
    def devices(self) -> set[str]:
        return {member.device for member in self.members}

    @property
    def runs(self) -> set[int]:
        return {member.place[0] for member in self.members}


def gravity(finding: Finding) -> tuple[bool, int, int, int, str]:
    """The gravest comes first: one that fails something, then by severity, verdict, place."""
    severity = finding.severity
    if severity is None:  # a death or a hang, which is not classed
        severity = Severity.MONITOR if finding.verdict is Verdict.FAIL else Severity.IGNORE
    return (
        finding.exit_code == EXIT_PASS,
        list(Severity).index(severity),
        GRAVEST.index(finding.verdict),
        finding.run,
        finding.worker or "",
    )


class _Ends(Struct, frozen=True):
    """Devices that came as far as one that then was not finite."""

    finite: set[str]
    """They told its next step."""
    bad: set[str]
    """They were not finite in it either."""


class Findings:
    """Of each worker, the gravest; and of runs as a whole."""

    def __init__(
        self,
        runs: Sequence[FleetInput],
        groups: Sequence[Members],
        told: Sequence[Group],
        *,
        is_fleet: bool = True,
    ) -> None:
        """`is_fleet`: else all are parts of one run, and none of them needs a peer in another."""
        self._needs_peers = is_fleet and len(runs) > 1
        self._runs, self._groups, self._told = runs, groups, told
        self._group_of = {m.place: at for at, each in enumerate(groups) for m in each.members}
        self._member_of = {m.place: m for each in groups for m in each.members}
        self._odd_in: dict[int, set[str]] = {}
        """Run -> its odd workers."""
        for place in (place for each in groups for place in each.compared.odd):
            self._odd_in.setdefault(place[0], set()).add(place[1])
        self._odd_again = self._devices_odd_again()
        self._ends: dict[tuple[int, int], _Ends] = {}
        self._parts: dict[tuple[str, ...], list[int]] = {}
        """Job of several nodes -> its runs."""
        for number, run in enumerate(runs):
            if run.job is not None:
                self._parts.setdefault(run.job, []).append(number)

    def all(self) -> Iterator[Finding]:
        for number, run in enumerate(self._runs):
            named = False
            for worker in run.workers:
                for finding in self._of_worker(number, run, worker):
                    # That a worker is alone, or slow, explains no failure of its run.
                    explains = finding.seen not in ("not compared", "slow")
                    named = named or (explains and finding.exit_code != EXIT_PASS)
                    yield finding
            if (of_run := self._of_run(number, run, named)) is not None:
                yield of_run

    def _of_worker(self, number: int, run: FleetInput, worker: WorkerResult) -> Iterator[Finding]:
        place = (number, worker.name)
        own = self._own(number, run, worker)
        odd = None if self._is_named_for(number, run, worker) else self._odd(place)
        if (others := self._unlike_golden_with(place, run, worker)) is not None:
            yield self._golden_is_unlike(number, run, worker, others)
        elif self._is_contradicted(place, run, worker):
            yield self._contradiction(number, run, worker)
        elif odd is not None:
            yield _graver(own, self._of_bits(number, run, worker, odd), odd)
            if own is not None and own.exit_code not in _OF_BITS:
                yield own
        elif (finite := self._finite_peers(place, run, worker)) is not None:
            yield self._nonfinite(number, run, worker, finite)
        elif own is not None and not self._is_tie_settled(place, own):
            yield own
        if (slow := self._slow(number, run, worker)) is not None:
            yield slow
        if (alone := self._not_compared(number, run, worker)) is not None and own is None:
            yield alone

    # What a run itself has found

    def _own(self, number: int, run: FleetInput, worker: WorkerResult) -> Finding | None:
        if worker.verdict in INNOCENT or (run.is_dead and worker.verdict is Verdict.INCONCLUSIVE):
            return None
        fails = worker.verdict is not Verdict.WARN
        return self._finding(
            "run",
            number,
            worker,
            worker.verdict,
            worker.cause_class,
            worker.severity,
            run.result.exit_code if fails else EXIT_PASS,
            _said(worker) or run.result.summary,
            repeat=worker.repeat,
            step=_first_step(run.result) if run.result.exit_code in _OF_BITS else None,
        )

    def _of_run(self, number: int, run: FleetInput, named: bool) -> Finding | None:
        """Of a run that did not pass and names no worker, or of which nothing is left."""
        result = run.result
        is_settled = result.exit_code == EXIT_UNNAMED and all(
            self._is_cleared((number, w.name)) or self._odd((number, w.name)) for w in run.workers
        )
        if result.exit_code == EXIT_PASS or ((named or is_settled) and not run.is_dead):
            return None
        if not named and self._is_ended_by_another_part(run):
            row = (Verdict.STOPPED, None, Severity.IGNORE, EXIT_PASS)
            return self._finding("run", number, None, *row, result.summary)
        seen: Seen = "dead" if run.is_dead else "run"
        kind = CauseClass.UNKNOWN if run.is_dead else None
        severity = Severity.MONITOR if run.is_dead else None
        return self._finding(
            *(seen, number, None, result.verdict, kind, severity),
            *(result.exit_code, result.summary),
        )

    def _job_of(self, number: int) -> list[int]:
        """The runs that are parts of its job: of one on a single node itself."""
        job = self._runs[number].job
        return [number] if job is None else self._parts[job]

    def _is_ended_by_another_part(self, run: FleetInput) -> bool:
        """Whether the worker that ended its job is told by the run of that node, which is here."""
        if run.is_dead or run.job is None or run.failed_first is None:
            return False
        others = (self._runs[number] for number in self._parts[run.job])
        return any(run.failed_first in each.named for each in others)

    # What only the comparison shows

    def _odd(self, place: Place) -> OddBits | None:
        at = self._group_of.get(place)
        return None if at is None else self._groups[at].compared.odd.get(place)

    def _is_cleared(self, place: Place) -> bool:
        at = self._group_of.get(place)
        return at is not None and place in self._groups[at].compared.cleared

    def _is_tie_settled(self, place: Place, own: Finding) -> bool:
        """What its run could not tell of it, the fleet does: it has the right bits."""
        is_tie = own.exit_code == EXIT_UNNAMED and own.verdict is Verdict.INCONCLUSIVE
        return is_tie and self._is_cleared(place)

    def _is_named_for(self, number: int, run: FleetInput, worker: WorkerResult) -> bool:
        """Whether another rank of its job is named for the bits that all of them have."""

        def is_named(at: int, each: WorkerResult) -> bool:
            odd = self._odd((at, each.name))
            return self._runs[at].is_odd(each) or (odd is not None and odd.is_alone)

        if not run.is_job or is_named(number, worker):
            return False
        job = self._job_of(number)
        return any(is_named(at, each) for at in job for each in self._runs[at].workers)

    def _devices_odd_again(self) -> set[str]:
        """Odd in two runs or more, where it is not the software of a host: another device of one of
        these runs had the right bits, or the device was in two hosts."""
        runs_of: dict[str, set[int]] = {}
        right_in: dict[int, set[str]] = {}
        for each in self._groups:
            for place in each.compared.odd:
                runs_of.setdefault(self._member_of[place].device, set()).add(place[0])
            for place in each.compared.cleared:
                right_in.setdefault(place[0], set()).add(self._member_of[place].device)
        return {
            device
            for device, runs in runs_of.items()
            if len(runs) > 1
            and (
                any(right_in.get(run, set()) - {device} for run in runs)
                or len({_machine(self._runs[run]) for run in runs} - {None}) > 1
            )
        }

    def _of_bits(self, number: int, run: FleetInput, worker: WorkerResult, odd: OddBits) -> Finding:
        noun = "job" if run.is_job else "device"
        what, step = _odd_text(odd, noun), odd.step
        repeat = None
        if not odd.num_right:
            row = (Verdict.INCONCLUSIVE, CauseClass.UNKNOWN, Severity.MONITOR, EXIT_UNNAMED)
        elif odd.is_shared:
            what += (
                f"; another {noun} gave the same wrong bits, so no GPU is to blame, but what they "
                "share: software, host, data"
            )
            row = (Verdict.INVALID, CauseClass.SOFTWARE, Severity.IGNORE, EXIT_USAGE)
        elif run.is_job and not odd.is_alone:
            what += "; ranks sum what they computed: the fault may be any one's"
            row = (Verdict.INCONCLUSIVE, CauseClass.UNKNOWN, Severity.MONITOR, EXIT_UNNAMED)
        elif self._member_of[number, worker.name].device in self._odd_again:
            what += "; in another run of this GPU, too"
            row = (Verdict.FAIL, CauseClass.HARDWARE, Severity.ISOLATE, EXIT_DISAGREEMENT)
            repeat = Repeat.PERSISTENT
        else:
            row = (Verdict.SUSPECT, CauseClass.UNKNOWN, Severity.MONITOR, EXIT_DISAGREEMENT)
            repeat = Repeat.NOT_REPLAYED
        verdict, kind, severity, code = row
        return self._finding(
            *("bits", number, worker, verdict, kind, severity, code, what),
            repeat=repeat,
            step=step,
            difference=odd.difference,
        )

    def _unlike_golden_with(
        self, place: Place, run: FleetInput, worker: WorkerResult
    ) -> int | None:
        """Other devices of a strict majority that had its bits in the step for which its run names
        it against a golden file. None: it does not, or there is none."""
        step = _golden_step(run.result, worker)
        if step is None or run.is_job or not _is_named_odd(run, worker):
            return None
        if not self._is_cleared(place):
            return None
        group = self._groups[self._group_of[place]]
        came = (m for m in group.members if m.first_step + m.trace.steps > step)
        others = {m.device for m in came if m.place in group.compared.cleared}
        return len(others - {self._member_of[place].device}) or None

    def _golden_is_unlike(
        self, number: int, run: FleetInput, worker: WorkerResult, others: int
    ) -> Finding:
        """The rule of a run of several workers, all of which differ from the file."""
        what = f"{_said(worker)}; and so do {others:,} equals in the fleet, with the same bits: "
        what += "the software, or another golden file's"
        return self._finding(
            *("bits", number, worker, Verdict.INVALID, CauseClass.SOFTWARE),
            *(Severity.IGNORE, EXIT_USAGE, what),
            step=_golden_step(run.result, worker),
        )

    def _is_contradicted(self, place: Place, run: FleetInput, worker: WorkerResult) -> bool:
        """Its run names it for other bits, and the fleet has those."""
        others = self._odd_in.get(place[0], set()) - {worker.name}
        return _is_named_odd(run, worker) and self._is_cleared(place) and bool(others)

    def _contradiction(self, number: int, run: FleetInput, worker: WorkerResult) -> Finding:
        what = "its run names it for other bits, but most of the fleet has the same: "
        return self._finding(
            *("bits", number, worker, Verdict.INCONCLUSIVE, CauseClass.UNKNOWN),
            *(Severity.MONITOR, EXIT_UNNAMED, what + _said(worker)),
            step=_first_step(run.result),
        )

    def _finite_peers(self, place: Place, run: FleetInput, worker: WorkerResult) -> int | None:
        """Devices that were finite at the step in which this worker was not, and had its bits until
        then. None: it was finite; there are fewer than two; another device was not finite there
        either, and no two GPUs fail alike; it is a rank, which gets the NaN of any other; or its
        own run had such peers."""
        if worker.returncode != EXIT_NON_FINITE or run.is_job or not self._is_cleared(place):
            return None
        if worker.severity is Severity.ISOLATE:
            return None
        ends = self._ends_at(self._group_of[place], self._member_of[place].trace.steps)
        finite = ends.finite - {self._member_of[place].device}
        return len(finite) if len(finite) > 1 and len(ends.bad) == 1 else None

    def _ends_at(self, group: int, steps: int) -> "_Ends":
        """Of those of a group that had the same bits until then."""
        if (group, steps) not in self._ends:
            cleared = self._groups[group].compared.cleared
            members = [m for m in self._groups[group].members if m.place in cleared]
            ended = [m for m in members if m.trace.steps == steps]
            self._ends[group, steps] = _Ends(
                finite={m.device for m in members if m.trace.steps > steps},
                bad={m.device for m in ended if self._is_not_finite(m.place)},
            )
        return self._ends[group, steps]

    def _is_not_finite(self, place: Place) -> bool:
        workers = self._runs[place[0]].workers
        return any(w.name == place[1] and w.returncode == EXIT_NON_FINITE for w in workers)

    def _nonfinite(
        self, number: int, run: FleetInput, worker: WorkerResult, finite: int
    ) -> Finding:
        member = self._member_of[number, worker.name]
        step = member.first_step + member.trace.steps
        what = f"not finite in step {step}, where {finite:,} equals in the fleet were: "
        return self._finding(
            *("nonfinite", number, worker, Verdict.FAIL, CauseClass.HARDWARE),
            *(Severity.ISOLATE, EXIT_NON_FINITE, what + _said(worker)),
            repeat=worker.repeat,
            step=step,
        )

    def _slow(self, number: int, run: FleetInput, worker: WorkerResult) -> Finding | None:
        place = (number, worker.name)
        at = self._group_of.get(place)
        slow = None if at is None else self._groups[at].speeds.slow.get(place)
        if slow is None or worker.slow is not None:
            return None
        first_step = self._member_of[place].first_step
        fails = run.record is not None and "speed" in (run.record.fail_on or ())
        return self._finding(
            *("slow", number, worker, Verdict.WARN, CauseClass.HARDWARE, Severity.MONITOR),
            *(EXIT_HEALTH if fails else EXIT_PASS, slow.text(first_step)),
            step=first_step + slow.since,
        )

    def _not_compared(self, number: int, run: FleetInput, worker: WorkerResult) -> Finding | None:
        """Of a worker that trained, and whose bits were held against nobody's: neither in its run
        (or job) nor in another."""
        if not self._needs_peers or len(run.workers) > 1 or run.job or worker.trace is None:
            return None
        place = (number, worker.name)
        at = self._group_of.get(place)
        why = run.why_not(worker)
        if at is not None:
            why = self._groups[at].compared.unlike.get(place) or why
            if why is None and len(self._groups[at].members) == 1:
                why = "; ".join(map(str, self._told[at].others)) or "it is the only run of its kind"
        if why is None:
            return None
        return self._finding(
            *("not compared", number, worker, Verdict.INCONCLUSIVE, CauseClass.UNKNOWN),
            *(Severity.IGNORE, EXIT_UNPROVEN, f"compared with nobody: {why}"),
        )

    def _finding(
        self,
        seen: Seen,
        number: int,
        worker: WorkerResult | None,
        verdict: Verdict,
        kind: CauseClass | None,
        severity: Severity | None,
        code: int,
        what: str,
        **more: Any,
    ) -> Finding:
        run = self._runs[number]
        return Finding(
            seen=seen,
            run=number,
            directory=run.directory,
            host=run.host,
            node=run.node,
            worker=None if worker is None else worker.name,
            device=Device() if worker is None else run.devices[worker.name],
            verdict=verdict,
            cause_class=kind,
            severity=severity,
            exit_code=code,
            what=what,
            drill=run.drill,
            **more,
        )


def _machine(run: FleetInput) -> str | None:
    """None: not known. Two pods of one machine have two names."""
    is_pod = run.record is not None and run.record.scheduler == "kubernetes"
    return run.node or (None if is_pod else run.host)


def _said(worker: WorkerResult) -> str:
    """What is wrong with it, or what to watch; empty: nothing."""
    told = next(filter(None, [*worker.symptoms, worker.cause, *worker.warnings]), "")
    return told.removeprefix(f"{worker.name}: ") if worker.verdict not in INNOCENT else ""


def _first_step(result: RunResult) -> int | None:
    """That of its first disagreement."""
    return result.disagreement.step if result.disagreement else None


def _golden_step(result: RunResult, worker: WorkerResult) -> int | None:
    """The first in which it has other bits than the golden file. None: in none, or there is no
    file."""
    standing = result.golden.of(worker.name) if result.golden else None
    return standing.disagreement.step if standing and standing.disagreement else None


def _is_named_odd(run: FleetInput, worker: WorkerResult) -> bool:
    return worker.verdict in (Verdict.FAIL, Verdict.SUSPECT) and run.is_odd(worker)


def _graver(own: Finding | None, found: Finding, odd: OddBits) -> Finding:
    """Of what its run has found and what the fleet shows of its bits. A replay says more."""
    if own is None or own.exit_code != EXIT_DISAGREEMENT:
        return found
    is_replayed = own.repeat not in (None, Repeat.NOT_REPLAYED, Repeat.UNSETTLED)
    if odd.is_shared and not is_replayed:
        return found
    if not odd.num_right:
        return own
    best = min([own, found] if is_replayed else [found, own], key=gravity)
    what = f"{own.what}; other bits than {odd.num_right:,} equal devices of the fleet, too"
    return replace(best, seen="bits", what=what, step=found.step, difference=found.difference)


def _odd_text(odd: OddBits, noun: str) -> str:
    """`noun`: what has a vote."""
    where = "" if odd.difference is None else f": {odd.difference.place}"
    if not odd.num_right:
        return f"other bits than another {noun} from {odd.where} on{where} (no majority)"
    than = f"{odd.num_right:,} equal {noun}{'s' * (odd.num_right != 1)}"
    return f"other bits than {than} from {odd.where} on{where}"
