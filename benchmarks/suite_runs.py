"""Whole runs of check.sh, in turns quiet and beside two busy processes, each appended
to the table of docs/log.md. `python -m benchmarks.suite_runs [COUNT]` (10)

Each is made in a clone of its own: what is committed meanwhile is in the next one. The
turns go on from the table's last row. With `--beside WHAT` each of the runs is beside other work
that keeps both cores busy, which the caller has started: WHAT is for the table.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOG = ROOT / "docs" / "log.md"
HEAD = "| whole run of check.sh's tests | commit | beside | result |\n|---|---|---|---|\n"
BUSY = (sys.executable, "-c", "while True: pass")
NUM_BUSY = 2
BESIDE, QUIET = f"{NUM_BUSY} busy processes", "nothing of ours"
CLOSING = re.compile(r"(?:=+ )?(.*) in ([\d.]+)s")


def run(tree: Path, beside: str) -> str:
    """The row of one whole run."""
    with ExitStack() as stack:
        for _ in range(NUM_BUSY if beside == BESIDE else 0):
            stack.callback(stack.enter_context(subprocess.Popen(BUSY)).kill)
        done = subprocess.run(
            ("bash", str(tree / "check.sh")),
            env=os.environ | {"MODEL_CHECK_VENV": sys.prefix},
            capture_output=True,
            text=True,
        )
    closing = CLOSING.match(done.stdout.splitlines()[-1] if done.stdout else "")
    said = f"{closing[1]}, {float(closing[2]) / 60:.1f} min" if closing else f"rc {done.returncode}"
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    if failed or not closing:
        print(done.stdout[-20_000:], flush=True)
    commit = subprocess.check_output(("git", "rev-parse", "--short", "HEAD"), cwd=tree, text=True)
    when = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    return f"| {when} | {commit.strip()} | {beside} | {'; '.join([said, *failed])} |\n"


def parts() -> tuple[str, str, str]:
    """The log up to the table's rows, these, and what follows."""
    text = LOG.read_text()
    if HEAD not in text:
        text = f"{text.rstrip()}\n\n{HEAD}"
    before, rest = text.split(HEAD)
    rows = re.match(r"(?:\|.*\n)*", rest)
    assert rows is not None
    return before + HEAD, rows[0], rest[rows.end() :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=10)
    parser.add_argument("--beside", help="other work that is under way")
    options = parser.parse_args()
    for _ in range(options.count):
        with tempfile.TemporaryDirectory() as directory:
            os.chmod(directory, 0o755)  # tests of a second user read the tree
            tree = Path(directory, "tree")
            subprocess.run(("git", "clone", "-q", str(ROOT), str(tree)), check=True)
            rows = parts()[1].splitlines()
            turn = BESIDE if rows and QUIET in rows[-1] else QUIET
            row = run(tree, options.beside or turn)
        before, above, after = parts()
        LOG.write_text(before + above + row + after)
        print(row, end="", flush=True)


if __name__ == "__main__":
    main()
