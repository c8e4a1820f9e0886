"""What people ask of a cache directory: list it, verify it, throw away what nobody needs."""

import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from model_check.data.build_lock import if_idle
from model_check.data.inventory import Entry, entries, problem
from model_check.data.publish import beside, storage_errors
from model_check.errors import DataError

UNUSED_DAYS = 30
_DAY_S = 24 * 3600.0

Say = Callable[[str], None]


def list_cache(root: Path, say: Say) -> None:
    """One line an entry: kind, size, days since its last use, name, what it holds."""
    found = entries(root)
    for entry in found:
        say(entry.line(root))
    say(f"{_together(found)} in {root}")


def verify_cache(root: Path, say: Say) -> None:
    """Every checksum of every entry. Raises DataError when one is not whole."""
    found = [entry for entry in entries(root) if entry.kind in ("view", "tokens")]
    bad = 0
    for entry in found:
        wrong = problem(entry)
        bad += wrong is not None
        say(f"{'BAD' if wrong else 'whole':<6} {entry.path.relative_to(root)}")
        if wrong:
            say(f"       {wrong}")
    if bad:
        raise DataError(
            f"{root}: {bad} of {len(found)} entries are not whole; the next preparation sets a bad "
            "one aside and builds it again (data.verify=full checks every checksum then, too)"
        )
    say(f"{len(found)} entries are whole in {root}")


def collect_garbage(root: Path, older_than_days: float, say: Say) -> None:
    """Remove what was set aside, what dead builders left, views that were not used for so long,
    and token stores that no view needs any more and that were not used for so long either.

    Raises StorageError. What somebody builds now, or might (no lock to be had), stays.
    """
    found = entries(root)
    oldest = time.time() - older_than_days * _DAY_S
    gone: list[Entry] = []
    left = [entry for entry in found if entry.kind == "set aside" or entry.dead]
    old_views = [entry for entry in found if entry.kind == "view" and entry.last_use <= oldest]
    for entry in left + old_views:
        if _removed(root, entry, say):
            gone.append(entry)
    needed = {entry.store for entry in found if entry.kind == "view" and entry not in gone}
    for entry in found:
        unused = entry.store not in needed and entry.last_use <= oldest
        if entry.kind == "tokens" and unused and _removed(root, entry, say):
            gone.append(entry)
    say(f"removed {_together(gone)} from {root} (unused: {older_than_days:g} days)")


def _removed(root: Path, entry: Entry, say: Say) -> bool:
    name = entry.path.relative_to(root)
    with if_idle(root, entry.store or "gc") as idle:
        if not idle:
            say(f"kept    {name}: somebody builds it, or no lock can be had")
            return False
        # First out of sight, in one step: nobody ever opens half of it.
        with storage_errors(root), beside(root, "gc") as directory:
            try:
                entry.path.rename(directory / "entry")
            except FileNotFoundError:
                return False
            shutil.rmtree(directory)
    say(f"removed {name}: {entry.size_bytes / 2**20:,.1f} MiB ({entry.about})")
    return True


def _together(found: Iterable[Entry]) -> str:
    sizes = [entry.size_bytes for entry in found]
    return f"{len(sizes)} entries, {sum(sizes) / 2**20:,.1f} MiB"
