"""Which of a person's own files a process has imported, and a digest of each: with other files it
trains something else."""

import hashlib
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache

from model_check.utils.words import printable

_NAME = "source "
"""As in launcher.verdict.golden."""
_UNREAD = "unread"
_MOST_NAMED = 64
_OF_OTHERS = ("/site-packages/", "/dist-packages/")


def digests(note: Callable[[str], None]) -> dict[str, str]:
    """`source model.py` -> 16 hex digits, or `unread`, for `__main__` and for each module that lies
    below its folder or the working directory, and belongs to no environment. Names are relative
    to the folder of `__main__`. `note` takes what could not be read. Of more than 64 files there
    is one digest."""
    roots = [os.path.dirname(path) for path in _files("__main__")]
    with suppress(OSError):  # it may be gone
        roots.append(os.getcwd())
    own = _prefixes(roots)
    paths = [path for path in _files(*sys.modules) if path.startswith(own)]
    found = {os.path.relpath(path, roots[0]): path for path in paths}
    read = {name: _digest(name, path, note) for name, path in sorted(found.items())}
    if len(read) <= _MOST_NAMED:
        return {_NAME + printable(name): digest for name, digest in read.items()}
    whole = hashlib.blake2b(repr(read).encode(errors="backslashreplace"), digest_size=8)
    return {f"{_NAME}of {len(read)} files": whole.hexdigest()}


def _files(*modules: str) -> Iterator[str]:
    """Yields real paths. There are thousands of modules, and few folders."""
    theirs, real = _prefixes(_places_of_others()), cache(os.path.realpath)
    for name in modules:
        # Not getattr: a lazy module would begin to import.
        file = getattr(sys.modules.get(name), "__dict__", {}).get("__file__")
        if not isinstance(file, str) or not os.path.isabs(file):
            continue
        with suppress(OSError, ValueError):
            path = os.path.join(real(os.path.dirname(file)), os.path.basename(file))
            if not _is_others(path, theirs):
                path = os.path.realpath(path)
                if not _is_others(path, theirs):
                    yield path


def _places_of_others() -> set[str]:
    """The standard library, what is installed, and us."""
    of_python = sysconfig.get_paths()
    found = {of_python[name] for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")}
    return found | {os.path.join(sys.prefix, "bin"), os.path.dirname(os.path.dirname(__file__))}


def _is_others(path: str, theirs: tuple[str, ...]) -> bool:
    return path.startswith(theirs) or any(each in path for each in _OF_OTHERS)


def _prefixes(folders: Iterable[str]) -> tuple[str, ...]:
    """Returns how the real path of a file in one of them begins."""
    return tuple(os.path.join(os.path.realpath(folder), "") for folder in folders)


def _digest(name: str, path: str, note: Callable[[str], None]) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.blake2b(file.read(), digest_size=8).hexdigest()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        note(f"its file {printable(name)} cannot be read, and no golden file knows it: {why}")
        return _UNREAD
