"""What workers met alike: a failure of all, or of all of one kind, is no GPU's. Pure."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from enum import Enum, auto
from signal import SIGKILL
from typing import Generic, NamedTuple, TypeVar

from launcher.verdict.agreement import DIVIDING
from launcher.verdict.facts import WorkerFacts
from launcher.verdict.last_lines import last_words, without_numbers
from launcher.verdict.record import Case, WorkerEnd
from model_check.errors import EXIT_SIGNAL_BASE, exit_code_of
from model_check.events import NonFinite, Scalar
from model_check.utils.requests import request_of

Met = TypeVar("Met")


class Shared(NamedTuple, Generic[Met]):
    """What one worker met, and all that met it: every worker, or all equals."""

    workers: Sequence[str]
    met: Met


class Peers(Enum):
    """How the other workers of a run did at the step in which one is not finite."""

    FINITE = auto()
    """One of its kind, or more, where all of a kind must have the same bits."""
    FEWER_FINITE = auto()
    """The same, and most of its kind met it: the finite ones may be wrong."""
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
    if _sharing(case, worker, _bad_step(case)):
        return Peers.NOT_FINITE
    kind = [case.all_facts[name] for name in _kind(case, worker)]
    num_bad = sum(e.nonfinite is not None and e.nonfinite.step == step for e in kind)
    num_finite = sum(e.last_step is not None and e.last_step >= step for e in kind)
    if num_finite == 0 or case.record.not_compared is not None:
        return Peers.UNKNOWN
    return Peers.FEWER_FINITE if num_bad > num_finite else Peers.FINITE


def shared_nonfinite(case: Case, worker: str) -> Shared[NonFinite] | None:
    """The non-finite step of this worker as it is told by one that knows most; None: it has none,
    or shares it with nobody."""
    names = _sharing(case, worker, _bad_step(case))
    found = [bad for name in names if (bad := case.all_facts[name].nonfinite)]
    known = [bad for bad in found if bad.repeated is not None]
    return Shared(names, (known or found)[0]) if found else None


class Failure(NamedTuple):
    """How a worker failed by itself."""

    returncode: int
    """As in `subprocess.Popen`."""
    said: str
    """Why, in its own words: of a foreign command its last line. Empty: it told nothing."""


def shared_failure(case: Case, worker: str) -> Shared[Failure] | None:
    """How the first of them failed; the others told the same, but for numbers, or ended with the
    same exit code and told nothing. None: this worker did not, or shares it with nobody."""
    if case.end.is_by_signal:
        return None
    ends = {each.name: each for each in case.workers}
    names = _sharing(case, worker, lambda name: _failure(case.all_facts[name], ends[name]))
    if not names:
        return None
    first, end = case.all_facts[names[0]], ends[names[0]]
    if first.done is not None:
        return Shared(names, Failure(first.done.exit_code, first.done.error or ""))
    is_trainer = first.phase is not None
    said = end.last_error or "" if is_trainer else last_words(end.last_lines)
    return Shared(names, Failure(end.returncode or 0, said))


def _sharing(case: Case, worker: str, what: Callable[[str], Hashable | None]) -> Sequence[str]:
    """All workers, where all met the same as this one; else all of its kind, where these did; else
    nobody. One alone shares nothing."""
    met = what(worker)
    for names in ([each.name for each in case.workers], _kind(case, worker)):
        is_shared = all(what(name) == met for name in names)
        if met is not None and len(names) > 1 and is_shared:
            return names
    return ()


def is_equal(case: Case, one: str, other: str) -> bool:
    """Whether both are of one kind. One that has not said what device it has counts as an equal, if
    its group is the same; where nothing is compared, groups tell nothing."""
    groups = case.record.groups if case.record.not_compared is None else {}
    is_of_group = groups.get(one) == groups.get(other)
    return is_of_group and not _differ(case.all_facts[one].detail, case.all_facts[other].detail)


def _kind(case: Case, worker: str) -> Sequence[str]:
    """This worker and its equals, but for those that are named for other bits: they compute
    something else."""
    named = {*case.suspects} - {worker}
    unnamed = (each.name for each in case.workers if each.name not in named)
    return [name for name in unnamed if is_equal(case, worker, name)]


def _differ(mine: Mapping[str, Scalar], others: Mapping[str, Scalar]) -> bool:
    """Whether both have told of their devices, and they are of different kinds."""
    return any(mine[key] != others[key] for key in DIVIDING if key in mine and key in others)


def _bad_step(case: Case) -> Callable[[str], int | None]:
    return lambda name: bad.step if (bad := case.all_facts[name].nonfinite) else None


def _failure(facts: WorkerFacts, end: WorkerEnd) -> tuple[int, str] | None:
    """How it failed, and what it said of that, but for a NaN or a break: these have rows of their
    own."""
    done = facts.done
    if facts.nonfinite or facts.broken or (done and done.peer_lost):
        return None
    if done is None:
        code = exit_code_of(end.returncode or 0)
        is_own = code and not (end.stopped_by_us or end.spawn_error or end.oom)
        # Who was killed, or asked to end, tells nothing of the software.
        is_own = is_own and code != EXIT_SIGNAL_BASE + SIGKILL and request_of(code) is None
        return (code, _said(facts, end)) if is_own else None
    if done.error is None or not 0 < done.exit_code < EXIT_SIGNAL_BASE:
        return None
    return done.exit_code, without_numbers(done.error)


def _said(facts: WorkerFacts, end: WorkerEnd) -> str:
    """Progress of a trainer tells nothing of its end."""
    return without_numbers(last_words(end.last_lines)) if facts.last_step is None else ""
