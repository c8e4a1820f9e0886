"""What the launcher says of the runs of the corpus, made anew from their directories."""

import shutil
import tempfile
from pathlib import Path

from launcher.report.rebuild import rebuild

RUNS = Path(__file__).with_name("runs")
DIRECTORY = "/tmp/model_check_corpus"
"""Where the runs were made, as their files say."""
SAID = ("report.json", "report.html", "said.txt")


def say_again(name: str) -> dict[str, str]:
    """Each file of SAID as it is made now; `said.txt` holds the lines and the exit code."""
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as directory:
        shutil.copytree(RUNS / name, Path(directory, name))
        for file in SAID:
            Path(directory, name, file).unlink(missing_ok=True)
        exit_code = rebuild([str(Path(directory, name))], lines.append, lines.append)
        said = {
            file: path.read_text()
            for file in SAID
            if (path := Path(directory, name, file)).exists()
        }
        said["said.txt"] = "\n".join([*lines, f"exit code {exit_code}", ""])
        return {file: text.replace(directory, DIRECTORY) for file, text in said.items()}
