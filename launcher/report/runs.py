"""`runs`: what the user's runs have left behind: a list, the report of one, an end to the old."""

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from launcher import run_dir
from launcher.report.comparison import begun, read_comparison
from launcher.report.read_run import is_running, read_conclusion, read_record
from launcher.verdict.comparison import ComparisonRecord
from launcher.verdict.record import RunRecord
from model_check.config.arguments import Parser
from model_check.errors import EXIT_PASS, StorageError, UsageError
from model_check.utils.held import hold
from model_check.utils.project_files import COMMAND
from model_check.utils.words import Say

RUNNING, CUT_SHORT, UNKNOWN = "running", "cut short", "unknown"
"""States of a run without report.json: its launcher lives; died; was never named, or is of another
host."""
_DAY_S = 86400.0
_DEFAULT_DAYS = 7.0
_ABOUT = """\
List your run directories, newest last; open the report of one; remove the old ones.
Not those that --run-dir put elsewhere (rm -r removes one).
"""
_HELP = """
examples:
  bash run.sh runs                  each run: verdict, exit code, size, name
  bash run.sh runs open             the newest report, in a browser
  bash run.sh runs clear --dry-run  what `clear` would remove
  bash run.sh runs clear --days 0   all that have ended
"""


class LeftRun(Struct, frozen=True):
    """A run directory that lies there."""

    directory: Path
    verdict: str
    """Or, without a report, RUNNING, CUT_SHORT or UNKNOWN."""
    exit_code: int | None
    summary: str
    size_bytes: int
    age_s: float

    def is_old(self, days: float) -> bool:
        """Whether it may go: no run of this host goes on in it. Of one about which nothing is
        known, a run that has just begun or runs elsewhere, not within a day."""
        youngest_s = max(days, 1.0 if self.verdict == UNKNOWN else 0.0) * _DAY_S
        return self.verdict != RUNNING and self.age_s >= youngest_s


def runs(argv: Sequence[str], environ: Mapping[str, str], say: Say) -> int:
    """Do what `argv` asks for. Returns 0. Raises UsageError and StorageError."""
    names = _parser().read(argv)
    found = sorted(_left_runs(run_dir.of_user(names.parent)), key=lambda run: -run.age_s)
    match names.what:
        case "open":
            _open(_chosen(found, names.run_dir, names.parent), environ, say)
        case "clear":
            _clear(found, names.days, say, is_dry=names.dry_run)
        case _:
            say(_document(found) if names.json else "\n".join(_table(found, names.parent)))
    return EXIT_PASS


def _parser() -> Parser:
    usage = f"{COMMAND} runs [list | open [RUN_DIR] | clear] [OPTIONS]"
    parser = Parser(usage=usage, description=_ABOUT, epilog=_HELP)
    add = parser.add_argument
    add("what", nargs="?", choices=("list", "open", "clear"), default="list", help="list")
    add("run_dir", nargs="?", type=Path, metavar="RUN_DIR", help="the newest that has a report")
    where = "where they lie (logging.log_dir; /tmp)"
    add("--parent", type=Path, default=run_dir.parent_of(None), metavar="DIR", help=where)
    age = f"clear: older than so many days ({_DEFAULT_DAYS:.0f})"
    add("--days", type=days, default=_DEFAULT_DAYS, metavar="N", help=age)
    add("--dry-run", action="store_true", help="clear: say what would go, remove nothing")
    add("--json", action="store_true", help="list: for machines")
    return parser


def days(text: str) -> float:
    """Raises ValueError for what is no number, or a negative one."""
    number = float(text)
    if not number >= 0:
        raise ValueError(text)
    return number


def _left_runs(directories: Iterable[Path]) -> Iterator[LeftRun]:
    for directory in directories:
        # Another `clear` may remove it right now.
        with suppress(FileNotFoundError):
            yield _left_run(directory)


def _left_run(directory: Path) -> LeftRun:
    age_s = max(0.0, time.time() - _last_written(directory))
    last_attempt = [directory, *run_dir.restarts_in(directory)][-1]
    ended = read_conclusion(last_attempt)
    return LeftRun(
        directory=directory,
        verdict=ended.verdict if ended else _state(directory),
        exit_code=ended.exit_code if ended else None,
        summary=ended.summary if ended else "",
        size_bytes=run_dir.size_bytes(directory),
        age_s=round(age_s, 1),
    )


def _last_written(directory: Path) -> float:
    """By the run itself, in seconds of the wall clock: a report may be made again at any time."""
    parts = [run_dir.newest_part(directory)]
    with suppress(UsageError):
        parts += begun(read_comparison(directory), directory)
    written = []
    for part in parts:
        with suppress(FileNotFoundError):
            written.append((part / run_dir.LAUNCHER_LOG).stat().st_mtime)
    return max(written) if written else directory.stat().st_mtime


def _state(directory: Path) -> str:
    record: RunRecord | ComparisonRecord
    try:
        if run_dir.is_comparison(directory):
            record = read_comparison(directory)
        else:
            record = read_record(run_dir.newest_part(directory))
    except UsageError:
        return UNKNOWN
    if is_running(record):
        return RUNNING
    return CUT_SHORT if record.host == os.uname().nodename else UNKNOWN


def _table(found: Sequence[LeftRun], parent: Path) -> Iterator[str]:
    if not found:
        yield f"no run directories of yours in {parent}"
        return
    yield f"{'verdict':<12}  exit  {'MiB':>9}  directory in {parent}"
    for run in found:
        code = "" if run.exit_code is None else run.exit_code
        yield f"{run.verdict:<12}  {code:>4}  {run.size_bytes / 2**20:>9,.1f}  {run.directory.name}"


def _document(found: Sequence[LeftRun]) -> str:
    rows = [msgspec.structs.asdict(run) | {"directory": str(run.directory)} for run in found]
    return json.dumps({"schema": run_dir.SCHEMA, "kind": "runs", "runs": rows}, indent=2)


def _chosen(found: Sequence[LeftRun], wanted: Path | None, parent: Path) -> LeftRun:
    """The newest, or `wanted`: a path, or a name in `parent`. Raises UsageError."""
    if wanted is not None:
        paths = {wanted.resolve(), (parent / wanted).resolve()}
        found = list(_left_runs(filter(run_dir.is_users, paths)))
    if ended := [run for run in found if run.exit_code is not None]:
        return ended[-1]
    which = f"in {parent}" if wanted is None else str(wanted)
    raise UsageError(f"runs open: {which}: no run of yours that has a report")


def _open(run: LeftRun, environ: Mapping[str, str], say: Say) -> None:
    # 5 ms that no other verb pays.
    import webbrowser

    page = run.directory.absolute() / "report.html"
    say(f"{run.verdict}: {run.summary} (exit code {run.exit_code})\n{page}")
    has_browser = any(environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))
    if not (has_browser and webbrowser.open(page.as_uri())):
        say("no browser can be started here: the page needs no other file, copy it to one")


def _clear(found: Sequence[LeftRun], days: float, say: Say, *, is_dry: bool) -> None:
    old = [run for run in found if run.is_old(days)]
    for run in old:
        if not is_dry:
            _remove(run.directory)
        say(f"{'would remove' if is_dry else 'removed'} {run.directory}")
    size_mib = sum(run.size_bytes for run in old) / 2**20
    say(f"{len(old)} of {len(found)}, {size_mib:,.1f} MiB; the others are younger, or run")


def _remove(directory: Path) -> None:
    """Raises StorageError."""
    try:
        with hold(directory.parent) as parent, suppress(FileNotFoundError):
            parent.remove(directory.name)
    except OSError as error:
        raise StorageError(f"{directory}: cannot be removed: {error.strerror}") from error
