"""Where this project lies: its two packages, and the files at the top of a checkout (the two
programs, presets, pyproject.toml, constraints.txt).

The wheel carries copies of those files in `model_check/project/` (pyproject.toml, `package-dir`).
"""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_INSTALLED = _PACKAGE / "project"

PACKAGES = _PACKAGE.parent
"""The directory to import `launcher` and `model_check` from."""
PROJECT = _INSTALLED if _INSTALLED.is_dir() else PACKAGES
"""The directory of the files at the top of a checkout."""
COMMAND = "run.sh" if PROJECT == PACKAGES else "model-check"
PROGRAM = f"bash {COMMAND}" if COMMAND.endswith(".sh") else COMMAND
"""What a person types."""


def version() -> str:
    """The version in pyproject.toml."""
    import tomllib  # 10 ms that the verbs need not pay

    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    return str(project["version"])
