"""What the launcher says of the runs of the corpus, made anew from their directories."""

import shutil
import tempfile
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path

from launcher.report.rebuild import rebuild
from model_check.utils.project_files import PACKAGES

RUNS = Path(__file__).with_name("runs")
DIRECTORY = "/tmp/model_check_corpus"
"""Where the runs were made, as their files say."""
SAID = ("report.json", "report.html", "fleet.json", "fleet.html", "said.txt")


FLEET = Path(__file__).with_name("fleet")
STYLE = PACKAGES / "launcher" / "report" / "page" / "style.css"
"""Of all pages, which are kept without it."""
OF_FLEET = ("pass", "odd_transient", "nan_one", "died", "changed")


def say_again(name: str) -> dict[str, str]:
    """Each file of SAID as it is made now; `said.txt` holds the lines and the exit code."""
    return _said([name], Path(name))


def say_of_fleet() -> dict[str, str]:
    """The same of several runs together."""
    return _said(OF_FLEET, Path("fleet"), "--output", "fleet")


def make_again(names: Sequence[str], directory: Path, *options: str) -> list[str]:
    """These runs in this directory, with reports that are made now; the lines and the exit code."""
    lines: list[str] = []
    for name in names:
        shutil.copytree(RUNS / name, directory / name, ignore=shutil.ignore_patterns(*SAID))
    runs = [str(directory / name) for name in names]
    exit_code = rebuild([*runs, *options], lines.append, lines.append)
    return [*lines, f"exit code {exit_code}\n"]


def _said(names: Sequence[str], place: Path, *options: str) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as directory, chdir(directory):
        lines = make_again(names, Path(directory), *options)
        said = {path.name: path.read_text() for path in place.iterdir() if path.name in SAID}
        said["said.txt"] = "\n".join(lines)
        plain = {file: without_style(text) for file, text in said.items()}
        return {file: text.replace(directory, DIRECTORY) for file, text in plain.items()}


def without_style(text: str) -> str:
    """And without the places where a long word may break: they depend on a directory's name."""
    return text.replace(STYLE.read_text(), "").replace("<wbr>", "")
