"""Which checkpoint a run goes on from, and whether the two belong together."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from model_check.config.profile import parse_steps
from model_check.config.resume import AUTO, changes, forbidden
from model_check.config.schema import Settings
from model_check.engine.checkpoint import CheckpointError, read_checkpoint
from model_check.engine.checkpoint_files import newest_first
from model_check.engine.misfit import misfit
from model_check.engine.saver import Saver
from model_check.engine.state import TrainingState

Say = Callable[[str], None]


def resume(state: TrainingState, wanted: str, saver: Saver, say: Say) -> None:
    """Put `state` where the checkpoint left off that `wanted` (training.resume) means; leave it as
    it is where there is none to find. Raises CheckpointError."""
    found = find(wanted, saver.directory, say)
    if found is None:
        return
    path, saved = found
    _refuse_misfit(path, saved, state)
    _refuse_another_run(path, saved, state)
    _refuse_to_profile_the_past(saved["step"], state.settings)
    state.restore(saved)
    saver.adopt(path, saved.get("kept", []))  # an alarm's checkpoint says nothing of others
    told = changes(saved["settings"], state.settings)
    if told:
        say(f"Resumed with other settings: {', '.join(told)}")
    say(f"Resumed from {path}: {saved['step']} steps done, {saved['total_tokens']:,} tokens")


def find(wanted: str, directory: Path, say: Say) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint that `wanted` means, verified and read. Raises CheckpointError."""
    path = Path(wanted)
    if wanted == AUTO:
        if found := _newest_sound(directory, say):
            return found
        say(f"Nothing to resume in {directory}: starting at step 0")
        return None
    if not path.is_dir():
        return path, read_checkpoint(path)
    own = path / directory.name if (path / directory.name).is_dir() else path
    if found := _newest_sound(own, say):
        return found
    raise CheckpointError(f"training.resume = {wanted}: {own} holds no last.pt or step_N.pt")


def _newest_sound(directory: Path, say: Say) -> tuple[Path, dict[str, Any]] | None:
    failures = []
    for path in newest_first(directory):
        try:
            return path, read_checkpoint(path)
        except CheckpointError as error:
            failures.append(str(error))
            say(f"Not resumed: {error}")
    if failures:
        raise CheckpointError(
            f"training.resume: no sound checkpoint in {directory} ({len(failures)} damaged); move "
            "them away to start afresh"
        )
    return None


def _refuse_misfit(path: Path, saved: dict[str, Any], state: TrainingState) -> None:
    """Raises CheckpointError that says which tensors, and which settings made them differ."""
    problem = misfit(saved["model"], state.model.state_dict())
    if problem is not None:
        geometry = changes(saved["settings"], state.settings, "model.")
        why = f"; settings that differ: {', '.join(geometry)}" if geometry else ""
        raise CheckpointError(f"{path}: does not fit this model: {problem}{why}")


def _refuse_another_run(path: Path, saved: dict[str, Any], state: TrainingState) -> None:
    """Raises CheckpointError when it is not the same run that goes on, unless that was asked
    for."""
    found = forbidden(saved["settings"], state.settings)
    if saved["data"] != state.data:
        found.append(f"data: {_described(saved['data'])} -> {_described(state.data)}")
    if found and not state.settings.training.resume_anyway:
        raise CheckpointError(
            f"{path}: of another run, which cannot go on exactly: {', '.join(found)} "
            "(training.resume_anyway=true resumes nevertheless)"
        )


def _refuse_to_profile_the_past(step: int, settings: Settings) -> None:
    if settings.debug.profile_steps is not None:
        parse_steps(settings.debug.profile_steps, settings.training.max_steps, from_step=step)


def _described(data: dict[str, Any]) -> str:
    return " ".join(str(value) for value in data.values()) or "unknown"
