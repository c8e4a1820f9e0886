"""What is said while a text is tokenized."""

import gzip
import json
import random
from pathlib import Path

import pytest

from model_check.data.build.progress import BuildProgress
from tests.data.lab import Lab, write_tokenizer


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_without_a_terminal_lines_come_and_grow_rarer() -> None:
    clock, said = Clock(), list[str]()
    progress = BuildProgress(100_000_000, None, said.append, clock=clock)
    for second in range(1, 101):
        clock.now += 1.0
        progress.advance(second * 1_000_000, 300_000)
    assert 10 < len(said) < 30
    assert said[0].startswith("data: tokenizing, 2%, 2.0 of 100.0 MB, 300,000 tokens, 1.0 MB/s, ")
    assert said[0].endswith(" tokens/s, ETA 1:38")
    progress.finish()
    assert said[-1].startswith("data: tokenized, 100.0 MB, 300,000 tokens, 1.0 MB/s, ")


def test_the_end_reads_as_the_end_although_blank_documents_were_not_counted() -> None:
    said: list[str] = []
    progress = BuildProgress(100_000_000, 400_000, said.append, clock=Clock())
    progress.advance(97_000_000, 300_000)
    progress.finish()
    assert said[-1].startswith("data: tokenized, 100.0 MB, 300,000 tokens, ")


def test_a_text_that_was_not_read_to_its_end_says_how_far() -> None:
    said: list[str] = []
    progress = BuildProgress(100_000_000, 300_000, said.append, clock=Clock())
    progress.advance(20_000_000, 300_000)
    progress.finish()
    assert said[-1].startswith("data: tokenized, the first 20.0 of 100.0 MB, 300,000 tokens, ")


def test_on_a_terminal_a_bar_is_drawn_and_removed() -> None:
    clock, said, drawn = Clock(), list[str](), list[str]()
    progress = BuildProgress(10_000_000, None, said.append, drawn.append, clock=clock)
    clock.now += 1.0
    progress.advance(5_000_000, 1_000_000)
    assert drawn == [
        "data: [######------] 50% 5.0 MB, 5.0 MB/s, 1,000,000 tokens/s, ETA 0:01",
    ]
    assert said == []
    progress.finish()
    assert drawn[-1] == ""


def test_who_waits_is_told_the_same() -> None:
    clock, told = Clock(), list[str]()
    progress = BuildProgress(10_000_000, None, lambda line: None, report=told.append, clock=clock)
    clock.now += 2.0
    progress.advance(5_000_000, 1_000_000)
    assert told == ["50%, 5.0 of 10.0 MB, 1,000,000 tokens, 2.5 MB/s, 500,000 tokens/s, ETA 0:02"]


def test_the_speed_is_that_of_this_process_alone() -> None:
    clock, told = Clock(), list[str]()
    progress = BuildProgress(10_000_000, None, lambda line: None, report=told.append, clock=clock)
    progress.resume(5_000_000, 1_000_000)
    clock.now += 2.0
    progress.advance(7_500_000, 1_500_000)
    assert told == ["75%, 7.5 of 10.0 MB, 1,500,000 tokens, 1.2 MB/s, 250,000 tokens/s, ETA 0:02"]


def test_a_stream_of_unknown_length_is_measured_by_the_tokens_it_must_give() -> None:
    clock, told = Clock(), list[str]()
    progress = BuildProgress(None, 4_000, lambda line: None, report=told.append, clock=clock)
    clock.now += 1.0
    progress.advance(1_000_000, 1_000)
    assert told == ["25%, 1.0 MB, 1,000 tokens, 1.0 MB/s, 1,000 tokens/s, ETA 0:03"]


def written(lab: Lab, kind: str) -> Path:
    """2,000 documents of 1,400 bytes in rows that hold more than their text."""
    pyarrow = pytest.importorskip("pyarrow")
    chance = random.Random(7)
    texts = [chance.randbytes(700).hex() for _ in range(2_000)]
    lines = "".join(json.dumps({"text": text, "url": text}) + "\n" for text in texts)
    match kind:
        case "txt":
            return lab.text("\n\n".join(texts), "rows.txt")
        case "jsonl":
            return lab.text(lines, "rows.jsonl")
        case "jsonl.gz":
            return lab.text(gzip.compress(lines.encode()), "rows.jsonl.gz")
        case "jsonl.zst":
            packed = pyarrow.compress(lines.encode(), codec="zstd", asbytes=True)
            return lab.text(packed, "rows.jsonl.zst")
        case _:
            parquet = pytest.importorskip("pyarrow.parquet")
            table = pyarrow.table({"text": texts, "url": texts})
            of_group = 100 if kind == "parquet" else None
            parquet.write_table(table, lab.dir / "rows.parquet", row_group_size=of_group)
            return lab.dir / "rows.parquet"


@pytest.mark.parametrize(
    "kind", ["txt", "jsonl", "jsonl.gz", "jsonl.zst", "parquet", "parquet, one group"]
)
def test_the_fraction_is_that_of_the_file_whatever_a_row_holds(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Each step counts as much of it as its share of the tokens."""
    steps: list[tuple[float, int]] = []
    advance = BuildProgress.advance

    def spied(self: BuildProgress, num_bytes: int, num_tokens: int) -> None:
        advance(self, num_bytes, num_tokens)
        steps.append((self.fraction or 0.0, num_tokens))

    monkeypatch.setattr(BuildProgress, "advance", spied)
    tokenizer = write_tokenizer(lab.dir / "tokenizer.json")
    lab.prepare(written(lab, kind), f"data.tokenizer={tokenizer}", "data.num_proc=1")
    assert len(steps) > 2
    assert steps == sorted(steps)
    assert steps[-1][0] == pytest.approx(1.0, abs=1e-4)
    within = 0.35 if kind in ("txt", "jsonl") else 0.12  # within a piece of those
    for fraction, num_tokens in steps:
        assert fraction == pytest.approx(num_tokens / steps[-1][1], abs=within)
