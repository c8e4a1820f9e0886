"""The directories that a run writes to, the data prepared there, and the hub token."""

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from launcher import run_dir
from launcher.doctor.finding import GIB, Finding, fail, ok, warn
from model_check.config.schema import Settings
from model_check.utils.dotenv import DOTENV, dotenv_value, why_unread
from model_check.utils.files import SETTINGS_BYTES, read_whole
from model_check.utils.held import hold_unlinked
from model_check.utils.project_files import COMMAND

FULL_GIB = 0.1
LOW_GIB = 5.0
LARGE_RUNS_GIB = 1.0


def check_storage(environ: Mapping[str, str], cwd: Path, settings: Settings) -> list[Finding]:
    """Of a run from `cwd`."""
    cache_dir = cwd / settings.data.cache_dir
    runs = cwd / run_dir.parent_of(settings.logging.log_dir)
    return [
        _directory("token caches", cache_dir),
        _directory("checkpoints", cwd / settings.system.checkpoint_dir),
        _directory("logs", runs),
        _leftovers(runs),
        _caches(cache_dir),
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
    with hold_unlinked(place) as directory:  # a file in the way: ENOTDIR
        directory.owner_of_new_file()
    return place


def _leftovers(parent: Path) -> Finding:
    """Our own directories of earlier runs: no program removes them unasked."""
    name = "run directories"
    runs = run_dir.of_user(parent)
    if not runs:
        return ok(name, f"none in {parent}")
    size = sum(map(run_dir.size_bytes, runs))
    found = f"{len(runs)} in {parent}, {size / 2**20:.1f} MiB"
    advice = f"`{COMMAND} runs` lists them, `{COMMAND} runs clear` removes the old ones"
    is_large = size >= LARGE_RUNS_GIB * GIB
    return Finding("warn" if is_large else "ok", name, found, advice)


def _caches(directory: Path) -> Finding:
    try:
        views = list(directory.glob("*/manifest.json"))
    except OSError as error:
        return warn("prepared data", f"{directory}: {error.strerror}", "look again")
    if not views:
        return ok("prepared data", f"none in {directory}; the first run prepares it")
    found = f"{len(views)} in {directory}, {run_dir.size_bytes(directory) / 2**20:.1f} MiB"
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
