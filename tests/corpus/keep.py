"""`python -m tests.corpus.keep NAME`: takes a run of make.sh into the corpus, with its reports and
without what names the machine that it ran on. A run whose launcher was killed has no report: one is
made of it."""

import platform
import re
import shutil
import sys
from pathlib import Path

from model_check.utils.project_files import PROJECT
from tests.corpus.said import (
    DIRECTORY,
    FLEET,
    RUNS,
    say_again,
    say_of_fleet,
    without_style,
)

KEPT = re.compile(
    r".*(\.jsonl|\.log|\.html|\.stacks\.txt|"
    r"(run|config|data|comparison|manifest|difference|report)\.json)"
)
NAMES = {
    platform.release(): "6.8.0",
    str(PROJECT): "/opt/model-check",
    sys.base_prefix: "/usr",
}


def keep(name: str) -> None:
    shutil.rmtree(RUNS / name, ignore_errors=True)
    for path in sorted(Path(DIRECTORY, name).rglob("*")):
        kept = RUNS / path.relative_to(DIRECTORY)
        kept.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file() and KEPT.fullmatch(path.name):
            kept.write_text(without_machine(path.read_text()))
        elif path.is_file():  # a report names it, and says whether it is there
            kept.touch()
    for file, text in say_again(name).items():
        if not (RUNS / name / file).exists():
            (RUNS / name / file).write_text(text)


def without_machine(text: str) -> str:
    text = without_style(text)
    for own, other in NAMES.items():
        text = text.replace(own, other)
    return text


def keep_fleet() -> None:
    """What is said of several runs together."""
    for file, text in say_of_fleet().items():
        (FLEET / file).write_text(text)


if __name__ == "__main__":
    keep_fleet() if sys.argv[1] == "--fleet" else keep(sys.argv[1])
