"""Where token caches and checkpoints go when nobody says it: into the working directory, or, where
nothing can be made there, into the user's cache directory, or, without one, beside the temporary
files."""

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from model_check.config.fields import all_fields, value_of
from model_check.config.schema import Settings
from model_check.errors import StorageError
from model_check.utils.held import hold_own, make_unlinked
from model_check.utils.user_cache import user_cache

FALLBACK = "default (working directory cannot be written)"
"""The source of a setting that `fallbacks` gives."""


def fallbacks(environ: Mapping[str, str]) -> dict[str, str]:
    """Setting -> its directory below `$XDG_CACHE_HOME/model_check` (`~/.cache/model_check`), for
    each one whose default neither exists nor can be made. Where that cannot be made either, as
    without a home: below `$TMPDIR/model_check_UID`. Checkpoints are only ever written: their
    default must be writable, too.

    All working directories share the token caches, whose names tell their content; each has
    checkpoints of its own.
    """
    instead = {"data.cache_dir": "datasets", "system.checkpoint_dir": f"checkpoints/{_here()}"}
    names = [name for name in instead if not _can_serve(name, Path(all_fields()[name].default))]
    ours = _own_place(environ) if names else None
    return {} if ours is None else {name: str(ours / instead[name]) for name in names}


def _own_place(environ: Mapping[str, str]) -> Path | None:
    ours = user_cache(environ)
    return ours if ours.is_absolute() and _can_be_made(ours) else _temporary_place()


def _temporary_place() -> Path | None:
    """Made here and now, since its name can be foreseen: a directory that is only planned could be
    made by another user first. None: one has."""
    from tempfile import gettempdir  # only who has no other place waits for it

    place = Path(gettempdir(), f"model_check_{os.geteuid()}")
    with suppress(OSError):
        make_unlinked(place, 0o700)
        hold_own(place).close()
        return place
    return None


def fallback_note(sources: Mapping[str, str], settings: Settings) -> list[str]:
    """What to tell a person of the settings that `fallbacks` gave; nothing where it gave none."""
    names = [name for name, source in sources.items() if source == FALLBACK]
    places = ", ".join(f"{name} = {value_of(settings, name)}" for name in names)
    return [f"the working directory cannot be written: {places}"] if names else []


def refuse_unwritable(settings: Settings, place: Path, error: OSError) -> str:
    """A note that `place`, of checkpoints, cannot be written, where a run would write there only if
    it failed. Raises StorageError where its settings ask for files there."""
    training = settings.training
    asked = {
        "training.save_interval": training.save_interval is not None,
        "training.save_last": training.save_last,
        "training.save_best": training.save_best,
        "training.save_on_signal": training.save_on_signal,
        "debug.dump_tensors": settings.debug.dump_tensors,
    }
    why = f"{place}: cannot be written: {error.strerror or error}"
    if names := ", ".join(name for name, is_on in asked.items() if is_on):
        raise StorageError(
            f"{why}; {names} would write there: name another system.checkpoint_dir"
        ) from error
    return f"{why}; a failure would leave no checkpoint to look at"


def _can_serve(name: str, directory: Path) -> bool:
    if name == "system.checkpoint_dir" and os.path.exists(directory):
        # Who cannot write there learns it, but for a working directory that is another user's.
        return any(os.access(place, os.W_OK | os.X_OK) for place in (directory, "."))
    return _can_be_made(directory)


def _can_be_made(directory: Path) -> bool:
    """Whether it exists, or its first parent that exists can be written."""
    places = (directory, *directory.parents)
    place = next(path for path in places if os.path.lexists(path) or path == places[-1])
    return place == directory or os.access(place, os.W_OK | os.X_OK)


def _here() -> str:
    """A name for the working directory: `NAME-8 hex digits of its path`."""
    path = ""
    with suppress(OSError):
        path = os.getcwd()
    return f"{os.path.basename(path)}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"
