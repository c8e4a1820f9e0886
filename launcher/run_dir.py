"""The run directory: where it is, whose it is, and how files of it are written: whole, and without
what looks like a secret."""

import os
import re
import stat
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from datetime import datetime
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import msgspec

from model_check.errors import StorageError
from model_check.events import readable
from model_check.utils.held import (
    HeldDirectory,
    NotPlainError,
    hold,
    hold_own,
    hold_unlinked,
    make_unlinked,
)
from model_check.utils.secrets import masked_values
from model_check.utils.worker_env import RUN_PREFIX

SCHEMA = 1
_ROUND = re.compile(r"round_[0-9]{3,}")
_ATTEMPT = re.compile(r"restart_[0-9]+")
LAUNCHER_LOG = "launcher.log"
COMPARISON = "comparison.json"
"""In the directory of a comparison: what was asked for."""
DOSSIER = "dossier"
PRIVATE = 0o700
"""Command lines, logs and, as hard links, weights out of a private home: for their owner alone."""


def default_path(log_dir: str | None) -> Path:
    """`/tmp/model_check_logs_<PID>_<timestamp>`, or the same name under `log_dir`."""
    stamp = datetime.now().strftime("%Y%m%d_%H%M%S")
    return parent_of(log_dir).absolute() / f"{RUN_PREFIX}{os.getpid()}_{stamp}"


def parent_of(log_dir: str | None) -> Path:
    """Where run directories lie."""
    return Path(log_dir or "/tmp")


def has_default_name(path: Path) -> bool:
    """Whether nobody chose its name."""
    return path.name.startswith(RUN_PREFIX)


def of_user(parent: Path) -> list[Path]:
    """The run directories in `parent` that are this user's own; no links, none of others."""
    return [path for path in parent.glob(f"{RUN_PREFIX}*") if is_users(path)]


def is_users(path: Path) -> bool:
    """Whether it is a directory, no link, of this user."""
    with suppress(OSError):
        status = path.lstat()
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return False


def size_bytes(directory: Path) -> int:
    """Of its files, as far as they can be read."""
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):  # a run that ends right now
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def round_path(directory: Path, number: int) -> Path:
    """Of a run of several rounds: each is a run in a directory of its own, counted from 1."""
    return directory / f"round_{number:03}"


def seed_path(directory: Path, seed: int) -> Path:
    """Of a training with that seed: a run in a directory of its own."""
    return directory / f"seed_{seed}"


def node_path(directory: Path, number: int, *, is_named: bool) -> Path:
    """Of one node of a job, as all may share a file system. `is_named`: somebody has chosen
    `directory`, which then holds those of all."""
    name = f"node_{number}"
    return directory / name if is_named else directory.with_name(f"{directory.name}_{name}")


def restart_path(directory: Path, number: int) -> Path:
    """Of a job that goes on: a run in a directory of its own, counted from 1."""
    return directory / f"restart_{number}"


def name_of(directory: Path, comparison: Path | None = None) -> str:
    """By which logs for people know the run. What goes on after a failure is the same run, a round
    is one of its own. `comparison`: the directory of the one that it is a training of."""
    if comparison is not None:
        return str(directory.relative_to(comparison.parent))
    if _ATTEMPT.fullmatch(directory.name):
        directory = directory.parent
    if _ROUND.fullmatch(directory.name):
        return f"{directory.parent.name}/{directory.name}"
    return directory.name


def part_name(directory: Path) -> str:
    """`restart_1`, `round_002`; empty for a run that is whole."""
    is_part = _ATTEMPT.fullmatch(directory.name) or _ROUND.fullmatch(directory.name)
    return directory.name if is_part else ""


def restarts_in(directory: Path) -> list[Path]:
    """Of a job that went on, in their order."""
    paths = (restart_path(directory, number) for number in count(1))
    return list(takewhile(os.path.isdir, paths))


def is_round(name: str) -> bool:
    return _ROUND.fullmatch(name) is not None


def is_part(name: str) -> bool:
    """Of a directory in that of a run: whether the run itself has made it."""
    return is_round(name) or _ATTEMPT.fullmatch(name) is not None or name == DOSSIER


def rounds_in(directory: Path) -> list[Path]:
    """In their order; of another run none."""
    with suppress(OSError), hold_unlinked(directory) as held:
        names = [name for name in held.names() if is_round(name)]
        return [directory / name for name in sorted(names, key=lambda name: (len(name), name))]
    return []


def is_comparison(directory: Path) -> bool:
    return os.path.isfile(directory / COMPARISON)


def comparison_of(directory: Path) -> Path | None:
    """The directory of the comparison that has `directory` as that of a training."""
    return next(filter(is_comparison, directory.parents[:2]), None)


def newest_part(directory: Path) -> Path:
    """Its last round, or what went on after its last restart; else the directory itself."""
    return next(reversed([*restarts_in(directory), *rounds_in(directory)]), directory)


def create_default(path: Path) -> Path:
    """`create`; under another name where somebody took this one, which can be foreseen."""
    try:
        return create(path)
    except StorageError:
        if not os.path.lexists(path):
            raise
        return create(path.with_name(f"{path.name}_{os.urandom(8).hex()}"))


def create(path: Path) -> Path:
    """Make the directory, for this launcher alone and readable by its user alone. One that exists
    must be empty and keeps its mode: its maker chose who may read. Raises StorageError."""
    try:
        # Another launcher may be quicker to make the log.
        with opened(path) as directory, suppress(FileExistsError):
            if not directory.names():
                directory.create_first(LAUNCHER_LOG).close()
                return path
    except OSError as error:
        raise _storage_error(path, error) from error
    raise StorageError(
        f"{path}: a run directory must be new or empty; this one is not empty "
        "(give --run-dir another path)"
    )


def opened(path: Path) -> HeldDirectory:
    """A run directory, held by its descriptor; made again if somebody deleted it during the run.

    Names below /tmp can be foreseen, and freed: another user could make the directory, or a link in
    its place, to get our files or to have them written elsewhere. Raises OSError, StorageError.
    """
    path = Path(os.path.abspath(path))
    try:
        make_unlinked(path, PRIVATE)
        return hold_own(path)
    except NotPlainError as error:
        raise StorageError(f"{path}: {error.strerror} (give --run-dir another path)") from error


def write_page(path: Path, make: Callable[[], str]) -> None:
    """As `write`, of what `make` returns. Raises StorageError, also where it fails: a fault of ours
    in a page costs nobody a verdict."""
    try:
        text = make()
    except Exception as error:
        raise StorageError(
            f"{path}: cannot be made ({type(error).__name__}: {error}): a fault of Model Check "
            "itself; please report it. The JSON beside it is whole"
        ) from error
    write(path, text)


def write(path: Path, data: bytes | str | Mapping[str, Any]) -> None:
    """Write one file of the run directory whole; secrets in a document are masked. Raises
    StorageError."""
    if isinstance(data, Mapping):
        document = msgspec.json.encode({"schema": SCHEMA, **masked_values(readable(data))})
        content = msgspec.json.format(document, indent=2) + b"\n"
    else:
        content = data if isinstance(data, bytes) else readable(data).encode()
    try:
        with opened(path.parent) as directory:
            directory.replace(path.name, content)
    except OSError as error:
        raise _storage_error(path, error) from error


def keep(evidence: Path, dossier: Path) -> Path:
    """Keep a file of evidence that a later run may write over: as a hard link in `dossier`, two
    levels below the run directory. Returns the link; `evidence` itself where no link can be made
    (another file system)."""
    with suppress(OSError, StorageError), ExitStack() as stack:
        directory = stack.enter_context(opened(dossier.parents[1]))
        for name in (dossier.parent.name, dossier.name):
            with suppress(FileExistsError):
                directory.make_directory(name)
            directory = stack.enter_context(directory.directory(name))
        os.link(evidence, evidence.name, dst_dir_fd=directory.descriptor)
    return kept(evidence, dossier)


def kept(evidence: Path, dossier: Path) -> Path:
    """Where `keep` has put the file, or left it."""
    place = dossier / evidence.name
    return place if place.exists() else evidence


def link_latest(path: Path) -> None:
    """Point `.logs/latest` of the working directory to this run, unless it is read-only."""
    with suppress(OSError), hold(Path()) as here:
        with suppress(FileExistsError):
            here.make_directory(".logs")
        # Another user's link there would have the link made, and a file replaced, elsewhere.
        with here.directory_or_own_link(".logs") as logs:
            new = f".latest.{os.getpid()}"
            os.symlink(path.absolute(), new, dir_fd=logs.descriptor)
            logs.rename(new, logs, "latest")


def _storage_error(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"{path}: cannot write the run directory: {error.strerror or error} "
        "(give --run-dir a directory with space that you may write)"
    )
