"""Follows the workers while they run: keeps their facts, keeps them in step, and stops the run
when bits differ."""

from collections.abc import Iterable, Mapping, Sequence

from launcher.verdict.agreement import Agreement
from launcher.verdict.alone import Standing, who_is_alone
from launcher.verdict.curves import Curves
from launcher.verdict.disagreement import EQUAL, VARIED, Disagreement, Mismatch, explain
from launcher.verdict.facts import UNREPEATABLE, WorkerFacts
from launcher.verdict.golden_watch import GoldenWatch
from launcher.verdict.observer import Dismissal, Observer
from launcher.verdict.own_command import CheckedCommand, why_unrepeatable
from launcher.verdict.pace import Pace
from launcher.verdict.record import Stop
from launcher.verdict.settling import Settling
from launcher.verdict.slow import Slowness
from model_check.errors import EXIT_USAGE
from model_check.events import (
    Break,
    Command,
    Dump,
    Evaluation,
    Event,
    Finished,
    Go,
    Kept,
    Phase,
    Step,
    Vectors,
)
from model_check.utils.trials import trials_in
from model_check.utils.words import listed


class Watch(Observer):
    """The supervisor's observer for one run. A worker without equals is held by nobody."""

    def __init__(
        self,
        groups: Mapping[str, str],
        max_lead: int,
        dossier_bytes: float | None = None,
        *,
        goes_on: bool = False,
        golden: GoldenWatch | None = None,
        command: CheckedCommand | None = None,
    ) -> None:
        """`groups`: worker -> the group whose members must agree bit for bit. `max_lead`: how many
        steps a worker may be ahead of the slowest of its group. `dossier_bytes`: how much each may
        keep as evidence; None: nobody keeps any. `goes_on`: the others go on when one is named.
        `golden`: hears each step, too. `command`: what the workers run; None: our trainer, or
        nothing is compared."""
        self.all_facts = {name: WorkerFacts() for name in groups}
        self.curves = {name: Curves() for name in groups}
        self.mismatch: Mismatch | None = None
        self.slowness = Slowness(groups)
        self.agreement = Agreement(groups)
        self.golden = golden
        self.last_vectors: dict[str, Vectors] = {}
        """Worker -> the latest that it told."""
        self._paces = _paces(groups, max_lead)
        self._dossier_bytes = dossier_bytes
        self._died: set[str] = set()
        """The workers that ended, but for those that said that they ended well, and those without
        which the run goes on."""
        self._named: set[str] = set()
        """The suspects of all faults so far."""
        self._step_s: dict[str, float] = {}
        """How long each worker's last step took."""
        self._settling: Settling | None = None
        """The fault that holds its group."""
        self._aside: list[Settling] = []
        """The faults of workers without which the run goes on."""
        self._varying: list[str] = []
        """Those whose first step gave other bits when it was computed twice."""
        self._goes_on = goes_on
        self.command = command
        self._dismissed: dict[str, Dismissal] = {}
        self._news: list[str] = []
        self._later: list[tuple[str, Step | Evaluation | Phase]] = []
        """What was told while a fault was settled; compared when the others go on."""
        self._dumps: list[tuple[str, Dump]] = []
        # Of each other kind the latest: where a report is rebuilt, nobody takes them.
        self._commands: dict[tuple[str, type[Command]], Command] = {}
        for pace in set(self._paces.values()):
            self._tell(pace.more_credit())

    @property
    def disagreements(self) -> list[Disagreement]:
        """In the order in which they were found, with all that is known of each by now."""
        faults = self._settlings
        return [explain(s.difference, s.vectors) for s in faults if s.difference is not None]

    @property
    def vectors(self) -> Mapping[str, Vectors]:
        """Worker -> those of the step that differs, as far as they were told."""
        return {} if self._settling is None else self._settling.vectors

    @property
    def due(self) -> float:
        ours = self.agreement.due if self._settling is None else self._settling.due
        return min([ours, *(settling.due for settling in self._aside)])

    @property
    def dismissed(self) -> Mapping[str, Dismissal]:
        return self._dismissed

    @property
    def holds_run(self) -> bool:
        if self._settling is None:
            return self.agreement.awaits_trials
        return self._settling.holds_run

    def on_event(self, worker: str, event: Event) -> Stop | None:
        """Take one event; a Stop when all is told and kept of a fault."""
        self.all_facts[worker].record(event)
        self.curves[worker].record(event)
        if self.golden is not None:
            self.golden.record(worker, event)
        if (stop := self._judge_alone(worker, event)) is not None:
            return stop
        match event:
            case Step():
                self._step_s[worker] = event.ms / 1000
                self.slowness.record(worker, event)
                self._compare(worker, event)
            case Evaluation():
                self._compare(worker, event)
            case Phase() if trials_in(event.detail):
                self._compare(worker, event)
            case Vectors():
                self._take(worker, event)
            case Break():
                self._keep_broken(worker, event)
            case Kept():
                self._is_done(worker, event.of_step)
        if isinstance(event, Step | Break):
            for settling in self._settlings:
                settling.heard(worker, event.step)
        if pace := self._paces.get(worker):
            pace.on_event(worker, event)
            self._guide(pace)
        return self._advance()

    def on_end(self, worker: str) -> None:
        pace = self._paces.get(worker)
        if pace is not None and worker in pace.here:
            self._died.add(worker)
        self._is_done(worker)
        self._leave(worker)
        if pace is not None:
            pace.leave(worker)
            self._guide(pace)

    def tick(self, now: float) -> Stop | None:
        """A Stop when those that have something to tell or to keep had their time."""
        if self._settling is None and (found := self.agreement.overdue(now)):
            self._settle(found)
        return self._advance(now)

    def commands(self) -> list[tuple[str, Command]]:
        """What is to be kept comes before the credit to go on."""
        others = [(worker, command) for (worker, _), command in self._commands.items()]
        told = [*self._dumps, *others]
        self._dumps.clear()
        self._commands.clear()
        return told

    def news(self) -> list[str]:
        told, self._news = self._news, []
        return told

    def finish(self) -> None:
        """The run is over: a difference that no further report can settle counts, too."""
        if self._settling is not None or self._judge_kernels():
            return
        if (found := self.agreement.unsettled()) is not None:
            self._settle(found)

    @property
    def _is_unrepeatable(self) -> bool:
        """Whether the command itself makes its workers differ."""
        return self.mismatch is not None and self.mismatch.is_of_command

    @property
    def _settlings(self) -> list[Settling]:
        return [*self._aside, *filter(None, [self._settling])]

    def _judge_alone(self, worker: str, event: Event) -> Stop | None:
        """What ends the run whatever the others say."""
        match event:
            case Phase(name="build" | "train") if event.detail:
                self.mismatch = self.mismatch or self.agreement.identify(worker, event.detail)
                return Stop(str(self.mismatch), EXIT_USAGE) if self.mismatch else None
            case Step(repeated=False):
                self._varying.append(worker)
            case Finished() if self.command is not None:  # others may do more steps
                self._leave(worker)
        return self._judge_kernels()

    def _judge_kernels(self) -> Stop | None:
        """One whose first step varies is alone with that where its equals repeat theirs."""
        for worker in self._varying:
            equals = self.agreement.equals(worker)
            twice = {n: (EQUAL, VARIED) if n in self._varying else (EQUAL,) for n in equals}
            answer = who_is_alone(twice)
            is_known = len(equals) > 1 or self.agreement.knows_equals(worker)
            if answer.standing is Standing.VARY and is_known:
                names = listed(list(answer.workers))
                return Stop(f"{names}: {UNREPEATABLE}", EXIT_USAGE, answer.workers)
        return None

    def _leave(self, worker: str) -> None:
        """Nobody waits for its reports any more."""
        if self._settling is None and (found := self.agreement.leave(worker)) is not None:
            self._settle(found)

    def _compare(self, worker: str, event: Step | Evaluation | Phase) -> None:
        if self._is_unrepeatable:
            return
        if self._settling is None:
            if (found := self.agreement.record(worker, event)) is not None:
                self._settle(found)
        elif self._goes_on:
            self._later.append((worker, event))

    def _compare_later(self) -> None:
        later, self._later = self._later, []
        for worker, event in later:
            self._compare(worker, event)

    def _settle(self, found: Disagreement) -> None:
        if self.command is not None:
            told, before = self.agreement.steps_at(found), self.agreement.steps_before(found)
            if (why := why_unrepeatable(found, told, before, self.command.seed)) is not None:
                self.mismatch = Mismatch("", found.bits, said=why)
                return
        pace = self._paces[next(iter(found.bits))]
        self._settling = self._settling_of(pace)
        if found.is_of_trial:
            self._settling.begin_with_trial(found)
        else:
            self._settling.begin_with_difference(found, self.last_vectors)
        self._name(found.odd)

    def _keep_broken(self, worker: str, event: Break) -> None:
        """It names itself: where the others go on, they need not be held for it."""
        if worker in self._dismissed or (self._settling and self._settling.asks(worker)):
            return  # it keeps its state for the difference that it made
        pace = self._paces.get(worker)
        settling = self._settling_of(pace)
        self._name([worker])
        here = () if pace is None else pace.here - {worker}
        behind = [name for name in here if self._is_behind(name, event.step)]
        settling.begin_with_break(worker, event, behind)
        if self._may_go_on_without((worker,), pace):
            self._put_aside(settling)
        elif self._settling is None:
            self._settling = settling
        else:  # the run ends of the fault before: it waits for no healthy one of this
            self._tell(told for told in settling.commands() if told[0] == worker)

    def _is_behind(self, worker: str, step: int) -> bool:
        facts = self.all_facts[worker]
        last = -1 if facts.last_step is None else facts.last_step
        return facts.broken is None and not facts.is_finished and last < step

    def _settling_of(self, pace: Pace | None) -> Settling:
        settling = Settling(pace, self._died, self._named, self._dossier_bytes)
        names = () if pace is None else pace.workers
        settling.step_s = {name: self._step_s[name] for name in names if name in self._step_s}
        return settling

    def _name(self, suspects: Iterable[str]) -> None:
        """None of them is a healthy one any more."""
        self._named.update(suspects)
        for settling in self._settlings:
            settling.avoid(self._named)

    def _take(self, worker: str, vectors: Vectors) -> None:
        self.last_vectors[worker] = vectors
        if self._settling is not None:
            self._settling.take(worker, vectors)

    def _guide(self, pace: Pace | None) -> None:
        if pace is None or (self._settling is not None and pace is self._settling.pace):
            return  # what differs must still be there when it is asked for
        self._tell(pace.more_credit())
        if pace.is_finished:
            self._tell(pace.let_go())

    def _is_done(self, worker: str, of_step: int | None = None) -> None:
        for settling in self._settlings:
            settling.done(worker, of_step)

    def _advance(self, now: float | None = None) -> Stop | None:
        if self._is_unrepeatable:
            return Stop(str(self.mismatch), EXIT_USAGE)
        for aside in self._aside:
            if aside.advance(now) is not None:
                self._let_suspects_go(aside)
            self._tell(aside.commands())
        if (settling := self._settling) is None:
            return None
        stop = settling.advance(now)
        if self._may_go_on_without(settling.suspects, settling.pace):
            self._settling = None
            self._put_aside(settling)
            if stop is not None:  # they have nothing to keep
                self._let_suspects_go(settling)
            self._compare_later()
            stop = self._advance(now)
            self._guide(settling.pace)  # unless a fault behind this one holds it
            return stop
        self._tell(settling.commands())
        return stop

    def _may_go_on_without(self, suspects: Sequence[str], pace: Pace | None) -> bool:
        has_others = pace is not None and bool(pace.here.difference(suspects))
        return self._goes_on and bool(suspects) and has_others

    def _put_aside(self, settling: Settling) -> None:
        """The others go on without its suspects, who keep their state."""
        pace, suspects = settling.pace, settling.suspects
        assert pace is not None, "there are others"
        self._aside.append(settling)
        self._news.append(f"{settling.reason}: the others go on without {listed(suspects)}")
        self._dismissed |= dict.fromkeys(suspects, Dismissal.AWAITED)
        self._died.difference_update(suspects)  # nobody waits for them any more
        for name in suspects:
            pace.leave(name)
        found = [self.agreement.exclude(name) for name in suspects]
        for difference in filter(None, found):
            if self._settling is None:
                self._settle(difference)

    def _let_suspects_go(self, settling: Settling) -> None:
        """They have kept their state, or had their time."""
        self._dismissed |= dict.fromkeys(settling.suspects, Dismissal.GIVEN_UP)
        self._tell((name, Go()) for name in settling.suspects)

    def _tell(self, commands: Iterable[tuple[str, Command]]) -> None:
        for worker, command in commands:
            if isinstance(command, Dump):
                self._dumps.append((worker, command))
            else:
                self._commands[worker, type(command)] = command


def _paces(groups: Mapping[str, str], max_lead: int) -> dict[str, Pace]:
    """Worker -> the pace of its group; none for a worker without equals."""
    members: dict[str, list[str]] = {}
    for worker, group in groups.items():
        members.setdefault(group, []).append(worker)
    paces = {group: Pace(names, max_lead) for group, names in members.items() if len(names) > 1}
    return {worker: paces[group] for worker, group in groups.items() if group in paces}
