"""The lines of a worker. A supervisor prefixes them; a worker that runs alone does it itself."""

import sys
from io import TextIOWrapper

from model_check.utils.standard_streams import complain, put
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
        """Raises BrokenPipeError; StorageError where the disk of standard output is full."""
        for line in printable_lines(text).split("\n"):
            put(f"{self.prefix}{line}")

    def say_for_all(self, text: str) -> None:
        """What is true of all ranks of a job."""
        if not self.is_quiet:
            self.say(text)

    def complain(self, text: str) -> None:
        for line in printable_lines(text).split("\n"):
            complain(f"{self.prefix}{line}")
