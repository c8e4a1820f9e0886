"""A result and its story as one page. Pure.

Written by hand: the import of a template engine took longer than all else that ends a run.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from launcher.report.page import gpu_table
from launcher.report.page.failure import failure
from launcher.report.page.figures import figures
from launcher.report.page.first_screen import first_screen
from launcher.report.page.markup import document, facts, folded, section, table, text
from launcher.report.page.story import Story
from launcher.report.table import COLUMNS, number, row
from launcher.verdict.results import RunResult, WorkerResult

_VALIDATION = ("worker", "split", "after steps", "loss", "perplexity", "tokens/s")
_OF_EXAMPLES = ("token accuracy", "exact match")


def page(result: RunResult, story: Story) -> str:
    """The whole document."""
    title = f"{result.verdict}: Model Check on {story.record.host}"
    return document(title, _parts(result, story))


def _parts(result: RunResult, story: Story) -> Iterator[str]:
    yield from first_screen(result, story)
    yield from failure(result, story)
    yield from figures(result, story)
    yield from section("Workers", table(COLUMNS, map(row, result.workers)))
    yield from section("Validation", _validation(result.workers))
    yield from section("GPUs", _gpus(result.workers))
    yield from section("This run", _run(result, story))


def _validation(workers: Sequence[WorkerResult]) -> Iterator[str]:
    """A row for each split of each worker; no table where nothing was evaluated."""
    splits = [(worker.name, split) for worker in workers for split in worker.validation]
    of_examples = any(split.exact_match is not None for _, split in splits)
    rows = [
        (
            name,
            split.split,
            str(split.step),
            number(split.loss),
            number(split.perplexity, "{:.2f}"),
            number(split.tokens_per_s, "{:,.0f}"),
            number(split.token_accuracy, "{:.4f}"),
            number(split.exact_match, "{:.4f}"),
        )
        for name, split in splits
    ]
    columns = [*_VALIDATION, *_OF_EXAMPLES] if of_examples else _VALIDATION
    if rows:
        yield from table(columns, [row[: len(columns)] for row in rows])


def _gpus(workers: Sequence[WorkerResult]) -> Iterator[str]:
    """What telemetry said of the GPUs; no table where there was none."""
    if rows := gpu_table.rows(workers):
        yield from table(gpu_table.COLUMNS, rows)


def _run(result: RunResult, story: Story) -> Iterator[str]:
    """What differs from the preset is open, all else folded."""
    record = story.record
    asked = record.asked_for or {}
    yield from facts(
        [
            ("host", text(record.host)),
            ("started", text(record.started_at.isoformat(timespec="seconds"))),
            ("command", text(" ".join(record.command))),
            ("exit code", text(result.exit_code)),
            ("preset", text(record.preset)),
            *((name, text(_shown(value))) for name, value in asked.items()),
        ]
    )
    notes = {w.name: w.notes for w in result.workers if w.notes}
    yield from folded("notes of the workers", _each(notes))
    yield from folded("versions, groups, GPUs, data", _each(result.run))
    details = {worker.name: worker.detail for worker in result.workers if worker.detail}
    yield from folded("what each worker told", _each(details))


def _each(values: Mapping[str, Any]) -> Iterator[str]:
    yield from facts((name, text(_shown(value))) for name, value in values.items())


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_shown(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    return str(value)
