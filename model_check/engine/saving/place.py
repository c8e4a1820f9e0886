"""Where the ranks of a job look for what they resume. Each looks for itself, and they compare what
they see: nodes whose directories are not shared would go on from different steps."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from model_check.config.resume import AUTO
from model_check.engine.run_context import RunContext
from model_check.engine.saving.checkpoint_files import (
    directories_beside,
    newest_first,
    unfinished,
)
from model_check.errors import CheckpointError
from model_check.utils.checkpoint_names import NONE_THERE, is_sharded
from model_check.utils.words import few

SHARE = "system.checkpoint_dir must be on a file system that all nodes share"


class NotShared(CheckpointError):
    """Only some of the ranks see it, or they see different ones."""


class Place(Struct, frozen=True, kw_only=True):
    """What one rank sees of it."""

    path: Path
    is_there: bool
    directory: Path | None
    """The newest in it counts; None: `path` is a checkpoint."""
    candidates: list[Path] = []
    """In `directory`, or beside `path`, the newest first."""
    unfinished: list[Path] = []
    """Sharded ones in `directory` whose saves were cut short."""
    beside: list[Path] = []
    """Directories of other workers with checkpoints, where `directory` has none."""
    why_empty: str = ""
    problem: str | None = None
    """Why it could not look."""


def agreed(which: str, context: RunContext) -> Place:
    """What the first rank sees, where the others see it, too. Raises CheckpointError, NotShared."""
    told: list[Place] = context.world.gathered(_looked(which, context))
    if problems := [place.problem for place in told if place.problem is not None]:
        raise CheckpointError("; ".join(dict.fromkeys(problems)))
    first = told[0]
    refuse_unshared(first.path, [place.is_there for place in told])
    refuse_others(first.path, [place.directory for place in told])
    if first.directory is None or context.world.is_alone:
        return first
    newest = [place.candidates[0] for place in told if place.candidates]
    found = list(dict.fromkeys([*newest, *(path for place in told for path in place.beside)]))
    # By their names: NFS may show one rank an older list than another.
    seen = context.world.gathered([os.path.exists(path) for path in found])
    for number, path in enumerate(found):
        refuse_unshared(path, [each[number] for each in seen])
    known = set(first.candidates)
    return next((p for p in told if p.candidates and p.candidates[0] not in known), first)


def refuse_unshared(path: Path, are_there: Sequence[bool]) -> None:
    """`are_there`: for each rank. Raises NotShared where some see it, and others do not."""
    blind = [f"rank {rank}" for rank, is_there in enumerate(are_there) if not is_there]
    if 0 < len(blind) < len(are_there):
        do = "does" if len(blind) == 1 else "do"
        raise NotShared(f"{path}: {few(blind)} {do} not see it, others do: {SHARE}")


def refuse_others(path: Path, seen: Sequence[object]) -> None:
    """`seen`: by each rank. Raises NotShared where that differs from what the first one sees."""
    odd = [f"rank {rank}" for rank, each in enumerate(seen) if each != seen[0]]
    if odd:
        does = "sees" if len(odd) == 1 else "see"
        raise NotShared(f"{path}: {few(odd)} {does} another one there than rank 0: {SHARE}")


def _looked(which: str, context: RunContext) -> Place:
    path, directory = Path(which), context.directory
    try:
        if which == AUTO:
            return _in(directory, directory, context)
        if os.path.isdir(path) and not is_sharded(path):
            own = path / directory.name
            return _in(path, own if os.path.isdir(own) else path, None)
        others: list[Path] = []
        with suppress(OSError):  # its directory may be closed to us, and the file is not
            others = [other for other in newest_first(path.parent) if other.name != path.name]
        return Place(path=path, is_there=os.path.exists(path), directory=None, candidates=others)
    except OSError as error:
        where = error.filename or directory
        problem = f"{where}: cannot be read: {error.strerror}"
        return Place(path=path, is_there=True, directory=None, problem=problem)


def _in(path: Path, directory: Path, asked_for: RunContext | None) -> Place:
    """`asked_for`: by nobody but training.resume = auto, which leaves no others behind. Raises
    OSError."""
    found, beside = newest_first(directory), []
    if asked_for is not None and not found:
        identity = asked_for.identity
        beside = directories_beside(directory, identity.worker, identity.started_at)
    is_named = asked_for is None
    is_cut_short = is_named and not found and directory in unfinished(directory.parent)
    return Place(
        path=path,
        is_there=True,
        directory=directory,
        candidates=found,
        unfinished=unfinished(directory),
        beside=beside,
        why_empty="its save was not finished" if is_cut_short else f"{directory} {NONE_THERE}",
    )
