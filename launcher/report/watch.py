"""`watch [RUN_DIR ...]`: runs as they go, as a table that is drawn again twice a second."""

import os
import select
import shutil
import sys
import termios
import tty
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from launcher.output.panel import Panel, can_have_one
from launcher.output.printer import write_all
from launcher.report.live_table import LiveTable
from launcher.report.progress import watched
from model_check.config.arguments import Parser
from model_check.errors import EXIT_PASS, UsageError
from model_check.utils.project_files import COMMAND
from model_check.utils.standard_streams import put

_LATEST = Path(".logs/latest")
_EVERY_S = 0.5
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
    directories = _directories(argv)
    out = sys.stdout.fileno()
    can_move = can_have_one(out)
    with closing(LiveTable([watched(path) for path in directories])) as table:
        if can_move and sys.stdin.isatty():
            _follow(table, out)
        columns = shutil.get_terminal_size().columns
        put("".join(f"{line}\n" for line in table.lines(columns, has_colours=can_move)), end="")
    return EXIT_PASS


def _directories(argv: Sequence[str]) -> list[Path]:
    parser = Parser(usage=f"{COMMAND} watch [RUN_DIR ...]", description=_ABOUT, epilog=_HELP)
    parser.add_argument("run_dirs", nargs="*", type=Path, metavar="RUN_DIR", help=str(_LATEST))
    found: list[Path] = parser.read(argv).run_dirs
    if not found and not os.path.lexists(_LATEST):
        raise UsageError(f"watch: no run was started from here ({_LATEST}); give a run directory")
    return found or [_LATEST.resolve()]


def _follow(table: LiveTable, out: int) -> None:
    """Draw until nothing more can be new."""

    def draw(columns: int, rows: int) -> list[str]:
        return [*table.lines(columns, rows - 1), "q: leave"]

    panel = Panel(out)
    panel.show(draw)
    with _keys() as stdin:
        while write_all(out, panel.below(b"")) and not table.is_over:
            panel.wrote()
            ready, _, _ = select.select([stdin], [], [], _EVERY_S)
            if ready and os.read(stdin, 1) in (b"q", b"Q", b"\x03", b""):
                break
        panel.hide()
        write_all(out, panel.below(b""))


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
