"""Where a Python process is, from the text of its stacks as faulthandler or py-spy write them.
Pure."""

import re

_NUM_FRAMES = 3
_THREAD = re.compile(r"^(?=Current thread 0x|Thread )", re.M)
_FAULTHANDLER = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\S+) in (?P<name>.*)$', re.M)
_PY_SPY = re.compile(r"^    (?P<name>\S+) \((?P<file>.*):(?P<line>\d+)\)$", re.M)


def innermost(text: str) -> str | None:
    """`wait (threading.py:324) < get (queue.py:180)`: the main thread's last calls, the latest
    first. None: there is no stack in `text`."""
    blocks = [part for part in _THREAD.split(text) if _THREAD.match(part)]
    named = [block for block in blocks if '"MainThread"' in block.partition("\n")[0]]
    for block in (*named, *reversed(blocks)):  # faulthandler writes the oldest thread last
        found = [*_FAULTHANDLER.finditer(block), *_PY_SPY.finditer(block)]
        if found:
            return " < ".join(map(_brief, found[:_NUM_FRAMES]))
    return None


def _brief(frame: re.Match[str]) -> str:
    return f"{frame['name']} ({frame['file'].rpartition('/')[2]}:{frame['line']})"
