"""What workers met alike: a failure of all is no GPU's. Pure."""

import re
from collections.abc import Sequence
from enum import Enum, auto

from launcher.verdict.record import Case
from launcher.verdict.steps import History
from model_check.errors import EXIT_SIGNAL_BASE
from model_check.events import Done, NonFinite

_NUMBER = re.compile(r"\d+(\.\d+)?")


class Peers(Enum):
    """How the other workers of a run did at the step in which one is not finite."""

    FINITE = auto()
    """One of them, or more."""
    NOT_FINITE = auto()
    """All of them."""
    UNKNOWN = auto()
    NONE = auto()
    """There is no other."""


def peers_at(case: Case, worker: str, step: int) -> Peers:
    """They train on the same data with the same settings: what one can compute, all can."""
    peers = [case.histories[other.name] for other in case.workers if other.name != worker]
    if any(peer.last_step is not None and peer.last_step >= step for peer in peers):
        return Peers.FINITE
    if not peers:
        return Peers.NONE
    are_bad = (peer.nonfinite is not None and peer.nonfinite.step == step for peer in peers)
    return Peers.NOT_FINITE if all(are_bad) else Peers.UNKNOWN


def shared_nonfinite(case: Case) -> NonFinite | None:
    """The non-finite step that every worker met, as it is told by one that knows most; None: there
    is none."""
    found = [history.nonfinite for history in _histories(case)]
    steps = {bad and bad.step for bad in found}
    if len(found) < 2 or len(steps) > 1:
        return None
    known = [bad for bad in found if bad and bad.repeated is not None]
    return next(iter(known), found[0])


def shared_failure(case: Case) -> Done | None:
    """What every worker said when it failed, where all said the same, but for numbers; None: they
    did not."""
    said = [history.done for history in _histories(case)]
    first = said[0] if said else None
    if first is None or first.error is None or not 0 < first.exit_code < EXIT_SIGNAL_BASE:
        return None
    is_shared = len(said) > 1 and len({done and _without_numbers(done) for done in said}) == 1
    return first if is_shared else None


def _without_numbers(done: Done) -> tuple[int, str]:
    """A GPU, a size, an address, a time differ between workers."""
    return done.exit_code, _NUMBER.sub("#", done.error or "")


def _histories(case: Case) -> Sequence[History]:
    return [case.histories[worker.name] for worker in case.workers]
