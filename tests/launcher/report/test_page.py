"""report.html shows what a worker said, and never as markup."""

from html.parser import HTMLParser
from typing import Any

from launcher.report.page import page
from launcher.verdict.results import RunResult, SplitResult, Verdict, WorkerResult

_VOID = {"meta"}


class Tags(HTMLParser):
    """Whether every tag that was opened was closed, in order; and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def result(*last_lines: str, **more: Any) -> RunResult:
    worker = WorkerResult(
        name="GPU0",
        verdict=Verdict.FAIL,
        cause="exit code 1: <b>bold</b>",
        steps=3,
        loss_first=9.0,
        loss_last="nan",
        tokens_per_s=None,
        peak_memory_bytes=None,
        duration_s=1.0,
        returncode=1,
        notes=['a "note"'],
        evidence=["/run/dossier/gpu0/nan.pt"],
        last_lines=list(last_lines),
        **more,
    )
    return RunResult(
        verdict=Verdict.FAIL,
        exit_code=1,
        summary="GPU0 failed & that is all",
        culprits=["GPU0"],
        disagreement=None,
        workers=[worker],
        leftovers=[],
        dropped_lines=0,
        run={"command": ["a", "<script>alert(2)</script>"]},
    )


def parsed(shown: RunResult) -> Tags:
    tags = Tags()
    tags.feed(page(shown))
    tags.close()
    assert tags.open == []
    return tags


def test_the_page_is_whole_and_tells_everything() -> None:
    text = parsed(result("first", "last")).text
    for told in ("GPU0 failed & that is all", 'a "note"', "nan.pt", "first\nlast", "exit code"):
        assert told in text


def test_what_a_worker_printed_is_text_and_no_markup() -> None:
    tags = parsed(result("<script>alert(1)</script>", "</pre><img src=x>"))
    assert tags.names.isdisjoint({"script", "img", "b"})
    assert "<script>alert(1)</script>" in tags.text


def test_every_split_has_its_row_and_without_any_there_is_no_table() -> None:
    held_out = SplitResult(
        split="held <i>out", step=30, loss=2.5, perplexity=12.1825, tokens_per_s=1234.5
    )
    broken = SplitResult(split="code", step=30, loss="nan", perplexity=None, tokens_per_s=None)
    shown = parsed(result(validation=[held_out, broken]))
    assert "GPU0held <i>out302.500012.181,234" in shown.text.replace("\n", "")
    assert "GPU0code30nann/an/a" in shown.text.replace("\n", "")
    assert "Validation" not in parsed(result()).text


def test_a_verdict_has_its_colour() -> None:
    text = page(result())
    assert '<td class="FAIL">FAIL</td>' in text
    assert "<td>GPU0</td>" in text
