"""`watch [RUN_DIR ...]`: runs as they go, as a table that is drawn again each second."""

import io
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from launcher.report.live_table import run_table
from launcher.report.progress import RunProgress, Watched, WatchedComparison, watched
from model_check.config.arguments import Parser
from model_check.errors import EXIT_PASS, UsageError
from model_check.utils.project_files import COMMAND
from model_check.utils.standard_streams import put

_LATEST = Path(".logs/latest")
_EVERY_S = 1.0
_ABOUT = """\
Watch runs while they go: phase, step, loss, speed, heat. From their files alone, so
over ssh and as often as you like; a run does not notice. `q` ends the watching.
"""
_HELP = """
examples:
  bash run.sh watch                 the newest run from here (.logs/latest)
  bash run.sh watch RUN_DIR ...     these, in one table each
"""


def watch(argv: Sequence[str]) -> int:
    """Until all runs are over or somebody types q. Returns 0. Raises UsageError."""
    runs = [watched(path) for path in _directories(argv)]
    console = Console(highlight=False)
    try:
        if console.is_terminal and sys.stdin.isatty():
            _follow(runs, console)
        else:
            _look(runs)
        put(_text(runs, console), end="")
    finally:
        for run in runs:
            run.close()
    return EXIT_PASS


def _directories(argv: Sequence[str]) -> list[Path]:
    parser = Parser(usage=f"{COMMAND} watch [RUN_DIR ...]", description=_ABOUT, epilog=_HELP)
    parser.add_argument("run_dirs", nargs="*", type=Path, metavar="RUN_DIR", help=str(_LATEST))
    found: list[Path] = parser.read(argv).run_dirs
    if not found and not os.path.lexists(_LATEST):
        raise UsageError(f"watch: no run was started from here ({_LATEST}); give a run directory")
    return found or [_LATEST.resolve()]


def _follow(runs: Sequence[Watched | WatchedComparison], console: Console) -> None:
    """Draw until nothing more can be new."""
    _look(runs)
    with _keys() as stdin, Live(console=console, screen=True, auto_refresh=False) as live:
        live.update(_drawn(runs, console.width), refresh=True)
        while not all(run.is_over for run in runs):
            ready, _, _ = select.select([stdin], [], [], _EVERY_S)
            if ready and os.read(stdin, 1) in (b"q", b"Q", b"\x03", b""):
                return
            _look(runs)  # how long a worker is silent changes, too
            live.update(_drawn(runs, console.width), refresh=True)


def _look(runs: Sequence[Watched | WatchedComparison]) -> None:
    for run in runs:
        run.look()


@contextmanager
def _keys() -> Iterator[int]:
    """Standard input, key by key, without echo."""
    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)
    tty.setcbreak(stdin)
    try:
        yield stdin
    finally:
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)


def _drawn(them: Sequence[Watched | WatchedComparison], width: int) -> Group:
    runs = [run for each in them for run in each.runs]
    parts = [part for run in runs for part in _parts(run, width)]
    return Group(*(parts or [Text("no training has begun yet")]))


def _text(them: Sequence[Watched | WatchedComparison], terminal: Console) -> str:
    """What `terminal` would show: it has manners of its own where a disk is full."""
    text = io.StringIO()
    console = Console(file=text, width=terminal.width, force_terminal=terminal.is_terminal)
    console.print(_drawn(them, terminal.width), highlight=False)
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def _parts(run: RunProgress, width: int) -> Iterator[RenderableType]:
    yield run_table(run, width, time.monotonic_ns(), is_named=True)
    yield Text("q: leave" if run.verdict is None else run.verdict)
    yield Text()
