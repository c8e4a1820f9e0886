"""Rights in a cache that several users share. Whoever made its directory writable for a group or
for all meant what is in it, too, whatever the umask of the one who prepares."""

import os
import stat
from contextlib import suppress
from pathlib import Path

_FOR_OTHERS_TO_WRITE = 0o022
_DIRECTORY = 0o2777
"""Not the sticky bit: under it a lock file of another user cannot be opened (protected_regular)."""


def make_shared(root: Path, directory: Path) -> None:
    """Make a directory of the cache `root`, unless it is there. Raises OSError."""
    if not directory.is_dir():
        directory.mkdir(parents=True, exist_ok=True)
        share(root, directory)


def share(root: Path, path: Path, *, writable: bool = True) -> None:
    """Give a file or directory that we made the rights of `root`, where that is shared."""
    with suppress(OSError):  # not ours, or a file system without rights
        rights = stat.S_IMODE(os.stat(root).st_mode)
        if not rights & _FOR_OTHERS_TO_WRITE:
            return
        if path.is_dir():
            path.chmod(rights & _DIRECTORY)
        else:
            path.chmod(rights & (0o666 if writable else 0o644))


def share_entry(root: Path, directory: Path) -> None:
    """A finished entry: its directory like the cache's, its files to be read."""
    for file in directory.iterdir():
        share(root, file, writable=False)
    share(root, directory)
