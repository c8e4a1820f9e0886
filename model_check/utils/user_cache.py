"""Where a user's caches are."""

import os
from collections.abc import Mapping
from pathlib import Path


def user_cache(environ: Mapping[str, str]) -> Path:
    """The user's own cache directory of this project. It is relative where nobody knows a home."""
    home = environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME') or '~'}/.cache"
    # Not Path.expanduser: it raises where nobody knows a home.
    return Path(os.path.expanduser(home)) / "model_check"
