"""What happens between the moment that a worker is seen to be wrong and the end of the run: its
group tells the fingerprints of the step, then the suspects and a healthy worker keep their state.
Pure; times are monotonic seconds."""

from collections.abc import Iterable, Iterator, Mapping, Set
from enum import Enum, auto
from statistics import median

from launcher.verdict.disagreement import Disagreement, explain
from launcher.verdict.observer import NEVER, SETTLE_S, SETTLE_STEPS
from launcher.verdict.pace import Pace
from launcher.verdict.record import Stop
from model_check.errors import EXIT_DISAGREEMENT, EXIT_UNNAMED
from model_check.events import AskVectors, Break, Command, Dump, Vectors
from model_check.utils.evidence import EVIDENCE_BYTES_PER_S, EVIDENCE_S
from model_check.utils.fingerprint import BEFORE, in_order

GO_S = 10.0
"""No worker stays longer after the last of its group has finished."""
_MAX_GUILTY = 64
_FLOWS = ("audit", "inputs", "forward", "backward")
"""Quantities of which a dossier keeps no tensors."""


class _Stage(Enum):
    ASKED = auto()
    """They tell the fingerprints of the step."""
    KEEPING = auto()
    OVER = auto()


class Settling:
    """A fault of one group of workers. It ends the run, unless the others go on."""

    def __init__(
        self, pace: Pace | None, died: Set[str], named: Set[str], dossier_bytes: float | None
    ) -> None:
        """`pace`: of the group; None: its worker has no equals. `died`: the workers whose end
        may end the run; it changes. `named`: the suspects of all faults so far; it grows.
        `dossier_bytes`: how much each may keep; None: nobody keeps anything."""
        self.pace = pace
        self.of_step = 0
        """The step of the fault."""
        self.difference: Disagreement | None = None
        self.vectors: dict[str, Vectors] = {}
        """Worker -> those of the step that differs, as far as they were told."""
        self.step_s: dict[str, float] = {}
        """How long each worker's last step took."""
        self._dossier_bytes = dossier_bytes
        self._stop: Stop | None = None
        self._stage = _Stage.ASKED
        self._until = NEVER
        self._keepers: set[str] = set()
        """Those that have not kept their state yet."""
        self._behind: set[str] = set()
        """Those of whom it is not known yet whether their state changed, too ..."""
        self._behind_until = NEVER
        """... and how long they are waited for."""
        self._healthy: str | None = None
        """The one that keeps beside the suspects."""
        self._dump: Dump | None = None
        self._died = died
        self._named = named
        self._commands: list[tuple[str, Command]] = []

    @property
    def due(self) -> float:
        return min(self._until, self._behind_until if self._behind else NEVER)

    @property
    def holds_run(self) -> bool:
        """Whether a death must wait: somebody is named, and what it shows is not kept yet."""
        is_named = self._stop.culprits if self._stop else self.difference and self.difference.odd
        return bool(is_named) and self._stage is not _Stage.OVER

    def begin_with_difference(self, found: Disagreement, known: Mapping[str, Vectors]) -> None:
        """`known`: what was told without being asked."""
        assert self.pace is not None, "a difference is among equals"
        self.difference, self.of_step = found, found.step
        for worker in self.pace.workers:
            if worker in known:
                self.take(worker, known[worker])
        ask = AskVectors(step=found.step)
        missing = self.pace.here - self.vectors.keys()
        self._commands += [(name, ask) for name in sorted(missing)]

    def begin_with_trial(self, found: Disagreement) -> None:
        """Before its first step no state could show it: nobody keeps any."""
        self.difference, self._stage = found, _Stage.KEEPING
        code = EXIT_DISAGREEMENT if found.odd else EXIT_UNNAMED
        self._stop = Stop(str(found), code, found.odd, outlasts_deaths=True)

    def begin_with_break(self, worker: str, found: Break, behind: Iterable[str]) -> None:
        """It and a healthy one are asked to keep their state; without equals it does by itself.
        `behind`: its equals that have not come so far."""
        self.of_step = found.step
        self._behind = {*behind}
        stop = Stop(f"{worker}: {found.what}", EXIT_DISAGREEMENT, (worker,))
        self._keep(stop, [worker], [found.kept_as])

    def asks(self, worker: str) -> bool:
        """Whether it is to keep its state for this difference, or will be."""
        found = self.difference
        return found is not None and worker in (found.odd or found.two_that_differ)

    def take(self, worker: str, vectors: Vectors) -> None:
        found = self.difference
        if found and self.pace and worker in self.pace.workers and vectors.step == found.step:
            self.vectors[worker] = vectors

    @property
    def suspects(self) -> tuple[str, ...]:
        """Those that are named, as soon as all is told of them."""
        return () if self._stop is None else self._stop.culprits

    @property
    def reason(self) -> str:
        return str(self._stop and self._stop.reason)

    def done(self, worker: str, of_step: int | None = None) -> None:
        """It has saved its state of that fault, or could not; None: it has ended."""
        if of_step in (None, self.of_step):
            self._keepers.discard(worker)
            self._behind.discard(worker)

    def heard(self, worker: str, step: int) -> None:
        """It has come through this step, or found its state changed there."""
        if step >= self.of_step:
            self._behind.discard(worker)

    def avoid(self, named: Set[str]) -> None:
        """They are suspects by now: what one of them kept as a healthy one does not count, and
        another one keeps. Where the others went on, the slowest has hardly passed that step."""
        if self.pace and self._stage is _Stage.KEEPING and self._healthy in named:
            self._keepers.discard(self._healthy)
            self._commands = [each for each in self._commands if each[0] != self._healthy]
            self._ask(self._find_healthy(self.pace.slowest_first))

    def commands(self) -> list[tuple[str, Command]]:
        told, self._commands = self._commands, []
        return told

    def advance(self, now: float | None = None) -> Stop | None:
        """What the run ends with, once: when all is told and kept, or they had their time."""
        if self._stage is _Stage.ASKED and (self._have_told() or self._is_late(now)):
            self._ask_to_keep()
        is_over = not (self._keepers or self._awaits_others(now)) or self._is_late(now)
        if self._stage is _Stage.KEEPING and is_over:
            self._stage, self._until = _Stage.OVER, NEVER
            return self._stop
        return None

    @property
    def _has_died(self) -> bool:
        """One of the group."""
        return self.pace is not None and not self._died.isdisjoint(self.pace.workers)

    def _have_told(self) -> bool:
        return self.pace is not None and self.pace.here <= self.vectors.keys()

    def _is_late(self, now: float | None) -> bool:
        """Sets the deadline when it is first asked in a stage. A death ends the run, and the time
        to tell: in whatever order the two are read."""
        if now is None or self._stage is _Stage.OVER:
            return False
        has_died = self._stage is _Stage.ASKED and self._has_died
        patience_s = 0.0 if has_died else self._patience_s()
        self._until = min(self._until, now + patience_s)
        return now >= self._until

    def _awaits_others(self, now: float | None) -> bool:
        """One that hangs, or has no credit for that step, never tells."""
        if self._behind and now is not None:
            self._behind_until = min(self._behind_until, now + self._settle_s)
        return bool(self._behind) and (now is None or now < self._behind_until)

    @property
    def _step_s(self) -> float:
        return median(self.step_s.values()) if self.step_s else 0.0

    @property
    def _settle_s(self) -> float:
        return max(SETTLE_S, SETTLE_STEPS * self._step_s)

    def _patience_s(self) -> float:
        if self._stage is _Stage.KEEPING:
            num_steps = 0 if self.pace is None else self.pace.lead + 1
            bytes_s = (self._dossier_bytes or 0.0) / EVIDENCE_BYTES_PER_S
            return EVIDENCE_S + SETTLE_STEPS * num_steps * self._step_s + bytes_s
        is_at_end = self.pace is not None and self.pace.is_finished
        return min(GO_S, self._settle_s) if is_at_end else self._settle_s

    def _ask_to_keep(self) -> None:
        assert self.difference is not None
        found = explain(self.difference, self.vectors)
        code = EXIT_DISAGREEMENT if found.odd else EXIT_UNNAMED
        suspects = found.odd or found.two_that_differ
        stop = Stop(str(found), code, found.odd)
        self._keep(stop, suspects, list(_guilty(self.vectors, suspects)))

    def _keep(self, stop: Stop, suspects: Iterable[str], tensors: list[str]) -> None:
        """All keep the state behind the last step with credit, which nobody has passed; one that
        has nobody beside it, where it is."""
        self._stop, self._stage, self._until = stop, _Stage.KEEPING, NEVER
        if self._dossier_bytes is None or (self._has_died and not stop.culprits):
            return  # a death may name somebody
        if self.pace is None:
            self._keepers = {*suspects}
            return
        keepers = self.pace.here.intersection(suspects) - self._died
        if keepers:
            keepers |= self._find_healthy(sorted(self.pace.here))
        step = self.pace.credit + 1 if len(keepers) > 1 else 0
        self._dump = Dump(step=step, of_step=self.of_step, tensors=tensors)
        self._ask(keepers)

    def _find_healthy(self, names: Iterable[str]) -> set[str]:
        """The first that nothing is known against, or none."""
        known = self._died | self._named
        found = [name for name in names if name not in known and not self.asks(name)][:1]
        self._healthy = next(iter(found), None)
        return {*found}

    def _ask(self, names: Iterable[str]) -> None:
        """To keep their state."""
        assert self._dump is not None
        self._keepers |= {*names}
        self._commands += [(name, self._dump) for name in sorted(names)]


def _guilty(vectors: Mapping[str, Vectors], suspects: Iterable[str]) -> Iterator[str]:
    """The tensors that differ, in causal order, as a dossier calls them."""
    suspects = {*suspects} & vectors.keys()
    told = [vectors[name] for name in suspects]
    other = next((vectors[name] for name in vectors if name not in suspects), None)
    told += [other] if other is not None else []
    names: dict[str, None] = {}
    for quantity in in_order(q for each in told for q in each.fp):
        kept_as = "gradients" if quantity == "grad_norms" else quantity.removeprefix(BEFORE)
        tensors = [each.fp.get(quantity, {}) for each in told]
        if kept_as in _FLOWS or len(tensors) < 2:
            continue
        for tensor in tensors[0]:
            if len({fp.get(tensor) for fp in tensors}) > 1:
                names.setdefault(f"{kept_as}/{tensor}")
    yield from list(names)[:_MAX_GUILTY]
