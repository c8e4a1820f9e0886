"""Follows the workers while they run: keeps their histories, keeps them in step, and stops the run
when bits differ."""

from collections.abc import Iterable, Mapping
from statistics import median

from launcher.verdict.agreement import Agreement
from launcher.verdict.disagreement import Disagreement, Mismatch, explain
from launcher.verdict.observer import NEVER, Observer
from launcher.verdict.pace import Pace
from launcher.verdict.record import Stop
from launcher.verdict.slow import Slowness
from launcher.verdict.steps import UNREPEATABLE, History
from model_check.errors import EXIT_DISAGREEMENT, EXIT_UNNAMED, EXIT_USAGE
from model_check.events import (
    AskVectors,
    Break,
    Command,
    Evaluation,
    Event,
    Phase,
    Step,
    Vectors,
)

SETTLE_S = 2.0
"""Workers that differ have so long to tell their vectors, or SETTLE_STEPS of their median step:
they answer between two steps. Two seconds are for a busy machine."""
SETTLE_STEPS = 2
GO_S = 10.0
"""No worker stays longer after the last of its group has finished."""


class Watch(Observer):
    """The supervisor's observer for one run. A worker without equals is held by nobody."""

    def __init__(self, groups: Mapping[str, str], max_lead: int) -> None:
        """`groups`: worker -> the group whose members must agree bit for bit. `max_lead`: how many
        steps a worker may be ahead of the slowest of its group."""
        self.histories = {name: History() for name in groups}
        self.mismatch: Mismatch | None = None
        self.slowness = Slowness(groups)
        self.agreement = Agreement(groups)
        self.vectors: dict[str, Vectors] = {}
        """Worker -> those of the step that differs, as far as they were told."""
        self.last_vectors: dict[str, Vectors] = {}
        """Worker -> the latest that it told."""
        self._paces = _paces(groups, max_lead)
        self._step_s: dict[str, float] = {}
        """How long each worker's last step took."""
        self._difference: Disagreement | None = None
        self._differing: Pace | None = None
        """The group of that difference."""
        self._is_told = False
        """The difference ends the run: its workers have told what they know, or had their time."""
        self._settle_until = NEVER
        self._died: set[str] = set()
        """The workers that ended, but for those that said that they ended well."""
        # Of each kind the latest: where a report is rebuilt, nobody takes them.
        self._commands: dict[tuple[str, type[Command]], Command] = {}
        for pace in set(self._paces.values()):
            self._tell(pace.more_credit())

    @property
    def disagreement(self) -> Disagreement | None:
        """The first, with all that is known of it by now."""
        if self._difference is None:
            return None
        return explain(self._difference, self.vectors)

    @property
    def due(self) -> float:
        return min(self._settle_until, NEVER if self._difference else self.agreement.due)

    def on_event(self, worker: str, event: Event) -> Stop | None:
        """Take one event; a Stop when all have told what they know of a step whose bits differ."""
        self.histories[worker].record(event)
        if (stop := self._judge_alone(worker, event)) is not None:
            return stop
        if isinstance(event, Step):
            self._step_s[worker] = event.ms / 1000
            self.slowness.record(worker, event)
        if isinstance(event, Step | Evaluation):
            self._compare(worker, event)
        elif isinstance(event, Vectors):
            self._take(worker, event)
        if pace := self._paces.get(worker):
            pace.on_event(worker, event)
            self._guide(pace)
        return self._stop_if_settled()

    def on_end(self, worker: str) -> None:
        if pace := self._paces.get(worker):
            if worker in pace.here:
                self._died.add(worker)
            pace.leave(worker)
            self._guide(pace)
        if self._difference is None and (found := self.agreement.leave(worker)):
            self._ask_about(found)

    def tick(self, now: float) -> Stop | None:
        """A Stop when those that differ have told all, or had their time. A death ends the run, and
        their time: in whatever order the two are read."""
        if self._difference is None and (found := self.agreement.overdue(now)):
            self._ask_about(found)
        if (pace := self._differing) is not None and not self._is_told:
            has_died = not self._died.isdisjoint(pace.workers)
            patience_s = 0.0 if has_died else self._patience_s(pace)
            self._settle_until = min(self._settle_until, now + patience_s)
        return self._stop_if_settled(is_late=now >= self._settle_until)

    def commands(self) -> list[tuple[str, Command]]:
        told = [(worker, command) for (worker, _), command in self._commands.items()]
        self._commands.clear()
        return told

    def finish(self) -> None:
        """The run is over: a difference that no further report can settle counts, too."""
        if self._difference is None and (found := self.agreement.unsettled()):
            self._keep(found)

    def _judge_alone(self, worker: str, event: Event) -> Stop | None:
        """What ends the run whatever the others say."""
        match event:
            case Phase(name="build"):
                self.mismatch = self.mismatch or self.agreement.identify(worker, event.detail)
                return Stop(str(self.mismatch), EXIT_USAGE) if self.mismatch else None
            case Step(repeated=False):
                return Stop(f"{worker}: {UNREPEATABLE}", EXIT_USAGE, (worker,))
            case Break():
                return Stop(f"{worker}: {event.what}", EXIT_DISAGREEMENT, (worker,))
        return None

    def _compare(self, worker: str, event: Step | Evaluation) -> None:
        if self._difference is None and (found := self.agreement.record(worker, event)):
            self._ask_about(found)

    def _ask_about(self, found: Disagreement) -> None:
        pace = self._keep(found)
        ask = AskVectors(step=found.step)
        self._tell((name, ask) for name in sorted(pace.here - self.vectors.keys()))

    def _keep(self, found: Disagreement) -> Pace:
        """The pace of the group that differs. What its workers told before they were asked counts,
        too."""
        pace = self._paces[next(iter(found.bits))]
        self._difference, self._differing = found, pace
        for worker in pace.workers:
            if worker in self.last_vectors:
                self._take(worker, self.last_vectors[worker])
        return pace

    def _take(self, worker: str, vectors: Vectors) -> None:
        self.last_vectors[worker] = vectors
        found, pace = self._difference, self._differing
        if found and pace and worker in pace.workers and vectors.step == found.step:
            self.vectors[worker] = vectors

    def _guide(self, pace: Pace) -> None:
        if pace is self._differing:
            return  # what differs must still be there when it is asked for
        self._tell(pace.more_credit())
        if pace.is_finished:
            self._tell(pace.let_go())

    def _patience_s(self, pace: Pace) -> float:
        step_s = median(self._step_s[worker] for worker in pace.workers if worker in self._step_s)
        patience_s = max(SETTLE_S, SETTLE_STEPS * step_s)
        return min(GO_S, patience_s) if pace.is_finished else patience_s

    def _stop_if_settled(self, *, is_late: bool = False) -> Stop | None:
        """Once."""
        pace = self._differing
        if pace is None or self._is_told or not (is_late or pace.here <= self.vectors.keys()):
            return None
        self._is_told, self._settle_until = True, NEVER
        found = self.disagreement
        if found is None:
            return None
        return Stop(str(found), EXIT_DISAGREEMENT if found.odd else EXIT_UNNAMED, found.odd)

    def _tell(self, commands: Iterable[tuple[str, Command]]) -> None:
        for worker, command in commands:
            self._commands[worker, type(command)] = command


def _paces(groups: Mapping[str, str], max_lead: int) -> dict[str, Pace]:
    """Worker -> the pace of its group; none for a worker without equals."""
    members: dict[str, list[str]] = {}
    for worker, group in groups.items():
        members.setdefault(group, []).append(worker)
    paces = {group: Pace(names, max_lead) for group, names in members.items() if len(names) > 1}
    return {worker: paces[group] for worker, group in groups.items() if group in paces}
