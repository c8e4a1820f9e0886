"""Who failed first, where no launcher of ours watches (torchrun): each rank says so in the store
before it leaves, under a number that the store gives out. No clock is compared with another
machine's."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
from msgspec import Struct
from torch.distributed import Store  # type: ignore[attr-defined]

from model_check.errors import PeerLost
from model_check.utils.words import first_line, listed
from model_check.utils.worker_env import RankEnv

FOLLOW_S = 2.0
"""A rank that lost another one may ask before that one has told why it leaves."""
ANSWER_S = 5.0
"""The store answers so soon, or its node is not there any more. Its client has no limit for that:
a thread waits for it."""
_LOOK_S = 0.05
_LEAVE_S = 0.5
"""From a rank's last word to its end, and until torchrun has seen that: it looks each 0.1 s."""
_COUNTER = "model-check/failed"
_FIRST = f"{_COUNTER}/1"
_SAVING = "model-check/saving"
Found = TypeVar("Found")


class Failed(Struct, frozen=True):
    """What a rank leaves in the store."""

    rank: int
    node: str
    steps: int
    """That it had done."""
    cause: str

    @property
    def told(self) -> str:
        done = f" after {self.steps} steps" if self.steps else ""
        return f"rank {self.rank} on node {self.node} failed first{done}: {self.cause}"


class Saving(Struct, frozen=True):
    """What a rank leaves in the store that is to leave itself, and saves evidence first."""

    failed: Failed
    wait_s: float
    """It may take so long. Who leaves earlier is its end under torchrun, and is named for it."""


class Failures:
    """The words of all ranks of one job."""

    def __init__(self, store: Store, env: RankEnv) -> None:
        """All ranks are here: their nodes are told. Raises what the store raises."""
        self._store, self._env = store, env
        self._awaited: Saving | None = None
        store.set(f"model-check/node/{env.rank}", env.node)
        names = [f"model-check/node/{rank}" for rank in range(env.world_size)]
        store.wait(names)
        self._nodes = [name.decode() for name in store.multi_get(names)]

    def tell(self, error: BaseException, steps: int) -> None:
        """This rank leaves, of its own fault."""
        failed = self._failed(error, steps)

        def say() -> None:
            number = self._store.add(_COUNTER, 1)
            self._store.set(f"{_COUNTER}/{number}", msgspec.json.encode(failed).decode())

        _bounded(say)

    def tell_saving(self, error: BaseException, steps: int, wait_s: float) -> None:
        """This rank is to leave, of its own fault, when its evidence is saved."""
        saving = Saving(self._failed(error, steps), wait_s)
        _bounded(lambda: self._store.set(_SAVING, msgspec.json.encode(saving).decode()))

    def _failed(self, error: BaseException, steps: int) -> Failed:
        return Failed(self._env.rank, self._env.node, steps, first_line(error))

    def explained(self, lost: PeerLost) -> PeerLost:
        """The same, with what the store tells of it."""
        self._began = time.monotonic() - lost.waited_s
        text = _bounded(self._why)
        if isinstance(text, Saving):
            self._awaited, text = text, text.failed.told
        if text is None:
            text = self._not_heard([self._nodes[0]])
        return PeerLost(f"{lost}; {text}", has_waited=lost.has_waited, waited_s=lost.waited_s)

    def let_leave(self) -> None:
        """Return when the rank that `explained` has named and that saves evidence has left."""
        if self._awaited is None:
            return
        until = time.monotonic() + self._awaited.wait_s
        while time.monotonic() < until and _bounded(self._is_told) is False:
            time.sleep(_LOOK_S)
        time.sleep(_LEAVE_S)

    def _is_told(self) -> bool:
        return bool(self._store.check([_FIRST]))

    def _why(self) -> str | Saving:
        self._store.set(f"model-check/lost/{self._env.rank}", "")
        until = time.monotonic() + FOLLOW_S
        while time.monotonic() < until:
            if self._is_told():
                return msgspec.json.decode(self._store.get(_FIRST), type=Failed).told
            if self._store.check([_SAVING]):
                return msgspec.json.decode(self._store.get(_SAVING), type=Saving)
            time.sleep(_LOOK_S)
        return self._missing([r for r in range(self._env.world_size) if not self._has_lost(r)])

    def _has_lost(self, rank: int) -> bool:
        return bool(self._store.check([f"model-check/lost/{rank}"]))

    def _missing(self, ranks: Sequence[int]) -> str:
        """Those that said nothing: a whole node, or some of its ranks."""
        if not ranks:
            return "every rank lost another one, and none tells why"
        nodes = dict.fromkeys(self._nodes[rank] for rank in ranks)
        whole = [n for n in nodes if self._ranks_of(n) <= {*ranks} and n != self._env.node]
        if len(whole) == len(nodes):
            return self._not_heard(whole)
        each = [f"rank {rank} on node {self._nodes[rank]}" for rank in ranks]
        return f"{listed(each)} did not come, and said nothing"

    def _ranks_of(self, node: str) -> set[int]:
        return {rank for rank, name in enumerate(self._nodes) if name == node}

    def _not_heard(self, nodes: Sequence[str]) -> str:
        silent_s = time.monotonic() - self._began
        which = "node" if len(nodes) == 1 else "nodes"
        return f"{which} {listed(nodes)} not heard for {silent_s:.0f} s: no GPU is to blame"


def _bounded(ask: Callable[[], Found]) -> Found | None:
    """None: the store did not answer."""
    found: list[Found] = []

    def work() -> None:
        try:
            found.append(ask())
        except RuntimeError:  # the store is gone
            return

    thread = threading.Thread(target=work, name="failures", daemon=True)
    thread.start()
    thread.join(FOLLOW_S + ANSWER_S)
    return found[0] if found else None
