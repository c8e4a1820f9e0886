"""The sentence of a fault stands once on its page: a reader takes three for three faults."""

import json
from collections.abc import Iterator
from html.parser import HTMLParser

import pytest

from tests.corpus.said import RUNS

_BLOCKS = ("p", "dd", "td", "th", "li", "h1", "h2", "h3", "h4", "figcaption")
_PHRASE = 6
"""Words that are no accident."""


class Blocks(HTMLParser):
    """What a reader sees of a page, in pieces; not what a worker printed."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.texts = [""]
        self.is_quoted = False
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.is_quoted = self.is_quoted or tag in ("pre", "style")
        if tag in _BLOCKS:
            self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.is_quoted = self.is_quoted and tag not in ("pre", "style")

    def handle_data(self, data: str) -> None:
        if not self.is_quoted:
            self.texts[-1] += data


def phrases(text: str) -> Iterator[str]:
    words = text.split()
    for at in range(len(words) - _PHRASE + 1):
        yield " ".join(words[at : at + _PHRASE])


@pytest.mark.parametrize("name", sorted(path.name for path in RUNS.iterdir()))
def test_what_is_said_of_a_run_stands_once_on_its_page(name: str) -> None:
    report = json.loads((RUNS / name / "report.json").read_text())
    page = (RUNS / name / "report.html").read_text()
    blocks = [" ".join(text.split()) for text in Blocks(page.partition("<h2>This run")[0]).texts]
    for phrase in phrases(f"{report['do_now']} {report['summary']}"):
        assert sum(phrase in block for block in blocks) <= 1, phrase
