"""What workers met alike: a failure of all, or of all of one kind, is no GPU's. Pure."""

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from enum import Enum, auto
from typing import Generic, NamedTuple, TypeVar

from launcher.verdict.agreement import DIVIDING
from launcher.verdict.record import Case
from launcher.verdict.steps import History
from model_check.errors import EXIT_SIGNAL_BASE
from model_check.events import Done, NonFinite, Scalar

_NUMBER = re.compile(r"\d+(\.\d+)?")
Met = TypeVar("Met")


class Shared(NamedTuple, Generic[Met]):
    """What one worker met, and all that met it: every worker, or all equals."""

    workers: Sequence[str]
    met: Met


class Peers(Enum):
    """How the other workers of a run did at the step in which one is not finite."""

    FINITE = auto()
    """One of its kind, or more, where all of a kind must have the same bits."""
    NOT_FINITE = auto()
    """All of them, or all of its kind."""
    UNKNOWN = auto()
    """No other of its kind came so far, or none must have its bits: what those of another kind
    computed, or kernels that may vary, proves nothing of its GPU."""
    NONE = auto()
    """There is no other."""


def peers_at(case: Case, worker: str, step: int) -> Peers:
    """They train on the same data with the same settings: what one can compute, all of its kind
    can."""
    if len(case.workers) == 1:
        return Peers.NONE
    if _sharing(case, worker, _bad_step):
        return Peers.NOT_FINITE
    equals = [case.histories[name] for name in _kind(case, worker) if name != worker]
    is_finite = any(e.last_step is not None and e.last_step >= step for e in equals)
    return Peers.FINITE if is_finite and case.record.not_compared is None else Peers.UNKNOWN


def shared_nonfinite(case: Case, worker: str) -> Shared[NonFinite] | None:
    """The non-finite step of this worker as it is told by one that knows most; None: it has none,
    or shares it with nobody."""
    names = _sharing(case, worker, _bad_step)
    found = [bad for name in names if (bad := case.histories[name].nonfinite)]
    known = [bad for bad in found if bad.repeated is not None]
    return Shared(names, (known or found)[0]) if found else None


def shared_failure(case: Case, worker: str) -> Shared[Done] | None:
    """What the first of them said when it failed; the others said the same, but for numbers. None:
    this worker told no failure, or shares it with nobody."""
    names = _sharing(case, worker, _failure)
    found = [done for name in names if (done := case.histories[name].done)]
    return Shared(names, found[0]) if found else None


def _sharing(case: Case, worker: str, what: Callable[[History], Hashable | None]) -> Sequence[str]:
    """All workers, where all met the same as this one; else all of its kind, where these did; else
    nobody. One alone shares nothing."""
    met = what(case.histories[worker])
    for names in ([each.name for each in case.workers], _kind(case, worker)):
        is_shared = all(what(case.histories[name]) == met for name in names)
        if met is not None and len(names) > 1 and is_shared:
            return names
    return ()


def is_equal(case: Case, one: str, other: str) -> bool:
    """Whether both are of one kind. One that has not said what device it has counts as an equal, if
    its group is the same; where nothing is compared, groups tell nothing."""
    groups = case.record.groups if case.record.not_compared is None else {}
    is_of_group = groups.get(one) == groups.get(other)
    return is_of_group and not _differ(case.histories[one].detail, case.histories[other].detail)


def _kind(case: Case, worker: str) -> Sequence[str]:
    """This worker and its equals, but for those that are named for other bits: they compute
    something else."""
    named = {*case.suspects} - {worker}
    unnamed = (each.name for each in case.workers if each.name not in named)
    return [name for name in unnamed if is_equal(case, worker, name)]


def _differ(mine: Mapping[str, Scalar], others: Mapping[str, Scalar]) -> bool:
    """Whether both have told of their devices, and they are of different kinds."""
    return any(mine[key] != others[key] for key in DIVIDING if key in mine and key in others)


def _bad_step(history: History) -> int | None:
    return history.nonfinite.step if history.nonfinite else None


def _failure(history: History) -> tuple[int, str] | None:
    """What it said when it failed, but of a NaN or a break: these have rows of their own. A GPU, a
    size, an address, a time differ between workers."""
    done = history.done
    if done is None or done.error is None or not 0 < done.exit_code < EXIT_SIGNAL_BASE:
        return None
    if history.nonfinite or history.broken or done.peer_lost:
        return None
    return done.exit_code, _NUMBER.sub("#", done.error)
