"""A cache that several users share: how its directories are opened, and which rights what we make
in it gets: a directory that is writable for a group or for all makes what is in it so, too,
whatever the umask of the process that prepares."""

import os
import stat
from contextlib import suppress
from pathlib import Path

from model_check.config.prepared_dir import DATASET
from model_check.utils.held import OTHERS_WRITE, HeldDirectory, hold

_DIRECTORY = 0o2777
"""Not the sticky bit: under it the status file of another user's dead builder would stay."""


def hold_cache(root: Path) -> HeldDirectory:
    """The directory of the entries. As the user's own choice (data.cache_dir) it may be a link.
    In a prepared directory that choice is the directory around it: there a link is followed as the
    kernel follows one under fs.protected_symlinks. Raises OSError."""
    if root.name != DATASET:
        return hold(root)
    with hold(root.parent) as prepared:
        return prepared.directory_or_own_link(DATASET)


def shared_directory(root: Path, name: str) -> HeldDirectory:
    """A directory of the cache `root` for all who use that; both are made unless they are there.
    Raises OSError."""
    root.mkdir(parents=True, exist_ok=True)
    with hold_cache(root) as cache:
        try:
            cache.make_directory(name)
        except FileExistsError:
            return cache.directory(name)
        held = cache.directory(name)
        with suppress(OSError):
            if is_ours(held):  # not one that was swapped in: root may change everybody's
                share(cache, held.descriptor)
        return held


def is_ours(directory: HeldDirectory) -> bool:
    """The file system says which user we are: NFS makes root nobody, others know one owner only."""
    owner = directory.status().st_uid
    return owner == os.geteuid() or owner == _owner_of_new_file(directory)


def _owner_of_new_file(directory: HeldDirectory) -> int:
    name = f".owner-{os.urandom(8).hex()}"
    with directory.create(name) as file:
        directory.unlink(name)
        return os.fstat(file.fileno()).st_uid


def share(directory: HeldDirectory, descriptor: int, *, writable: bool = True) -> None:
    """Give an open file or directory that we made the rights of `directory`, if that is shared."""
    with suppress(OSError):  # a file system without rights; on NFS root may be nobody
        rights, status = stat.S_IMODE(directory.status().st_mode), os.fstat(descriptor)
        if not rights & OTHERS_WRITE:
            return
        for_files = 0o666 if writable else 0o644
        os.fchmod(descriptor, rights & (_DIRECTORY if stat.S_ISDIR(status.st_mode) else for_files))


def share_entry(root: HeldDirectory, entry: HeldDirectory) -> None:
    """A finished entry: its directory like the cache's, its files to be read."""
    for name in entry.names():
        with entry.open(name) as file:
            share(root, file.fileno(), writable=False)
    share(root, entry.descriptor)
