"""Text of a dataset on the hub, read with the `datasets` package, at a pinned commit."""

import errno
import re
from collections.abc import Iterator
from copy import copy
from functools import cached_property
from typing import Any

from model_check.config.schema import DataSettings
from model_check.data.cache.publish import BrokenOffError
from model_check.data.sources.hub import Hub, without_secrets
from model_check.data.sources.source import no_column
from model_check.data.sources.text import Repairs, clean
from model_check.errors import DataError, StorageError
from model_check.utils.words import first_line

WIKITEXT = "Salesforce/wikitext"
C4 = "allenai/c4"
KNOWN = {"wikitext": WIKITEXT, "c4": C4}
"""Short names."""
USUAL_CONFIG = {
    # 103-raw has the same validation text and 50 times the training text: 300 MB to fetch and
    # minutes to tokenize. 2-raw (6 MB) suffices for 290 sequences of 8192 tokens.
    WIKITEXT: "wikitext-2-raw-v1",
    C4: "en",
}
_HEADING = re.compile(r"^ = [^=].* = \n?$")
_ROWS = 256
PIP_HINT = "hub datasets need the datasets package: pip install 'datasets>=4' pyarrow"


class HubSource:
    """A hub dataset. A row is a document, except in wikitext, whose rows are lines of articles."""

    size_bytes = None

    def __init__(self, repo: str, data: DataSettings, hub: Hub) -> None:
        """Where only a part will be read, it is streamed, not fetched whole."""
        self.name = KNOWN.get(repo, repo)
        self._config = data.dataset_config or USUAL_CONFIG.get(self.name)
        self._split = data.split
        self._text_column = data.text_column
        self._hub = hub
        self._streamed = data.num_samples is not None or self.endless
        short_name, named = self.name.rpartition("/")[2], self._config or ""
        self.label = named if named.startswith(short_name) else f"{short_name}-{named}"

    def with_split(self, split: str) -> "HubSource":
        """Another split of the same dataset at the same commit."""
        other = copy(self)
        other._split = split
        return other

    @property
    def endless(self) -> bool:
        return self.name == C4

    @cached_property
    def _commit(self) -> str:
        return self._hub.dataset_commit(self.name)

    def identity(self) -> dict[str, Any]:
        return {
            "kind": "hub",
            "repo": self.name,
            "commit": self._commit,
            "config": self._config,
            "split": self._split,
            "text_column": self._text_column,
        }

    def documents(self, repairs: Repairs) -> Iterator[str]:
        rows = self._rows(repairs)
        texts = _articles(rows) if self.name == WIKITEXT else rows
        for text, place in texts:
            if (document := clean(text, place, repairs)) is not None:
                yield document

    def _rows(self, repairs: Repairs) -> Iterator[tuple[str, str]]:
        row = 0
        for column in self._batches():
            for value in column:
                row += 1
                place = f"{self.name} {self._split}, row {row}"
                if isinstance(value, str):
                    yield value, place
                else:
                    repairs.add("row skipped: not a string", place)

    def _batches(self) -> Iterator[list[Any]]:
        online = self._hub.why_offline is None
        if online:
            self._hub.check_access(self.name)
        datasets = import_datasets()
        begun = False
        try:
            table = datasets.load_dataset(
                self.name,
                self._config,
                split=self._split,
                revision=self._commit,
                streaming=self._streamed and online,
            )
            self._check(table, online)
            for batch in table.select_columns([self._text_column]).iter(batch_size=_ROWS):
                begun = True
                yield batch[self._text_column]
        except DataError:
            raise
        # datasets also raises errors of packages that it uses.
        except Exception as error:
            raise self._explained(error, begun) from error

    def _check(self, table: Any, online: bool) -> None:
        """Raises DataError unless `table` has the column and is of our commit: offline, datasets
        takes the commit that it cached last."""
        columns = table.column_names
        if columns is not None and self._text_column not in columns:
            raise no_column(self.name, self._text_column, columns)
        if not online and not any(self._commit in f["filename"] for f in table.cache_files):
            raise DataError(
                f"{self.name}: the hub cache of this machine holds another commit than "
                f"{self._commit[:12]}, and {self._hub.why_offline}"
            )

    def _explained(self, error: Exception, begun: bool) -> DataError | StorageError:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return StorageError(
                f"{self.name}: no space left where hub datasets are kept; set HF_HOME to a "
                f"directory on a bigger disk ({error.filename or 'no file named'})"
            )
        if self._hub.why_offline is not None:
            return DataError(
                f"{self.name}: not in the hub cache of this machine, and {self._hub.why_offline}"
            )
        text = f"{self.name}: {type(error).__name__}: {without_secrets(first_line(error))}"
        if begun:
            return BrokenOffError(f"{text}; run again: it goes on from there")
        return DataError(text)


def import_datasets() -> Any:
    """The `datasets` package without progress bars. Raises DataError where it is absent."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(PIP_HINT) from error
    datasets.disable_progress_bars()
    return datasets


def _articles(rows: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Wikitext's lines joined to articles, each of which begins with a heading of level one."""
    lines: list[str] = []
    first = ""
    for line, place in rows:
        if lines and _HEADING.match(line):
            yield "".join(lines), first
            lines = []
        first = first if lines else place
        lines.append(line)
    if lines:
        yield "".join(lines), first
