"""Which checkpoint a run goes on from, and whether the two belong together."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from model_check.config.profile import parse_steps
from model_check.config.resume import AUTO, architecture_changes, changes, forbidden
from model_check.config.schema import Settings
from model_check.engine.checkpoint import CheckpointError, read_checkpoint
from model_check.engine.run_context import Surroundings
from model_check.engine.saving.checkpoint_files import directories_beside, newest_first
from model_check.engine.saving.misfit import misfit
from model_check.engine.saving.saver import Saver
from model_check.engine.state import TrainingState

Say = Callable[[str], None]


def resume(state: TrainingState, wanted: str, saver: Saver, here: Surroundings) -> None:
    """Put `state` where the checkpoint left off that `wanted` (training.resume) means; leave it as
    it is where there is none to find. Raises CheckpointError."""
    say = here.say
    found = find(wanted, here)
    if found is None:
        return
    path, saved = found
    _refuse_misfit(path, saved, state)
    _refuse_another_run(path, saved, state)
    _refuse_to_profile_the_past(saved["step"], state.settings)
    state.restore(saved)
    saver.adopt(path, saved.get("kept", []))  # an alarm's checkpoint says nothing of others
    told = [
        *forbidden(saved["settings"], state.settings),
        *changes(saved["settings"], state.settings),
    ]
    if told:
        say(f"Resumed with other settings: {', '.join(told)}")
    say(f"Resumed from {path}: {saved['step']} steps done, {saved['total_tokens']:,} tokens")


def find(wanted: str, here: Surroundings) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint that `wanted` means, verified and read. Raises CheckpointError."""
    path, directory, say = Path(wanted), here.directory, here.say
    if wanted == AUTO:
        if found := _newest_sound(directory, say):
            return found
        _refuse_to_leave_others(here)
        say(f"Nothing to resume in {directory}: starting at step 0")
        return None
    if not path.is_dir():
        return path, _named(path)
    own = path / directory.name if (path / directory.name).is_dir() else path
    if found := _newest_sound(own, say):
        return found
    raise CheckpointError(f"training.resume = {wanted}: {own} holds no last.pt or step_N.pt")


def _named(path: Path) -> dict[str, Any]:
    try:
        return read_checkpoint(path)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}; `--resume {path.parent}` takes the newest sound last.pt or step_N.pt there"
        ) from error


def _refuse_to_leave_others(here: Surroundings) -> None:
    """Another GPU was chosen than before, or one more: starting at step 0 beside checkpoints is not
    what was asked for."""
    with _reading(here.directory):
        others = directories_beside(here.directory, here.worker, here.started_at)
    if others:
        names = ", ".join(str(path) for path in others)
        raise CheckpointError(
            f"training.resume = auto: {here.directory} holds no last.pt or step_N.pt, but {names} "
            f"does; `--resume {others[0]}` goes on from there, no --resume starts at step 0"
        )


def _newest_sound(directory: Path, say: Say) -> tuple[Path, dict[str, Any]] | None:
    failures = []
    with _reading(directory):
        candidates = newest_first(directory)
    for path in candidates:
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


@contextmanager
def _reading(directory: Path) -> Iterator[None]:
    """Raises CheckpointError where the names of checkpoints cannot be read."""
    try:
        yield
    except OSError as error:
        where = error.filename or directory
        raise CheckpointError(f"{where}: cannot be read: {error.strerror}") from error


def _refuse_misfit(path: Path, saved: dict[str, Any], state: TrainingState) -> None:
    """Raises CheckpointError that says which tensors, and which settings made them differ."""
    problem = misfit(saved["model"], state.model.state_dict())
    if problem is not None:
        settings = architecture_changes(saved["settings"], state.settings)
        why = f"; settings that differ: {', '.join(settings)}" if settings else ""
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
