"""Run a Python program that waits before it renames a finished store into place, until stdin ends:
`gated_program.py PROGRAM ARG ...`. There it says `at the gate`."""

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    from tests.data.gated_builder import gate_the_rename

    gate_the_rename("rename")
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
