"""The lines of a worker. A supervisor prefixes them; a worker that runs alone does it itself."""

import sys
from io import TextIOWrapper
from typing import TextIO

from model_check.utils.words import printable_lines


class Console:
    """Whole lines, written at once."""

    def __init__(self) -> None:
        self.prefix = ""
        """`[GPU3] ` for a worker that runs alone; set as soon as its name is known."""
        self.is_quiet = False
        """Another rank says what is true of all."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, TextIOWrapper):  # a terminal without UTF-8 must not fail a run
                stream.reconfigure(line_buffering=True, errors="backslashreplace")

    def say(self, text: str) -> None:
        self._write(text, sys.stdout)

    def say_for_all(self, text: str) -> None:
        """What is true of all ranks of a job."""
        if not self.is_quiet:
            self.say(text)

    def complain(self, text: str) -> None:
        self._write(text, sys.stderr)

    def _write(self, text: str, stream: TextIO) -> None:
        for line in printable_lines(text).split("\n"):
            print(f"{self.prefix}{line}", file=stream, flush=True)
