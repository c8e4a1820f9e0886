"""Text of a dataset on the hub, read with the `datasets` package, at a pinned commit."""

import re
from collections.abc import Iterator
from copy import copy
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from model_check.config.dataset import C4, KNOWN, WIKITEXT
from model_check.config.schema import DataSettings
from model_check.data.cache.publish import BrokenOffError
from model_check.data.sources.documents import Document, RowForm
from model_check.data.sources.hub import Hub, cache_failure, without_secrets
from model_check.data.sources.source import no_column
from model_check.data.sources.text import Repairs
from model_check.errors import DataError, StorageError
from model_check.utils.words import first_line

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

    def __init__(self, repo: str, data: DataSettings, hub: Hub, form: RowForm) -> None:
        """Where only a part will be read, it is streamed, not fetched whole."""
        self.name = KNOWN.get(repo, repo)
        self._config = data.dataset_config or USUAL_CONFIG.get(self.name)
        self._split = data.split
        self._form = form
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
            **self._form.identity(),
        }

    def documents(self, repairs: Repairs) -> Iterator[Document]:
        column = self._form.column
        rows = self._rows()
        if self.name == WIKITEXT and column is not None:
            rows = _articles(rows, column)
        for row, place in rows:
            if (document := self._form.document(row, place, repairs)) is not None:
                yield document

    def _rows(self) -> Iterator[tuple[dict[str, Any], str]]:
        """(a row, its place)"""
        rows = chain.from_iterable(self._batches())
        for number, row in enumerate(rows, 1):
            yield row, f"{self.name} {self._split}, row {number}"

    def _batches(self) -> Iterator[list[dict[str, Any]]]:
        online = self._hub.why_offline is None
        if online:
            self._hub.check_access(self.name)
        datasets = import_datasets()
        streamed = self._streamed and online
        begun = False
        try:
            if online and not streamed:
                self._fetch(datasets)
            table = datasets.load_dataset(
                self.name,
                self._config,
                split=self._split,
                revision=self._commit,
                streaming=streamed,
            )
            self._check(table, online)
            if self._form.column is not None:
                table = table.select_columns([self._form.column])
            for batch in table.iter(batch_size=_ROWS):
                begun = True
                each = zip(*batch.values(), strict=True)
                yield [dict(zip(batch, values, strict=True)) for values in each]
        except (DataError, StorageError):
            raise
        # datasets also raises errors of packages that it uses.
        except Exception as error:
            raise self._explained(error, begun) from error

    def _fetch(self, datasets: Any) -> None:
        """Its files with the hub's own bytes, before `datasets` makes tables of them; they would
        stay. Raises DataError."""
        builder = datasets.load_dataset_builder(self.name, self._config, revision=self._commit)
        if Path(builder.cache_dir).exists():
            return
        here = f"hf://datasets/{self.name}@{self._commit}/"
        of_splits = (builder.config.data_files or {}).values()
        urls = [str(url) for urls in of_splits for url in urls]
        if files := [url.removeprefix(here) for url in urls if url.startswith(here)]:
            self._hub.fetch_dataset(self.name, self._commit, files)

    def _check(self, table: Any, online: bool) -> None:
        """Raises DataError unless `table` has the column and is of our commit: offline, datasets
        takes the commit that it cached last."""
        columns, column = table.column_names, self._form.column
        if columns is not None and column is not None and column not in columns:
            raise no_column(self.name, column, columns)
        if not online and not any(self._commit in f["filename"] for f in table.cache_files):
            raise DataError(
                f"{self.name}: the hub cache of this machine holds another commit than "
                f"{self._commit[:12]}, and {self._hub.why_offline}"
            )

    def _explained(self, error: Exception, begun: bool) -> DataError | StorageError:
        if (failure := cache_failure(error, self.name)) is not None:
            return failure
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


def _articles(
    rows: Iterator[tuple[dict[str, Any], str]], column: str
) -> Iterator[tuple[dict[str, Any], str]]:
    """Wikitext's lines joined to articles, each of which begins with a heading of level one."""
    lines: list[str] = []
    first = ""
    for row, place in rows:
        if not isinstance(row[column], str):
            yield row, place
            continue
        if lines and _HEADING.match(row[column]):
            yield {column: "".join(lines)}, first
            lines = []
        first = first if lines else place
        lines.append(row[column])
    if lines:
        yield {column: "".join(lines)}, first
