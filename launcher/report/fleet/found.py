"""Which run directories a command line means: those that it names, and those in a directory that
holds some. Reads names only, and a comparison's record."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from launcher import run_dir
from launcher.report.comparison import begun, read_comparison
from model_check.errors import UsageError
from model_check.utils.held import hold_unlinked

_DEEPEST = 3
"""Levels below a directory that is named: DIR/cluster/node/run."""
_OF_A_RUN = re.compile(r"run\.json|report\.json|launcher\.log|.*\.events\.jsonl")


class Found(NamedTuple):
    """A directory that should hold a run."""

    path: Path
    problem: str | None = None
    """Why it holds none that can be read; None: it may."""


class Search:
    """What is found below the directories of a command line."""

    def __init__(self, given: Sequence[Path]) -> None:
        """Raises UsageError where nothing is, whatever was named."""
        if not any(map(os.path.lexists, given)):
            raise UsageError(f"report: {given[0]}: no such file or directory, nor the others")
        directories = [path for path in given if not os.path.isfile(path)]
        if not directories:
            raise UsageError(f"report: {given[0]}: a file, no run directory, and so are the others")
        self.notes: list[str] = []
        self.found: list[Found] = []
        self.holder: Path | None = None
        """The directory that was named and holds the runs; None: runs were named, or several."""
        for path in directories:
            self._take(path, len(given) == 1)
        # The shell's DIR/* names our own fleet.html, too.
        if num := len(given) - len(directories):
            self.notes.append(f"{num:,} files were named that are no run directories: left out")

    def _take(self, path: Path, is_only: bool) -> None:
        names = _names(path)
        if isinstance(names, Found):
            self.found.append(names)
            return
        inner = list(_nested(path, names, 1) if is_run(names) else _below(path, names, 1))
        own = list(_own(path, names, inner))
        if own and not inner:
            self.found += own
            return
        children = _without_strangers(path, [*own, *inner])
        below = [each for each in children if each.problem != _NONE]
        if not below:
            self.found.append(Found(path, _empty(names)))
            return
        self.holder = path if is_only else None
        self.notes.append(f"{path}: {len(below):,} run directories in it")
        if others := len(children) - len(below):
            self.notes.append(f"{path}: {others:,} more in it hold no run: left out")
        self.found += below


_NONE = "it holds no run"


def is_fleet(given: Sequence[Path]) -> bool:
    """Whether the command line names more than one run: several, or a directory that holds some,
    be it a run itself."""
    if len(given) != 1:
        return len(given) > 1
    names = _names(given[0])
    if isinstance(names, Found):
        return False
    if is_run(names):
        return any(True for _ in _nested(given[0], names, 1))
    are_dead = []
    for each in _below(given[0], names, 1):
        if each.problem is None:
            return True
        are_dead.append(each.problem != _NONE)
    # Where nothing else is, all of them are nodes whose run never began.
    return bool(are_dead) and all(are_dead)


def is_run(names: Sequence[str]) -> bool:
    """Whether a directory with these names is that of a run, of rounds or of a comparison."""
    of_many = (run_dir.COMPARISON in names, any(map(run_dir.is_round, names)))
    return any(of_many) or any(map(_OF_A_RUN.fullmatch, names))


def parts(path: Path, names: Sequence[str]) -> list[Found]:
    """The runs that one run directory stands for: its rounds, its trainings, its last attempt."""
    if run_dir.COMPARISON in names:
        with suppress(UsageError):
            paths = begun(read_comparison(path), path)
            return [Found(each) for each in paths] or [Found(path, "no training of it has begun")]
        return [Found(path, "a comparison whose record is damaged")]
    if any(map(run_dir.is_round, names)):
        return [Found(each) for each in run_dir.rounds_in(path)]
    if "restart_1" in names:
        return [Found(run_dir.newest_part(path))]
    return [Found(path)]


def _own(path: Path, names: Sequence[str], nested: Sequence[Found]) -> list[Found]:
    """The run of the directory itself. A log beside runs (`nested`) may be anybody's, and makes
    none of it."""
    if nested:
        names = [name for name in names if name != run_dir.LAUNCHER_LOG]
    return parts(path, names) if is_run(names) else []


def _nested(path: Path, names: Sequence[str], depth: int) -> Iterator[Found]:
    """Runs in the directory of a run that are none of its own parts; beside them, the dead."""
    # Below a comparison lie its trainings.
    if run_dir.COMPARISON in names or depth > _DEEPEST:
        return
    with suppress(OSError), os.scandir(path) as entries:
        inner = [each.name for each in entries if each.is_dir(follow_symlinks=False)]
        strangers = [name for name in inner if not run_dir.is_part(name)]
        found = list(_below(path, strangers, depth))
        if any(each.problem is None for each in found):
            yield from (each for each in found if each.problem != _NONE)


def _without_strangers(holder: Path, children: list[Found]) -> list[Found]:
    """Where all runs have the name that we give them (/tmp), an empty directory of another name is
    no run that never began."""

    def is_named_by_us(each: Found) -> bool:
        return each.path == holder or run_dir.has_default_name(
            Path(each.path.relative_to(holder).parts[0])
        )

    runs = [each for each in children if each.problem is None]
    if not runs or not all(map(is_named_by_us, runs)):
        return children
    return [
        each if each.problem is None or is_named_by_us(each) else Found(each.path, _NONE)
        for each in children
    ]


def _below(path: Path, names: Sequence[str], depth: int) -> Iterator[Found]:
    for name in sorted(names, key=_naturally):
        if name.startswith("."):
            continue
        child = path / name
        inner = _names(child)
        if isinstance(inner, Found):
            # A file, a link to one, a link to nothing: none of a fleet's.
            if os.path.isdir(child):
                yield inner
        elif is_run(inner):
            nested = list(_nested(child, inner, depth + 1))
            yield from (*_own(child, inner, nested), *nested)
        elif not inner:
            yield Found(child, _empty(inner))
        elif depth < _DEEPEST:
            below = list(_below(child, inner, depth + 1))
            yield from below if any(f.problem != _NONE for f in below) else [Found(child, _NONE)]
        else:
            yield Found(child, _NONE)


def _names(path: Path) -> list[str] | Found:
    try:
        with hold_unlinked(path) as held:
            return held.names()
    # A name with a zero byte is a ValueError.
    except (OSError, ValueError) as error:
        return Found(path, f"it cannot be read: {getattr(error, 'strerror', None) or error}")


def _empty(names: Sequence[str]) -> str:
    return _NONE if names else "it is empty: its run never began"


def _naturally(name: str) -> list[tuple[int, str]]:
    """node2 comes before node10."""
    pieces = re.split(r"([0-9]{1,18})", name)
    return [(int(each), "") if at % 2 else (0, each) for at, each in enumerate(pieces)]
