"""What people ask of a cache directory: list it, verify it, throw away what nobody needs."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from model_check.config.prepared_dir import DATASET, METADATA, read_metadata
from model_check.data.cache.inventory import Entry, entries, problem
from model_check.data.cache.lock import if_idle
from model_check.data.cache.publish import is_of_another_user, set_aside, take_away
from model_check.data.read.manifest import CorruptEntryError, read_view
from model_check.errors import DataError, StorageError

UNUSED_DAYS = 30
_DAY_S = 24 * 3600.0

Say = Callable[[str], None]


def list_cache(root: Path, say: Say) -> None:
    """One line an entry: kind, size, days since its last use, name, what it holds. Raises DataError
    where there is no such directory."""
    _must_exist(root)
    found = entries(root)
    for entry in found:
        say(entry.line(root))
    say(f"{_together(found)} in {root}")


def verify_cache(root: Path, say: Say) -> None:
    """Every checksum of every entry; a bad one is set aside, so that the next preparation makes it
    again whatever it checks. Raises DataError when one is not whole, or there is no `root`."""
    _must_exist(root)
    found = [entry for entry in entries(root) if entry.kind in ("view", "tokens")]
    bad = 0
    for entry in found:
        wrong = problem(entry)
        bad += wrong is not None
        say(f"{'BAD' if wrong else 'whole':<6} {entry.path.relative_to(root)}")
        if wrong is not None:
            say(f"       {wrong}")
            say(f"       {_out_of_the_way(root, entry, wrong)}")
    if bad:
        again = f"prepare {root.parent} again" if _is_prepared(root) else "prepare again"
        raise DataError(
            f"{root}: {bad} of {len(found)} entries are not whole; {again}: what was set aside is "
            "built anew (--gc removes the bad one)"
        )
    say(f"{len(found)} entries are whole in {root}")


def _must_exist(root: Path) -> None:
    if not root.is_dir():
        raise DataError(
            f"{root}: no such directory, so nothing was prepared there (data.cache_dir; "
            "--output-dir for a prepared directory)"
        )


def _out_of_the_way(root: Path, entry: Entry, wrong: DataError) -> str:
    """What became of an entry that is not whole."""
    if not isinstance(wrong, CorruptEntryError):
        return "left there: it may be whole for users who can read it"
    with if_idle(root, entry.store or "verify") as idle:
        if not idle:
            return "left there: somebody builds it, or no lock can be had"
        if problem(entry) is None:
            return "somebody built it anew meanwhile"
        try:
            return f"set aside as {set_aside(root, entry.path)}"
        except StorageError as error:
            return f"left there: {error}"


def collect_garbage(root: Path, older_than_days: float, say: Say) -> None:
    """Remove what was set aside, what dead builders left, views that were not used for so long,
    and token stores that no view needs any more and that were not used for so long either. What a
    prepared directory holds stays.

    What somebody builds now, or might (no lock to be had), stays, and so does what another user
    alone may remove. Raises StorageError, after all others, when an entry cannot be removed;
    ConfigError.
    """
    found, kept = entries(root), _views_of_prepared(root)
    oldest = time.time() - older_than_days * _DAY_S
    rubbish = _Rubbish(root, say)
    for entry in found:
        old_view = entry.kind == "view" and entry.last_use <= oldest
        if entry.kind == "set aside" or entry.dead or (old_view and entry.path.name not in kept):
            rubbish.take(entry)
    needed = {entry.store for entry in found if entry.kind == "view" and entry not in rubbish.gone}
    for entry in found:
        unused = entry.store not in needed and entry.last_use <= oldest
        if entry.kind == "tokens" and unused and not entry.dead:
            rubbish.take(entry)
    say(f"removed {_together(rubbish.gone)} from {root} (unused: {older_than_days:g} days)")
    if rubbish.num_failed:
        raise StorageError(
            f"{root}: {rubbish.num_failed} entries cannot be removed (see above): do it by hand"
        )


def _is_prepared(root: Path) -> bool:
    return root.name == DATASET and (root.parent / METADATA).exists()


def _views_of_prepared(root: Path) -> set[str]:
    """The views that a prepared directory around `root` is made of: they are never unused. Raises
    ConfigError where it cannot be understood."""
    metadata = read_metadata(root.parent) if root.name == DATASET else None
    if metadata is None:
        return set()
    name = Path(metadata.view).name
    try:
        view, _ = read_view(root / name, "off")
    except (FileNotFoundError, CorruptEntryError):
        return {name}
    return {name, *(split.view for split in view.splits.values() if split.view is not None)}


class _Rubbish:
    """What was removed of a cache, each entry for itself."""

    def __init__(self, root: Path, say: Say) -> None:
        self.gone: list[Entry] = []
        self.num_failed = 0
        self._root = root
        self._say = say

    def take(self, entry: Entry) -> None:
        name = entry.path.relative_to(self._root)
        with if_idle(self._root, entry.store or "gc") as idle:
            if not idle:
                self._say(f"kept    {name}: somebody builds it, or no lock can be had")
                return
            try:
                if not take_away(self._root, "gc", entry.path):
                    return
            except StorageError as error:
                self._left(entry, name, error)
                return
        self.gone.append(entry)
        self._say(f"removed {name}: {entry.size_bytes / 2**20:,.1f} MiB ({entry.about})")

    def _left(self, entry: Entry, name: Path, error: StorageError) -> None:
        cause = error.__cause__
        if isinstance(cause, PermissionError) and is_of_another_user(self._root, entry.path):
            self._say(f"kept    {name}: belongs to another user")
            return
        self.num_failed += 1
        self._say(f"left    {name}: cannot be removed: {getattr(cause, 'strerror', None) or error}")


def _together(found: Iterable[Entry]) -> str:
    sizes = [entry.size_bytes for entry in found]
    return f"{len(sizes)} entries, {sum(sizes) / 2**20:,.1f} MiB"
