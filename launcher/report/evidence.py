"""The files that explain a failure, kept where later runs do not write over them."""

from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec.structs import replace

from launcher import run_dir
from launcher.verdict.steps import History


def keep(histories: Mapping[str, History], directory: Path) -> None:
    """Put each worker's evidence into its dossier in the run directory; the histories then tell of
    it there."""
    _tell_where(histories, directory, run_dir.keep)


def find(histories: Mapping[str, History], directory: Path) -> None:
    """Have the histories tell of what `keep` once kept there."""
    _tell_where(histories, directory, run_dir.kept)


def _tell_where(
    histories: Mapping[str, History], directory: Path, place: Callable[[Path, Path], Path]
) -> None:
    for name, history in histories.items():
        dossier = directory / "dossier" / name.lower()
        history.evidence = [
            replace(item, path=str(place(Path(item.path), dossier))) for item in history.evidence
        ]
