"""Holds what each worker tells against a golden file, as it tells it. Pure over events."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from launcher.verdict.agreement import compare
from launcher.verdict.disagreement import Disagreement, explain
from launcher.verdict.facts import WorkerFacts
from launcher.verdict.golden import (
    NAME,
    OF_SPEED,
    Golden,
    GoldenResult,
    Other,
    Standing,
    key_of,
    others,
)
from launcher.verdict.own_command import COMMAND, given_otherwise
from launcher.verdict.record import RunRecord
from launcher.verdict.slow import WARM_UP
from model_check.events import Evaluation, Event, Step, Vectors
from model_check.utils.fingerprint import BEFORE
from model_check.utils.words import listed

_OTHER_WEIGHTS = "it began with other weights (model.init_from, or how they are drawn)"


class _Track(Struct):
    """What is kept of one worker."""

    num_equal: int = 0
    last: Step | None = None
    """Its latest step that was equal."""
    difference: Disagreement | None = None
    given: list[str] = field(default_factory=list)
    """What it had been given otherwise to compute where it differs, in words."""
    ms: list[float] = field(default_factory=list)
    """Of each step, milliseconds."""


class GoldenWatch:
    def __init__(
        self, golden: Golden, file: str, workers: Iterable[str], settings: Mapping[str, Any]
    ) -> None:
        """`file`: the path as it was asked for. `settings`: those that decide the steps of the run,
        or its command, by name, to name what differs; empty: not known."""
        self._golden, self._file, self._settings = golden, file, settings
        self._steps = {step.step: step for step in golden.steps}
        self._evaluations = {(e.step, e.split): e for e in golden.evaluations}
        self._tracks = {worker: _Track() for worker in workers}

    def record(self, worker: str, event: Event) -> None:
        track = self._tracks[worker]
        match event:
            case Step():
                track.ms.append(event.ms)
                self._hold(worker, event, self._steps.get(event.step))
            case Evaluation():
                self._hold(worker, event, self._evaluations.get((event.step, event.split)))

    def result(
        self, record: RunRecord, all_facts: Mapping[str, WorkerFacts], last: Mapping[str, Vectors]
    ) -> GoldenResult:
        """Of a run that is over. `last`: worker -> the latest fingerprints that it told."""
        was = self._golden.source.versions
        standings = [
            self._standing(name, record, all_facts[name], last.get(name)) for name in self._tracks
        ]
        return GoldenResult(
            file=self._file,
            source=self._golden.source,
            workers=self._without_other_start(standings),
            changed=[o for o in others(was, record.versions) if o.name not in self._golden.key],
        )

    def _hold(
        self, worker: str, event: Step | Evaluation, expected: Step | Evaluation | None
    ) -> None:
        track = self._tracks[worker]
        if expected is None or track.difference is not None:
            return
        if not _is_same(expected, event):
            track.difference = compare({NAME: expected, worker: event})
        if track.difference and isinstance(expected, Step) and isinstance(event, Step):
            told = {NAME: expected, worker: event}
            before = {NAME: self._steps.get(event.step - 1), worker: track.last}
            were = {name: step for name, step in before.items() if step is not None}
            track.given = given_otherwise(track.difference, told, were).words
        if isinstance(event, Step) and track.difference is None:
            track.num_equal += 1
            track.last = event

    def _standing(
        self, name: str, record: RunRecord, facts: WorkerFacts, last: Vectors | None
    ) -> Standing:
        track = self._tracks[name]
        here = key_of(record.groups[name], facts.detail, record.checked)
        of_other_kind = self._golden.why_not(record.checked)
        differing = others(self._golden.key, here) if facts.detail and not of_other_kind else []
        standing = Standing(
            name=name,
            steps=facts.num_steps,
            equal_steps=track.num_equal,
            others=self._by_setting(differing),
            why_not=record.not_compared or of_other_kind or self._why_not(track, facts),
            speed=self._speed(track) if {o.name for o in differing}.isdisjoint(OF_SPEED) else None,
        )
        if not standing.is_comparable or track.difference is None:
            return standing
        vectors = {NAME: self._golden.last, name: last}
        return replace(standing, disagreement=_explained(track.difference, vectors))

    def _by_setting(self, differing: Sequence[Other]) -> list[Other]:
        """With the settings that differ in place of their digests, where they are known."""
        theirs, ours = self._golden.source.settings, self._settings
        named = others(theirs, ours) if theirs and ours else []
        digest = [other for other in differing if other.name in ("settings", COMMAND)]
        return [*(named or digest if digest else []), *(o for o in differing if o not in digest)]

    def _why_not(self, track: _Track, facts: WorkerFacts) -> str | None:
        if not facts.num_steps:
            return "it told no step"
        is_held = track.num_equal or track.difference is not None
        return None if is_held else "the file holds none of its steps"

    def _without_other_start(self, standings: Sequence[Standing]) -> list[Standing]:
        """Where all had been given something else to compute, nothing that they computed is known
        to be wrong."""
        why = {each.name: told for each in standings if (told := self._other_start(each))}
        if len(why) < sum(each.is_comparable for each in standings):
            return [*standings]
        return [
            replace(each, disagreement=None, why_not=why[each.name]) if each.name in why else each
            for each in standings
        ]

    def _other_start(self, standing: Standing) -> str | None:
        """What this worker had been given otherwise; None: it differs in nothing, or computed what
        differs."""
        found, given = standing.disagreement, self._tracks[standing.name].given
        if found is None:
            return None
        if self._golden.is_of_command:
            what = f"other than in the file from step {found.step} on: {listed(given)}"
            return what if given else None
        is_first = found.step == self._golden.steps[0].step and found.quantity.startswith(BEFORE)
        return _OTHER_WEIGHTS if is_first else None

    def _speed(self, track: _Track) -> float | None:
        golden_ms, own_ms = self._golden.step_ms, usual_ms(track.ms)
        return round(golden_ms / own_ms, 3) if golden_ms and own_ms else None


def usual_ms(ms: Sequence[float]) -> float | None:
    """The median of step times behind the warm-up; None: too few."""
    return median(ms[WARM_UP:]) if len(ms) > WARM_UP else None


def _is_same(one: Step | Evaluation, other: Step | Evaluation) -> bool:
    """The usual case, in a twentieth of the time that `compare` takes."""
    if not (isinstance(one, Step) and isinstance(other, Step)) or one.loss != other.loss:
        return False
    return (one.grad_norm, one.taken, one.fp) == (other.grad_norm, other.taken, other.fp)


def _explained(found: Disagreement, vectors: Mapping[str, Vectors | None]) -> Disagreement:
    """With the tensor, where both told the fingerprints of that step."""
    told = {name: each for name, each in vectors.items() if each and each.step == found.step}
    return explain(found, told)
