"""The files at the top of a checkout: the two programs, presets, pyproject.toml, constraints.txt.

The wheel carries copies of them in `model_check/project/` (pyproject.toml, `package-dir`).
"""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_INSTALLED = _PACKAGE / "project"

PROJECT = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent


def version() -> str:
    """The version in pyproject.toml."""
    import tomllib  # 10 ms that only --version pays

    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    return str(project["version"])
