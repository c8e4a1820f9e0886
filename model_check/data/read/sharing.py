"""A cache that several users share: how its directories are opened, and with which rights entries
are made in it. A cache directory that is writable for a group or for all is shared on purpose, so
its entries get the same rights, whatever the umask of the process that prepares."""

import os
import stat
from contextlib import suppress
from pathlib import Path

from model_check.config.prepared_dir import DATASET
from model_check.utils.held import OTHERS_WRITE, HeldDirectory, hold, make_unlinked, refuse_planted

_DIRECTORY = 0o2777
"""Without the sticky bit, under which the status file of another user's dead builder would
stay."""


def hold_cache(root: Path) -> HeldDirectory:
    """The directory of the entries. data.cache_dir is the user's own choice and may be a link, but
    for one that another user laid in a directory like /tmp. In a prepared directory the user chose
    the directory around it, so a link is followed as the kernel follows one under
    fs.protected_symlinks. Raises OSError."""
    refuse_planted(root)
    if root.name != DATASET:
        return hold(root)
    with hold(root.parent) as prepared:
        return prepared.directory_or_own_link(DATASET)


def shared_directory(root: Path, name: str) -> HeldDirectory:
    """A directory of the cache `root` for all its users; both are made if absent. Raises
    OSError."""
    if not root.is_dir():
        make_unlinked(root)
    with hold_cache(root) as cache:
        try:
            cache.make_directory(name)
        except FileExistsError:
            return cache.directory(name)
        held = cache.directory(name)
        with suppress(OSError):
            # Another user may have swapped one in, and root may change everybody's rights.
            if held.is_ours():
                share(cache, held.descriptor)
        return held


def share(directory: HeldDirectory, descriptor: int, *, writable: bool = True) -> None:
    """Give an open file or directory that we made the rights of `directory`, if that is shared."""
    # A file system may have no rights, and on NFS root may be nobody.
    with suppress(OSError):
        rights, status = stat.S_IMODE(directory.status().st_mode), os.fstat(descriptor)
        if not rights & OTHERS_WRITE:
            return
        for_files = 0o666 if writable else 0o644
        os.fchmod(descriptor, rights & (_DIRECTORY if stat.S_ISDIR(status.st_mode) else for_files))


def share_entry(root: HeldDirectory, entry: HeldDirectory) -> None:
    """Share a finished entry: its directory with the cache's rights, its files for reading."""
    for name in entry.names():
        with entry.open(name) as file:
            share(root, file.fileno(), writable=False)
    share(root, entry.descriptor)
