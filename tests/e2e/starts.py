"""Starts of the launcher that end at once, many of them in one process: a start of Python costs
more than all that they do."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.deadline import DEADLINE_S


class Start(NamedTuple):
    directory: Path
    arguments: Sequence[str]


class Ended(NamedTuple):
    exit_code: int
    shown: str
    """Its stdout and stderr as one terminal would show them."""


def run_each(starts: Mapping[str, Start], env: Mapping[str, str]) -> dict[str, Ended]:
    """What each of the starts came to, in an environment that finds our packages."""
    asked = {name: (str(start.directory), start.arguments) for name, start in starts.items()}
    done = subprocess.run(
        [sys.executable, "-P", __file__],
        input=json.dumps(asked),
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    return {name: Ended(*ended) for name, ended in json.loads(done.stdout).items()}


def _main() -> None:
    from launcher.cli import main

    terminal, told = os.dup(1), {}
    for name, (directory, arguments) in json.load(sys.stdin).items():
        os.chdir(directory)
        with tempfile.TemporaryFile() as shown:
            os.dup2(shown.fileno(), 1)
            os.dup2(shown.fileno(), 2)
            code = main(arguments)
            shown.seek(0)
            told[name] = (code, shown.read().decode())
    os.write(terminal, json.dumps(told).encode())


if __name__ == "__main__":
    _main()
