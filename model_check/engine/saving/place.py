"""Where the ranks of a job look for what they resume. Each looks for itself, and they compare what
they see: nodes whose directories are not shared would go on from different steps."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from model_check.config.resume import AUTO, changed
from model_check.config.schema import Settings
from model_check.engine.run_context import RunContext
from model_check.engine.saving.checkpoint_files import unfinished
from model_check.engine.saving.lineage import Header, Lineage, contents_of
from model_check.engine.saving.own_directory import is_in_use
from model_check.errors import CheckpointError
from model_check.utils.checkpoint_names import NONE_THERE, is_earlier, is_sharded, paths_in
from model_check.utils.words import few

_WORKER = re.compile(r"[cg]pu\d+[\w.]*")
"""`gpu3`, of a MIG slice `gpu3.1`."""
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
    """In `directory`: those of the run that fits best, the newest first, and what cannot be read;
    else beside `path`."""
    passed_over: list[str] = []
    """Newer ones there, of other runs, and why."""
    unfinished: list[Path] = []
    """Sharded ones in `directory` whose saves were cut short."""
    beside: list[Path] = []
    """Directories of other workers with checkpoints, where `directory` has none."""
    why_empty: str = ""
    problem: str | None = None
    """Why it could not look."""


def agreed(which: str, settings: Settings, context: RunContext) -> Place:
    """What the first rank sees, where the others see it, too. Raises CheckpointError, NotShared."""
    told: list[Place] = context.world.gathered(_looked(which, settings, context))
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


def _looked(which: str, settings: Settings, context: RunContext) -> Place:
    path, directory = Path(which), context.directory
    try:
        if which == AUTO:
            return _in(which, directory, directory, settings, context)
        if os.path.isdir(path) and not is_sharded(path):
            names = (directory.name, context.identity.worker.lower(), ".")
            own = next((own for name in names if paths_in(own := path / name)), path)
            return _in(which, path, own, settings, context)
        others: list[Path] = []
        with suppress(OSError):  # its directory may be closed to us, and the file is not
            others = [p for p in paths_in(path.parent) if p.name != path.name and not is_earlier(p)]
        return Place(path=path, is_there=os.path.exists(path), directory=None, candidates=others)
    except OSError as error:
        where = error.filename or directory
        problem = f"{where}: cannot be read: {error.strerror}"
        return Place(path=path, is_there=True, directory=None, problem=problem)


def _in(which: str, path: Path, directory: Path, settings: Settings, context: RunContext) -> Place:
    """Raises OSError."""
    contents = contents_of(directory)
    lineages = contents.lineages(settings, context.world.size)
    own = lineages[0].headers if lineages else []
    candidates, is_named = contents.to_try(own), which != AUTO
    is_cut_short = is_named and not candidates and directory in unfinished(directory.parent)
    return Place(
        path=path,
        is_there=True,
        directory=directory,
        candidates=candidates,
        passed_over=[text for each in lineages[1:] for text in _passed_over(each, own, settings)],
        unfinished=unfinished(directory),
        # Whoever names a directory leaves no others behind.
        beside=[] if candidates or is_named else _beside(directory, context),
        why_empty="its save was not finished" if is_cut_short else f"{directory} {NONE_THERE}",
    )


def _passed_over(other: Lineage, own: Sequence[Header], settings: Settings) -> Iterator[str]:
    newest = other.headers[0]
    if newest.attempt > own[0].attempt:
        differ = [text for _, text in changed(newest.settings, settings, "must_equal", "tell")]
        yield f"{newest.path}: of another run: {few(differ)}"


def _beside(directory: Path, context: RunContext) -> list[Path]:
    """Directories of other workers with checkpoints of earlier launches. The workers of one launch
    do not wait for each other; a run by hand that is in its directory is no earlier one."""
    worker, launch = context.identity.worker.lower(), context.identity.run_name
    is_own = re.fullmatch(rf"{re.escape(worker)}(_\d+)?", directory.name)
    parent = directory.parent if is_own else directory
    others = sorted(
        path
        for path in (parent.iterdir() if parent.is_dir() else ())
        if _WORKER.fullmatch(path.name) and path.name != directory.name and path.is_dir()
    )
    if is_own:  # a job's, or those of a run by hand
        others.append(parent)
    return [path for path in others if _is_left_behind(path, launch, path == parent)]


def _is_left_behind(directory: Path, launch: str | None, is_of_job: bool) -> bool:
    headers = contents_of(directory).headers
    if launch is None or is_of_job:
        return bool(headers) and not is_in_use(directory)
    return any(header.launch != launch for header in headers)
