"""The loop that starts the workers, hears them, and ends when no process of the run is left.

One thread, one selector: deaths (pidfds), events, output, signals, deadlines. What to do is decided
by `policy`, or where bits differ by the observer (`verdict/live`); how to end it is `teardown`'s;
the terminal is `printer`'s.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from msgspec.structs import asdict, replace

from launcher.contain import processes
from launcher.contain.lifeline import Lifeline
from launcher.contain.linux import check_pidfds, set_child_subreaper
from launcher.contain.memory import HERE, Membership, OomWatch
from launcher.contain.processes import Family
from launcher.output.printer import Printer
from launcher.plan import WorkerSpec
from launcher.supervise import policy
from launcher.supervise.hang import ANSWER_S, HangEvidence, forget_empty
from launcher.supervise.listening import Listener
from launcher.supervise.loop import Loop, Urgency
from launcher.supervise.other_nodes import tell_end, tell_failures
from launcher.supervise.outcome import Companion, OtherNodes, Outcome
from launcher.supervise.signals import SignalInbox
from launcher.supervise.teardown import Stage, Teardown
from launcher.supervise.worker import Spawn, SpawnError, Worker, spawn
from launcher.verdict.observer import NEVER, Observer
from launcher.verdict.record import RunEnd, Stop
from model_check.errors import EXIT_PASS, EXIT_UNNAMED
from model_check.events import Event, Step
from model_check.utils.requests import IMPATIENT, REQUESTS, TO_FORWARD, TO_STOP

PAUSE_S = 1.0
"""Overslept by more than this, we were stopped or frozen, not just short of CPU."""
_ASK_AGAIN_S = 0.05
NUM_SPARE_FDS = 8
"""Held in reserve: an end must work even if a start failed because no descriptor was left."""


class Supervisor:
    """One run of some workers. `run` once, from the main thread."""

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        limits: policy.Limits,
        printer: Printer,
        observer: Observer | None = None,
        *,
        companion: Companion | None = None,
        other_nodes: OtherNodes | None = None,
        keep_signals: bool = False,
        after: Outcome | None = None,
        clock: Callable[[], float] = time.monotonic,
        pause_s: float = PAUSE_S,
        spawn: Spawn = spawn,
        membership: Membership = HERE,
    ) -> None:
        """`keep_signals`: hold USR1 and USR2 instead of forwarding them: these workers do not
        expect them; and a request to end that came when they had ended well. `after`: how an
        earlier run of this process ended: the signals that it kept are forwarded, or end this run
        before it starts; its leftovers are reaped when they die."""
        kept_signals = after.kept_signals if after else ()
        notices = [signum for signum in kept_signals if signum in TO_FORWARD]
        self._workers = [Worker(spec.name, spec=spec, held_signals=[*notices]) for spec in specs]
        self._limits = limits
        self._printer = printer
        self._observer = observer or Observer()
        self._companions = [companion] if companion else []
        self._unstarted = [*self._companions]
        self._other_nodes = other_nodes
        self._clock = clock
        self._pause_s = pause_s
        self._spawn = spawn
        self._oom = OomWatch(membership)
        self._tag = os.urandom(16).hex()
        self._loop = Loop()
        self._left_behind = set(after.end.leftovers if after else ())
        self._lifeline: Lifeline | None = None
        self._hang: HangEvidence | None = None
        self._teardown: Teardown | None = None
        self._stop: Stop | None = None
        self._observed: Stop | None = None
        # Number and time (monotonic seconds) of the latest wake-up.
        self._wake, self._woke = 0, clock()
        self._listener = Listener(self._loop, printer, lambda: self._woke)
        self._judge_at = NEVER
        # When we heard that the job ends on another node.
        self._stopped_at = NEVER
        self._told: set[str] = set()
        self._keeps_signals = keep_signals
        self._kept_signals: list[signal.Signals] = []
        self._requests = dict.fromkeys(kept_signals)
        self._num_impatient = 0
        self._held_back: list[Worker] = []  # dead, and a debugger holds the exit code

    def run(self) -> Outcome:
        """Start all workers, return when all are gone. An exception meanwhile (a bug, in us or in
        `observer`) is raised again when all are gone."""
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
        return self._outcome()

    @contextmanager
    def _set_up(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.callback(self._loop.close)
            try:
                check_pidfds()
                self._inbox = stack.enter_context(SignalInbox())
                self._loop.watch(self._inbox.fd, self._act_on_signals, Urgency.SIGNAL)
                if self._other_nodes is not None:
                    nodes = self._other_nodes
                    self._loop.watch(nodes.fd, nodes.drain, Urgency.EVENT)
                if self._inbox.stop_fd is not None:
                    self._loop.watch(self._inbox.stop_fd, self._suspend, Urgency.SIGNAL)
                stack.callback(set_child_subreaper, set_child_subreaper(True))
                self._spare_fds = stack.enter_context(ExitStack())
                for _ in range(NUM_SPARE_FDS):
                    self._spare_fds.enter_context(open(os.devnull))
                self._family = self._found_family()
            except OSError as error:
                raise SpawnError("the supervisor cannot start", error) from error
            yield

    def _found_family(self) -> Family:
        me = os.getpid()
        row = processes.read_process(me)
        spared = frozenset(processes.children(me))
        since_ticks = row.started_ticks if row else 0
        if row is None:
            self._printer.say("no /proc: a process that leaves its worker's group lives on unseen")
        family = Family(self._tag, since_ticks, me, os.getsid(0), spared)
        try:
            self._lifeline = Lifeline(family)
        except OSError as error:
            warning = f"no guardian ({error}): a SIGKILL of this launcher may leave orphans"
            self._printer.say(warning)
            return family
        self._loop.watch(self._lifeline.pidfd, self._guardian_dies, Urgency.EVENT)
        return family._replace(spared=spared | {self._lifeline.guardian_pid})

    def _guardian_dies(self) -> None:
        assert self._lifeline is not None
        self._loop.unwatch(self._lifeline.pidfd)
        self._printer.say("the guardian was killed: a SIGKILL of this launcher may leave orphans")

    def _start_all(self) -> None:
        for signum in [s for s in self._requests if s in TO_STOP]:
            self._asked_to_stop(signum)
            self._turn(may_wait=False)
        for worker in self._workers:
            if self._stop is not None:
                return
            self._start(worker)
            self._turn(may_wait=False)  # signals and deaths count while the others start, too
        if self._stop is None:
            self._start_companions()

    def _start(self, worker: Worker) -> None:
        shared = self._lifeline.cgroup if self._lifeline is not None else None
        try:
            spawned = self._spawn(worker.spec, self._tag, shared.entry_fd if shared else None)
        except SpawnError as error:
            worker.cannot_start(error, self._clock(), self._wake)
            return
        worker.has_started(spawned, self._clock())
        if self._lifeline is not None:
            self._lifeline.add(spawned.process.pid)
        self._loop.watch(spawned.pidfd, partial(self._dies, worker, spawned.pidfd), Urgency.DEATH)
        self._listener.listen(worker, spawned, partial(self._hear, worker))
        self._printer.note(f"{worker!r}")

    def _start_companions(self) -> None:
        """After the workers, none of which waits for it, or when these have ended already: then
        its first look is its last."""
        while self._unstarted:
            self._start_companion(self._unstarted.pop())

    def _start_companion(self, companion: Companion) -> None:
        companion.start(self._woke)
        if companion.pid is None or companion.fd is None:
            return
        spared = self._family.spared | {companion.pid}
        self._family = self._family._replace(spared=spared)
        read = partial(self._read_companion, companion, companion.fd)
        self._loop.watch(companion.fd, read, Urgency.EVENT)

    def _read_companion(self, companion: Companion, fd: int) -> None:
        if not companion.read(self._woke):
            self._loop.unwatch(fd)

    # -- one turn of the loop

    def _turn(self, may_wait: bool = True) -> None:
        timeout_s = 0.0
        if may_wait:
            self._listener.gather()
            timeout_s = max(0.0, self._due() - self._clock())
        ready = self._loop.wait(timeout_s)
        last_woke, self._woke = self._woke, self._clock()
        self._wake += 1
        if self._woke - last_woke > timeout_s + self._pause_s:
            self._forgive_silence()
        self._loop.serve(ready)
        self._ask_again()
        self._consult()
        self._judge()
        self._advance()

    def _consult(self) -> None:
        """What follows from all that was heard now."""
        stop = self._observer.tick(self._woke)
        self._observed = self._observed or stop
        for line in self._observer.news():
            self._printer.say(line)
        dismissed = self._observer.dismissed
        for worker in self._workers:
            worker.dismissal = dismissed.get(worker.name)
        for name, command in self._observer.commands():
            self._listener.tell(name, command)
        self._listener.send()

    def _advance(self) -> None:
        if self._teardown is not None:
            self._teardown.advance(self._woke)
        elif self._hang is not None and self._hang.advance(self._woke):
            self._stop_all()
        for companion in self._companions:
            companion.tick(self._woke)

    @property
    def _is_over(self) -> bool:
        return self._teardown is not None and self._teardown.stage is Stage.OVER

    def _due(self) -> float:
        """When there is something to do even if no descriptor is ready."""
        if self._teardown is not None:
            due = self._teardown.deadline(self._woke)
        else:
            judge_at = min(self._judge_at, self._limits.stop_at)
            due = self._hang.due if self._hang is not None else judge_at
        if self._held_back:
            due = min(due, self._woke + _ASK_AGAIN_S)
        return min([due, self._observer.due, *(companion.due for companion in self._companions)])

    def _judge(self) -> None:
        if self._is_ending:
            return
        has_failed = any(w.returncode for w in self._workers if w.dismissal is None)
        if has_failed:
            # What was said before the first death was seen may tell more than the order of deaths.
            self._listener.hear_events()
            self._consult()
        observed = self._observed
        # Where bits differ and nothing tells whose are right, a death may name somebody.
        is_open = has_failed and observed and observed.exit_code == EXIT_UNNAMED
        if observed is not None and (observed.outlasts_deaths or not is_open):
            self._end(observed)
            return
        self._act_on_signals()  # one that came since we woke up may be why they died
        if self._is_ending:
            return
        if self._woke >= self._limits.stop_at:
            self._end(policy.stop_for_deadline(self._workers, self._limits))
        elif (elsewhere := self._ended_elsewhere()) is not None:
            self._follow(elsewhere)
        elif not self._observer.holds_run:
            self._follow(self._decided())

    def _ended_elsewhere(self) -> policy.Continue | Stop | None:
        """What ends the job on another node, where nothing of our own is to be told."""
        if self._other_nodes is None:
            return None
        tell_failures(self._workers, self._other_nodes)
        stop = self._other_nodes.stop()
        if stop is None or policy.own_failures(self._workers):
            return None
        self._stopped_at = min(self._stopped_at, self._woke)
        since = self._stopped_at
        return policy.follow_elsewhere(stop, since, self._workers, self._woke, self._limits)

    @property
    def _is_ending(self) -> bool:
        return self._teardown is not None or self._stop is not None

    def _decided(self) -> policy.Continue | Stop | policy.Done:
        others, now = self._other_nodes, self._woke
        if policy.judges_a_death(self._workers):
            for worker in self._workers:
                worker.look_at_work(now)
        lost_elsewhere = () if others is None else others.lost_peers(now)
        return policy.decide(self._workers, now, self._limits, self._requests, lost_elsewhere)

    def _follow(self, decision: policy.Continue | Stop | policy.Done) -> None:
        match decision:
            case Stop() as stop:
                self._end(stop)
            case policy.Done():
                self._begin_teardown()
            case policy.Continue() as going_on:
                self._judge_at = going_on.until
                self._tell_once(going_on.why)
                self._tell_early()

    def _tell_early(self) -> None:
        """One line on each worker that ended well long before the others."""
        running = ", ".join(view.name for view in self._workers if view.returncode is None)
        for view in policy.ended_early(self._workers, self._woke, self._limits):
            ran_s = view.ended_at - (view.started_at or 0.0)
            what = f"{view.name} ended with exit code 0 after {ran_s:.1f} s"
            self._tell_once(f"{what}; still running: {running}", about=view.name)

    def _tell_once(self, line: str, about: str = "") -> None:
        """The first line about a worker; about none: of a failure that the others may share."""
        if line and about not in self._told:
            self._told.add(about)
            self._printer.say(line)

    # -- what descriptors bring

    def _dies(self, worker: Worker, pidfd: int) -> None:
        """Its pidfd says that it is dead. A debugger may hold its exit code back: the pidfd then
        stays readable, so we ask again at times instead of watching it."""
        self._loop.unwatch(pidfd)
        if not self._has_ended(worker) and worker.alive:
            self._held_back.append(worker)

    def _ask_again(self) -> None:
        self._held_back = [w for w in self._held_back if not self._has_ended(w) and w.alive]

    def _has_ended(self, worker: Worker) -> bool:
        """Look whether it ended since the last look, and hear its last words if so."""
        if not worker.check_exit(self._woke, self._wake):
            return False
        if worker.returncode == -signal.SIGKILL and not worker.stopped_by_us:
            worker.oom = self._oom.moved()
        self._listener.hear_last_words(worker)
        self._observer.on_end(worker.name)
        self._printer.note(f"{worker!r}")
        return True

    def _hear(self, worker: Worker, event: Event) -> None:
        """Nothing is ended here: we are in the middle of a stream that an end would read on."""
        worker.hear(event, self._clock())
        stop = self._observer.on_event(worker.name, event)
        self._observed = self._observed or stop
        if self._other_nodes is not None and isinstance(event, Step):
            self._other_nodes.tell_step(worker.name, event)

    # -- signals

    def _act_on_signals(self) -> None:
        for signum in self._inbox.take():
            if signum == signal.SIGCHLD:
                self._reap_adopted()
                continue
            if signum in REQUESTS:
                self._requests[signum] = None
            if signum in TO_STOP:
                self._asked_to_stop(signum)
            elif signum in TO_FORWARD:
                self._forward(signum)
            elif signum == signal.SIGCONT:
                self._resume()

    def _forward(self, signum: signal.Signals) -> None:
        if not self._keeps_signals:
            for worker in self._workers:
                worker.forward(signum)
        elif signum not in self._kept_signals:
            self._kept_signals.append(signum)
            self._printer.say(f"{signum.name} received: it is passed on when the workers run")

    def _asked_to_stop(self, signum: signal.Signals) -> None:
        self._num_impatient += signum in IMPATIENT
        if self._stop is None and self._have_all_ended_well():
            self._came_too_late(signum)
        elif not self._is_ending:
            self._end(policy.stop_for_signal(signum))
        elif self._teardown is None:  # a run that is told to end does not wait for evidence
            self._stop_all()
        elif self._num_impatient >= 2:
            self._teardown.kill(self._woke)
        elif signum in IMPATIENT:
            self._printer.say("already stopping; once more kills at once")

    def _have_all_ended_well(self) -> bool:
        """Also those whose death is not seen yet: signals are served before deaths."""
        for worker in self._workers:
            self._has_ended(worker)
        return all(worker.returncode == 0 for worker in self._workers)

    def _came_too_late(self, signum: signal.Signals) -> None:
        """The verdict stands; what the workers left behind is ended in any case."""
        if self._keeps_signals:
            self._kept_signals.append(signum)
        else:
            self._printer.say(f"{signum.name} received when all workers had ended well: too late")
        if self._teardown is not None and self._num_impatient >= 2:
            self._teardown.kill(self._woke)

    def _suspend(self) -> None:
        """Stop the workers, then ourselves."""
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
            worker.suspend()
        self._inbox.stop()
        self._resume()

    def _resume(self) -> None:
        for worker in self._workers:
            worker.signal_group(signal.SIGCONT)
        self._forgive_silence()

    def _forgive_silence(self) -> None:
        """We did not run for a while (stopped, a frozen container, a machine that was paused), and
        nor did the workers: every silence begins anew."""
        now = self._clock()
        for worker in self._workers:
            worker.last_heard = max(worker.last_heard, now)
        for companion in self._companions:
            companion.forgive_silence(now)

    def _reap_adopted(self) -> None:
        """Reap the orphans that came back to us, each by its own pid."""
        groups = {worker.pid for worker in self._workers if worker.pid is not None}
        for orphan in processes.adopted(self._family, groups):
            processes.reap(orphan.pid)
        self._left_behind = {pid for pid in self._left_behind if not processes.reap(pid)}

    # -- the end

    def _end(self, stop: Stop) -> None:
        """End the run for this reason, the first one."""
        self._stop = stop
        if self._other_nodes is not None and stop.elsewhere is None:
            tell_end(stop, self._workers, self._other_nodes)
        if not stop.is_hang or self._woke + ANSWER_S > self._limits.stop_at:
            self._stop_all()
            return
        self._printer.say(f"{stop.reason}: saving what everybody is doing")
        self._spare_fds.close()
        self._hang = HangEvidence(self._workers, self._printer.say, self._woke)

    def _stop_all(self) -> None:
        self._begin_teardown()
        alive = sum(worker.alive for worker in self._workers)
        grace_s = self._limits.grace_left_s(self._woke)
        rest = f": stopping {alive} (grace {grace_s:.3g} s)" if alive else ""
        if self._stop is not None:
            self._printer.say(f"{self._stop.reason}{rest}")

    def _begin_teardown(self) -> Teardown:
        if self._hang is not None and self._stop is not None:
            found = self._hang.close(self._woke)
            silent = (*self._stop.culprits, *self._stop.tied)
            places = dict.fromkeys(found[name] for name in silent if name in found)
            reason = ", ".join([str(self._stop.reason), *places])
            self._stop = replace(self._stop, reason=reason)
        self._wake += 1  # a worker that is found dead now died after what made us stop
        for worker in self._workers:
            self._has_ended(worker)
        self._spare_fds.close()
        if self._stop is None:
            self._start_companions()  # the teardown spares them
        self._teardown = Teardown(self._workers, self._family, self._printer.say)
        self._teardown.begin(self._woke, self._limits.grace_left_s(self._woke))
        if self._stop is None and (strays := self._teardown.strays):
            self._printer.say(f"still at work in the background, so ended: {', '.join(strays)}")
        for companion in self._companions:
            companion.finish()
        return self._teardown

    def _kill_all(self) -> None:
        self._observer = Observer()
        teardown = self._teardown or self._begin_teardown()
        teardown.kill(self._woke)
        while not self._is_over:
            self._turn()

    def _let_go(self) -> None:
        """The last signals and bytes, then the pids, then the guardian: it outlives all others."""
        self._inbox.shut()
        self._act_on_signals()
        self._listener.close()
        for companion in self._companions:
            companion.close()
        for worker in self._workers:
            worker.release()
        if self._hang is not None:
            self._hang.release()
        forget_empty(self._workers)
        if (told := self._oom.moved()) and not any(w.oom for w in self._workers):
            self._printer.say(f"during this run, {told}")
        self._reap_adopted()
        if self._lifeline is not None:
            self._loop.unwatch(self._lifeline.pidfd)
            self._lifeline.dismiss() if self._is_over else self._lifeline.cut()

    def _outcome(self) -> Outcome:
        stop = asdict(self._stop) if self._stop else {"exit_code": EXIT_PASS}
        end = RunEnd(
            **stop,
            requests=tuple(self._requests),
            leftovers=self._teardown.leftovers if self._teardown else (),
            dropped_lines=self._printer.dropped_lines,
        )
        workers = tuple(worker.end() for worker in self._workers)
        return Outcome(end, workers, tuple(self._kept_signals))
