"""The loop that starts the workers, hears them, and ends with nobody left behind.

One thread, one selector: deaths (pidfds), events, output, signals, deadlines. What to do is decided
by `policy`; how to end it is `teardown`'s; the terminal is `printer`'s.
"""

import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from msgspec.structs import replace

from launcher.contain import processes
from launcher.contain.lifeline import Lifeline
from launcher.contain.linux import set_child_subreaper
from launcher.contain.memory import OomCounter, OomWatch
from launcher.contain.processes import Family
from launcher.output.printer import Printer
from launcher.plan import WorkerSpec
from launcher.supervise.hang import Inquest, forget_empty
from launcher.supervise.listening import Ears
from launcher.supervise.loop import Loop, Urgency
from launcher.supervise.outcome import Companion, Observer, Outcome
from launcher.supervise.policy import (
    Continue,
    Done,
    Limits,
    WorkerView,
    decide,
    ended_early,
    stop_for_signal,
)
from launcher.supervise.signals import SignalInbox
from launcher.supervise.spare_fds import SpareFds
from launcher.supervise.teardown import Stage, Teardown
from launcher.supervise.worker import (
    Spawn,
    SpawnError,
    Worker,
    spawn,
    spawn_error,
)
from launcher.verdict.stop import Stop
from model_check.errors import EXIT_PASS
from model_check.events import Event
from model_check.utils.requests import IMPATIENT, REQUESTS, TO_FORWARD, TO_STOP

__all__ = ["Observer", "Outcome", "Supervisor"]

_NEVER = float("inf")
ABSENT_S = 1.0
"""A wake-up that is so late did not wait for a processor alone: nobody ran."""


class Supervisor:
    """One run of some workers. `run` once, from the main thread."""

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        limits: Limits,
        printer: Printer,
        observer: Observer | None = None,
        *,
        companion: Companion | None = None,
        keep_signals: bool = False,
        kept_signals: Sequence[int] = (),
        left_behind: Collection[int] = (),
        clock_ns: Callable[[], int] = time.monotonic_ns,
        absent_s: float = ABSENT_S,
        spawn: Spawn = spawn,
        oom_counter: OomCounter | None = None,
    ) -> None:
        """`keep_signals`: what else is passed on to the workers is not meant for these; it is kept
        for the next supervisor, as its `kept_signals`. `left_behind`: the leftovers of an earlier
        supervisor in this process, which are reaped when they die after all."""
        self._workers = [Worker(spec) for spec in specs]
        for worker in self._workers:
            for signum in kept_signals:
                worker.forward(signal.Signals(signum))
        self._limits = limits
        self._printer = printer
        self._observer = observer
        self._companion = companion
        self._clock_ns = clock_ns
        self._absent_s = absent_s
        self._spawn = spawn
        self._oom = OomWatch(oom_counter or OomCounter())
        self._tag = os.urandom(16).hex()
        self._loop = Loop()
        self._ears = Ears(self._loop, printer, lambda: self._woke_ns)
        self._left_behind = set(left_behind)
        self._unsure: set[Worker] = set()  # a debugger holds back how they ended
        self._told_early: set[str] = set()
        self._spare_fds = SpareFds()
        self._lifeline: Lifeline | None = None
        self._inquest: Inquest | None = None
        self._teardown: Teardown | None = None
        self._stop: Stop | None = None
        self._wake = 0
        self._woke_ns = 0
        self._must_judge = True
        self._judge_at = _NEVER
        self._keeps_signals = keep_signals
        self._kept_signals: list[signal.Signals] = []
        self._requests = dict.fromkeys(kept_signals)
        self._num_signals = 0
        self._num_impatient = 0

    def run(self) -> Outcome:
        """Start everybody, return when all are gone. Whatever is raised meanwhile (a bug, in us or
        in the observer) is raised again when all are gone."""
        dropped_before = self._printer.dropped_lines
        with self._set_up():
            try:
                self._start_all()
                while not self._is_over:
                    self._turn()
            except BaseException:
                self._kill_all()
                raise
            finally:
                self._let_go()
        return self._outcome(dropped_before)

    @contextmanager
    def _set_up(self) -> Iterator[None]:
        self._woke_ns = self._clock_ns()
        with ExitStack() as stack:
            stack.callback(self._loop.close)
            try:
                self._inbox = stack.enter_context(SignalInbox())
                self._loop.watch(self._inbox.fileno(), self._act_on_signals, Urgency.SIGNAL)
                if self._inbox.stop_fd is not None:
                    self._loop.watch(self._inbox.stop_fd, self._suspend, Urgency.SIGNAL)
                stack.callback(set_child_subreaper, set_child_subreaper(True))
                stack.callback(self._spare_fds.free)
                self._spare_fds.take()
                self._family = self._found_family()
            except OSError as error:
                raise spawn_error("the supervisor cannot start", error) from error
            yield

    def _found_family(self) -> Family:
        me = os.getpid()
        row = processes.read_process(me)
        spared = frozenset(processes.children(me))
        since_ticks = row.started_ticks if row else 0
        family = Family(self._tag, since_ticks, me, os.getsid(0), spared)
        try:
            self._lifeline = Lifeline(family)
        except OSError as error:
            self._printer.say(
                f"no guardian ({error}): a SIGKILL of this launcher may leave orphans"
            )
            return family
        return family._replace(spared=spared | {self._lifeline.guardian_pid})

    def _start_all(self) -> None:
        for worker in self._workers:
            if self._stop is not None:
                return
            self._start(worker)
            self._turn(may_wait=False)  # signals and deaths count while the others start, too

        self._start_companion()

    def _start_companion(self) -> None:
        """After the workers: none of them waits for it."""
        companion = self._companion
        if companion is None or self._teardown is not None:
            return
        companion.start(self._now)
        if companion.pid is not None and companion.fd is not None:
            spared = self._family.spared | {companion.pid}
            self._family = self._family._replace(spared=spared)
            self._loop.watch(companion.fd, self._read_companion, Urgency.EVENT)

    def _read_companion(self) -> None:
        if self._companion is None or self._companion.fd is None:
            return
        if not self._companion.read(self._now):
            self._loop.unwatch(self._companion.fd)

    def _close_companion(self) -> None:
        if self._companion is None:
            return
        if self._companion.fd is not None:
            self._loop.unwatch(self._companion.fd)
        self._companion.close()

    def _start(self, worker: Worker) -> None:
        self._must_judge = True
        try:
            spawned = self._spawn(worker.spec, self._tag)
        except SpawnError as error:
            worker.cannot_start(error, self._clock_ns(), self._wake)
            return
        worker.has_started(spawned, self._clock_ns())
        if self._lifeline is not None:
            self._lifeline.add(spawned.process.pid)
        dies = partial(self._dies, worker, spawned.pidfd)
        self._loop.watch(spawned.pidfd, dies, Urgency.DEATH)
        self._ears.listen(worker, spawned, partial(self._hear, worker))
        self._printer.note(f"{worker!r}")

    # -- one turn of the loop

    def _turn(self, may_wait: bool = True) -> None:
        now = self._clock_ns() / 1e9
        timeout_s = self._timeout_s(now) if may_wait else 0
        ready = self._loop.wait(timeout_s, hear_output=not self._ears.is_resting(now))
        self._wake += 1
        awake_before, self._woke_ns = self._now, self._clock_ns()
        if timeout_s is not None and self._now - awake_before > timeout_s + self._absent_s:
            self._forgive_silence()
        self._loop.serve(ready)
        self._judge()
        self._advance()
        if self._companion is not None:
            self._companion.tick(self._now)
        self._ears.end_turn()

    def _advance(self) -> None:
        if self._teardown is not None:
            self._teardown.advance(self._now)
        elif self._inquest is not None:
            self._inquest.advance(self._now)
            if self._inquest.is_over:
                self._stop_everybody()

    @property
    def _now(self) -> float:
        """Monotonic seconds of the latest wake-up."""
        return self._woke_ns / 1e9

    @property
    def _is_over(self) -> bool:
        return self._teardown is not None and self._teardown.stage is Stage.OVER

    def _timeout_s(self, now: float) -> float | None:
        heard_by = self._companion.due if self._companion else _NEVER
        due = min(self._next_stage_at(now), self._ears.due(now), heard_by)
        return None if due == _NEVER else max(0.0, due - now)

    def _next_stage_at(self, now: float) -> float:
        if self._teardown is not None:
            return self._teardown.deadline(now)
        return self._inquest.deadline if self._inquest is not None else self._judge_at

    def _judge(self) -> None:
        if self._is_ending or not (self._must_judge or self._now >= self._judge_at):
            return
        if any(worker.returncode for worker in self._workers):
            # What was said before the first death was seen may tell more than the order of deaths.
            self._ears.hear_events()
        self._act_on_signals()  # one that came since we woke up may be why they died
        if not self._is_ending:
            self._must_judge = False
            self._act_on_views([worker.view() for worker in self._workers])

    @property
    def _is_ending(self) -> bool:
        return self._teardown is not None or self._stop is not None

    def _act_on_views(self, views: Sequence[WorkerView]) -> None:
        match decide(views, self._now, self._limits, self._requests):
            case Stop() as stop:
                self._end(stop)
            case Done():
                self._begin_teardown()
            case Continue(until=until):
                self._judge_at = _NEVER if until is None else until
                self._tell_early(views)

    def _tell_early(self, views: Sequence[WorkerView]) -> None:
        """One word on each worker that ended well long before the others."""
        running = ", ".join(view.name for view in views if view.returncode is None)
        for view in ended_early(views, self._now, self._limits):
            if view.name not in self._told_early:
                self._told_early.add(view.name)
                ran_s = view.ended_at - (view.started_at or 0.0)
                what = f"{view.name} ended with exit code 0 after {ran_s:.1f} s"
                self._printer.say(f"{what}; still running: {running}")

    # -- what descriptors bring

    def _dies(self, worker: Worker, pidfd: int) -> None:
        """Its pidfd says that it is dead: that it says once, whatever the kernel lets us know."""
        self._loop.unwatch(pidfd)
        if not self._has_ended(worker) and worker.alive:
            self._unsure.add(worker)

    def _has_ended(self, worker: Worker) -> bool:
        """Look whether it ended since the last look, and hear its last words if so."""
        if not worker.check_exit(self._woke_ns, self._wake):
            return False
        self._must_judge = True
        if worker.was_killed:
            worker.oom = self._oom.moved()
        self._ears.hear_last_words(worker)
        self._printer.note(f"{worker!r}")
        return True

    def _hear(self, worker: Worker, event: Event) -> None:
        worker.hear(event, self._clock_ns())  # written after the wake-up, perhaps
        self._must_judge = True
        stop = self._observer.on_event(worker.spec.name, event) if self._observer else None
        if stop is not None:
            self._end(stop)

    # -- signals

    def _act_on_signals(self) -> None:
        for signum in self._inbox.take():
            if signum == signal.SIGCHLD:
                self._reap_adopted()
                continue
            self._num_signals += 1
            if signum in REQUESTS:
                self._requests[signum] = None
            if signum in TO_STOP:
                self._asked_to_stop(signum)
            elif signum in TO_FORWARD:
                self._pass_on(signum)
            elif signum == signal.SIGCONT:
                self._resume()

    def _pass_on(self, signum: signal.Signals) -> None:
        if not self._keeps_signals:
            for worker in self._workers:
                worker.forward(signum)
        elif signum not in self._kept_signals:
            self._kept_signals.append(signum)
            self._printer.say(f"{signum.name} received: it is passed on when the workers run")

    def _asked_to_stop(self, signum: signal.Signals) -> None:
        self._num_impatient += signum in IMPATIENT
        if not self._is_ending:
            self._end(stop_for_signal(signum))
        elif self._teardown is None:  # whoever is told to end does not wait for evidence
            self._stop_everybody()
        elif self._num_impatient >= 2:
            self._teardown.kill(self._now)
        elif signum in IMPATIENT:
            self._printer.say("already stopping; once more kills at once")

    def _suspend(self) -> None:
        """Stop the workers, then ourselves. SIGSTOP for them: their groups are orphaned."""
        if self._teardown is not None:
            self._inbox.discard_stop()
            return
        if processes.is_orphaned(os.getpgrp()):
            self._inbox.discard_stop()
            self._printer.say(
                "SIGTSTP received: no shell is above that could continue this run, so it goes on"
            )
            return
        for worker in self._workers:
            worker.signal_group(signal.SIGSTOP)
        self._inbox.stop()
        self._resume()

    def _resume(self) -> None:
        for worker in self._workers:
            worker.signal_group(signal.SIGCONT)
        self._forgive_silence()

    def _forgive_silence(self) -> None:
        """We did not run for a while (stopped, a frozen container, a machine that was paused), and
        nor did they: every silence begins anew."""
        now_ns = self._clock_ns()
        for worker in self._workers:
            worker.last_heard_ns = max(worker.last_heard_ns, now_ns)
        if self._companion is not None:
            self._companion.forgive_silence(now_ns / 1e9)

    def _reap_adopted(self) -> None:
        """Orphans that came back to us, each by its own pid; also asks again for workers whose end
        a debugger held back."""
        self._unsure = {worker for worker in self._unsure if not self._has_ended(worker)}
        groups = {worker.pid for worker in self._workers if worker.pid is not None}
        processes.reap_adopted(self._family, groups)
        self._left_behind = {pid for pid in self._left_behind if not processes.reap(pid)}

    # -- the end

    def _end(self, stop: Stop) -> None:
        """The first reason to stop is the one that counts."""
        if self._stop is not None:
            return
        self._stop = stop
        if stop.is_hang and self._teardown is None:
            self._printer.say(f"{stop.reason}: saving what everybody is doing")
            self._spare_fds.free()
            self._inquest = Inquest(self._workers, self._printer.say)
            self._inquest.begin(self._now)
        else:
            self._stop_everybody()

    def _stop_everybody(self) -> None:
        self._begin_teardown()
        alive = sum(worker.alive for worker in self._workers)
        rest = f": stopping {alive} (grace {self._limits.grace_s:g} s)" if alive else ""
        if self._stop is not None:
            self._printer.say(self._stop.reason + rest)

    def _close_inquest(self, inquest: Inquest) -> None:
        inquest.close(self._now)
        for worker in self._workers:
            if (path := inquest.paths.get(worker.spec.name)) is not None:
                worker.evidence = (path,)
        if self._stop is not None:
            found = [inquest.findings[n] for n in self._stop.culprits if n in inquest.findings]
            self._stop = replace(self._stop, reason=", ".join([self._stop.reason, *found]))

    def _begin_teardown(self) -> None:
        if self._teardown is not None:
            return
        if self._inquest is not None:
            self._close_inquest(self._inquest)
        self._wake += 1  # whoever is found dead now died after what made us stop, but by itself
        for worker in self._workers:
            self._has_ended(worker)
        self._spare_fds.free()
        self._teardown = Teardown(self._workers, self._family, self._loop, self._printer.say)
        self._teardown.begin(self._now, self._limits.grace_s)
        if self._companion is not None:
            self._companion.finish()

    def _kill_all(self) -> None:
        self._observer = None
        self._begin_teardown()
        if self._teardown is not None:
            self._teardown.kill(self._now)
        while not self._is_over:
            self._turn()

    def _let_go(self) -> None:
        """The last bytes, then the pids, then the guardian: it outlives everybody."""
        self._ears.close()
        self._close_companion()
        for worker in self._workers:
            worker.release()
        if self._inquest is not None:
            self._inquest.release()
        forget_empty(self._workers)
        if (told := self._oom.moved()) and not any(w.oom for w in self._workers):
            self._printer.say(f"during this run, {told}")
        self._reap_adopted()
        if self._lifeline is not None:
            self._lifeline.dismiss() if self._is_over else self._lifeline.cut()

    def _outcome(self, dropped_before: int) -> Outcome:
        return Outcome(
            exit_code=self._stop.exit_code if self._stop else EXIT_PASS,
            stop=self._stop,
            workers=tuple(worker.end() for worker in self._workers),
            leftovers=self._teardown.leftovers if self._teardown else (),
            signals=self._num_signals,
            dropped_lines=self._printer.dropped_lines - dropped_before,
            kept_signals=tuple(self._kept_signals),
            requests=tuple(self._requests),
        )
