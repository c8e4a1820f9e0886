"""What of a directory is read, what is not, and that it is said once."""

import gzip
import os
import sys

import pytest

from model_check.config.dataset import TEXT
from model_check.data.build.prepare import Prepared
from model_check.errors import DataError
from tests.data.lab import WORDS, Lab, run_tool

LINE = '{"text": "%s"}\n'


def row(text: str) -> str:
    return LINE % (text + " " + WORDS * 5)


def told(lab: Lab) -> list[str]:
    return [line for line in lab.said if "not read" in line or "empty:" in line]


def prepared(lab: Lab, *overrides: str) -> Prepared:
    return lab.prepare(lab.dir / "corpus", *overrides)


def zstd(content: bytes) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    return bytes(pyarrow.compress(content, codec="zstd", asbytes=True))


def test_what_is_not_read_is_told_in_one_line_when_it_is_built_and_when_it_is_found(
    lab: Lab,
) -> None:
    lab.text(row("one"), "corpus/a.jsonl")
    for name in ("b.csv", "sub/c.toml", "LICENSE", "d.csv.gz", "e.json", "f.tar", "g.docx"):
        lab.text("x", f"corpus/{name}")
    for name in (".DS_Store", ".git/config", "sub/.hidden.txt"):
        lab.text("x", f"corpus/{name}")
    for hit in (False, True):
        assert prepared(lab).hit == hit
        (line,) = told(lab)
        assert line == (
            f"data: {lab.dir / 'corpus'}: 7 files not read, only .txt, .jsonl (both also .gz, "
            ".zst), .parquet beside rows: LICENSE, b.csv, d.csv.gz, e.json, f.tar (+2 more)"
        )


@pytest.mark.parametrize("suffix", [*TEXT, *(f"{kind}.gz" for kind in TEXT), ".MD", ".md.zst"])
def test_running_text_has_many_suffixes(lab: Lab, suffix: str) -> None:
    content = ("<html>\n" + WORDS * 9).encode()
    pack = {"gz": gzip.compress, "zst": zstd}.get(suffix.rpartition(".")[2], bytes)
    named = lab.text(pack(content), f"corpus/a{suffix}")
    alone, text = lab.prepare(named), lab.prepare(lab.text(content, "same.txt"))
    assert alone.splits["train"].num_tokens == text.splits["train"].num_tokens
    assert prepared(lab).view.num_tokens == text.view.num_tokens
    assert told(lab) == []


def test_beside_rows_of_examples_running_text_is_left_out(lab: Lab) -> None:
    """As the README.md of a data set."""
    rows = '{"prompt": "a", "completion": "b"}\n' * 9
    lab.text(rows, "corpus/a.jsonl")
    lab.text("about it", "corpus/README.md")
    assert prepared(lab, "training.stage=prompt_target").view.num_sequences == 9
    (line,) = told(lab)
    assert line == (
        f"data: {lab.dir / 'corpus'}: 1 file not read, only .jsonl (also .gz, .zst), .parquet: "
        "README.md"
    )


def test_beside_rows_of_text_only_txt_is_text(lab: Lab) -> None:
    lab.text(row("one"), "corpus/a.jsonl")
    lab.text("two", "corpus/b.txt")
    lab.text("about it", "corpus/README.md")
    prepared(lab)
    (line,) = told(lab)
    assert line.endswith(
        "1 file not read, only .txt, .jsonl (both also .gz, .zst), .parquet beside rows: README.md"
    )


def test_where_all_is_read_nothing_is_told(lab: Lab) -> None:
    lab.text(row("one"), "corpus/a.jsonl")
    lab.text("x", "corpus/.hidden.csv")
    prepared(lab)
    assert told(lab) == []


def test_validation_by_rows_and_processes_tell_it_once(lab: Lab) -> None:
    lines = [row("one"), row("two").replace("{", '{"set": "val", ')]
    lab.text("".join(lines) * 50, "corpus/a.jsonl")
    lab.text("x", "corpus/b.csv")
    prepared(lab, "data.validation=val=set:val", "data.num_proc=2")
    assert len(told(lab)) == 1


def test_a_validation_directory_has_a_line_of_its_own(lab: Lab) -> None:
    lab.text(row("one") * 9, "corpus/a.jsonl")
    lab.text(row("two") * 9, "corpus/held/v.jsonl")
    lab.text("x", "corpus/held/v.csv")
    lab.text("x", "corpus/b.csv")
    prepared(lab, f"data.validation=val={lab.dir / 'corpus/held'}")
    assert [line.rpartition(": ")[2] for line in told(lab)] == ["b.csv", "v.csv"]


def test_empty_files_are_told(lab: Lab) -> None:
    lab.text(row("one"), "corpus/a.jsonl")
    lab.text("", "corpus/b.txt")
    prepared(lab)
    (line,) = told(lab)
    assert line == f"data: {lab.dir / 'corpus'}: 1 file empty: b.txt"


def test_a_directory_with_nothing_to_read_names_what_is_there(lab: Lab) -> None:
    lab.text("x", "corpus/a.csv")
    lab.text("x", "corpus/b.toml")
    with pytest.raises(DataError, match=r"no \.txt, .* file in it; there are: a\.csv, b\.toml"):
        prepared(lab)


def test_a_file_of_another_format_is_refused_by_name(lab: Lab) -> None:
    with pytest.raises(DataError, match=r"notes\.csv: text comes from \.txt, \.md"):
        lab.prepare(lab.text("x", "notes.csv"))


@pytest.mark.parametrize("name", ["a.JSONL", "a.Jsonl", "a.JSONL.GZ", "a.jsonl.Gz"])
def test_the_case_of_a_suffix_is_not_in_the_key(lab: Lab, name: str) -> None:
    content = gzip.compress(row("one").encode(), mtime=0)
    packed = name.lower().endswith(".gz")
    for corpus, file in (("corpus", name), ("other/corpus", name.lower())):
        lab.text(content if packed else row("one"), f"{corpus}/{file}")
        lab.text("more " * 50, f"{corpus}/a.k.TXT" if corpus == "corpus" else f"{corpus}/a.k.txt")
    first = prepared(lab)
    second = lab.prepare(lab.dir / "other/corpus")
    assert (first.path, second.hit) == (second.path, True)
    assert lab.prepare(lab.dir / "corpus" / name).view.num_tokens < first.view.num_tokens


@pytest.mark.parametrize("name", ["d.jsonl.zst", "d.JSONL.ZST", "d.txt.zst", "d.txt.gz"])
def test_packed_text_is_the_text(lab: Lab, name: str) -> None:
    content = ("line of text\n" * 9 if ".txt" in name else row("one") * 9).encode()
    pack = zstd if name.lower().endswith(".zst") else gzip.compress
    plain = lab.prepare(lab.text(content, name.lower().rpartition(".")[0]))
    packed = lab.prepare(lab.text(pack(content[:20]) + pack(content[20:]), name))
    assert packed.view.num_tokens == plain.view.num_tokens


@pytest.mark.parametrize("log", [27, 28, 31], ids="2 to the {}".format)
def test_a_zstd_window_that_takes_too_much_memory_is_told_with_the_cure(lab: Lab, log: int) -> None:
    """A frame by hand (RFC 8878, section 3.1): `--long=31` of a small text needs no long window."""
    text = row(WORDS * 9).encode()
    block = (len(text) << 3 | 1).to_bytes(3, "little") + text  # the last one, raw
    packed = lab.text(b"\x28\xb5\x2f\xfd\x00" + bytes([(log - 10) << 3]) + block, "d.jsonl.zst")
    if log == 27:
        assert not lab.prepare(packed).hit
        return
    with pytest.raises(DataError, match=r"window is longer than 128 MiB.*zstd -dc --long=31 .*d"):
        lab.prepare(packed)


@pytest.mark.parametrize("content", [b"no zstd at all " * 9, None], ids=["another", "torn"])
def test_what_is_no_whole_zstd_is_an_error_that_names_the_file(
    lab: Lab, content: bytes | None
) -> None:
    packed = zstd(os.urandom(1000).hex().encode())
    with pytest.raises(DataError, match=r"d\.jsonl\.zst: cannot be read"):
        lab.prepare(lab.text(content or packed[: len(packed) // 2], "d.jsonl.zst"))


def test_without_pyarrow_the_package_is_named(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = zstd(row("one").encode())
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"d\.txt\.zst: zstd needs the pyarrow package: pip inst"):
        lab.prepare(lab.text(packed, "d.txt.zst"))


def test_directories_that_links_lead_to_are_read_once(lab: Lab) -> None:
    lab.text(row("one"), "corpus/real/a.jsonl")
    lab.text(row("two"), "elsewhere/b.jsonl")
    lab.text(row("three"), "elsewhere/deep/c.jsonl")
    corpus = lab.dir / "corpus"
    alone = prepared(lab).view.num_tokens
    (corpus / "a_circle").symlink_to(corpus)
    (corpus / "a_twin").symlink_to(corpus / "real")
    assert prepared(lab).view.num_tokens == alone
    (corpus / "b_link").symlink_to(lab.dir / "elsewhere")
    (corpus / "c_link").symlink_to(lab.dir / "elsewhere" / "deep")
    linked = prepared(lab)
    for name in ("b.jsonl", "deep/c.jsonl"):
        lab.text((lab.dir / "elsewhere" / name).read_bytes(), f"copied/b_link/{name}")
    lab.text(row("one"), "copied/real/a.jsonl")
    assert lab.prepare(lab.dir / "copied").view.num_tokens == linked.view.num_tokens


@pytest.mark.parametrize("target", ["loop.jsonl", "gone"])
def test_a_link_that_leads_nowhere_is_an_error_without_a_traceback(lab: Lab, target: str) -> None:
    lab.text(row("one"), "corpus/a.jsonl")
    (lab.dir / "corpus" / "loop.jsonl").symlink_to(target)
    code, output = run_tool(f"data.dataset={lab.dir / 'corpus'}", f"data.cache_dir={lab.cache}")
    assert code == 2
    assert "Traceback" not in output
    assert "loop.jsonl: cannot be read: " in output


def test_a_link_of_no_format_that_leads_nowhere_is_told(lab: Lab) -> None:
    lab.text(row("one"), "corpus/a.jsonl")
    (lab.dir / "corpus" / "loop").symlink_to("loop")
    prepared(lab)
    (line,) = told(lab)
    assert line.endswith(": loop")


def test_a_pipe_is_no_text(lab: Lab) -> None:
    os.mkfifo(lab.dir / "pipe.txt")
    with pytest.raises(DataError, match=r"pipe\.txt: is no regular file"):
        lab.prepare(lab.dir / "pipe.txt")


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.parquet", "a.txt.gz"])
def test_a_link_to_itself_is_told_by_name(lab: Lab, name: str) -> None:
    lab.text(row("one"), "corpus/b.jsonl")
    (lab.dir / "corpus" / name).symlink_to(name)
    with pytest.raises(DataError, match=f"corpus/{name}: cannot be read: Too many levels"):
        prepared(lab)
