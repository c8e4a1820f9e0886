"""The checkpoint directory of a worker, which no other run is in."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, flock
from itertools import count
from pathlib import Path

from model_check.engine.distributed.world import ALONE, World
from model_check.utils.checkpoint_names import IN_USE
from model_check.utils.held import hold_unlinked
from model_check.utils.words import Say, few, printable

_LONGEST = 4096


@contextmanager
def checkpoint_directory(
    parent: str,
    is_isolated: bool,
    worker: str,
    say: Say,
    world: World = ALONE,
    *,
    has_place: bool = False,
) -> Iterator[Path]:
    """A directory of its own for a worker beside others that train the same, else `parent`: for one
    that was started by hand, and for a job, whose directory is that of its first rank.

    `has_place`: `parent` was made for this one training, on whichever GPU it is.

    Several may be started by hand in one place, with a GPU each: `parent` is the first one's, and
    another one's is `parent/gpu3`, or `gpu3_2` beside one on the same GPU. There it stays,
    whichever begins first next time.
    """
    plain, own = Path(parent), Path(parent) / worker.lower()
    if is_isolated:
        yield own
        return
    with ExitStack() as stack:
        claims = world.is_first
        last = None if has_place else _who(plain)
        mine = _claimed(_in_order(plain, own, worker, last), worker, say, stack) if claims else own
        place = Path(world.gathered(str(mine))[0])
        _tell_unshared(place, world, say)
        yield place


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


def _in_order(plain: Path, own: Path, worker: str, last: str | None) -> Iterator[Path]:
    """`last`: who was in `plain`."""
    is_anothers = last is not None and not last.startswith(f"{worker} ")
    yield from (own, plain) if is_anothers and own.is_dir() else (plain, own)
    yield from (own.with_name(f"{own.name}_{number}") for number in count(2))


def _claimed(places: Iterator[Path], worker: str, say: Say, stack: ExitStack) -> Path:
    """The first of `places` that no run is in."""
    taken = ""
    while holder := _claim(place := next(places), worker, stack):
        taken = taken or f"{place} is in use by {holder}"
    if taken:
        say(f"{taken}: checkpoints and evidence go to {place}")
    return place


def _claim(directory: Path, worker: str, stack: ExitStack) -> str | None:
    """Hold the directory until the end of `stack`; who else does. A directory that cannot be
    written, or locked, is nobody's: what is saved there will say so."""
    with suppress(OSError):
        held = stack.enter_context(hold_unlinked(directory, make=True))
        file = stack.enter_context(held.append_or_create(IN_USE))
        try:
            flock(file, LOCK_EX | LOCK_NB)  # until the process ends, however it does
        except BlockingIOError:
            return _who(directory) or "another run"
        os.ftruncate(file.fileno(), 0)
        os.write(
            file.fileno(), f"{worker} (process {os.getpid()} on {os.uname().nodename})".encode()
        )
    return None


def _who(directory: Path) -> str | None:
    """`GPU0 (process 4711 on node7)`: who is there, or was last."""
    with suppress(OSError), hold_unlinked(directory) as held:
        return printable(held.read(IN_USE, _LONGEST).decode(errors="replace")) or None
    return None
