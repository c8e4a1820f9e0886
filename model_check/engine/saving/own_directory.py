"""The directory of a run's checkpoints and evidence, which the run claims for as long as it lasts.

The claim is a lock on `.in_use` in the directory; the file says who holds it, or held it last. No
run writes, renames or removes a checkpoint in a directory that it has not claimed.
"""

import errno
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import NamedTuple

from model_check.config.places import refuse_unwritable
from model_check.config.resume import AUTO
from model_check.config.schema import Settings, SystemSettings
from model_check.dist.world import ALONE, World
from model_check.engine.run_context import Claim
from model_check.engine.saving.earlier import finish_moves
from model_check.engine.saving.lineage import contents_of
from model_check.errors import CheckpointError, StorageError
from model_check.utils.checkpoint_names import IN_USE, paths_in
from model_check.utils.held import HeldDirectory, hold_unlinked
from model_check.utils.words import Say, few, printable

_LONGEST = 4096
_ENDED = ", ended"
"""Follows the holder in `.in_use` when its run is over, for file systems without locks."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_TRIES = 3
_DEFAULT = Path(SystemSettings().checkpoint_dir)


class Seeker(NamedTuple):
    """A process that looks for its directory."""

    settings: Settings
    worker: str
    """`GPU3`"""
    is_isolated: bool = False
    """Other workers of its run have directories beside it; it is no rank of a job."""
    has_place: bool = False
    """`system.checkpoint_dir` was made for this one training, on whichever GPU it is."""

    @property
    def name(self) -> str:
        return f"{self.worker} (process {os.getpid()} on {os.uname().nodename})"

    def was(self, holder: str) -> bool:
        """Whether `holder` was the same worker on the same machine."""
        machine = re.escape(os.uname().nodename)
        return bool(re.match(rf"{re.escape(self.worker)} \(process \d+ on {machine}\)", holder))


@contextmanager
def checkpoint_directory(seeker: Seeker, say: Say, world: World = ALONE) -> Iterator[Claim]:
    """A directory that no other run is in: `system.checkpoint_dir` for a run by hand and for a job,
    whose first rank claims it for all; `gpu3` in it for an isolated worker. Where another run is in
    it, the next free one of `gpu3`, `gpu3_2`, ...; a line says so.

    With `training.resume = auto` the directory whose checkpoints fit this run best comes first.
    Raises CheckpointError where another process has it, and StorageError where checkpoints are to
    be written and cannot be.
    """
    with ExitStack() as stack:
        claim, problem = None, None
        if world.is_first:
            try:
                claim = _claimed(seeker, world.size, say, stack)
            except (CheckpointError, StorageError) as error:
                problem = error
        directory, problem = world.gathered((claim and claim.directory, problem))[0]
        if problem is not None:
            raise problem
        _tell_unshared(directory, world, say)
        yield claim or Claim(directory, _of_rank(directory, seeker, world, stack))


def is_in_use(directory: Path) -> bool:
    """Whether another run is in it now."""
    with suppress(OSError), hold_unlinked(directory) as held, held.open(IN_USE) as file:
        return not _lock(file.fileno(), LOCK_SH, _holder(held))
    return False


def _tell_unshared(place: Path, world: World, say: Say) -> None:
    """Now, and not when the job is to go on from there."""
    seen = world.gathered(os.path.exists(place / IN_USE))
    blind = [f"rank {rank}" for rank, is_there in enumerate(seen) if not is_there]
    if seen[0] and blind:
        do = "does" if len(blind) == 1 else "do"
        say(
            f"{place}: {few(blind)} {do} not see it: no job goes on from checkpoints there; "
            "system.checkpoint_dir must be on a file system that all nodes share"
        )


def _claimed(seeker: Seeker, num_ranks: int, say: Say, stack: ExitStack) -> Claim:
    """Claims the directory of the first rank. Raises CheckpointError, StorageError."""
    usual, further = _places(seeker)
    fitting = _fitting(usual, seeker.settings, num_ranks)
    holders: dict[Path, str] = {}
    claim = _first_free(fitting, seeker, holders, say, stack)
    if claim is None and (num_ranks > 1 or any(map(seeker.was, holders.values()))) and holders:
        taken, holder = next(iter(holders.items()))
        raise CheckpointError(
            f"training.resume = auto: {taken} holds the checkpoints of this run, and {holder} is "
            "using it: wait until that run has ended, or start without --resume"
        )
    if claim is None:
        others = (place for place in chain(usual, further) if place not in holders)
        if holders:  # no checkpoints of another run in place of those that are in use
            others = (place for place in others if not paths_in(place))
        claim = _first_free(others, seeker, holders, say, stack)
    assert claim is not None  # `further` has no end
    with suppress(OSError):
        finish_moves(claim.directory)
    return claim


def _of_rank(directory: Path, seeker: Seeker, world: World, stack: ExitStack) -> Path:
    """A directory for the evidence of a further rank, which no other run is in."""
    # Another node has a worker of the same name.
    parent = directory if world.node == 0 else directory / f"node_{world.node}"
    own = parent / seeker.worker.lower()
    places = chain([own], _numbered(own))
    with suppress(OSError):  # the first rank has told it
        own = next(place for place in places if _claim(place, seeker, stack) is None)
    return own


def _numbered(place: Path) -> Iterator[Path]:
    """`gpu3_2`, `gpu3_3`, ..."""
    return (place.with_name(f"{place.name}_{number}") for number in count(2))


def _places(seeker: Seeker) -> tuple[list[Path], Iterator[Path]]:
    """The directories to try: the usual one and all that are there, those of other workers behind
    its own; and further ones, without end."""
    parent = Path(seeker.settings.system.checkpoint_dir)
    own = parent / seeker.worker.lower()
    usual, further = [own] if seeker.is_isolated else [parent, own], _numbered(own)
    while os.path.isdir(place := next(further)):
        usual.append(place)
    further = chain([place], further)
    if not seeker.has_place:
        last = {place: _last_in(place) for place in usual}
        if any(map(seeker.was, last.values())):  # there is one of its own
            usual.sort(key=lambda place: last[place] != "" and not seeker.was(last[place]))
    return usual, further


def _fitting(places: Iterable[Path], settings: Settings, num_ranks: int) -> list[Path]:
    """Returns the places whose checkpoints `training.resume = auto` would go on from: those that
    fit best, of which whichever is free will do."""
    found = []
    for place in places if settings.training.resume == AUTO else ():
        with suppress(OSError):
            for fit, _ in contents_of(place).lineages(settings, num_ranks)[:1]:
                if not fit.is_another_run or settings.training.resume_anyway:
                    found.append((fit, place))
    best = min((fit for fit, _ in found), default=None)
    return [place for fit, place in found if fit == best]


def _first_free(
    places: Iterable[Path], seeker: Seeker, holders: dict[Path, str], say: Say, stack: ExitStack
) -> Claim | None:
    """Claims the first one that no run is in, until the end of `stack`; adds who is in the others
    to `holders`. Raises StorageError."""
    for place in places:
        try:
            holder = _claim(place, seeker, stack)
        except OSError as error:
            say(refuse_unwritable(seeker.settings, place, error))
            return Claim(place)
        if holder is None:
            for taken, other in list(holders.items())[:1]:
                say(f"{taken} is in use by {other}: checkpoints and evidence go to {place}")
            return Claim(place, check=partial(_refuse_if_taken, place, printable(seeker.name)))
        holders[place] = holder
    return None


def _claim(place: Path, seeker: Seeker, stack: ExitStack) -> str | None:
    """Hold the directory until the end of `stack`; else return who does. Raises OSError."""
    for _ in range(_TRIES):
        with suppress(FileNotFoundError):
            return _try_to_claim(place, seeker, stack)
    return _try_to_claim(place, seeker, stack)


def _try_to_claim(place: Path, seeker: Seeker, stack: ExitStack) -> str | None:
    """Raises FileNotFoundError also where the last holder has just removed the file."""
    was_there = os.path.lexists(place)
    with ExitStack() as otherwise:
        held = otherwise.enter_context(hold_unlinked(place, make=True))
        file = otherwise.enter_context(held.append_or_create(IN_USE)).fileno()
        holder = _holder(held)
        if not _lock(file, LOCK_EX, holder):
            return holder or "another run"
        if os.fstat(file).st_nlink != 1:
            with suppress(FileNotFoundError):  # a link to the file of a copied directory
                held.unlink(IN_USE)
            raise FileNotFoundError
        os.ftruncate(file, 0)
        os.write(file, seeker.name.encode())
        with suppress(PermissionError):  # whoever may write in the directory may claim it, too
            os.fchmod(file, held.status().st_mode & 0o666)
        otherwise.callback(_leave, held, file, was_there)
        stack.enter_context(otherwise.pop_all())
    return None


def _lock(descriptor: int, kind: int, holder: str) -> bool:
    """Lock it until the process ends, however it does. False: another run has it; where the file
    system has no locks, if `holder` does not show that its run is over. Raises OSError."""
    try:
        flock(descriptor, kind | LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return _is_over(holder)
    return True


def _is_over(holder: str) -> bool:
    told = re.search(r"\(process (\d+) on (.*)\)$", holder)
    if told is None or told[2] != os.uname().nodename:
        return told is None  # nobody was there, or it has ended
    # In a container that was started again a process may have the number that it had before.
    return told[1] == str(os.getpid()) or not os.path.exists(f"/proc/{told[1]}")


def _leave(held: HeldDirectory, descriptor: int, was_there: bool) -> None:
    """Removes a directory that was made for this run and in which nothing was saved."""
    with suppress(OSError):
        if was_there or held.names() != [IN_USE]:
            os.write(descriptor, _ENDED.encode())
            return
        held.unlink(IN_USE)
        os.rmdir(held.path)
        if held.path.parent == _DEFAULT:
            os.rmdir(_DEFAULT)


def _refuse_if_taken(place: Path, name: str) -> None:
    """Raises StorageError when `.in_use` names another run: one that claimed the directory at the
    same moment on a file system without locks, or after somebody had removed the file."""
    holder = _last_in(place)
    if holder and holder != name:
        raise StorageError(
            f"{place}: {holder} has taken it meanwhile: nothing more is written there. Was it moved"
            " or removed, or has its file system no locks? Give each run a directory of its own"
        )


def _last_in(place: Path) -> str:
    with suppress(OSError), hold_unlinked(place) as held:
        return _holder(held)
    return ""


def _holder(held: HeldDirectory) -> str:
    """`GPU0 (process 4711 on node7)`: who is there, or was last; empty: nobody."""
    with suppress(OSError):
        return printable(held.read(IN_USE, _LONGEST).decode(errors="replace"))
    return ""
