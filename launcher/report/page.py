"""report.html: a RunResult as one page that needs no other file. Pure.

Written by hand: the import of a template engine took longer than all else that ends a run. Every
value goes through `_text`, which masks secrets and escapes the rest.
"""

import html
from collections.abc import Iterable, Iterator, Sequence

from launcher.report import gpu_table
from launcher.report.table import COLUMNS, number, row
from launcher.verdict.results import RunResult, Verdict, WorkerResult
from launcher.verdict.scope import scope_lines
from model_check.utils.secrets import masked

_VALIDATION = ("worker", "split", "after steps", "loss", "perplexity", "tokens/s")

_STYLE = """\
:root { color-scheme: light dark; --line: #8885; --bad: #c22; --good: #182; --odd: #a60; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; margin: 1rem 0; }
th, td { text-align: right; padding: .35rem .6rem; border-bottom: 1px solid var(--line); }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
.PASS { color: var(--good); } .FAIL { color: var(--bad); }
.WARN, .SUSPECT, .INCONCLUSIVE { color: var(--odd); }
pre { overflow-x: auto; padding: .6rem; border: 1px solid var(--line); }
dt { font-weight: 600; } dd { margin: 0 0 .4rem 0; overflow-wrap: anywhere; }
"""


def page(result: RunResult) -> str:
    """The whole document."""
    return "\n".join(_document(result)) + "\n"


def _document(result: RunResult) -> Iterator[str]:
    verdict = _text(result.verdict)
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>Model Check: {verdict}</title>\n<style>\n{_STYLE}</style>\n</head>\n<body>"
    yield f'<h1>Model Check: <span class="{verdict}">{verdict}</span></h1>'
    yield f"<p>{_text(result.summary)}</p>"
    if result.scope is not None:
        lines = scope_lines(result.scope, len(result.workers))
        yield from (f"<p>{_text(line)}</p>" for line in lines)
    yield from _table(COLUMNS, map(row, result.workers))
    yield from _validation(result.workers)
    for worker in result.workers:
        if worker.cause or worker.evidence or worker.notes or worker.warnings or worker.symptoms:
            yield from _about(worker)
    yield from _gpus(result.workers)
    yield from _run(result)
    yield "</body>\n</html>"


def _validation(workers: Sequence[WorkerResult]) -> Iterator[str]:
    """A row for each split of each worker; no table where nothing was evaluated."""
    rows = [
        (
            worker.name,
            split.split,
            str(split.step),
            number(split.loss),
            number(split.perplexity, "{:.2f}"),
            number(split.tokens_per_s, "{:,.0f}"),
        )
        for worker in workers
        for split in worker.validation
    ]
    if rows:
        yield "<h2>Validation</h2>"
        yield from _table(_VALIDATION, rows)


def _about(worker: WorkerResult) -> Iterator[str]:
    yield f"<h2>{_text(worker.name)}</h2>"
    texts = dict.fromkeys((worker.cause, *worker.symptoms, *worker.warnings, *worker.notes))
    for text in texts:
        if text:
            yield f"<p>{_text(text)}</p>"
    if worker.evidence:
        items = "".join(f"<li><code>{_text(path)}</code></li>" for path in worker.evidence)
        yield f"<ul>{items}</ul>"
    if worker.last_lines:
        yield "<pre>" + _text("\n".join(worker.last_lines)) + "</pre>"


def _gpus(workers: Sequence[WorkerResult]) -> Iterator[str]:
    """What telemetry said of the GPUs; no table where there was none."""
    if rows := gpu_table.rows(workers):
        yield "<h2>GPUs</h2>"
        yield from _table(gpu_table.COLUMNS, rows)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """A cell that names a verdict has its colour."""
    heads = "".join(f'<th scope="col">{_text(column)}</th>' for column in columns)
    yield f"<table>\n<thead><tr>{heads}</tr></thead>\n<tbody>"
    for cells in rows:
        yield "<tr>" + "".join(map(_cell, cells)) + "</tr>"
    yield "</tbody>\n</table>"


def _cell(text: str) -> str:
    colour = f' class="{text}"' if text in Verdict.__members__ else ""
    return f"<td{colour}>{_text(text)}</td>"


def _run(result: RunResult) -> Iterator[str]:
    yield f"<h2>Run</h2>\n<dl>\n<dt>exit code</dt><dd>{result.exit_code}</dd>"
    for key, value in result.run.items():
        yield f"<dt>{_text(key)}</dt><dd>{_text(value)}</dd>"
    yield "</dl>"


def _text(value: object) -> str:
    return html.escape(masked(str(value)))
