"""What the supervisor hands out: a helper's turn, and how the run ended."""

from signal import Signals
from typing import Protocol

from msgspec import Struct

from launcher.verdict.nodes import LostPeer
from launcher.verdict.record import RunEnd, Stop, WorkerEnd
from model_check.events import Step


class Companion(Protocol):
    """A helper process beside the workers. How it ends changes nothing for the run."""

    pid: int | None
    fd: int | None
    """Its output, until `close`; None: it does not run."""

    def start(self, now: float) -> None:
        """Start it, if it can be; times are monotonic seconds."""

    @property
    def due(self) -> float:
        """When to call `tick` at the latest."""

    def read(self, now: float) -> bool:
        """Its output is readable; False: that was the end of it."""

    def tick(self, now: float) -> None: ...

    def forgive_silence(self, now: float) -> None:
        """We and it were stopped until now."""

    def finish(self) -> None:
        """The workers are asked to end. Must not wait."""

    def close(self) -> None:
        """The workers are gone. May wait for a bounded time."""


class OtherNodes(Protocol):
    """The launchers of the same job on other nodes."""

    fd: int
    """Readable when one of them has said something; then `drain` it."""

    def drain(self) -> None: ...

    def lost_peers(self, now: float) -> list[LostPeer]:
        """Ranks there that cannot go on without another one."""

    def stop(self) -> Stop | None:
        """What ends the job there."""

    def tell_step(self, worker: str, step: Step) -> None:
        """One of ours has taken it."""

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
        """The first word on each worker counts. `worker`: None: nobody is blamed. `signum`: the
        signal that asked for it. `peer_lost`: the rank only lost another one."""


class Outcome(Struct, frozen=True):
    """How a run ended."""

    end: RunEnd
    workers: tuple[WorkerEnd, ...] = ()
    kept_signals: tuple[Signals, ...] = ()
    """SIGUSR1/2 that came during preparation; the next supervisor forwards them. Requests to end
    that came when it had ended well: the next supervisor starts nobody."""
