"""The seam between the loop that hears the workers and what follows from their words."""

from collections.abc import Mapping
from enum import Enum, auto

from launcher.verdict.record import Stop
from model_check.events import Command, Event

NEVER = float("inf")
SETTLE_S = 5.0
"""When one worker has shown a fault, each other one has so long, or SETTLE_STEPS of its steps, to
come to that step: to fail in it, too, to pass it, or to tell its fingerprints there. Five seconds
are for a busy machine."""
SETTLE_STEPS = 2


class Dismissal(Enum):
    """Of a worker without which the run goes on."""

    AWAITED = auto()
    """It keeps evidence, and ends by itself."""
    GIVEN_UP = auto()
    """It had its time: it is ended with the run."""


class Observer:
    """Follows a run from within its loop, so each call must be quick. This one wants nothing. A
    Stop ends the run, unless it is ending already; times are monotonic seconds."""

    @property
    def due(self) -> float:
        """When to call `tick` at the latest."""
        return NEVER

    @property
    def holds_run(self) -> bool:
        """Whether it settles something that is more than a death: none ends the run meanwhile."""
        return False

    @property
    def dismissed(self) -> Mapping[str, Dismissal]:
        return {}

    def news(self) -> list[str]:
        """Lines for people, once."""
        return []

    def on_event(self, worker: str, event: Event) -> Stop | None:
        """This worker said so."""

    def on_end(self, worker: str) -> None:
        """The process of this worker has ended, whatever it said."""

    def tick(self, now: float) -> Stop | None:
        """After each wake-up, when all that came with it was told."""

    def commands(self) -> list[tuple[str, Command]]:
        """What to tell which worker, now."""
        return []
