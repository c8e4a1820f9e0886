"""Keeps the workers of one group in step. Pure: it says what each of them is to be told."""

from collections.abc import Iterable

from model_check.events import Command, Credit, Done, Event, Finished, Go, Phase, Step

_NO_STEP = -1


class Pace:
    """A worker gets credit up to `max_lead` steps beyond the slowest that still trains. One that is
    finished is let go when all are: until then it is a witness."""

    def __init__(self, workers: Iterable[str], max_lead: int) -> None:
        self._max_lead = max_lead
        self.workers = tuple(workers)
        self._last = dict.fromkeys(self.workers, _NO_STEP)
        """The last step that each has finished; of those that still train."""
        self.here = set(self.workers)
        """Those that have not ended well."""
        self._told_credit = _NO_STEP
        self._let_go: set[str] = set()

    @property
    def credit(self) -> int:
        """The last step that may begin."""
        return self._told_credit

    @property
    def lead(self) -> int:
        return self._max_lead

    @property
    def is_finished(self) -> bool:
        """Nobody trains any more."""
        return not self._last

    @property
    def slowest_first(self) -> list[str]:
        """Those that have not ended well."""
        return sorted(self.here, key=lambda name: (self._last.get(name, self._told_credit), name))

    def on_event(self, worker: str, event: Event) -> None:
        match event:
            case Phase(name="train", detail={"first_step": int(first)}):
                self._reach(worker, first - 1)
            case Step():
                self._reach(worker, event.step)
            case Finished():
                self._last.pop(worker, None)
            case Done(exit_code=0):  # after a failure the run ends
                self.leave(worker)

    def leave(self, worker: str) -> None:
        """It has ended: nobody waits for it."""
        self._last.pop(worker, None)
        self.here.discard(worker)

    def more_credit(self) -> list[tuple[str, Command]]:
        """For all that still train, when the slowest of them went on."""
        credit = min(self._last.values(), default=_NO_STEP) + self._max_lead
        if credit <= self._told_credit:
            return []
        self._told_credit = credit
        return [(worker, Credit(step=credit)) for worker in self._last]

    def let_go(self) -> list[tuple[str, Command]]:
        """For all that are still here, once."""
        held = self.here - self._let_go
        self._let_go |= held
        return [(worker, Go()) for worker in sorted(held)]

    def _reach(self, worker: str, step: int) -> None:
        if worker in self._last:
            self._last[worker] = max(self._last[worker], step)
