"""Which checkpoints of a directory belong to one run, and which of them is the newest.

What is inside decides, never a clock and never a name. A run that begins at step 0 draws a
`run_id`, and whoever resumes one of its checkpoints keeps it. Each process that saves is a further
`attempt` of its run: its number is one more than every number that its directory holds. So of two
branches of a run the later one is the newer, whichever came further.
"""

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from model_check.config.resume import changed, digest_of_run, forbidden
from model_check.config.schema import Settings
from model_check.engine.checkpoint import load_plain
from model_check.engine.sharded.manifest import read_manifest
from model_check.errors import CheckpointError, ConfigError
from model_check.events import Natural
from model_check.utils.archive import DAMAGE, checksums_of
from model_check.utils.checkpoint_names import (
    LAST,
    NONE_THERE,
    common_file,
    is_earlier,
    is_sharded,
    paths_in,
    sharded_name,
    steps_of,
    was_begun,
)
from model_check.utils.words import few

_EXTENDED = "training.max_steps"
"""Whoever resumes a run often wants more steps of it: this change says least about whose it is."""
_UNREADABLE = (
    *(CheckpointError, ConfigError, OSError, LookupError, TypeError, ValueError),
    *(AttributeError, RuntimeError),  # a tensor in place of a setting
)


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint says of itself, read without its tensors."""

    path: Path = Path()
    step: Natural
    settings: dict[str, dict[str, Any]]
    run_id: str = ""
    """In a checkpoint of an older version a digest of the settings that must be equal; the next
    three have their defaults there."""
    attempt: Annotated[int, msgspec.Meta(ge=0, le=1 << 32)] = 0
    launch: str | None = None
    """The name that all workers of one launch share."""
    num_ranks: Annotated[int, msgspec.Meta(ge=1)] = 1

    @property
    def order(self) -> tuple[int, bool, int, bool]:
        """The greatest is the newest of its run; of two with the same step it is `last`. Where an
        older version numbered no attempts, what was kept from an earlier run is the older one."""
        is_last = self.path.name in (LAST, sharded_name(LAST))
        return self.attempt, self.attempt > 0 or not is_earlier(self.path), self.step, is_last

    @property
    def progress(self) -> tuple[int, int]:
        return self.attempt, self.step


class Fit(NamedTuple):
    """How far the settings of a run differ from those of now; the smallest fits best."""

    is_another_run: bool
    """Something differs that must be equal."""
    num_changes: int
    is_extended: bool
    """`training.max_steps` differs."""


class Lineage(NamedTuple):
    """The checkpoints of one run in a directory, the newest first."""

    fit: Fit
    headers: Sequence[Header]


class Contents(NamedTuple):
    """The checkpoints of a directory."""

    headers: list[Header]
    """All that can be read, the newest first, with those that were kept from earlier runs."""
    unread: list[Path]
    """The others, without those kept."""

    def lineages(self, settings: Settings, num_ranks: int = 1) -> list[Lineage]:
        """The runs that left them, the one that fits `settings` best first; of several that fit
        alike, the one that saved last."""
        of_run = attrgetter("run_id")
        # Sorting is stable: within a run the newest stays first.
        runs = [list(own) for _, own in groupby(sorted(self.headers, key=of_run), of_run)]
        runs.sort(key=lambda own: own[0].order, reverse=True)
        found = [Lineage(fit_of(own[0], settings, num_ranks), own) for own in runs]
        return sorted(found, key=lambda lineage: lineage.fit)

    def to_try(self, headers: Sequence[Header]) -> list[Path]:
        """The paths of `headers`, and among them what cannot be read, each before the first that
        is no newer by its name: it is not passed over in silence."""
        paths: list[Path] = []
        unread = sorted(self.unread, key=_named_step, reverse=True)
        for header in headers:
            while unread and _named_step(unread[0]) >= header.step:
                paths.append(unread.pop(0))
            paths.append(header.path)
        return [*paths, *unread]


def _named_step(path: Path) -> float:
    """Returns infinity for `last`, which may hold any step."""
    steps = steps_of(path)
    return math.inf if steps is None else steps


def contents_of(directory: Path) -> Contents:
    """Raises OSError where the directory cannot be listed."""
    paths = sorted(paths_in(directory))
    found = {path: header_of(path) for path in paths}
    headers = [header for header in found.values() if header is not None]
    headers.sort(key=lambda header: header.order, reverse=True)
    unread = [path for path in paths if found[path] is None and not is_earlier(path)]
    return Contents(headers, unread)


def header_of(path: Path) -> Header | None:
    """None: it cannot be read. Who tries to resume it learns why."""
    try:
        file = common_file(path) if is_sharded(path) else path
        if not file.is_file():  # a pipe would wait for somebody who writes to it
            return None
        header = header_in(load_plain(file), path)
        fit_of(header, Settings())  # raises where these are no settings
    except _UNREADABLE:
        return None
    return header


def header_in(state: Any, path: Path) -> Header:
    """Raises ValueError, or others where the settings are none."""
    header = msgspec.convert(state, Header)
    run_id = header.run_id or digest_of_run(header.settings)
    return msgspec.structs.replace(header, path=path, run_id=run_id)


def fit_of(header: Header, settings: Settings, num_ranks: int = 1) -> Fit:
    others = forbidden(header.settings, settings, (header.num_ranks, num_ranks))
    names = [name for name, _ in changed(header.settings, settings, "tell")]
    is_extended = _EXTENDED in names
    return Fit(bool(others), len(others) + len(names) - is_extended, is_extended)


def newest_first(directory: Path) -> list[Path]:
    """The checkpoints of all runs there. Raises OSError where the directory cannot be listed."""
    contents = contents_of(directory)
    return contents.to_try(contents.headers)


def newest_in(source: Path) -> Path:
    """Of a directory of checkpoints the newest; else `source`. Raises OSError, ConfigError."""
    if not os.path.lexists(source):
        raise ConfigError(f"{source}: no such checkpoint, and no such directory")
    source.stat()
    if not source.is_dir() or is_sharded(source):
        return source
    checkpoints = newest_first(source)
    if not checkpoints and not was_begun(source):
        below = [str(path) for path in sorted(source.glob("*/")) if newest_first(path)]
        there = f"; {few(below)} {'has' if len(below) == 1 else 'have'} some" if below else ""
        raise ConfigError(f"{source}: {NONE_THERE}{there}")
    return next(iter(checkpoints), source)


def state_sum(path: Path) -> int | None:
    """A checksum of the tensors in a checkpoint, out of the checksums that it holds; None: it holds
    none that can be read."""
    with suppress(CheckpointError, OSError, *DAMAGE):
        if is_sharded(path):
            return hash(tuple((n, t.sum) for n, t in read_manifest(path).tensors.items()))
        return checksums_of(path, "/data/")
    return None
