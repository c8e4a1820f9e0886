"""Tokenizing in parallel: the same bytes whatever the number of processes, and no hang when one
dies."""

import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from model_check.data.build import build as building
from model_check.data.build.build import BuildOptions, build_tokens
from model_check.data.build.encode import EncoderSpec, Task, tasks_of
from model_check.data.build.workers import WorkerPool
from model_check.data.cache.memo import Memo, stat_signature
from model_check.data.read.manifest import MANIFEST
from model_check.data.sources import file_piece
from model_check.data.sources.documents import TextColumn
from model_check.data.sources.file_piece import pieces_of
from model_check.data.sources.local_text import LocalSource
from model_check.data.sources.spans import document_spans, line_spans
from model_check.data.sources.text import CUT_AT_BLANK_LINE, Repairs, cut_into_documents
from model_check.data.tokenizers.tokenizer import TextTokenizer
from model_check.errors import DataError, InternalError
from model_check.utils.cores import usable_cores
from model_check.utils.held import hold
from tests.data.lab import ROOT, WORDS, Lab, wait_until, write_tokenizer


def corpus(lab: Lab) -> Path:
    """All kinds of files, with something to repair in most."""
    for number in range(12):
        lab.text(f"file {number}\r\n" + WORDS * (3 + number), f"corpus/{number:02}.txt")
    rows = [json.dumps({"text": f"row {number} " + WORDS}) for number in range(40)]
    lab.text("\n".join([*rows, "{broken", '{"text": "\\ud800"}']), "corpus/rows.jsonl")
    packed = gzip.compress("\n".join(rows).encode(), mtime=0)
    lab.text(packed, "corpus/packed.jsonl.gz")
    lab.text(WORDS * 5, "corpus/zz.txt")
    return lab.dir / "corpus"


def tokenizer_of(lab: Lab) -> TextTokenizer:
    from tokenizers import Tokenizer

    path = write_tokenizer(lab.dir / "tokenizer.json")
    return TextTokenizer(Tokenizer.from_file(str(path)), "tiny")


def build(
    lab: Lab,
    source: LocalSource,
    how: BuildOptions,
    max_tokens: int | None = None,
    begin_id: int | None = None,
) -> dict[str, bytes]:
    """Every file of the store."""
    lab.said.clear()
    directory = lab.dir / f"store{next(_serial)}"
    directory.mkdir()
    say = lab.said.append
    with hold(directory) as held:
        build_tokens(
            *(held, source, tokenizer_of(lab), {}, max_tokens, say, 4096, how), begin_id=begin_id
        )
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    if max_tokens is not None:
        del files[MANIFEST]  # it counts the repairs of all that was read, some of it in vain
    return files


_serial = count()


@pytest.mark.parametrize(("max_tokens", "begin_id"), [(None, None), (2500, None), (2500, 7)])
def test_any_number_of_processes_gives_the_same_bytes(
    lab: Lab, max_tokens: int | None, begin_id: int | None
) -> None:
    path = corpus(lab)
    found, said = [], []
    for how in (
        BuildOptions(num_workers=1),
        BuildOptions(num_workers=1, task_bytes=1),
        BuildOptions(num_workers=2, task_bytes=3000, tasks_a_worker=1),
        BuildOptions(num_workers=3, task_bytes=1, tasks_a_worker=1, save_every_s=0.0),
    ):
        source = LocalSource(path, TextColumn("text"), Memo(lab.dir))
        found.append(build(lab, source, how, max_tokens, begin_id))
        said.append([line for line in lab.said if " x " in line])
    assert found[1:] == found[:-1]
    if max_tokens is None:  # how far ahead was read differs otherwise
        assert said[1:] == said[:-1]
        assert any("line skipped: not JSON (first at rows.jsonl:41)" in line for line in said[0])


@pytest.mark.parametrize(("num_tasks", "num_workers"), [(3, 0), (4, 2), (7, 3), (99, 5)])
def test_there_are_as_many_processes_as_have_enough_to_do(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, num_tasks: int, num_workers: int
) -> None:
    started = []

    class Recorded(WorkerPool):
        def __init__(self, num_workers: int, order: EncoderSpec) -> None:
            started.append(num_workers)
            super().__init__(1, order)

    monkeypatch.setattr(building, "WorkerPool", Recorded)
    for number in range(num_tasks):
        lab.text(WORDS, f"corpus/{number}.txt")
    source = LocalSource(lab.dir / "corpus", TextColumn("text"), Memo(lab.dir))
    build(lab, source, BuildOptions(num_workers=5, task_bytes=1, tasks_a_worker=2))
    assert started == [num_workers] * bool(num_workers)


def test_a_killed_process_is_named_and_nothing_hangs(lab: Lab) -> None:
    tokenizer = tokenizer_of(lab)
    source = LocalSource(corpus(lab), TextColumn("text"), Memo(lab.dir))
    order = EncoderSpec(tokenizer.to_json(), "tiny", "tokenizers", "uint16", None)
    with WorkerPool(2, order) as crew:
        results = crew.results(bounded(tasks_of(source, 1)))
        next(results)
        for pid in children():
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(
            InternalError, match=r"\(pid \d+\) died: killed by SIGKILL \(9\), at wo"
        ):
            list(results)
    assert children() == []


def test_a_ctrl_c_does_not_reach_a_process_that_only_starts(lab: Lab) -> None:
    tokenizer = tokenizer_of(lab)
    source = LocalSource(corpus(lab), TextColumn("text"), Memo(lab.dir))
    order = EncoderSpec(tokenizer.to_json(), "tiny", "tokenizers", "uint16", None)
    tasks = bounded(tasks_of(source, 1))
    with WorkerPool(2, order) as crew:
        for pid in children():
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGTERM)
        assert len(list(crew.results(tasks))) == len(tasks)
    assert children() == []


CREW_OF_TWO = """
import os, sys
from model_check.data.build.workers import WorkerPool
from model_check.data.build.encode import EncoderSpec
with WorkerPool(2, EncoderSpec("{}", "tiny", "tokenizers", "uint16", None)):
    print(open(f"/proc/self/task/{os.getpid()}/children").read(), flush=True)
    sys.stdin.read()
"""


def test_no_process_outlives_a_builder_that_was_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CREW_OF_TWO],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as builder:
        assert builder.stdout is not None
        pids = [int(pid) for pid in builder.stdout.readline().split()]
        builder.kill()
    assert len(pids) == 2
    wait_until(lambda: not any(map(lives, pids)), "the end of what a dead builder started")


def lives(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return not stat.rpartition(")")[2].startswith(" Z")


def test_a_text_file_named_like_a_module_is_not_imported(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("numpy", "pickle", "tokenizers"):
        lab.text("raise SystemExit('was imported')", f"{name}.py")
    monkeypatch.chdir(lab.dir)
    tokenizer = tokenizer_of(lab)
    source = LocalSource(corpus(lab), TextColumn("text"), Memo(lab.dir))
    order = EncoderSpec(tokenizer.to_json(), "tiny", "tokenizers", "uint16", None)
    with WorkerPool(1, order) as crew:
        assert list(crew.results(bounded(tasks_of(source, 1))))


def test_what_a_process_refuses_is_raised_here(lab: Lab) -> None:
    path = lab.text(WORDS * 10)
    (piece,) = pieces_of(path, "notes.txt", TextColumn("text"), stat_signature(path))
    piece = replace(piece, signature="another")
    tokenizer = tokenizer_of(lab)
    order = EncoderSpec(tokenizer.to_json(), "tiny", "tokenizers", "uint16", None)
    with (
        WorkerPool(1, order) as crew,
        pytest.raises(DataError, match=r"notes.txt: changed while it was read"),
    ):
        list(crew.results([Task([piece])]))


def bounded(tasks: object) -> list[Task]:
    return [task for task in tasks if task.bounded]  # type: ignore[attr-defined]


def test_a_quota_of_a_container_bounds_the_processes(tmp_path: Path) -> None:
    cores = usable_cores(tmp_path / "none")
    quota = tmp_path / "cpu.max"
    for text, expected in (
        ("max 100000\n", cores),
        ("50000 100000\n", 1),
        ("100000000 100000\n", cores),
    ):
        quota.write_text(text)
        assert usable_cores(quota) == expected


def children() -> list[int]:
    """The pids of this process's tokenizing workers: other tests may have left it other children,
    as multiprocessing's tracker of resources."""
    own = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in own if WorkerPool.__module__ in command_line(pid)]


def command_line(pid: str) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\n",
        b"one line",
        b"x" * (CUT_AT_BLANK_LINE - 1) + b"\n\nnext\n\n\nlast",
        (b"word " * 20 + b"\n") * 120_000,
        ((b"word " * 20 + b"\n") * 3000 + b" \t \n\n") * 20,
        b"y" * (5 << 20) + b"\nend\n",
    ],
    ids=["empty", "newline", "line", "border", "no blank lines", "blank lines", "long line"],
)
def test_spans_are_the_documents_that_reading_from_the_start_gives(lab: Lab, text: bytes) -> None:
    path = lab.text(text)
    spans = list(document_spans(path))
    with path.open("rb") as lines:
        expected = list(cut_into_documents(lines))
    assert [(span.first_line, text[span.start : span.end]) for span in spans] == expected


@pytest.mark.parametrize("piece_bytes", [1, 10, 1000])
def test_spans_of_lines_hold_every_line_once_and_whole(lab: Lab, piece_bytes: int) -> None:
    lines = [f"line {number}\n".encode() for number in range(50)] + [b"no end"]
    path = lab.text(b"".join(lines))
    spans = list(line_spans(path, piece_bytes))
    assert b"".join(path.read_bytes()[s.start : s.end] for s in spans) == b"".join(lines)
    for span in spans:
        assert path.read_bytes()[: span.start].count(b"\n") == span.first_line - 1
        assert span.start == 0 or path.read_bytes()[span.start - 1 : span.start] == b"\n"


def test_parquet_is_read_by_row_groups_and_rows_keep_their_numbers(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_piece, "PIECE_BYTES", 1)
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts: Sequence[str | None] = [*("word " * n for n in range(1, 30)), None, "last"]
    path = lab.dir / "d.parquet"
    parquet.write_table(pa.table({"text": texts}), path, row_group_size=7)
    pieces = list(pieces_of(path, "d.parquet", TextColumn("text"), stat_signature(path)))
    repairs = Repairs()
    documents = [text for piece in pieces for text in piece.documents(repairs)]
    assert len(pieces) == 5
    assert documents == [text for text in texts if text]
    assert repairs.lines() == [
        "1 x row skipped: 'text' is not a string (first at d.parquet, row 30)"
    ]
