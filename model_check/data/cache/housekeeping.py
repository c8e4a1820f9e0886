"""What users ask of a cache directory: list it, verify it, remove what nobody needs."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from model_check.config.prepared_dir import DATASET, METADATA, read_metadata
from model_check.data.cache.inventory import DAY_S, Entry, entries, problem
from model_check.data.cache.lock import if_idle
from model_check.data.cache.publish import is_of_another_user, set_aside, take_away
from model_check.data.read.manifest import CorruptEntryError, OtherSchemaError, read_view
from model_check.errors import DataError, StorageError
from model_check.utils.words import Say

UNUSED_DAYS = 30


def list_cache(root: Path, say: Say) -> None:
    """One line for each entry: kind, size, days since its last use, name, what it holds. Raises
    DataError where there is no such directory."""
    _must_exist(root)
    found = entries(root)
    for entry in found:
        say(entry.line(root))
    say(f"{_total(found)} in {root}")


def verify_cache(root: Path, say: Say) -> None:
    """Compare every checksum of every entry. A bad entry is set aside, so that the next preparation
    makes it again whatever data.verify is. Raises DataError when one is not whole, or there is no
    `root`."""
    _must_exist(root)
    found = [entry for entry in entries(root) if entry.kind in ("view", "tokens")]
    bad = others = 0
    for entry in found:
        wrong = problem(entry)
        if isinstance(wrong, OtherSchemaError):
            say(f"other  {entry.path.relative_to(root)}\n       {wrong}")
            others += 1
            continue
        bad += wrong is not None
        say(f"{'BAD' if wrong else 'whole':<6} {entry.path.relative_to(root)}")
        if wrong is not None:
            say(f"       {wrong}")
            say(f"       {_set_aside(root, entry, wrong)}")
    if bad:
        again = f"prepare {root.parent} again" if _is_prepared(root) else "prepare again"
        raise DataError(
            f"{root}: {bad} of {len(found)} entries are not whole; {again}: what was set aside is "
            "built anew (--gc removes the bad one)"
        )
    say(f"{len(found) - others} entries are whole in {root}")


def _must_exist(root: Path) -> None:
    if not root.is_dir():
        raise DataError(
            f"{root}: no such directory, so nothing was prepared there (data.cache_dir; "
            "--output-dir for a prepared directory)"
        )


def _set_aside(root: Path, entry: Entry, wrong: DataError) -> str:
    """Says what became of an entry that is not whole."""
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
    """Remove what was set aside, what dead builders left, views that were not used for so many
    days, and token stores that no remaining view needs and that were not used for as long.

    These stay: what a prepared directory consists of, what is being built or may be (no lock can be
    had), and what only another user may remove. Raises StorageError, after all entries were tried,
    when one cannot be removed; ConfigError.
    """
    found, kept = entries(root), _views_of_prepared(root)
    oldest = time.time() - older_than_days * DAY_S
    remover = _Remover(root, say)
    for entry in found:
        old_view = entry.kind == "view" and entry.last_use <= oldest
        if entry.kind == "set aside" or entry.dead or (old_view and entry.path.name not in kept):
            remover.remove(entry)
    views = [entry for entry in found if entry.kind == "view" and entry not in remover.removed]
    needed = {view.store for view in views}
    for entry in found:
        unused = entry.store not in needed and entry.last_use <= oldest
        if entry.kind == "tokens" and unused and not entry.dead:
            remover.remove(entry)
    say(f"removed {_total(remover.removed)} from {root} (unused: {older_than_days:g} days)")
    if remover.num_failed:
        raise StorageError(
            f"{root}: {remover.num_failed} entries cannot be removed (see above): do it by hand"
        )


def _is_prepared(root: Path) -> bool:
    return root.name == DATASET and (root.parent / METADATA).exists()


def _views_of_prepared(root: Path) -> set[str]:
    """Names of the views that a prepared directory around `root` consists of: they count as used.
    Raises ConfigError where its metadata cannot be understood."""
    metadata = read_metadata(root.parent) if root.name == DATASET else None
    if metadata is None:
        return set()
    name = Path(metadata.view).name
    try:
        view, _ = read_view(root / name, "off")
    except (FileNotFoundError, CorruptEntryError):
        return {name}
    return {name, *(split.view for split in view.splits.values() if split.view is not None)}


@dataclass
class _Remover:
    """Removes entries of a cache, one by one, and records which."""

    root: Path
    say: Say
    removed: list[Entry] = field(default_factory=list)
    num_failed: int = 0

    def remove(self, entry: Entry) -> None:
        name = entry.path.relative_to(self.root)
        with if_idle(self.root, entry.store or "gc") as idle:
            if not idle:
                self.say(f"kept    {name}: somebody builds it, or no lock can be had")
                return
            try:
                if not take_away(self.root, "gc", entry.path):
                    return
            except StorageError as error:
                self._failed(entry, name, error)
                return
        self.removed.append(entry)
        self.say(f"removed {name}: {entry.size_bytes / 2**20:,.1f} MiB ({entry.about})")

    def _failed(self, entry: Entry, name: Path, error: StorageError) -> None:
        cause = error.__cause__
        if isinstance(cause, PermissionError) and is_of_another_user(self.root, entry.path):
            self.say(f"kept    {name}: belongs to another user")
            return
        self.num_failed += 1
        self.say(f"left    {name}: cannot be removed: {getattr(cause, 'strerror', None) or error}")


def _total(found: Iterable[Entry]) -> str:
    sizes = [entry.size_bytes for entry in found]
    return f"{len(sizes)} entries, {sum(sizes) / 2**20:,.1f} MiB"
