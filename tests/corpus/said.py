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


def _said(names: Sequence[str], place: Path, *options: str) -> dict[str, str]:
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as directory, chdir(directory):
        for name in names:
            without = shutil.ignore_patterns(*SAID)
            shutil.copytree(RUNS / name, name, ignore=without)
        runs = [str(Path(directory, name)) for name in names]
        exit_code = rebuild([*runs, *options], lines.append, lines.append)
        lines.append(f"exit code {exit_code}\n")
        said = {path.name: path.read_text() for path in place.iterdir() if path.name in SAID}
        said["said.txt"] = "\n".join(lines)
        plain = {file: without_style(text) for file, text in said.items()}
        return {file: text.replace(directory, DIRECTORY) for file, text in plain.items()}


def without_style(text: str) -> str:
    """And without the places where a long word may break: they depend on a directory's name."""
    return text.replace(STYLE.read_text(), "").replace("<wbr>", "")
