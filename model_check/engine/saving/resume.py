"""Which checkpoint a run resumes, and whether it belongs to this run."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from model_check.config.profile import parse_steps
from model_check.config.resume import (
    AUTO,
    architecture_changes,
    changes,
    forbidden,
    known_settings,
)
from model_check.config.schema import Settings
from model_check.dist.world import World
from model_check.engine.checkpoint import not_ours, read_checkpoint
from model_check.engine.run_context import RunContext
from model_check.engine.saving.fit import has_since, other_counts, refuse_misfits
from model_check.engine.saving.lineage import fit_of, header_in, header_of, state_sum
from model_check.engine.saving.place import (
    NotShared,
    Place,
    agreed,
    refuse_others,
    refuse_unshared,
)
from model_check.engine.saving.saver import Saver
from model_check.engine.schedule import learning_rate
from model_check.engine.sharded.parts import mesh_of
from model_check.engine.state import Resumable, TrainingState
from model_check.errors import CheckpointError, ConfigError
from model_check.utils.checkpoint_names import NONE_THERE, content_of, steps_of
from model_check.utils.words import Say, few

_SMOOTH = 0.1
"""By so much of itself the learning rate may change from one step to the next."""


def resume(state: TrainingState, which: str, saver: Saver) -> None:
    """Put `state` where the checkpoint left off that `which` (training.resume) means; leave it as
    it is where there is none. Raises CheckpointError."""
    say = state.context.channels.say
    if (found := find(which, state)) is None:
        return
    path, saved = found
    saved["settings"] = _settings_of(path, saved)
    refuse_misfits(path, saved, state, _difference(saved, state))
    _refuse_another_run(path, saved, state)
    _refuse_to_profile_the_past(saved["step"], state.settings)
    state.restore(saved)
    state.progress.resumed, state.progress.resumed_content = path.absolute(), content_of(path)
    _go_on_with(path, saved, state, saver)
    before = saved["settings"]
    ranks = _num_ranks(saved, state)
    if other := [*forbidden(before, state.settings, ranks), *changes(before, state.settings)]:
        say(f"Resumed with other settings: {', '.join(other)}")
    if jump := _jump_of_rate(before, state.settings, saved["step"]):
        say(jump)
    theirs, ours = _layout_of(saved), _layout(ranks[1], mesh_of(state.sharded))
    if theirs != ours:
        say(
            f"Resumed with {ours} what {theirs} trained: weights and moments to the bit, the same "
            "batches, but sums in another order, so not bit for bit"
            + ("" if ranks[0] == ranks[1] else "; each rank has the first one's random states")
        )
    say(f"Resumed from {path}: {saved['step']} steps done, {saved['total_tokens']:,} tokens")


def _jump_of_rate(before: dict[str, Any], settings: Settings, step: int) -> str | None:
    """A longer training stretches its schedule. None: the rate goes on."""
    if step == 0:
        return None
    training = settings.training
    old = learning_rate(step - 1, known_settings(before).training)
    new = learning_rate(step, training)
    if abs(new - old) <= _SMOOTH * old:
        return None
    end = f"{training.lr_schedule} to step {training.max_steps}"
    return f"Learning rate: {old:.2e} in the last step, {new:.2e} in the next ({end})"


def _layout_of(saved: dict[str, Any]) -> str:
    num_ranks, shards = saved.get("num_ranks", 1), saved.get("shards")
    return _layout(num_ranks, {} if shards is None else shards.manifest.world.mesh)


def _layout(num_ranks: int, mesh: Mapping[str, int]) -> str:
    """`4 ranks`; where they share weights `4 ranks (replicate 2, shard 2)`."""
    sizes = ", ".join(f"{name} {size}" for name, size in mesh.items())
    return f"{num_ranks} rank{'s'[: num_ranks > 1]}{f' ({sizes})' if sizes else ''}"


def _go_on_with(path: Path, saved: dict[str, Any], state: TrainingState, saver: Saver) -> None:
    """Goes on with the run of the checkpoint, or begins a new one if settings other than
    `training.max_steps` differ."""
    progress = state.progress
    header = header_in(saved, path)
    progress.resumed_at = header.progress
    if fit_of(header, state.settings, state.context.world.size)[:2] == (False, 0):
        progress.run_id = header.run_id
    saver.adopt([*saved.get("kept", []), path.name])  # an alarm's checkpoint names no others


def find(which: str, state: TrainingState) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint that `which` means, verified and read; None: auto, and there is none. The
    weights and moments of a sharded one are still on the disk. All ranks find the same. Raises
    CheckpointError, NotShared."""
    context = state.context
    say, world = context.channels.say, context.world
    place = agreed(which, state.settings, context)
    if place.directory is None:
        return place.path, _named(place, world)
    for path in place.unfinished:
        say(f"Not resumed: {path}: its save was not finished")
    for text in place.passed_over:
        say(f"Not resumed: {text}")
    if found := _newest_sound(place, context):
        _tell_other_states(found[0], found[1]["step"], place.candidates, say)
        return found
    if which != AUTO:
        raise CheckpointError(f"training.resume = {which}: {place.why_empty}")
    _refuse_to_leave_others(place)
    say(f"Nothing to resume in {place.directory}: starting at step 0")
    return None


def _read(path: Path, world: World) -> dict[str, Any]:
    """Read by each rank, and refused by all where one of them cannot, or has another one there.
    Raises CheckpointError, NotShared."""
    state, problem, content = {}, None, ""
    try:
        content = content_of(path)
        state = read_checkpoint(path, Resumable, hollow=True, share=(world.rank, world.size))
    except CheckpointError as error:
        problem = str(error)
    told = world.gathered((problem, os.path.exists(path), content))
    refuse_unshared(path, [is_there for _, is_there, _ in told])
    if problems := [each for each, _, _ in told if each is not None]:
        raise CheckpointError("; ".join(dict.fromkeys(problems)))
    refuse_others(path, [content for _, _, content in told])
    return state


def _named(place: Place, world: World) -> dict[str, Any]:
    try:
        return _read(place.path, world)
    except NotShared:
        raise
    except CheckpointError as error:
        if not place.candidates:
            raise
        raise CheckpointError(
            f"{error}; `--resume {place.path.parent}` takes the newest sound last.pt or step_N.pt "
            "there"
        ) from error


def _refuse_to_leave_others(place: Place) -> None:
    """Another GPU was chosen than before, or one more: a run that starts at step 0 beside the
    checkpoints of others is not what was asked for."""
    if place.beside:
        names = ", ".join(str(path) for path in place.beside)
        raise CheckpointError(
            f"training.resume = auto: {place.directory} {NONE_THERE}, but {names} "
            f"does; `--resume {place.beside[0]}` goes on from there, no --resume starts at step 0"
        )


def _newest_sound(place: Place, context: RunContext) -> tuple[Path, dict[str, Any]] | None:
    failures, say = [], context.channels.say
    for path in place.candidates:
        try:
            return path, _read(path, context.world)
        except NotShared:
            raise
        except CheckpointError as error:
            failures.append(str(error))
            say(f"Not resumed: {error}")
    if failures:
        raise CheckpointError(
            f"training.resume: no sound checkpoint in {place.directory} ({len(failures)} damaged); "
            "move them away to start afresh"
        )
    return None


def _tell_other_states(path: Path, step: int, candidates: Sequence[Path], say: Say) -> None:
    """Says where another state of this step of the run lies: of another branch, or copied there."""
    named = (other for other in candidates if steps_of(other) in (None, step))
    headers = [header for other in named if (header := header_of(other)) is not None]
    own = state_sum(path)
    same_step = (header.path for header in headers if header.step == step)
    if others := [str(other) for other in same_step if state_sum(other) != own]:
        say(f"{path} is resumed; another state of the same step is in {few(others)}")


def _settings_of(path: Path, saved: dict[str, Any]) -> dict[str, Any]:
    """The settings of the checkpoint, complete. Raises CheckpointError."""
    try:
        settings: dict[str, Any] = msgspec.to_builtins(known_settings(saved["settings"]))
    except ConfigError as error:
        raise not_ours(path, error) from error
    return settings


def _difference(saved: dict[str, Any], state: TrainingState) -> str:
    """Returns the settings and data that differ, which may be why the checkpoint does not fit."""
    settings = architecture_changes(saved["settings"], state.settings)
    why = f"; settings that differ: {', '.join(settings)}" if settings else ""
    # The tokenizer decides the size of the vocabulary.
    return why + "".join(f"; {change}" for change in _other_data(saved, state))


def _refuse_another_run(path: Path, saved: dict[str, Any], state: TrainingState) -> None:
    """Raises CheckpointError when the checkpoint is of another run, unless
    training.resume_anyway."""
    found = forbidden(saved["settings"], state.settings, _num_ranks(saved, state))
    found += _other_data(saved, state)
    found += [] if has_since(saved) else other_counts(saved)
    if splits := state.context.splits and sorted(saved["val_loss"].keys() - state.context.splits):
        found.append(f"val_loss of {few(splits)}, which this run does not evaluate")
    if found and not state.settings.training.resume_anyway:
        raise CheckpointError(
            f"{path}: of another run, which cannot go on exactly: {', '.join(found)} "
            "(training.resume_anyway=true resumes nevertheless)"
        )


def _num_ranks(saved: dict[str, Any], state: TrainingState) -> tuple[int, int]:
    return saved.get("num_ranks", 1), state.context.world.size


def _other_data(saved: dict[str, Any], state: TrainingState) -> list[str]:
    """How the data differ, in words; empty: they do not."""
    own = dict(state.context.identity.data)
    if _same_data(saved["data"], own):
        return []
    what = "data (another text, tokenizer, context_length or data.validation)"
    return [f"{what}: {_described(saved['data'])} -> {_described(own)}"]


def _same_data(before: dict[str, Any], own: dict[str, Any]) -> bool:
    """The content decides. An older checkpoint knows only the key of its cache."""
    decisive = "content" if "content" in before else "cache"
    return bool(before.get(decisive) == own.get(decisive))


def _refuse_to_profile_the_past(step: int, settings: Settings) -> None:
    if settings.debug.profile_steps is not None:
        parse_steps(settings.debug.profile_steps, settings.training.max_steps, from_step=step)


def _described(data: dict[str, Any]) -> str:
    return " ".join(str(value) for value in data.values()) or "unknown"
