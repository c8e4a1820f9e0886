"""The directories that a run writes to, the data prepared there, and the hub token."""

import os
import shlex
import shutil
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from launcher.doctor.finding import GIB, Finding, fail, ok, warn
from model_check.utils.dotenv import DOTENV, dotenv_value, why_unread
from model_check.utils.files import SETTINGS_BYTES, read_whole

FULL_GIB = 0.1
LOW_GIB = 5.0
LARGE_RUNS_GIB = 1.0


def check_storage(
    environ: Mapping[str, str], cwd: Path, cache_dir: Path, runs: Path = Path("/tmp")
) -> list[Finding]:
    """`runs`: where run directories lie by default."""
    return [
        _directory("token caches", cwd / cache_dir),
        _directory("checkpoints", cwd / ".checkpoints"),
        _directory("logs", runs),
        _leftovers(runs),
        _caches(cwd / cache_dir),
        _hub_token(environ, cwd),
    ]


def _directory(name: str, path: Path) -> Finding:
    """Whether a file can be made there, or where it would be created, and whether there is room."""
    try:
        free = shutil.disk_usage(try_to_write(path)).free / GIB
    except OSError as error:
        return fail(name, f"{path}: cannot write: {error.strerror}", "choose another directory")
    found = f"{path}: {free:.1f} GiB free"
    if free < FULL_GIB:
        return fail(name, found, "make room")
    if free < LOW_GIB:
        return warn(name, found, "make room: a checkpoint of the default model takes 23 GB")
    return ok(name, found)


def try_to_write(path: Path) -> Path:
    """Make a file in the directory `path`, or where it would be created, and leave nothing behind;
    returns that place. Raises OSError."""
    path = path.absolute()
    place = next(parent for parent in (path, *path.parents) if parent.exists())
    with tempfile.TemporaryFile(dir=place):  # a file in the way: ENOTDIR
        return place


def _leftovers(parent: Path) -> Finding:
    """Our own directories of earlier runs: no program removes them."""
    name = "run directories"
    runs = [path for path in parent.glob("model_check_logs_*") if _is_ours(path)]
    if not runs:
        return ok(name, f"none in {parent}")
    size = sum(map(_size, runs))
    found = f"{len(runs)} in {parent}, {size / 2**20:.1f} MiB"
    # No other user's, and none of a run that goes on: it has no report yet.
    remove = (
        f"find {shlex.quote(str(parent))} -maxdepth 1 -type d -user {os.geteuid()} -name "
        "'model_check_logs_*' -exec test -e '{}/report.json' ';' -exec rm -r '{}' +"
    )
    advice = f"to remove those that have a report: {remove}"
    is_large = size >= LARGE_RUNS_GIB * GIB
    return Finding("warn" if is_large else "ok", name, found, advice)


def _is_ours(path: Path) -> bool:
    with suppress(OSError):
        status = path.lstat()
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return False


def _size(directory: Path) -> int:
    """Bytes of its files, as far as they can be read."""
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):  # a run that ends right now
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def _caches(directory: Path) -> Finding:
    try:
        views = list(directory.glob("*/manifest.json"))
    except OSError as error:
        return warn("prepared data", f"{directory}: {error.strerror}", "look again")
    if not views:
        return ok("prepared data", f"none in {directory}; the first run prepares it")
    found = f"{len(views)} in {directory}, {_size(directory) / 2**20:.1f} MiB"
    return ok("prepared data", found)


def _hub_token(environ: Mapping[str, str], cwd: Path) -> Finding:
    """Whether there is a token; never what it is."""
    name, token = "HF_TOKEN", environ.get("HF_TOKEN", "")
    if token.strip():
        if token != token.strip() or any(mark in token for mark in "'\" "):
            return warn(name, "set, with blanks or quotes in it", "export it without them")
        return ok(name, "set")
    hub = Path(environ.get("HF_HOME") or Path(environ.get("HOME", "/"), ".cache", "huggingface"))
    stored = Path(environ.get("HF_TOKEN_PATH") or hub / "token")
    if _read(stored).strip():
        return ok(name, f"not set; a token is stored in {stored}")
    if dotenv_value(name, cwd) is not None:
        return ok(name, f"not set; {cwd / DOTENV} has it, which the preparation of data reads")
    return warn(
        name,
        f"not set{why_unread(cwd)}",
        "only gated models and data sets need it: export HF_TOKEN=... with read permission",
    )


def _read(path: Path) -> str:
    """Its text; empty when there is none to read."""
    with suppress(OSError):
        return read_whole(path, SETTINGS_BYTES).decode(errors="replace")
    return ""
