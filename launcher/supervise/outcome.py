"""What the supervisor hands out: each event while it runs, and how the run ended. Values only."""

from collections.abc import Callable
from signal import Signals
from typing import Protocol

from msgspec import Struct

from launcher.verdict.record import RunEnd, Stop, WorkerEnd
from model_check.events import Event

Observe = Callable[[str, Event], Stop | None]
"""Called in the loop with a worker's name and its event: be quick. A Stop ends the run, unless it
is ending already."""


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


class Outcome(Struct, frozen=True):
    """How a run ended."""

    end: RunEnd
    workers: tuple[WorkerEnd, ...] = ()
    kept_signals: tuple[Signals, ...] = ()
    """SIGUSR1/2 that came during preparation; the next supervisor forwards them. Requests to end
    that came when it had ended well: the next supervisor starts nobody."""
