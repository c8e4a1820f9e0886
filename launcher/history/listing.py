"""`history`: what became of each GPU in the runs so far."""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import groupby
from pathlib import Path

import msgspec

from launcher.history.gpu_history import GpuHistory, path_of
from launcher.verdict.past import FORGOTTEN, SCHEMA, PastRun, forgotten, is_transient
from model_check.config.arguments import Parser
from model_check.config.load import Request, load
from model_check.errors import EXIT_PASS, UsageError
from model_check.utils.project_files import COMMAND
from model_check.utils.words import Say

_COLUMNS = 80
_UUID = len("GPU-5d1c92ab")
_ABOUT = """\
What became of each GPU in your runs, newest last: a line outlives the run directory
that it names. A second transient fault of a GPU is ISOLATE.
"""
_HELP = """
examples:
  bash run.sh history               every run
  bash run.sh history GPU-5d1c      one GPU, by the beginning of its UUID
  bash run.sh history GPU3          whatever was GPU3, or CPU0, in its run
  bash run.sh history --json        for machines
  bash run.sh history forget GPU-5d1c --because "replaced, ticket 17"
"""


def history(argv: Sequence[str], environ: Mapping[str, str], say: Say) -> int:
    """Do what `argv` asks for. Returns 0. Raises UsageError and StorageError."""
    if argv[:1] == ["forget"]:
        return _forget(argv[1:], environ, say)
    names = _parser().read(argv)
    path, kept = _kept(names.file, environ)
    runs = [run for run in kept.runs() if _is_of(run, names.which)]
    if names.which and not runs:
        raise UsageError(f"history: {path}: no line of a GPU or worker {names.which}")
    say(_document(path, runs, kept) if names.json else "\n".join(_lines(runs, kept)))
    return EXIT_PASS


def _forget(argv: Sequence[str], environ: Mapping[str, str], say: Say) -> int:
    """A GPU was replaced, or a cause was found. No line goes: one is added."""
    names = _forget_parser().read(argv)
    path, kept = _kept(names.file, environ)
    of = {run.uuid: run for run in kept.runs() if run.uuid and _is_of(run, names.uuid)}
    if not names.because.strip():
        raise UsageError("history forget: --because TEXT: why, for whoever reads the history")
    if len(of) != 1:
        many = (
            f"{len(of)} GPUs: {', '.join(sorted(map(str, of)))}" if of else "no line of such a GPU"
        )
        raise UsageError(f"history forget {names.uuid}: {path}: {many}")
    ((uuid, last),) = of.items()
    kept.append([forgotten(last, names.because, datetime.now().astimezone())])
    say(f"history: {uuid}: what was before counts no more: {names.because}")
    return EXIT_PASS


def _kept(file_name: str | None, environ: Mapping[str, str]) -> tuple[Path, GpuHistory]:
    file = {} if file_name is None else {"launch.history_file": ("--file", file_name)}
    settings = load(Request(flags=file, environ=environ), lambda: False).settings
    path = path_of(settings.launch.history_file, environ)
    if path is None:
        raise UsageError("history: none is kept: launch.history_file is empty (--file names one)")
    return path, GpuHistory(path)


def _parser() -> Parser:
    usage = f"{COMMAND} history [UUID | WORKER] [OPTIONS]"
    parser = Parser(usage=usage, description=_ABOUT, epilog=_HELP)
    add = parser.add_argument
    which = "the beginning of a GPU's UUID, or a worker's name"
    add("which", nargs="?", metavar="UUID | WORKER", help=which)
    add("--file", metavar="FILE", help="where it is kept (launch.history_file)")
    add("--json", action="store_true", help="for machines")
    return parser


def _forget_parser() -> Parser:
    usage = f"{COMMAND} history forget UUID --because TEXT [--file FILE]"
    about = "What the history holds of a GPU counts no more: it was replaced, or a cause was found."
    parser = Parser(usage=usage, description=about)
    parser.add_argument("uuid", metavar="UUID", help="the beginning of the GPU's UUID")
    parser.add_argument("--because", metavar="TEXT", required=True, help="why; it is kept")
    parser.add_argument("--file", metavar="FILE", help="where it is kept (launch.history_file)")
    return parser


def _is_of(run: PastRun, which: str | None) -> bool:
    wanted = (which or "").lower()
    return run.worker.lower() == wanted or (run.uuid or "").lower().startswith(wanted)


def _document(path: Path, runs: Sequence[PastRun], kept: GpuHistory) -> str:
    rows = [msgspec.to_builtins(run) for run in runs]
    document = {"schema": SCHEMA, "kind": "history", "file": str(path)}
    return json.dumps(document | {"left_out": kept.num_unread, "runs": rows}, indent=2)


def _lines(runs: Sequence[PastRun], kept: GpuHistory) -> Iterator[str]:
    yield f"history in {kept.path}" if runs else f"no run yet: the history will be {kept.path}"
    for (time, run_dir), group in groupby(runs, key=lambda run: (run.time, run.run_dir)):
        workers = list(group)
        if workers[0].verdict == FORGOTTEN:
            yield f"{time[:16].replace('T', ' ')}  forgotten, what was before counts no more:"
            yield from (f"  {run.uuid}: {run.cause}" for run in workers)
            continue
        drill = "  DRILL" if workers[0].is_drill else ""
        yield f"{time[:16].replace('T', ' ')}  {run_dir}{drill}"
        yield from _table(workers)
    yield from _transients(runs)
    if kept.lack is not None:
        yield kept.lack


def _table(workers: Sequence[PastRun]) -> Iterator[str]:
    """A line a worker, in columns; the last one is cut where the line is full."""
    rows = [_row(run) for run in workers]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width)
        yield f"  {'  '.join(cells)}"[:_COLUMNS].rstrip()


def _row(run: PastRun) -> tuple[str, ...]:
    kind = ", ".join(filter(None, (run.cause_class, run.repeat)))
    classed = f"{run.severity} ({kind})" if run.severity else ""
    model = (run.model or f"on {run.host}").removeprefix("NVIDIA ")
    return run.worker, (run.uuid or "")[:_UUID], run.verdict, classed, model


def _transients(runs: Sequence[PastRun]) -> Iterator[str]:
    """Of those that had several: drills apart."""
    found: dict[tuple[str, bool], list[PastRun]] = {}
    for run in runs:
        if run.device is not None and run.verdict == FORGOTTEN:
            found.pop((run.device, False), None)
        elif run.device is not None and is_transient(run):
            found.setdefault((run.device, run.is_drill), []).append(run)
    for (device, is_drill), those in found.items():
        if len(those) > 1:
            what = "DRILL" if is_drill else "ISOLATE"
            yield f"{what} {device}: {len(those)} transient since {those[0].time[:10]}"
