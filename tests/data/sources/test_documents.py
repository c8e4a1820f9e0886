"""Documents as they come: broken, mixed, in every format."""

import gzip
import json
import os
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from model_check.data.cache.memo import Memo, stat_signature
from model_check.data.read.token_cache import TokenCache
from model_check.data.sources import spans
from model_check.data.sources.documents import TextColumn
from model_check.data.sources.embedded import EmbeddedSource
from model_check.data.sources.file_piece import pieces_of
from model_check.data.sources.local_text import LocalSource
from model_check.data.sources.text import CUT_AT_LINE_END, Repairs
from model_check.errors import DataError
from tests.data.lab import WORDS, Lab


def read(path: Path, column: str = "text") -> tuple[list[str], list[str]]:
    """(documents, repairs as they are reported)"""
    repairs = Repairs()
    documents = list(
        LocalSource(path, TextColumn(column), Memo(path.parent / "memo")).documents(repairs)
    )
    return documents, repairs.lines()


def test_bom_and_cr_line_ends_are_not_text(lab: Lab) -> None:
    documents, repairs = read(lab.text(b"\xef\xbb\xbfone\r\ntwo\rthree\n"))
    assert documents == ["one\ntwo\nthree\n"]
    assert repairs == ["1 x document with CR line ends made LF (first at notes.txt:1)"]


def test_invalid_utf8_is_replaced_and_its_line_named(lab: Lab) -> None:
    documents, repairs = read(lab.text(b"fine\nbad \xff here\n"))
    assert documents == ["fine\nbad \ufffd here\n"]
    assert repairs == ["1 x invalid UTF-8 replaced (first at notes.txt:2)"]


def test_nul_characters_are_removed(lab: Lab) -> None:
    assert read(lab.text("a\0b"))[0] == ["ab"]


def test_utf16_is_refused_with_the_cure(lab: Lab) -> None:
    with pytest.raises(DataError, match=r"notes.txt: is UTF-16; convert it \(iconv"):
        read(lab.text("hello".encode("utf-16")))
    with pytest.raises(DataError, match=r"notes.txt: is UTF-32; convert it \(iconv -f UTF-32"):
        read(lab.text("hello".encode("utf-32")))


def test_a_lone_surrogate_in_jsonl_is_replaced(lab: Lab) -> None:
    documents, repairs = read(lab.text('{"text": "a\\ud800b"}\n', "d.jsonl"))
    assert documents == ["a\ufffdb"]
    assert repairs == ["1 x document with lone surrogates replaced (first at d.jsonl:1)"]


def test_unusable_lines_are_skipped_counted_and_named(lab: Lab) -> None:
    lines = ['{"text": "good"}', "{broken", "", '{"other": 1}', '{"text": 7}', '{"text": " "}']
    documents, repairs = read(lab.text("\n".join(lines), "d.jsonl"))
    assert documents == ["good"]
    assert repairs == [
        "1 x line skipped: not JSON (first at d.jsonl:2)",
        "1 x row skipped: no 'text' in it (data.text_column) (first at d.jsonl:4, keys: other)",
        "1 x row skipped: 'text' is not a string (first at d.jsonl:5)",
        "1 x empty document skipped (first at d.jsonl:6)",
    ]


def test_nothing_usable_is_an_error_that_says_why(lab: Lab) -> None:
    with pytest.raises(DataError, match=r"no usable text: 2 x row skipped: no 'text' in it"):
        lab.prepare(lab.text('{"body": "x"}\n{"body": "y"}\n', "d.jsonl"))


def test_empty_files_are_an_error(lab: Lab) -> None:
    with pytest.raises(DataError, match="no usable text"):
        lab.prepare(lab.text(b""))


def test_a_directory_without_text_is_an_error(lab: Lab) -> None:
    (lab.dir / "empty").mkdir()
    message = r"no .txt, .*, .jsonl \(all also .gz, .zst\), .parquet file in it; it is empty"
    with pytest.raises(DataError, match=message):
        read(lab.dir / "empty")


def test_gzipped_jsonl_is_read(lab: Lab) -> None:
    path = lab.text(gzip.compress(b'{"body": "packed"}\n'), "d.jsonl.gz")
    assert read(path, "body")[0] == ["packed"]


def test_a_torn_gzip_is_an_error_that_names_the_file(lab: Lab) -> None:
    packed = gzip.compress(json.dumps({"text": WORDS * 100}).encode())
    with pytest.raises(DataError, match=r"d.jsonl.gz: cannot be read"):
        read(lab.text(packed[: len(packed) // 2], "d.jsonl.gz"))


def test_parquet_is_read(lab: Lab) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"text": ["one", None, "two"]}), lab.dir / "d.parquet")
    documents, repairs = read(lab.dir / "d.parquet")
    assert documents == ["one", "two"]
    assert repairs == ["1 x row skipped: 'text' is not a string (first at d.parquet, row 2)"]


def test_a_binary_column_of_parquet_is_text(lab: Lab) -> None:
    """As Spark and Impala wrote strings; what is no UTF-8 is counted, as elsewhere."""
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = pa.array(["one", "z\u00fcge".encode(), b"\xff two", None], pa.binary())
    parquet.write_table(pa.table({"text": texts}), lab.dir / "d.parquet")
    documents, repairs = read(lab.dir / "d.parquet")
    assert documents == ["one", "z\u00fcge", "\ufffd two"]
    assert "1 x invalid UTF-8 replaced (first at d.parquet, row 3:1)" in repairs


def test_many_small_row_groups_are_read_together(lab: Lab) -> None:
    """Each opening reads the footer, which describes them all: 20,000 took an hour."""
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [f"text {number}" for number in range(3_000)]
    path = lab.dir / "d.parquet"
    parquet.write_table(pa.table({"text": texts}), path, row_group_size=1)
    pieces = list(pieces_of(path, "d.parquet", TextColumn("text"), stat_signature(path)))
    assert len(pieces) == 1
    assert list(pieces[0].documents(Repairs())) == texts
    assert pieces[0].num_bytes_read == pieces[0].num_bytes_stored == path.stat().st_size


def test_a_damaged_parquet_file_is_not_called_a_parquet_file(lab: Lab) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"text": [WORDS] * 99}), lab.dir / "d.parquet")
    whole = (lab.dir / "d.parquet").read_bytes()
    for damaged in (whole[:-9], whole[: len(whole) // 2], whole[:-8] + b"\xff" * 4 + b"PAR1"):
        with pytest.raises(DataError, match=r"as parquet: .*; it is cut off or damaged: fetch it"):
            read(lab.text(damaged, "d.parquet"))


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (gzip.compress(b'{"text": "a"}\n') + b"garbage", "d.jsonl.gz"),
        (gzip.compress(b'{"text": "a"}\n' * 999)[:-9], "d.jsonl.gz"),
        (b"no gzip", "d.txt.gz"),
    ],
    ids=["garbage behind", "torn", "none"],
)
def test_a_damaged_archive_is_told_with_what_to_do(lab: Lab, content: bytes, name: str) -> None:
    with pytest.raises(DataError, match=r"; it is cut off or damaged: fetch it again"):
        read(lab.text(content, name))


def test_rows_whose_lines_end_in_cr_are_told_so(lab: Lab) -> None:
    documents, repairs = read(lab.text('{"text": "a"}\r{"text": "b"}\r', "d.jsonl"))
    assert documents == []
    assert "(its lines end in CR: tr" in repairs[0]


def test_without_pyarrow_the_cure_is_named(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"d.parquet: parquet needs the pyarrow package: pip inst"):
        read(lab.text(b"PAR1", "d.parquet"))


def test_a_missing_parquet_column_names_those_that_are_there(lab: Lab) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"body": ["one"], "id": [1]}), lab.dir / "d.parquet")
    with pytest.raises(DataError, match=r"no column 'text' \(there are body, id\)"):
        read(lab.dir / "d.parquet")


def test_a_file_that_is_no_parquet_is_an_error(lab: Lab) -> None:
    pytest.importorskip("pyarrow")
    with pytest.raises(DataError, match="not readable as parquet"):
        read(lab.text("nonsense" * 10, "d.parquet"))


def test_a_huge_file_is_cut_into_documents_without_losing_a_line(lab: Lab) -> None:
    text = "".join(f"line {number}\n" for number in range(900_000))
    documents, _ = read(lab.text(text))
    assert len(documents) > 1
    assert max(map(len, documents)) <= CUT_AT_LINE_END + 20
    assert "".join(documents) == text


def test_embedded_text_is_documentation_and_source_of_this_python() -> None:
    source = EmbeddedSource()
    documents = list(source.documents(Repairs()))
    assert any('The "assert" statement' in text for text in documents)
    assert any("class OrderedDict" in text for text in documents)
    assert source.identity() == EmbeddedSource().identity()


def test_machines_with_the_same_python_have_the_same_text(tmp_path: Path) -> None:
    """Beside the library lie files of its build, of a distribution, of pip and of people."""
    files = {
        "argparse.py": "same\n",
        "json/__init__.py": "same, too\n",
        "_sysconfigdata__linux_x86_64-linux-gnu.py": "prefix = '{}'\n",
        "_sysconfigdata__x86_64-linux-gnu.py": "prefix = '{}'\n",
        "config-3.11-x86_64-linux-gnu/python-config.py": "prefix = '{}'\n",
        "sitecustomize.py": "# {}\n",
        "usercustomize.py": "# {}\n",
        "_distutils_system_mod.py": "# {}\n",
        "site-packages/pip/__init__.py": "# {}\n",
        "json/tests/test_all.py": "# {}\n",
    }
    for machine in ("/usr", "/opt/python"):
        for name, content in files.items():
            path = tmp_path / machine[1:] / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content.format(machine))
    one, other = (EmbeddedSource(tmp_path / place) for place in ("usr", "opt/python"))
    assert list(one.documents(Repairs())) == ["same\n", "same, too\n"]
    assert one.identity() == other.identity()


def test_without_sources_of_the_library_there_is_no_embedded_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no sources of the standard library"):
        EmbeddedSource(tmp_path).identity()


def test_a_literal_end_token_in_a_text_forges_no_end(lab: Lab) -> None:
    lines = [json.dumps({"text": "before <|endoftext|> after " * 5}) for _ in range(4)]
    cache = TokenCache.open(lab.prepare(lab.text("\n".join(lines), "d.jsonl")).path)
    tokens = np.concatenate([cache.gather(np.arange(cache.num_sequences))[:, :-1].ravel()])
    ends = cache.store.document_ends.read()
    assert len(ends) == 4
    ended = [int(end) - 1 for end in ends if end <= tokens.size]
    assert np.flatnonzero(tokens == cache.end_id).tolist() == ended


def test_names_that_are_no_text_are_escaped_wherever_they_are_told(lab: Lab) -> None:
    """A file name of Latin-1 bytes, a key of half a character: neither fits JSON or a terminal."""
    lines = [json.dumps({"text": WORDS * 9}), '{"\\ud800\\n\\u001b[2J": 1}']
    lab.text("\n".join(lines), os.fsdecode(b"corpus/caf\xe9.jsonl"))
    prepared = lab.prepare(lab.dir / "corpus")
    place = r"(first at caf\udce9.jsonl:2, keys: \ud800\n\x1b[2J)"
    line = f"data: 1 x row skipped: no 'text' in it (data.text_column) {place}"
    assert line in lab.said
    assert prepared.view.num_sequences > 0
    assert lab.prepare(lab.dir / "corpus").hit
    assert line in lab.said


def test_a_directory_that_cannot_be_listed_does_not_pass_for_an_empty_one(lab: Lab) -> None:
    source = LocalSource(lab.dir / "gone", TextColumn("text"), Memo(lab.dir))
    with pytest.raises(DataError, match="gone: cannot be read: No such file"):
        source.identity()


def test_a_pipe_among_the_texts_is_refused_and_not_waited_for(lab: Lab) -> None:
    lab.text(WORDS, "corpus/a.txt")
    os.mkfifo(lab.dir / "corpus/b.txt")
    with pytest.raises(DataError, match=r"b.txt: is no regular file"):
        read(lab.dir / "corpus")


@pytest.mark.parametrize("change", ["grows", "shrinks", "is emptied", "vanishes"])
@pytest.mark.parametrize("name", ["d.jsonl", "d.txt"])
def test_a_file_that_changes_while_it_is_read_is_an_error(lab: Lab, name: str, change: str) -> None:
    """After its first piece: what is cut off would else just not be there."""
    path = lab.text(f'{{"text": "{WORDS}"}}\n\n' * 80_000, name)
    source = LocalSource(path, TextColumn("text"), Memo(lab.dir))
    source.identity()
    pieces = source.pieces()
    assert list(next(pieces).documents(Repairs()))
    if change == "vanishes":
        path.unlink()
    else:
        sizes = {"grows": 1 << 23, "shrinks": 1 << 12, "is emptied": 0}
        os.truncate(path, sizes[change])
    with pytest.raises(DataError, match=r"changed while it was read|cannot be read"):
        list(chain.from_iterable(piece.documents(Repairs()) for piece in pieces))


def test_a_line_without_an_end_is_refused_before_it_fills_the_memory(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans, "LONGEST_LINE", 1 << 20)
    zeros = bytes(4 << 20)
    for name, content in (
        ("a.txt", zeros),
        ("b.jsonl", zeros),
        ("c.jsonl.gz", gzip.compress(zeros)),
    ):
        with pytest.raises(DataError, match=rf"{name}: a line of more than 1 MiB"):
            read(lab.text(content, name))
