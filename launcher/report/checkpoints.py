"""What a training that was stopped can go on from: a line for people. Writes nothing."""

import re
from collections.abc import Sequence
from pathlib import Path

from model_check.config.schema import Settings

_NAME = re.compile(r"last\.pt|step_[0-9]+\.pt")


def resume_line(settings: Settings, workers: Sequence[str]) -> str | None:
    """Which checkpoints `--resume auto` would find, or that there is none; None where the settings
    ask for none."""
    training, parent = settings.training, Path(settings.system.checkpoint_dir)
    if training.save_interval is None and not training.save_last:
        return None
    newest = {worker: _newest(parent / worker.lower()) for worker in workers}
    sharing: dict[str, list[str]] = {}
    for worker, name in newest.items():
        sharing.setdefault(name or "none", []).append(worker)
    found = ", ".join(f"{name} ({', '.join(names)})" for name, names in sharing.items())
    if any(newest.values()):
        text = f"checkpoints in {parent}: {found}; --resume auto goes on from there"
    else:
        text = f"no checkpoint in {parent} yet"
    if training.save_on_signal:
        return f"{text} (a SIGUSR1 instead would have saved first)"
    return f"{text} (with training.save_on_signal=true a SIGUSR1 saves, then ends the run)"


def _newest(directory: Path) -> str | None:
    """The file in it that was written last."""
    try:
        found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]
        return max(found, key=lambda path: path.lstat().st_mtime_ns).name if found else None
    except OSError:
        return None
