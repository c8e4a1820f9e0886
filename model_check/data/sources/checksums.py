"""The hub's own checksums of files that came from it: bytes change on the way, and on a disk."""

import hashlib
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from huggingface_hub import HfApi

Kind = Literal["model", "dataset"]

_SHA256 = re.compile("[0-9a-f]{64}")
_FILES_A_REQUEST = 500


def changed_files(
    api: "HfApi", repo: str, kind: Kind, snapshot: Path, patterns: Sequence[str] = ("*",)
) -> list[str]:
    """Files of a snapshot, a directory of huggingface_hub's cache that is named by its commit,
    whose bytes are not those that the hub has. A file of which the hub tells nothing counts as
    right. Raises OSError."""
    files = [path for path in sorted(snapshot.rglob("*")) if path.is_file()]
    names = [str(path.relative_to(snapshot)) for path in files]
    names = [name for name in names if any(fnmatch(name, pattern) for pattern in patterns)]
    told = _told(api, repo, kind, snapshot.name, names)
    return [name for name in names if _is_changed(snapshot / name, told.get(name))]


def _told(api: "HfApi", repo: str, kind: Kind, commit: str, names: list[str]) -> dict[str, str]:
    """File -> sha256, or what git calls a file: a sha1 of its size and its bytes."""
    told: dict[str, str] = {}
    for first in range(0, len(names), _FILES_A_REQUEST):
        some = names[first : first + _FILES_A_REQUEST]
        # A mirror may not know the request: its files come with an ETag at least.
        with suppress(Exception):
            for info in api.get_paths_info(repo, some, revision=commit, repo_type=kind):
                large = getattr(info, "lfs", None)
                told[info.path] = large.sha256 if large else getattr(info, "blob_id", "")
    return told


def _is_changed(file: Path, told: str | None) -> bool:
    """Without a word of the hub, the ETag with which the file came decides, which names the blob;
    of a large file it is the sha256. Others may be of any kind."""
    checksum = told or (Path(os.readlink(file)).name if file.is_symlink() else "")
    if _SHA256.fullmatch(checksum):
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest() != checksum
    if not told:
        return False
    content = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() != told
