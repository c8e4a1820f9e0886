"""The nodes of one job, as this node's launcher sees them: who is there, where the ranks are, who
failed first, and whether all are done."""

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from launcher.nodes.failures import TELL_S, Asked, EndedElsewhere, NodeLost
from launcher.nodes.first_node import FirstNode
from launcher.nodes.further_node import FurtherNode
from launcher.nodes.link import Link
from launcher.nodes.messages import (
    Bits,
    Broken,
    Ended,
    Failure,
    Follower,
    Gone,
    Hello,
    Over,
    Ready,
    differing,
    two_versions,
)
from launcher.verdict.nodes import Elsewhere, JobPart
from launcher.verdict.record import RunEnd, Stop
from model_check.errors import (
    EXIT_INTERNAL,
    EXIT_PASS,
    EXIT_PEER_LOST,
    EXIT_SIGNAL_BASE,
    ConfigError,
)
from model_check.events import Step
from model_check.utils.requests import TO_STOP
from model_check.utils.slurm import SlurmStep
from model_check.utils.words import few, listed

_LOOK_S = 0.1
_ORDER_S = 2.0
"""The first node's launcher orders what is told within milliseconds."""
Said = TypeVar("Said", Hello, Ready, Follower, Failure, Ended, Over, Gone)


class Share(Struct, frozen=True):
    """This node's part of a job."""

    first_rank: int
    num_ranks: int
    """Of the whole job."""
    resume: str | None = None
    """The checkpoint that the first node has chosen for all; None: the job begins as it began."""


class Nodes:
    """From the meeting to the end of one run."""

    def __init__(
        self,
        step: SlurmStep,
        hello: Hello,
        address: str,
        port: int,
        silence_s: float,
        *,
        is_sharded: bool = False,
    ) -> None:
        """`silence_s`: how long another node may be silent. `is_sharded`: ranks hold different
        tensors."""
        self._step, self._me = step, hello.node
        self._address = address
        make = FirstNode if hello.node == 0 else FurtherNode
        self._link: Link = make(hello, step.names, address, port)
        self._silence_s = silence_s
        self._num_workers = len(hello.workers)
        self.fd = self._link.fd
        """Readable when another node has said something."""
        self._is_sharded = is_sharded
        self._steps: dict[int, dict[str, dict[str, str]]] = {}
        """Those that not all ranks here have told."""
        self._told: set[str] = set()
        """The workers of ours that have told that they follow or failed."""
        self._heard_at: dict[tuple[int, str], float] = {}

    def open(self, patience_s: float) -> None:
        """`patience_s`: how long the others may take to come. Raises ConfigError."""
        self._patience_s = patience_s
        self._link.start(self._silence_s, time.monotonic() + patience_s)

    @property
    def address(self) -> str:
        """Where the ranks meet: of the first node as the others reach it, since its own name may
        mean loopback to it."""
        seen = self._link.local_address if self.is_first else None
        return self._address if seen is None else seen

    @property
    def is_first(self) -> bool:
        return self._me == 0

    # -- before the start

    def meet(self) -> Share:
        """Wait until all are here. Raises ConfigError where they were asked for different things,
        NodeLost, Asked."""
        hellos = self._all(Hello, self._patience_s)
        first = hellos[0]
        for each in hellos[1:]:
            if names := differing(first.settings, each.settings):
                raise ConfigError(
                    f"nodes {first.name} and {each.name} were asked for different trainings: "
                    f"{few(names)} differ: give all the same command"
                )
            if each.version != first.version:  # else the first node refuses it
                raise ConfigError(two_versions(first, each))
            if each.torch != first.torch:
                raise ConfigError(
                    f"torch is {first.torch} on {first.name} and {each.torch} on {each.name}: "
                    "install the same on all nodes"
                )
        sizes = [len(each.workers) for each in hellos]
        return Share(sum(sizes[: self._me]), sum(sizes), first.resume)

    def begin(self, data: str, port: int) -> int:
        """Wait until the data of all are prepared; where the ranks meet. `port`: of the first node.
        Raises ConfigError where nodes would train on different data, NodeLost, Asked."""
        self._link.say(Ready(self._me, data, port))
        ready = self._all(Ready, None)
        for each in ready[1:]:
            if each.data != ready[0].data:
                raise ConfigError(
                    f"nodes {self._name(0)} and {self._name(each.node)} prepared different data "
                    f"({ready[0].data} and {each.data}): share data.cache_dir, or the data set"
                )
        return ready[0].port

    def _all(self, kind: type[Said], patience_s: float | None) -> list[Said]:
        """What each node said, in their order."""
        until = None if patience_s is None else time.monotonic() + patience_s
        while True:
            found = {m.node: m for m in self._of(kind)}
            if len(found) == len(self._step.names):
                return [found[node] for node in sorted(found)]
            if self._link.refused is not None:
                raise ConfigError(self._link.refused)
            if (stop := self.stop()) is not None:
                raise EndedElsewhere(stop)
            if until is not None and time.monotonic() > until + 2 * self._silence_s:
                missing = [n for i, n in enumerate(self._step.names) if i not in found]
                raise NodeLost(f"{listed(missing)} did not come in {patience_s:.0f} s")
            self._wait(lambda: False)

    def _wait(self, is_there: Callable[[], bool]) -> None:
        """A moment. Raises Asked: signals are blocked until a supervisor answers them."""
        self._link.wait(is_there, _LOOK_S)
        if (asked := signal.sigtimedwait(TO_STOP, 0)) is not None:
            raise Asked(asked.si_signo)

    # -- while the ranks train

    def drain(self) -> None:
        self._link.drain()

    def followers(self, now: float) -> list[tuple[str, str, float]]:
        """Ranks of other nodes that cannot go on without another one: name, what it said, when we
        heard of it."""
        found = [m for m in self._of(Follower) if m.node != self._me]
        for each in found:
            self._heard_at.setdefault((each.node, each.worker), now)
        return [
            (f"{m.worker} on {self._name(m.node)}", m.said, self._heard_at[m.node, m.worker])
            for m in found
        ]

    def stop(self) -> Stop | None:
        """What ends our part of the job: the first failure elsewhere, or a node that is gone."""
        return next((self._stop_for(m) for m in self._ends() if not self._is_own(m)), None)

    def tell_follower(self, worker: str, said: str) -> None:
        if worker not in self._told:
            self._told.add(worker)
            self._link.say(Follower(self._me, worker, said))

    def tell_failure(
        self,
        worker: str | None,
        step: int | None,
        cause: str,
        exit_code: int,
        *,
        signum: int | None = None,
        is_deadline: bool = False,
    ) -> None:
        """The first word on each worker counts."""
        if (worker or "") in self._told:
            return
        self._told.add(worker or "")
        self._link.say(Failure(self._me, worker, step, cause, exit_code, signum, is_deadline))

    def tell_step(self, worker: str, step: Step) -> None:
        """For the first node to compare: when all ranks here have told it, and agree. Where they do
        not, this node finds out by itself who is wrong."""
        shared = {"loss": step.loss, "grad_norm": step.grad_norm}
        if not self._is_sharded:
            shared |= step.fp
        told = self._steps.setdefault(step.step, {})
        told[worker] = shared
        if len(told) < self._num_workers:
            return
        values = [*self._steps.pop(step.step).values()]
        if all(each == values[0] for each in values):
            self._link.say(Bits(self._me, step.step, values[0]))

    # -- when they are gone

    def concluded(self, end: RunEnd) -> RunEnd:
        """How the job ended: as here, or as the node whose failure was told first. Where all went
        well here, the others are waited for."""
        if end.exit_code != EXIT_PASS and end.elsewhere is None and not self._has_told:
            signum = end.exit_code - EXIT_SIGNAL_BASE if end.is_by_signal else None
            self.tell_failure(None, None, str(end.reason), end.exit_code, signum=signum)
        self._link.say(Ended(self._me, end.exit_code))
        try:
            if end.exit_code == EXIT_PASS and not end.is_deadline:
                while self.stop() is None and not self._are_all(Ended):
                    self._wait(lambda: self.stop() is not None or self._are_all(Ended))
            else:
                self._link.wait(lambda: self._has_ended(self._me) or self._is_cut_off, _ORDER_S)
        except Asked as asked:
            return self._asked_to_end(end, asked)
        first = next(self._ends(), None)
        if isinstance(first, Broken) and end.exit_code == EXIT_PASS:
            return replace(end, reason=first.why, exit_code=EXIT_INTERNAL)
        if (
            first is None
            or isinstance(first, Broken)
            or self._is_own(first)
            or _is_alike(first, end, self._own_step())
        ):
            return end
        stop = self._stop_for(first)
        assert stop.elsewhere is not None
        signum = stop.elsewhere.signum
        return replace(
            end,
            requests=end.requests if signum is None else (*end.requests, signum),
            is_deadline=stop.is_deadline,
            reason=stop.reason,
            exit_code=stop.exit_code,
            culprits=(),
            tied=(),
            is_hang=False,
            elsewhere=stop.elsewhere,
        )

    def _asked_to_end(self, end: RunEnd, asked: Asked) -> RunEnd:
        """While the others were waited for: a request to end the job, unless all had ended."""
        self.tell_failure(None, None, str(asked), asked.exit_code, signum=asked.signum)
        self._link.wait(
            lambda: any(map(self._is_own, self._of(Failure))) or self._is_cut_off, _ORDER_S
        )
        if end.exit_code == EXIT_PASS and self._have_all_ended and next(self._ends(), None) is None:
            return end
        requests = (*end.requests, asked.signum)
        return replace(end, reason=str(asked), exit_code=asked.exit_code, requests=requests)

    def leave(self, *, goes_on: bool = False) -> bool:
        """Stay until the others are done with their evidence and their reports: where Slurm ends a
        step with its first task, we would cut them off. `goes_on`: this node would try again.
        Whether all would, as far as is known: one that is not heard may come."""
        self._link.say(Over(self._me, goes_on))
        began = time.monotonic()
        until, tell_until = began + self._patience_s, began + TELL_S
        try:
            while (now := time.monotonic()) < until and not self._may_leave(now < tell_until):
                self._wait(lambda: self._may_leave(now < tell_until))
        except Asked:
            goes_on = False
        self._link.close()
        is_missing = any(gone.has_ended for gone in self._of(Gone) if not self._is_over(gone.node))
        return goes_on and not is_missing and all(each.goes_on for each in self._of(Over))

    def _may_leave(self, waits_for_late: bool) -> bool:
        """`waits_for_late`: for those that have not come; on a further node for the first one, to
        which it has said nothing yet."""
        if not self._are_all(Over):
            return False
        told = {message.node for message in self._of(Over)}
        gone = {message.node for message in self._of(Gone)}
        owed = {*range(len(self._step.names))} if self.is_first else {self._me}
        knows = owed <= told | gone or self._is_cut_off or self._link.refused is not None
        return knows or not waits_for_late

    def break_off(self, why: str, exit_code: int) -> None:
        """Go, and tell the others why, where they still wait for a word of this launcher."""
        if not self._has_ended(self._me):
            self.tell_failure(None, None, why, exit_code)
        self._link.close()

    def vanish(self) -> None:
        """Go without a word: the others hear that this launcher is gone."""
        self._link.close()

    @property
    def fault(self) -> str | None:
        """A traceback: of ours, in the link."""
        return self._link.fault

    def record(self, share: Share, workers: Sequence[str]) -> JobPart:
        """For run.json."""
        hellos = sorted(self._of(Hello), key=lambda hello: hello.node)
        return JobPart(
            number=self._me,
            name=self._name(self._me),
            job=self._step.key,
            num_ranks=share.num_ranks,
            ranks={worker: share.first_rank + at for at, worker in enumerate(workers)},
            hosts={hello.name: hello.host for hello in hellos},
        )

    @property
    def agreed_steps(self) -> int | None:
        """In so many steps the first node has seen the same bits of all; None: this is another."""
        link = self._link
        return link.comparison.num_agreed if isinstance(link, FirstNode) else None

    # -- of the log

    def _of(self, kind: type[Said]) -> Iterator[Said]:
        return (message for message in [*self._link.log] if isinstance(message, kind))

    def _ends(self) -> Iterator[Failure | Gone | Broken]:
        """What ends the job, in its order; a node whose ranks were done may go, and what is told
        when all were done ends nothing."""
        ended: set[int] = set()
        for message in [*self._link.log]:
            match message:
                case Ended():
                    ended.add(message.node)
                    if len(ended) == len(self._step.names):
                        return
                case Failure() | Broken():
                    yield message
                case Gone() if not self._has_ended(message.node):
                    yield message

    def _is_own(self, message: "Failure | Gone | Broken") -> bool:
        """Whether this launcher has said it."""
        if isinstance(message, Broken):
            return False
        is_compared = isinstance(message, Failure) and message.is_compared
        return message.node == self._me and not is_compared

    def _stop_for(self, first: "Failure | Gone | Broken") -> Stop:
        if isinstance(first, Broken):
            return Stop(first.why, EXIT_INTERNAL)
        node = self._name(first.node)
        if isinstance(first, Gone):
            where = Elsewhere(node=node, cause=first.why, exit_code=EXIT_PEER_LOST)
            return Stop(f"{first.why}: no GPU is to blame", EXIT_PEER_LOST, elsewhere=where)
        rank = None if first.worker is None else self._rank(first.node, first.worker)
        where = Elsewhere(
            node=node,
            worker=first.worker,
            rank=rank,
            step=first.step,
            cause=first.cause,
            exit_code=first.exit_code,
            signum=first.signum,
        )
        return Stop(where.told, first.exit_code, is_deadline=first.is_deadline, elsewhere=where)

    def _rank(self, node: int, worker: str) -> int | None:
        workers: Mapping[int, list[str]] = {m.node: m.workers for m in self._of(Hello)}
        if worker not in workers.get(node, []):
            return None
        before = sum(len(workers.get(number, [])) for number in range(node))
        return before + workers[node].index(worker)

    def _own_step(self) -> int | None:
        return next((m.step for m in self._of(Failure) if self._is_own(m)), None)

    @property
    def _has_told(self) -> bool:
        return "" in self._told or any(map(self._is_own, self._of(Failure)))

    @property
    def _have_all_ended(self) -> bool:
        return {m.node for m in self._of(Ended)} == {*range(len(self._step.names))}

    def _has_ended(self, node: int) -> bool:
        return any(m.node == node for m in self._of(Ended))

    def _are_all(self, kind: type[Ended] | type[Over]) -> bool:
        """Those that are gone, or never came, are not waited for."""
        log = [*self._link.log]
        here = {message.node for message in log if isinstance(message, Hello)}
        done = {message.node for message in log if isinstance(message, kind | Gone | Over)}
        return self._is_cut_off or here <= done

    def _is_over(self, node: int) -> bool:
        return any(message.node == node for message in self._of(Over))

    @property
    def _is_cut_off(self) -> bool:
        """Nothing will come from the other nodes any more."""
        return self.fault is not None or any(message.node == 0 for message in self._of(Gone))

    def _name(self, node: int) -> str:
        return self._step.names[node]


def _is_alike(first: "Failure | Gone", end: RunEnd, step: int | None) -> bool:
    """What comes on several nodes in the same step is not the first one's alone: our own verdict
    tells what it is."""
    if isinstance(first, Gone) or end.elsewhere is not None:
        return False
    return (first.exit_code, first.step) == (end.exit_code, step)
