"""The environment to run in: the current one where it meets the requirements, else our own.

`python -P -m launcher.install.environment run|check|found [PYTHON ARGUMENTS ...]`: find or make it,
then become its Python with those arguments; `found` makes none. run.sh, check.sh and by_hand.sh
call this. Standard library only.
"""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.install.requirements import lacking, required, say
from model_check.errors import ModelCheckError, UsageError
from model_check.utils.project_files import PROJECT


def main(argv: Sequence[str]) -> int:
    """Returns an exit code only when there are no arguments, or no environment."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # A Ctrl-C ends this process without a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    purpose, *arguments = argv
    try:
        python = find(purpose, Path(os.environ.get("MODEL_CHECK_VENV") or PROJECT / ".venv"))
    except ModelCheckError as error:
        say(f"error: {error}")
        return error.exit_code
    if arguments:
        os.execv(python, [str(python), *arguments])
    return 0


def find(purpose: str, venv: Path) -> Path:
    """The Python to become. Checks do not take what they find: they want the pinned versions.
    `found` is a run that must not wait for an installation: it raises UsageError."""
    own = Path(sys.prefix).resolve() == venv.resolve()
    if purpose != "check" and not own:
        missing = lacking(required())
        if not missing:
            return Path(sys.executable)
        if purpose == "run" and sys.prefix != sys.base_prefix:
            names = " ".join(f"'{need}'" for need in missing)
            say(
                f"the active environment {sys.prefix} lacks some requirements, so {venv} is used "
                f"(to use the active one: {sys.executable} -m pip install {names})"
            )
    # Here, because it takes 30 ms, which a start in a found environment does without.
    from launcher.install import installation

    if purpose != "found":
        return installation.make(venv.absolute(), purpose)
    if not installation.is_ready(venv, "run"):
        raise UsageError(
            f"no Python here has our packages, and {venv} is not ready: `bash {PROJECT}/run.sh "
            "doctor` makes it, once; then the same command works"
        )
    return installation.python_of(venv.absolute())


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
