"""Versions of installed packages, from the names of their metadata directories alone.

For the record, not for a decision: `requirements` reads the metadata itself, with a module whose
import every worker's start would wait for (12 ms).
"""

import os
import sys
from collections.abc import Collection
from contextlib import suppress


def versions(packages: Collection[str]) -> dict[str, str | None]:
    """Package -> the version that comes first on the path; None: not installed."""
    found: dict[str, str | None] = dict.fromkeys(packages)
    for directory in reversed(sys.path):
        with suppress(OSError):  # a zip file, or one of the path's names that are not there
            for entry in os.listdir(directory or "."):
                package, _, version = entry.removesuffix(".dist-info").partition("-")
                if package in found and entry.endswith(".dist-info"):
                    found[package] = version
    return found
