"""Follows the workers while they run: keeps their histories, stops the run when bits differ."""

from collections.abc import Mapping

from launcher.verdict.agreement import Agreement
from launcher.verdict.disagreement import Disagreement, Mismatch
from launcher.verdict.record import Stop
from launcher.verdict.slow import Slowness
from launcher.verdict.steps import History
from model_check.errors import EXIT_DISAGREEMENT
from model_check.events import Event, Step


class Watch:
    """The supervisor's observer for one run."""

    def __init__(self, groups: Mapping[str, str]) -> None:
        """`groups`: worker -> the group whose members must agree bit for bit."""
        self.histories = {name: History() for name in groups}
        self.disagreement: Disagreement | None = None
        self.mismatch: Mismatch | None = None
        self.agreement = Agreement(groups)
        self.slowness = Slowness(groups)

    def on_event(self, worker: str, event: Event) -> Stop | None:
        """Take one event; a Stop at the first step whose bits differ."""
        self.histories[worker].record(event)
        if not isinstance(event, Step) or self.disagreement:
            return None
        self.slowness.record(worker, event)
        self.disagreement = self.agreement.record(worker, event)
        if self.disagreement is None:
            return None
        return Stop(str(self.disagreement), EXIT_DISAGREEMENT, self.disagreement.odd)

    def finish(self) -> None:
        """The run is over: a difference that no further report can settle counts, too."""
        self.disagreement = self.disagreement or self.agreement.unsettled()
