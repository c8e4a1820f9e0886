"""Computes the steps to a fault again, in new processes, on the devices of a run that is over."""

import os
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from signal import Signals
from statistics import median

from msgspec import Struct
from msgspec.structs import replace

from launcher.launch import Launch
from launcher.output.printer import Printer
from launcher.plan import Place, ReplayPlan, plan_replay
from launcher.report.files import intact, lines_of
from launcher.supervise.outcome import Outcome
from launcher.supervise.supervisor import Supervisor
from launcher.verdict.disagreement import Replay
from launcher.verdict.live import Watch
from launcher.verdict.record import RunRecord
from launcher.verdict.replay import (
    Attempt,
    Question,
    Record,
    ReplayWatch,
    answer,
    is_open,
    questions_of,
)
from model_check.events import Step, decode
from model_check.utils.checkpoint_names import content_of
from model_check.utils.requests import TO_STOP
from model_check.utils.words import listed

_WRITES = (
    "replay: the command writes its files again, each worker its own where it names them by "
    "$MODEL_CHECK_WORKER; launch.replay_s=0: no replay"
)


def questions_to(launch: Launch, record: RunRecord, watch: Watch) -> list[Question]:
    """What the devices of a run that is over are to be asked."""
    end = record.end
    is_over = end is not None and end.is_by_bits and not end.leftovers
    settings = launch.loaded.settings.launch
    if not is_over or launch.not_compared or launch.is_job or settings.replay_s == 0:
        return []
    return questions_of(watch)


class Replayed(Struct, frozen=True):
    """The answers to all questions."""

    replays: tuple[Replay, ...]
    signum: int | None
    """The signal to us that ended them all."""


def replay(
    questions: Sequence[Question],
    launch: Launch,
    record: RunRecord,
    watch: Watch,
    printer: Printer,
    after: Outcome | None = None,
) -> Replayed:
    """The answers, all of them within launch.replay_s. `record`, `watch`: of the run that is over.
    `after`: how it ended; a signal to us that came while it did ends the replays, too. Raises
    ModelCheckError: files of the run cannot be read, or no process can be started."""
    until = min(time.monotonic() + launch.loaded.settings.launch.replay_s, launch.limits.stop_at)
    replays, signum = [], _request(after)
    for question in questions:
        replayer = Replayer(question, launch, record, watch, printer)
        replays.append(replayer.answer(until - time.monotonic(), after, signum))
        printer.say(replays[-1].said)
        signum = signum or replayer.signum
    return Replayed(tuple(replays), signum)


def _request(outcome: Outcome | None) -> int | None:
    """The signal by which we were asked to end, whatever ended the run."""
    return next((s for s in outcome.end.requests if s in TO_STOP), None) if outcome else None


class Told(Struct, frozen=True):
    """What a worker told of the steps that are replayed."""

    record: Record
    start_s: float
    """From its start, or its first word, to its first step."""
    step_s: float
    """The median of its steps."""


class Replayer:
    """One question to the devices of a run."""

    def __init__(
        self, question: Question, launch: Launch, record: RunRecord, watch: Watch, printer: Printer
    ) -> None:
        self._question, self._launch, self._printer = question, launch, printer
        self._watch, self._num_workers = watch, len(record.workers)
        self._directory = launch.context.run_dir
        # A command tells nothing before its first step, and may take long to come there.
        began_ns = record.started_ns if launch.check else None
        self._told = {
            name: _told(self._directory, name, question.to_step, began_ns)
            for name in question.workers
        }
        self.signum: int | None = None
        """The signal to us that ended it."""
        self._begin = _begin(question, watch)
        self._lost = _lost(self._begin)
        cache = Path(record.data["path"]) if record.data else None
        held = frozenset(question.workers if len(question.workers) > 1 else ())
        self._context = replace(launch.context, token_cache=cache, held=held)

    def answer(self, limit_s: float, after: Outcome | None, signum: int | None) -> Replay:
        """Compute the steps again, as often as it takes, for at most so long. `signum`: the signal
        that forbids it already."""
        asked = f"{Signals(signum).name} received" if signum else None
        if why_not := asked or self._question.why_not or self._lost or self._too_long(limit_s):
            return answer(self._question, [], self._begin.step, why_not)
        with self._printer.showing(lambda columns, _: [self._what[: columns - 1]]):
            return self._computed_again(limit_s, after)

    def _computed_again(self, limit_s: float, after: Outcome | None) -> Replay:
        self._printer.say(f"{self._what}, at most {limit_s:.0f} s (launch.replay_s)")
        if self._launch.check is not None:
            self._printer.say(_WRITES)
        attempts: list[Attempt] = []
        until, began = time.monotonic() + limit_s, time.monotonic()
        while True:
            attempts.append(self._attempt(until - time.monotonic(), after))
            took_s = (time.monotonic() - began) / len(attempts)
            has_time = time.monotonic() + took_s < until
            if self.signum or not (has_time and is_open(self._question, attempts)):
                return answer(self._question, attempts, self._begin.step)

    @property
    def _what(self) -> str:
        suspects, healthy = listed(self._question.suspects), self._question.healthy
        beside = f", beside {listed(list(healthy))}" if healthy else ""
        return f"replay: {self._question.what(self._begin.step)} again on {suspects}{beside}"

    def _attempt(self, limit_s: float, after: Outcome | None) -> Attempt:
        records = {name: told.record for name, told in self._told.items()}
        watch = ReplayWatch(self._question, records, self._watch.all_facts, limit_s)
        plan = ReplayPlan(
            to_step=self._question.to_step,
            resume=self._begin.checkpoint,
            number=_free_number(self._directory, self._question.workers),
            command=self._launch.arguments.command,
            check=self._launch.check,
        )
        specs = plan_replay(self._places, self._num_workers, self._context, plan)
        limits = self._launch.limits
        outcome = Supervisor(specs, limits, self._printer, watch, after=after).run()
        self.signum = self.signum or _request(outcome)
        return watch.attempt(outcome.end)

    @property
    def _places(self) -> list[Place]:
        return [p for p in self._launch.picked.places if p.name in self._question.workers]

    def _too_long(self, limit_s: float) -> str | None:
        num_steps = self._question.to_step + 1 - self._begin.step
        need_s = max(told.start_s + num_steps * told.step_s for told in self._told.values())
        if need_s <= limit_s:
            return None
        left = f"{max(0.0, limit_s):.0f} s are left (launch.replay_s)"
        return f"{num_steps:,} steps need about {need_s:.0f} s, and {left}"


class Begin(Struct, frozen=True):
    """Where a replay begins."""

    step: int = 0
    checkpoint: Path | None = None
    """None: at the start of training."""
    content: str | None = None
    """What was in it when the run wrote it, or began with it; None: an older run did not say."""


def _begin(question: Question, watch: Watch) -> Begin:
    """From the newest checkpoint of the run that is older than the fault: the healthy worker's,
    since that of a suspect may hold its fault. Else from where the run began."""
    source = (*question.healthy, *question.suspects)[0]
    facts = watch.all_facts[source]
    resumed, content = (facts.detail.get(key) for key in ("resumed", "resumed_content"))
    begun = Begin()
    if resumed:
        begun = Begin(facts.first_step, Path(str(resumed)), None if not content else str(content))
    if not question.healthy and not question.is_named:
        return begun
    for event in reversed(intact(facts.saved)):
        if begun.step < event.step <= question.begin_by:
            return Begin(event.step, Path(event.path), event.content)
    return begun


def _lost(begin: Begin) -> str | None:
    """Why a replay cannot begin there: the checkpoint that the run itself began with is not what it
    was then; None: it can."""
    path = begin.checkpoint
    if path is None or begin.content in (None, content_of(path)):
        return None
    what = "was written over" if path.exists() else "is gone"
    return f"{path}, with which the run began, {what}"


def _told(directory: Path, worker: str, to_step: int, began_ns: int | None) -> Told:
    """`began_ns`: when its process was started; None: with its first word. Raises UsageError for a
    file that cannot be read."""
    events = list(lines_of(directory / f"{worker.lower()}.events.jsonl", decode))
    record = {e.step: e for e in events if isinstance(e, Step) and e.step <= to_step}
    steps = list(record.values())
    start_s = (steps[0].t - (began_ns or events[0].t)) / 1e9 if steps else 0.0
    step_s = median(step.ms for step in steps) / 1000 if steps else 0.0
    return Told(record, start_s, step_s)


def _free_number(directory: Path, workers: Sequence[str]) -> int:
    """Of a replay whose files are not there yet."""
    for number in count(1):
        logs = (directory / f"{worker.lower()}.replay{number}.log" for worker in workers)
        if not any(os.path.lexists(log) for log in logs):
            return number
    raise AssertionError("there are endlessly many numbers")
