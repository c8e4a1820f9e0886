"""The launcher's command line in the process of a test."""

import os
import subprocess
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

from launcher import cli


def answer_of(*argv: str, cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """`python -m launcher ARGV` in this process, for what starts no worker: a plan, a refusal,
    `config show`, `doctor`, `history`, `report`."""
    out, err = StringIO(), StringIO()
    with (
        chdir(cwd),
        patch.dict(os.environ, env, clear=True),
        patch.object(cli, "run", _refuse_to_start),
        patch("launcher.compare.compare.run_comparison", _refuse_to_start),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            code = cli.main(argv)
        except SystemExit as ended:  # --help
            code = int(ended.code or 0)
    return subprocess.CompletedProcess(argv, code, out.getvalue(), err.getvalue())


def _refuse_to_start(*_: object) -> int:
    raise AssertionError("a run would start")
