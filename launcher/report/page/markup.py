"""Parts of the page. Each value becomes text here: secrets masked, the rest escaped. Pure."""

import html
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from launcher.verdict.results import Verdict
from model_check.utils.secrets import masked
from model_check.utils.words import escape

SIGNS = {
    Verdict.PASS: "✓",
    Verdict.WARN: "!",
    Verdict.FAIL: "✕",
    Verdict.SUSPECT: "?",
    Verdict.INCONCLUSIVE: "~",
    Verdict.INVALID: "≠",
    Verdict.STOPPED: "■",
}
"""Beside each verdict's colour, for those who do not see it."""
_STYLE = Path(__file__).with_name("style.css")


def document(title: str, content: Iterable[str]) -> str:
    """A page of its own: nothing of it is fetched."""
    head = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        # A page without an icon has one fetched.
        '<link rel="icon" href="data:,">',
        f"<title>{text(title)}</title>",
        f"<style>\n{_STYLE.read_text()}</style>\n</head>\n<body>\n<main>",
    ]
    return "\n".join([*head, *content, "</main>\n</body>\n</html>\n"])


def text(value: object) -> str:
    """Safe between tags and within the quotes of an attribute, and seen as it is."""
    return html.escape(escape(masked(str(value))))


def badge(verdict: Verdict) -> str:
    return f'<b class="{verdict}">{SIGNS[verdict]} {verdict}</b>'


def facts(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    """A list of names and their values, which are markup; no list of none."""
    items = [f"<dt>{text(name)}</dt><dd>{value}</dd>" for name, value in pairs if value]
    if items:
        yield f"<dl>{''.join(items)}</dl>"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> Iterator[str]:
    """Cells are text; one that names a verdict has its sign and colour. It scrolls by itself where
    the page is too narrow. `kind`: `figures`, where all columns but the first hold numbers."""
    heads = "".join(f'<th scope="col">{text(column)}</th>' for column in columns)
    opened = f'<table class="{kind}">' if kind else "<table>"
    yield f'<div class="scroll" tabindex="0">{opened}\n<thead><tr>{heads}</tr></thead>\n<tbody>'
    for cells in rows:
        yield "<tr>" + "".join(map(_cell, cells)) + "</tr>"
    yield "</tbody>\n</table></div>"


def folded(title: str, content: Iterable[str]) -> Iterator[str]:
    """Closed until somebody opens it; nothing where there is no content."""
    if lines := list(content):
        yield f"<details><summary>{text(title)}</summary>"
        yield from lines
        yield "</details>"


def section(title: str, content: Iterable[str]) -> Iterator[str]:
    """With its title; nothing where there is no content."""
    if lines := list(content):
        yield f"<section><h2>{text(title)}</h2>"
        yield from lines
        yield "</section>"


def _cell(content: str) -> str:
    is_verdict = content in Verdict.__members__
    return f"<td>{badge(Verdict(content)) if is_verdict else text(content)}</td>"
