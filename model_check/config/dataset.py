"""What data.dataset may name: a word of ours, a path, or a dataset of the hub."""

import os

from model_check.errors import DataError

WIKITEXT = "Salesforce/wikitext"
C4 = "allenai/c4"
KNOWN = {"wikitext": WIKITEXT, "c4": C4}
"""Short names of datasets of the hub."""
WORDS = ("auto", "embedded", *KNOWN)
TEXT = (".txt", ".md", ".markdown", ".rst", ".tex", ".html", ".htm", ".py")
"""Files of running text."""
PACKED = (".gz", ".zst")
_LINES = (*TEXT, ".jsonl")
SUFFIXES = (*_LINES, *(kind + packing for kind in _LINES for packing in PACKED), ".parquet")
"""Of all files that are read; also in upper case."""


def is_path(name: str) -> bool:
    """Whether it can only be a path. `NAME` and `OWNER/NAME` may be of the hub."""
    return (
        name.lower().endswith(SUFFIXES)
        or name.startswith(("/", "./", "../", "~"))
        or name.endswith(("/", "."))
        or name.count("/") > 1
    )


def check_path(name: str) -> None:
    """Raises DataError for a path where nothing is."""
    if is_path(name) and not os.path.exists(name):
        where = os.path.abspath(name)
        raise DataError(f"data.dataset = {name!r}: no such file or directory ({where})")
