"""run.json and report.json, read again: the one place that knows damaged files, foreign files and
those of older versions."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from launcher import run_dir
from launcher.report.files import content_of
from launcher.verdict.comparison import ComparisonRecord
from launcher.verdict.record import RunRecord
from launcher.verdict.results import Conclusion, RunResult
from model_check.errors import UsageError
from model_check.utils.held import hold_unlinked
from model_check.utils.words import listed

_LONGEST = 1 << 26
"""Bytes of a report.json: that of 64 GPUs has 1 MB."""
T = TypeVar("T")


class _Version(Struct):
    schema: int = run_dir.SCHEMA


def read_conclusion(directory: Path) -> Conclusion | None:
    """How a run, its rounds or a comparison ended. None: it has no report that can be read."""
    return _read_report(directory, Conclusion)


def read_result(directory: Path) -> RunResult | None:
    """The report of a run. None: there is none that can be used, and run.json may tell more."""
    result = _read_report(directory, RunResult)
    if result is None or len({worker.name for worker in result.workers}) < len(result.workers):
        return None
    return result


def read_record(directory: Path) -> RunRecord:
    """run.json. Raises UsageError where there is none, or none of ours."""
    path = directory / "run.json"
    if rounds := run_dir.rounds_in(directory):
        raise UsageError(f"{directory}: a run of {len(rounds)} rounds: give one, as {rounds[-1]}")
    if run_dir.is_comparison(directory):
        raise UsageError(f"{directory}: a comparison: give one training of it, a directory below")
    try:
        record = decoded(path, RunRecord)
        _refuse_contradictions(record)
    except OSError as error:
        raise UsageError(f"{path}: not a run directory: {error.strerror}") from error
    # What is not UTF-8 is a ValueError, as is every error of msgspec.
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: damaged, or not a run of ours: {error}") from error
    return record


def decoded(path: Path, kind: type[T]) -> T:
    """A file of ours. Raises OSError, ValueError and RecursionError for one that is damaged,
    UsageError for one of another version."""
    document = msgspec.json.decode(content_of(path), type=dict[str, Any])
    if (schema := document.get("schema")) != run_dir.SCHEMA:
        raise UsageError(f"{path}: written by another version (schema {schema!r})")
    return msgspec.convert(document, kind, str_keys=True)


def is_running(record: RunRecord | ComparisonRecord) -> bool:
    """Whether the launcher that wrote it lives: on this host, under this pid, as a launcher."""
    with suppress(OSError):
        command = Path(f"/proc/{record.pid}/cmdline").read_bytes()
        return record.host == os.uname().nodename and b"launcher" in command
    return False


def _read_report(directory: Path, kind: type[T]) -> T | None:
    with suppress(OSError, ValueError, RecursionError), hold_unlinked(directory) as held:
        content = held.read("report.json", _LONGEST)
        if msgspec.json.decode(content, type=_Version).schema == run_dir.SCHEMA:
            return msgspec.json.decode(content, type=kind)
    return None


def _refuse_contradictions(record: RunRecord) -> None:
    """Raises ValueError."""
    workers, end, ended = {*record.workers}, record.end, record.ended
    if not workers or workers != record.groups.keys():
        raise ValueError("`workers` and `groups` name different workers, or none")
    if end is None and ended is None:
        return
    if end is None or ended is None:
        raise ValueError("it needs `end` and `ended`, or neither")
    if record.golden and workers != {each.name for each in record.golden.workers}:
        raise ValueError("`golden` names other workers than `workers`")
    names = [worker.name for worker in ended]
    if len({*names}) < len(names):
        raise ValueError("two workers of `ended` have the same name")
    if strangers := end.workers - {*names}:
        raise ValueError(f"`end` names {listed(sorted(strangers))}, who is not in `ended`")
