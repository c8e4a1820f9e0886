"""Which checkpoint a run resumes, and whether it belongs to this run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from model_check.config.profile import parse_steps
from model_check.config.resume import AUTO, architecture_changes, changes, forbidden
from model_check.config.schema import Settings
from model_check.engine.checkpoint import CheckpointError, not_ours, read_checkpoint, shapes
from model_check.engine.run_context import RunContext
from model_check.engine.saving.checkpoint_files import directories_beside, newest_first
from model_check.engine.saving.saver import Saver
from model_check.engine.state import Resumable, TrainingState
from model_check.models.mismatch import mismatch
from model_check.utils.words import Say, first_line


def resume(state: TrainingState, which: str, saver: Saver) -> None:
    """Put `state` where the checkpoint left off that `which` (training.resume) means; leave it as
    it is where there is none. Raises CheckpointError."""
    say = state.context.channels.say
    if (found := find(which, state.context)) is None:
        return
    path, saved = found
    _refuse_other_tensors(path, saved, state)
    _refuse_another_run(path, saved, state)
    _refuse_to_profile_the_past(saved["step"], state.settings)
    _restore(path, saved, state)
    state.progress.resumed = path.absolute()
    saver.adopt(path, saved.get("kept", []))  # an alarm's checkpoint names no others
    before = saved["settings"]
    ranks = _num_ranks(saved, state)
    if other := [*forbidden(before, state.settings, ranks), *changes(before, state.settings)]:
        say(f"Resumed with other settings: {', '.join(other)}")
    if ranks[0] != ranks[1]:
        say(
            f"Resumed with {ranks[1]} rank{'s'[: ranks[1] > 1]} what {ranks[0]} trained: the same "
            "batches, but sums in another order, so not bit for bit"
        )
    say(f"Resumed from {path}: {saved['step']} steps done, {saved['total_tokens']:,} tokens")


def find(which: str, context: RunContext) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint that `which` means, verified and read; None: auto, and there is none. Raises
    CheckpointError."""
    path, directory, say = Path(which), context.directory, context.channels.say
    if which == AUTO:
        if found := _newest_sound(directory, say):
            return found
        _refuse_to_leave_others(context)
        say(f"Nothing to resume in {directory}: starting at step 0")
        return None
    if not path.is_dir():
        return path, _named(path)
    own = path / directory.name if (path / directory.name).is_dir() else path
    if found := _newest_sound(own, say):
        return found
    raise CheckpointError(f"training.resume = {which}: {own} holds no last.pt or step_N.pt")


def _named(path: Path) -> dict[str, Any]:
    try:
        return read_checkpoint(path, Resumable)
    except CheckpointError as error:
        with _reading(path.parent):
            others = [other for other in newest_first(path.parent) if other.name != path.name]
        if not others:
            raise
        raise CheckpointError(
            f"{error}; `--resume {path.parent}` takes the newest sound last.pt or step_N.pt there"
        ) from error


def _refuse_to_leave_others(context: RunContext) -> None:
    """Another GPU was chosen than before, or one more: a run that starts at step 0 beside the
    checkpoints of others is not what was asked for."""
    directory, identity = context.directory, context.identity
    with _reading(directory):
        others = directories_beside(directory, identity.worker, identity.started_at)
    if others:
        names = ", ".join(str(path) for path in others)
        raise CheckpointError(
            f"training.resume = auto: {directory} holds no last.pt or step_N.pt, but {names} "
            f"does; `--resume {others[0]}` goes on from there, no --resume starts at step 0"
        )


def _newest_sound(directory: Path, say: Say) -> tuple[Path, dict[str, Any]] | None:
    failures = []
    with _reading(directory):
        candidates = newest_first(directory)
    for path in candidates:
        try:
            return path, read_checkpoint(path, Resumable)
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
    """Turn the failure to list a directory into CheckpointError."""
    try:
        yield
    except OSError as error:
        where = error.filename or directory
        raise CheckpointError(f"{where}: cannot be read: {error.strerror}") from error


def _refuse_other_tensors(path: Path, saved: dict[str, Any], state: TrainingState) -> None:
    """Raises CheckpointError with the tensors, and the settings that made them differ."""
    problem = mismatch(shapes(saved["model"]), shapes(state.model.state_dict()))
    if problem is not None:
        settings = architecture_changes(saved["settings"], state.settings)
        why = f"; settings that differ: {', '.join(settings)}" if settings else ""
        raise CheckpointError(f"{path}: does not fit this model: {problem}{why}")


def _refuse_another_run(path: Path, saved: dict[str, Any], state: TrainingState) -> None:
    """Raises CheckpointError when the checkpoint is of another run, unless
    training.resume_anyway."""
    found = forbidden(saved["settings"], state.settings, _num_ranks(saved, state))
    if not _same_data(saved["data"], own := dict(state.context.identity.data)):
        what = "data (another text, tokenizer, context_length or data.validation)"
        found.append(f"{what}: {_described(saved['data'])} -> {_described(own)}")
    if found and not state.settings.training.resume_anyway:
        raise CheckpointError(
            f"{path}: of another run, which cannot go on exactly: {', '.join(found)} "
            "(training.resume_anyway=true resumes nevertheless)"
        )


def _num_ranks(saved: dict[str, Any], state: TrainingState) -> tuple[int, int]:
    return saved.get("num_ranks", 1), state.context.world.size


def _same_data(before: dict[str, Any], own: dict[str, Any]) -> bool:
    """The content decides. An older checkpoint knows only the key of its cache."""
    decisive = "content" if "content" in before else "cache"
    return bool(before.get(decisive) == own.get(decisive))


def _restore(path: Path, saved: dict[str, Any], state: TrainingState) -> None:
    """Raises CheckpointError for moments of other tensors, and for damaged random states."""
    try:
        if saved["optimizer"]["state"].keys() != state.optimizer.state_dict()["state"].keys():
            raise not_ours(path, "its optimizer has no moments, or others, of some weights")
        state.restore(saved)
    except (KeyError, IndexError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise not_ours(path, f"{type(error).__name__}: {first_line(error)}") from error


def _refuse_to_profile_the_past(step: int, settings: Settings) -> None:
    if settings.debug.profile_steps is not None:
        parse_steps(settings.debug.profile_steps, settings.training.max_steps, from_step=step)


def _described(data: dict[str, Any]) -> str:
    return " ".join(str(value) for value in data.values()) or "unknown"
