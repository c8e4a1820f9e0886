"""A program of ours that a person starts: `python3 pretrain_main.py`. Standard library only, and
nothing that an old Python cannot read, nor our other modules: it may be one.
"""

import os
import sys

OLDEST = (3, 11)
_STARTED = "MODEL_CHECK_BY_HAND"
"""Which process became another Python. It keeps its id, so a second time would be without end."""
_SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "by_hand.sh")


def become_ready() -> None:
    """Return in a Python that has our packages. Another one becomes the Python that run.sh would
    take, with the same arguments, or ends with exit code 2 and a line that says what to do."""
    is_second = os.environ.pop(_STARTED, "") == str(os.getpid())
    if _is_ready():
        return
    if is_second or not os.path.exists(_SCRIPT):
        line = "lacks some of our packages; in its place: bash run.sh"
        print(f"[launcher] error: {sys.executable} {line}", file=sys.stderr)
        sys.exit(2)
    os.environ[_STARTED] = str(os.getpid())
    arguments = sys.orig_argv[1:] if sys.version_info >= (3, 10) else sys.argv
    os.execvp("bash", ["bash", _SCRIPT, *arguments])


def _is_ready() -> bool:
    """Whoever was started by our launcher, or in our environment, need not look (40 ms)."""
    stamp = os.path.join(sys.prefix, "ready-run")
    if os.environ.get("MODEL_CHECK_RUN_DIR") or os.path.exists(stamp):
        return True
    if sys.version_info < OLDEST:
        return False
    from launcher.install.requirements import lacking, required

    return not lacking(required())
