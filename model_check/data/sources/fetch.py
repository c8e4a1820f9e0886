"""One file of a hub model, for a process that leaves huggingface_hub alone.

`python -m model_check.data.sources.fetch ORGANISATION/MODEL config.json` prints its copy's path.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from model_check.config.load import Request, load
from model_check.data.cache.memo import Memo
from model_check.data.sources.hub import Hub
from model_check.errors import DataError, ModelCheckError


def main(argv: Sequence[str]) -> int:
    repo, name = argv
    try:
        data = load(Request(preset="cpu", environ=os.environ), lambda: False).settings.data
        hub = Hub(data.hub_timeout_s, data.offline, Memo(Path(data.cache_dir).expanduser()))
        file = hub.model_files(repo, [name]) / name
        if not file.is_file():
            raise DataError(f"{repo}: has no {name} on {hub.endpoint}")
        print(file)
    except ModelCheckError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
