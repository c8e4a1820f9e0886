"""How far an installation is, in one line, by what pip writes to its log. Standard library only."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from launcher.install.requirements import say
from model_check.utils.words import printable

_REWRITE_S, _SAY_S = 0.5, 10.0
"""So often the line of a terminal is rewritten, and so often there is a new line elsewhere."""
_USUAL_COLUMNS = 80
"""Of a terminal that tells no size."""
BEGINS = "\n--- "
"""Before the command of each pip in the log."""
_FOUND = re.compile(r"^(?:Collecting|Processing) ", re.MULTILINE)
_DOWNLOADING = re.compile(r"^ *Downloading (?:\S*/)?([^\s/]+?)-\d\S*\.whl \((.+)\)$", re.MULTILINE)
_INSTALLING = re.compile(r"^Installing collected packages: (.+)$", re.MULTILINE)


def follow(process: "subprocess.Popen[bytes]", log: Path, began: float) -> int:
    """Wait for a pip that writes to `log`, and say how far it is, with the seconds since `began`.
    Returns its exit code."""
    is_terminal = os.isatty(2)
    while True:
        try:
            process.wait(_REWRITE_S if is_terminal else _SAY_S)
            break
        except subprocess.TimeoutExpired:
            state = state_of(log.read_text(errors="replace"))
        line = printable(f"{state}, {time.monotonic() - began:.0f} s")
        _rewrite(f"[launcher] {line}") if is_terminal else say(line)
    if is_terminal:
        _rewrite("")
    return process.returncode


def state_of(log: str) -> str:
    """`31 packages found, downloading torch (892.1 MB)`; then `installing 57 packages`."""
    log = log.rpartition(BEGINS)[2]  # the words of an earlier one are in it, too
    if installing := _INSTALLING.findall(log):
        return f"installing {installing[-1].count(',') + 1} packages"
    found = f"packages found: {len(_FOUND.findall(log))}"
    if downloads := _DOWNLOADING.findall(log):
        name, size = downloads[-1]
        return f"{found}, downloading {name} ({size})"
    return found


def _rewrite(text: str) -> None:
    """Show it in place of what the terminal's line holds."""
    room = (os.get_terminal_size(2).columns or _USUAL_COLUMNS) - 1
    print(f"\r{text[:room]:<{room}}\r", end="", file=sys.stderr, flush=True)
