"""The nodes of one job, as this node's launcher sees them: who is there, where the ranks are, who
failed first, and whether all are done."""

import signal
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from msgspec.structs import replace

from launcher.nodes.failures import TELL_S, Asked, JobEnded
from launcher.nodes.follower import Follower
from launcher.nodes.leader import Leader
from launcher.nodes.link import Link
from launcher.nodes.messages import (
    Bits,
    Failure,
    Join,
    Leave,
    Ready,
    WorkersExited,
    differing,
)
from launcher.verdict.agreement import compare
from launcher.verdict.nodes import Elsewhere, JobPart, LostPeer
from launcher.verdict.record import RunEnd, Stop
from model_check.errors import (
    EXIT_PASS,
    EXIT_PEER_LOST,
    EXIT_SIGNAL_BASE,
    ConfigError,
)
from model_check.events import Step
from model_check.utils.requests import TO_STOP
from model_check.utils.slurm import SlurmStep
from model_check.utils.words import few

NEVER = float("inf")
_LOOK_S = 0.1
_ORDER_S = 2.0
"""The first node's launcher orders what is told within milliseconds."""
Said = TypeVar("Said", Join, Ready, Failure, WorkersExited, Leave)


class Nodes:
    """From the meeting to the end of one run."""

    def __init__(
        self, step: SlurmStep, join: Join, address: str, port: int, silence_s: float
    ) -> None:
        """`silence_s`: how long another node may be silent."""
        self._step, self._me = step, join.node
        make = Leader if join.node == 0 else Follower
        self._link: Link = make(join, step.names, address, port)
        self._silence_s = silence_s
        self._num_workers = len(join.workers)
        self.fd = self._link.fd
        """Readable when another node has said something."""
        self._steps: dict[int, dict[str, Step]] = {}
        """Those that not all ranks here have told."""
        self._told: set[str] = set()
        """The workers of ours whose failure the others know."""
        self._ranks: dict[tuple[int, str], int] = {}
        """Node and worker -> its rank, when all are here."""
        self._heard_at: dict[Failure, float] = {}

    def open(self, patience_s: float) -> None:
        """`patience_s`: how long the others may take to come. Raises ConfigError."""
        self._patience_s = patience_s
        self._link.start(self._silence_s, time.monotonic() + patience_s)

    @property
    def address(self) -> str:
        """Where the ranks meet: of the first node as the others reach it, since its own name may
        mean loopback to it."""
        return self._link.address

    @property
    def is_first(self) -> bool:
        return self._me == 0

    # -- before the start

    def meet(self) -> tuple[JobPart, str | None]:
        """Wait until all are here: this node's part, and the checkpoint that the first node has
        chosen for all (None: the job begins as it began). Raises ConfigError where they were asked
        for different things, JobEnded."""
        joined = self._all(Join)
        first = joined[0]
        for each in joined[1:]:
            if names := differing(first.settings, each.settings):
                raise ConfigError(
                    f"nodes {first.name} and {each.name} were asked for different trainings: "
                    f"{few(names)} differ: give all the same command"
                )
            if each.torch != first.torch:
                raise ConfigError(
                    f"torch is {first.torch} on {first.name} and {each.torch} on {each.name}: "
                    "install the same on all nodes"
                )
        members = [(each.node, worker) for each in joined for worker in each.workers]
        self._ranks = {member: rank for rank, member in enumerate(members)}
        part = JobPart(
            number=self._me,
            name=self._name(self._me),
            job=self._step.key,
            num_ranks=len(members),
            ranks={name: rank for (node, name), rank in self._ranks.items() if node == self._me},
            hosts={join.name: join.host for join in joined},
        )
        return part, first.resume

    def begin(self, data: str, port: int) -> int:
        """Wait until the data of all are prepared; where the ranks meet. `port`: of the first node.
        Raises ConfigError where nodes would train on different data, JobEnded."""
        self._link.say(Ready(self._me, data, port))
        ready = self._all(Ready)
        for each in ready[1:]:
            if each.data != ready[0].data:
                raise ConfigError(
                    f"nodes {self._name(0)} and {self._name(each.node)} prepared different data "
                    f"({ready[0].data} and {each.data}): share data.cache_dir, or the data set"
                )
        return ready[0].port

    def _all(self, kind: type[Said]) -> list[Said]:
        """What each node said, in their order."""

        def found() -> dict[int, Said]:
            return {message.node: message for message in self._of(kind)}

        num_nodes = len(self._step.names)
        self._wait(lambda: len(found()) == num_nodes or self.stop() is not None)
        told, stop = found(), self.stop()
        if len(told) < num_nodes and stop is not None:
            raise JobEnded(stop)
        return [told[node] for node in sorted(told)]

    def _wait(self, is_there: Callable[[], bool], until: float = NEVER) -> None:
        """Raises Asked: signals are blocked until a supervisor answers them."""
        while not is_there() and time.monotonic() < until:
            self._link.wait(is_there, _LOOK_S)
            if (asked := signal.sigtimedwait(TO_STOP, 0)) is not None:
                raise Asked(asked.si_signo)

    def _wait_for_order(self, is_there: Callable[[], bool]) -> None:
        """Until what was said has its place in the log."""
        self._link.wait(lambda: is_there() or self._link.is_cut_off, _ORDER_S)

    # -- while the ranks train

    def drain(self) -> None:
        self._link.drain()

    def lost_peers(self, now: float) -> list[LostPeer]:
        """Ranks of other nodes that cannot go on without another one."""
        return [
            LostPeer(
                f"{m.worker} on {self._name(m.node)}",
                m.cause,
                self._heard_at.setdefault(m, now),
            )
            for m in self._of(Failure)
            if m.peer_lost and m.node != self._me
        ]

    def stop(self) -> Stop | None:
        """What ends our part of the job: the first failure elsewhere, or a node that is gone."""
        return next((self._stop_for(m) for m in self._ends() if not self._is_own(m)), None)

    def tell_failure(
        self,
        worker: str | None,
        step: int | None,
        cause: str,
        exit_code: int,
        *,
        signum: int | None = None,
        is_deadline: bool = False,
        peer_lost: bool = False,
    ) -> None:
        """The first word on each worker counts."""
        if (worker or "") not in self._told:
            self._told.add(worker or "")
            what = (worker, step, cause, exit_code, signum, is_deadline, peer_lost)
            self._link.say(Failure(self._me, *what))

    def tell_step(self, worker: str, step: Step) -> None:
        """For the first node to compare: when all ranks here have told it, and agree. Where they do
        not, this node finds out by itself who is wrong."""
        told = self._steps.setdefault(step.step, {})
        told[worker] = step
        if len(told) == self._num_workers and compare(self._steps.pop(step.step)) is None:
            self._link.say(Bits(self._me, replace(told[min(told)], repeated=None)))

    # -- when they are gone

    def concluded(self, end: RunEnd) -> RunEnd:
        """How the job ended: as here, or as the node whose failure was told first. Where all went
        well here, the others are waited for."""
        if end.exit_code != EXIT_PASS and end.elsewhere is None and not self._has_told:
            signum = end.exit_code - EXIT_SIGNAL_BASE if end.is_by_signal else None
            self.tell_failure(None, None, str(end.reason), end.exit_code, signum=signum)
        self._link.say(WorkersExited(self._me))
        try:
            if end.exit_code == EXIT_PASS and not end.is_deadline:
                self._wait(lambda: self.stop() is not None or self._are_all(WorkersExited))
            else:
                self._wait_for_order(lambda: self._has_exited(self._me))
        except Asked as asked:
            return self._asked_to_end(end, asked)
        first = next(self._ends(), None)
        if first is None or self._is_own(first) or self._is_alike(first, end):
            return end
        stop = self._stop_for(first)
        return replace(
            end,
            requests=end.requests if first.signum is None else (*end.requests, first.signum),
            is_deadline=stop.is_deadline,
            reason=stop.reason,
            exit_code=stop.exit_code,
            culprits=stop.culprits,
            tied=(),
            is_hang=False,
            elsewhere=stop.elsewhere,
        )

    def _is_alike(self, first: Failure, end: RunEnd) -> bool:
        """What comes on several nodes in the same step is not the first one's alone: our own
        verdict tells what it is."""
        step = self._own_failures[0].step if self._own_failures else None
        is_alike = (first.exit_code, first.step) == (end.exit_code, step)
        return first.is_own and end.elsewhere is None and is_alike

    def _asked_to_end(self, end: RunEnd, asked: Asked) -> RunEnd:
        """While the others were waited for: a request to end the job, unless all had ended."""
        self.tell_failure(None, None, str(asked), asked.exit_code, signum=asked.signum)
        self._wait_for_order(lambda: bool(self._own_failures))
        are_all_done = self._have_all_exited and next(self._ends(), None) is None
        if end.exit_code == EXIT_PASS and are_all_done:
            return end
        requests = (*end.requests, asked.signum)
        return replace(end, reason=str(asked), exit_code=asked.exit_code, requests=requests)

    def leave(self, *, goes_on: bool = False) -> bool:
        """Stay until the others are done with their evidence and their reports: where Slurm ends a
        step with its first task, we would cut them off. `goes_on`: this node would try again.
        Whether all would, as far as is known: one that is not heard may come."""
        self._link.say(Leave(self._me, goes_on))
        try:
            self.stay()
        except Asked:
            goes_on = False
        return goes_on and all(each.goes_on for each in self._of(Leave))

    def stay(self) -> None:
        """Until all others know what this launcher had to say, and are done. Raises Asked."""
        tell_until = (now := time.monotonic()) + TELL_S
        try:
            self._wait(
                lambda: self._may_leave(time.monotonic() < tell_until), now + self._patience_s
            )
        finally:
            self._link.close()

    def _may_leave(self, waits_for_late: bool) -> bool:
        """`waits_for_late`: for those that have not come; on a further node for the first one, to
        which it has said nothing yet."""
        owed = {*range(len(self._step.names))} if self.is_first else {self._me}
        knows = self._link.is_cut_off or owed <= {message.node for message in self._of(Leave)}
        return self._are_all(Leave) and (knows or not waits_for_late)

    def break_off(self, why: str, exit_code: int) -> None:
        """Go, and tell the others why, where they still wait for a word of this launcher."""
        if not self._has_exited(self._me):
            self.tell_failure(None, None, why, exit_code)
        self._link.close()

    @property
    def fault(self) -> str | None:
        """A traceback: of ours, in the link."""
        return self._link.fault

    @property
    def agreed_steps(self) -> int | None:
        """In so many steps the first node has seen the same bits of all; None: this is another."""
        link = self._link
        return link.num_agreed if isinstance(link, Leader) else None

    # -- of the log

    def _of(self, kind: type[Said]) -> Iterator[Said]:
        return (message for message in [*self._link.log] if isinstance(message, kind))

    def _ends(self) -> Iterator[Failure]:
        """What ends the job, in its order; what is told when all were done ends nothing."""
        exited: set[int] = set()
        for message in [*self._link.log]:
            if isinstance(message, WorkersExited):
                exited.add(message.node)
            if len(exited) == len(self._step.names):
                return
            if isinstance(message, Failure) and not message.peer_lost:
                yield message

    def _is_own(self, message: Failure) -> bool:
        """Whether this launcher has said it."""
        return message.node == self._me and message.is_own

    @property
    def _own_failures(self) -> list[Failure]:
        return [m for m in self._of(Failure) if self._is_own(m) and not m.peer_lost]

    def _stop_for(self, first: Failure) -> Stop:
        node = self._name(first.node)
        where = Elsewhere(
            node=node,
            worker=first.worker,
            rank=self._ranks.get((first.node, first.worker or "")),
            step=first.step,
            cause=first.cause,
            exit_code=first.exit_code,
            signum=first.signum,
        )
        is_lost = not first.is_own and first.exit_code == EXIT_PEER_LOST
        reason = f"{first.cause}: no GPU is to blame" if is_lost else where.told
        named = (first.worker,) if first.worker is not None and first.node == self._me else ()
        return Stop(reason, first.exit_code, named, is_deadline=first.is_deadline, elsewhere=where)

    @property
    def _has_told(self) -> bool:
        return "" in self._told or bool(self._own_failures)

    @property
    def _have_all_exited(self) -> bool:
        return {m.node for m in self._of(WorkersExited)} == {*range(len(self._step.names))}

    def _has_exited(self, node: int) -> bool:
        return any(m.node == node for m in self._of(WorkersExited))

    def _are_all(self, kind: type[WorkersExited] | type[Leave]) -> bool:
        """Those that are lost, or never came, are not waited for."""
        log = [*self._link.log]
        here = {message.node for message in log if isinstance(message, Join)}
        done = {message.node for message in log if isinstance(message, kind | Leave)}
        return self._link.is_cut_off or here <= done

    def _name(self, node: int) -> str:
        return self._step.names[node]
