"""The run directory: where it is, who made it, what is written into it before the workers start."""

import os
import platform
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from launcher.masking import masked
from model_check.errors import StorageError
from model_check.events import readable
from model_check.utils.files import write_atomic

SCHEMA = 1
LAUNCHER_LOG = "launcher.log"
PRIVATE = 0o700
"""Command lines, logs and, as hard links, weights out of a private home: for their owner alone."""


def default_path(log_dir: str | None) -> Path:
    """`/tmp/model_check_logs_<PID>_<timestamp>`, or the same name under `log_dir`."""
    stamp = datetime.now().strftime("%Y%m%d_%H%M%S")
    parent = Path(log_dir) if log_dir else Path("/tmp")
    return parent.absolute() / f"model_check_logs_{os.getpid()}_{stamp}"


def create(path: Path) -> Path:
    """Make the directory, for this launcher alone and readable by its user alone; one that exists
    must be empty, and keeps its mode: who made it chose who may read. Raises StorageError."""
    try:
        path.mkdir(PRIVATE, parents=True, exist_ok=True)
        if _is_strangers(path):
            raise StorageError(
                f"{path} belongs to another user, in a place where anybody may have made it "
                "(give --run-dir another path)"
            )
        is_free = not any(path.iterdir()) and _claim(path / LAUNCHER_LOG)
    except OSError as error:
        raise _storage_error(path, error) from error
    if not is_free:
        raise StorageError(
            f"{path}: a run directory must be new or empty; this one is not empty "
            "(give --run-dir another path)"
        )
    return path


def _is_strangers(path: Path) -> bool:
    """Names below /tmp can be foreseen: whoever made it could lay links into it for our files, or
    make it a link itself."""
    is_public = bool(path.parent.stat().st_mode & stat.S_IWOTH)
    return is_public and path.lstat().st_uid not in (os.geteuid(), 0)


def _claim(log: Path) -> bool:
    """Make the log; False: another launcher was quicker."""
    try:
        log.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def write(path: Path, data: bytes | str | Mapping[str, Any]) -> None:
    """Write one file of the run directory whole. Raises StorageError."""
    if isinstance(data, Mapping):
        document = msgspec.json.encode({"schema": SCHEMA, **readable(data)})
        content = msgspec.json.format(document, indent=2) + b"\n"
    else:
        content = data if isinstance(data, bytes) else readable(data).encode()
    try:
        path.parent.mkdir(PRIVATE, parents=True, exist_ok=True)  # somebody deleted it meanwhile
        write_atomic(path, content)
    except OSError as error:
        raise _storage_error(path, error) from error


def keep(evidence: Path, dossier: Path) -> Path:
    """Where evidence will still be when a later run has written over it: a hard link in `dossier`,
    or `evidence` itself where there can be none (another file system)."""
    with suppress(OSError):
        dossier.mkdir(parents=True, exist_ok=True)
        (dossier / evidence.name).hardlink_to(evidence)
    return kept(evidence, dossier)


def kept(evidence: Path, dossier: Path) -> Path:
    """Where `keep` has put it, or left it."""
    place = dossier / evidence.name
    return place if place.exists() else evidence


def telemetry_path(directory: Path, worker: str) -> Path:
    """`gpu3.telemetry.jsonl`: what NVML said of the worker's GPU."""
    return directory / f"{worker.lower()}.telemetry.jsonl"


def link_latest(path: Path) -> None:
    """Point `.logs/latest` of the working directory to this run; a read-only directory has none."""
    with suppress(OSError):
        link = Path(".logs") / "latest"
        link.parent.mkdir(exist_ok=True)
        beside = link.with_name(f".latest.{os.getpid()}")
        beside.symlink_to(path.absolute())
        beside.replace(link)


def facts(argv: Sequence[str], **more: Any) -> dict[str, Any]:
    """What run.json says of the invocation and the machine; nothing that looks like a secret."""
    return {
        "command": masked(argv),
        "started_at": datetime.now().astimezone().isoformat(timespec="seconds"),
        "started_ns": time.monotonic_ns(),
        "pid": os.getpid(),
        "cwd": str(Path.cwd()),
        "host": platform.node(),
        "kernel": platform.release(),
        "python": sys.version.split()[0],
        **more,
    }


def _storage_error(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"{path}: cannot write the run directory: {error.strerror or error} "
        "(give --run-dir a directory with space that you may write)"
    )
