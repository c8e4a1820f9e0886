"""The run directory: where it is, who made it, what is written into it before the workers start."""

import os
import platform
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
from model_check.utils.files import write_atomic

SCHEMA = 1


def default_path(log_dir: str | None) -> Path:
    """`/tmp/model_check_logs_<PID>_<timestamp>`, or the same name under `log_dir`."""
    stamp = datetime.now().strftime("%Y%m%d_%H%M%S")
    parent = Path(log_dir) if log_dir else Path("/tmp")
    return parent.absolute() / f"model_check_logs_{os.getpid()}_{stamp}"


def create(path: Path) -> Path:
    """Make the directory; one that exists must be empty. Raises StorageError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        occupied = any(path.iterdir())
    except OSError as error:
        raise _storage_error(path, error) from error
    if occupied:
        raise StorageError(
            f"{path}: a run directory must be new or empty; this one has files of another run "
            "(give --run-dir another path, or remove it)"
        )
    return path


def write(path: Path, data: bytes | str | Mapping[str, Any]) -> None:
    """Write one file of the run directory whole. Raises StorageError."""
    if isinstance(data, Mapping):
        data = (
            msgspec.json.format(msgspec.json.encode({"schema": SCHEMA, **data}), indent=2) + b"\n"
        )
    try:
        write_atomic(path, data)
    except OSError as error:
        raise _storage_error(path, error) from error


def keep(evidence: Path, dossier: Path) -> Path:
    """Where evidence will still be when a later run has written over it: a hard link in `dossier`,
    or `evidence` itself where there can be none (another file system)."""
    kept = dossier / evidence.name
    try:
        dossier.mkdir(parents=True, exist_ok=True)
        kept.hardlink_to(evidence)
    except OSError:
        return evidence
    return kept


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
