"""What a file is by its first bytes, where it is not what its name says."""

import codecs
from pathlib import Path

LONGEST_HEAD = 512
PICKLES = ("a zip archive, as torch.save makes", "a pickle")
"""What a .bin of weights may be."""
PARQUET = "a parquet file"
_LFS = b"version https://git-lfs"
_SIGNATURES = (
    (
        _LFS,
        "a git-lfs pointer, which stands for the file (`git lfs pull` fetches it)",
    ),
    (b"\x1f\x8b", "a gzip archive"),
    (b"PK\x03\x04", PICKLES[0]),
    (b"PAR1", PARQUET),
    (b"\x28\xb5\x2f\xfd", "a zstd archive"),
    (b"BZh", "a bzip2 archive"),
    (b"\xfd7zXZ\x00", "an xz archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"GGUF", "a GGUF file of llama.cpp"),
    (b"%PDF", "a PDF"),
    (b"\x80\x02", PICKLES[1]),
    (b"\x80\x04", PICKLES[1]),
)
_PAGES = (b"<!doctype html", b"<html")


def what_begins(head: bytes) -> str | None:
    """`head`: the first LONGEST_HEAD bytes, or all. None: nothing that is known here."""
    for signature, what in _SIGNATURES:
        if head.startswith(signature) and (signature == _LFS or not _is_text(head)):
            return what
    if is_page(head):
        return "a web page (what a download leaves where it is refused)"
    return "a tar archive" if head[257:262] == b"ustar" else None


def _is_text(head: bytes) -> bool:
    """One may begin with the letters of a format."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # its last character may be cut off
    except UnicodeDecodeError:
        return False
    return not any(byte < 0x20 and byte not in b"\t\n\f\r" for byte in head)


def is_page(head: bytes) -> bool:
    return head.lstrip().lower().startswith(_PAGES)


def what_is(path: Path) -> str | None:
    """The same of a file; None, too, where it cannot be read."""
    try:
        with path.open("rb") as file:
            return what_begins(file.read(LONGEST_HEAD))
    except OSError:
        return None
