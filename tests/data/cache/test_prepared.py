"""The data preparation tool, and the directories that it makes."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from model_check.config.arguments import Parser, add_settings_options, settings_request
from model_check.config.load import Request, load
from model_check.config.memory import describe_size, estimate_memory
from model_check.config.schema import Settings
from model_check.data.build.prepare import prepare
from model_check.data.read.token_cache import TokenCache
from model_check.errors import ConfigError, DataError, StorageError, UsageError
from tests.data.lab import WORDS, Lab, run_tool, write_tokenizer

CORPUS = 12


@pytest.fixture
def corpus(lab: Lab) -> Path:
    for number in range(CORPUS):
        lab.text(f"{WORDS * 10}\nthis is text {number} of {CORPUS}\n", f"raw/{number:02}.txt")
    return lab.dir / "raw"


def content_of(directory: Path) -> dict[str, str]:
    files = [p for p in directory.rglob("*") if p.is_file() and ".locks" not in p.parts]
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(files)
    }


def settings_from(*argv: str) -> Settings:
    parser = Parser()
    add_settings_options(parser)
    return load(settings_request(parser.read(argv), {}), lambda: False).settings


def test_the_tool_of_the_guide_leaves_tokenizer_dataset_and_metadata(
    lab: Lab, corpus: Path
) -> None:
    out = lab.dir / "processed"
    code, said = run_tool(
        *("--input_dir", corpus, "--output_dir", out, "--tokenizer_type", "bpe"),
        *("--vocab_size", 400, "--max_length", 64, "--stride", 16, "--num_workers", 2),
    )
    assert code == 0, said
    assert {path.name for path in out.iterdir()} == {"tokenizer.json", "dataset", "metadata.json"}
    metadata = json.loads((out / "metadata.json").read_text())
    assert metadata["max_length"] == 64
    assert (metadata["overlap"], metadata["stride"]) == (16, 48)
    assert metadata["num_documents"] == CORPUS
    counts = metadata["splits"]["train"]
    assert "num_trained_on" not in counts
    assert counts["num_tokens"] + counts["num_dropped"] == metadata["num_tokens"]
    settings = settings_from("--data_dir", str(out))
    cache = TokenCache.open(prepare(settings, print).path, "full")
    assert (cache.context_length, cache.stride) == (64, 48)
    assert cache.vocab_size == metadata["vocab_size"]
    assert (cache.store.path / "tokenizer.json").read_bytes() == (
        out / "tokenizer.json"
    ).read_bytes()


@pytest.mark.parametrize(("more", "length"), [((), 256), (("training.context_length=64",), 64)])
def test_an_overlap_without_a_length_is_one_of_the_length_that_acts(
    lab: Lab, corpus: Path, more: tuple[str, ...], length: int
) -> None:
    out = lab.dir / "out"
    asked = ("--input_dir", corpus, "--output_dir", out, "--tokenizer_type", "bpe")
    code, said = run_tool("--preset", "cpu", *asked, "--vocab_size", 400, "--stride", 32, *more)
    assert code == 0, said
    metadata = json.loads((out / "metadata.json").read_text())
    assert (metadata["max_length"], metadata["overlap"]) == (length, 32)


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_workers_and_hash_seeds_do_not_change_a_byte(lab: Lab, corpus: Path, kind: str) -> None:
    found = []
    for workers, seed in ((1, "1"), (2, "2")):
        out = lab.dir / f"out{workers}"
        code, said = run_tool(
            *("--input_dir", corpus, "--output_dir", out, "--tokenizer_type", kind),
            *("--vocab_size", 1100, "--max_length", 32, "--num_workers", workers),
            "data.validation=held=0.2",
            PYTHONHASHSEED=seed,
            RAYON_NUM_THREADS=str(workers),
        )
        assert code == 0, said
        found.append(content_of(out))
    assert found[0] == found[1]


def prepared(lab: Lab, corpus: Path, *overrides: str) -> Path:
    out = lab.dir / "out"
    lab.prepare(corpus, f"data.output_dir={out}", *overrides)
    return out


def test_a_prepared_directory_is_found_whole_and_brings_its_settings(
    lab: Lab, corpus: Path
) -> None:
    out = prepared(lab, corpus, "data.validation=held=0.2", "data.stride=8")
    request = Request(preset="debug", overrides=(f"data.dataset={out}",))
    loaded = load(request, lambda: False)
    assert loaded.settings.training.context_length == 16
    assert loaded.settings.model.vocab_size is None
    assert loaded.sources["data.stride"] == str(out)
    found = prepare(loaded.settings, print)
    assert found.hit
    assert list(found.splits) == ["train", "held"]
    assert not lab.cache.joinpath("tokens").exists()


def test_the_size_before_a_start_is_that_with_the_vocabulary_of_the_directory(
    lab: Lab, corpus: Path
) -> None:
    named = ("--data-dir", str(prepared(lab, corpus)), "--preset", "cpu")
    follows, given = settings_from(*named), settings_from(*named, "model.vocab_size=300")
    assert follows.model.vocab_size is None
    for device in ("cpu", "cuda"):
        assert estimate_memory(follows, device) == estimate_memory(given, device)
    count, _, rest = describe_size(given, "cpu").partition(";")
    told = f"{count} with a vocabulary of 300 (of the prepared directory);{rest}"
    assert describe_size(follows, "cpu") == told
    raw = settings_from("--preset", "cpu", f"data.dataset={corpus}")
    assert "with a vocabulary of 8,192 (the tokenizer decides)" in describe_size(raw, "cpu")


def test_a_prepared_directory_brings_what_marks_its_documents(lab: Lab, corpus: Path) -> None:
    tokenizer = write_tokenizer(lab.dir / "tokenizer.json", begin="<s>")
    asked = (f"data.tokenizer={tokenizer}", "data.document_tokens=begin_end")
    out = prepared(lab, corpus, *asked)
    assert settings_from("--preprocessed-data", str(out)).data.document_tokens == "begin_end"
    metadata = json.loads((out / "metadata.json").read_text())
    # As an older version left it.
    del metadata["document_tokens"]
    (out / "metadata.json").write_text(json.dumps(metadata))
    assert settings_from("--preprocessed-data", str(out)).data.document_tokens == "end"


def test_a_prepared_directory_needs_none_of_the_texts_that_it_was_made_from(
    lab: Lab, corpus: Path
) -> None:
    held = lab.text("held out. " * 40, "held.txt")
    out = prepared(lab, corpus, f"data.validation=held={held}")
    held.unlink()
    shutil.rmtree(corpus)
    found = prepare(settings_from("--preprocessed-data", str(out)), print)
    assert list(found.splits) == ["train", "held"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.context_length=32", r"training.context_length = 32, but .* prepared with 16"),
        (
            "data.validation=a=0.1",
            "data.validation = a=0.1, but .* prepared without; .*again with it",
        ),
        ("training.eval_interval=5", "training.eval_interval = 5: .* was prepared without a val"),
        ("data.document_tokens=begin_end", "document_tokens = begin_end, but .* with end"),
        ("data.tail=pad", "data.tail = pad, but .* prepared with drop"),
        ("model.vocab_size=100", r"model.vocab_size = 100 is too small for .* with 300 ids"),
    ],
)
def test_what_the_directory_does_not_have_is_refused_in_one_line(
    lab: Lab, corpus: Path, override: str, message: str
) -> None:
    out = prepared(lab, corpus)
    with pytest.raises(ConfigError, match=message) as refused:
        settings_from("--preprocessed-data", str(out), override)
    assert "\n" not in str(refused.value)


def test_a_second_preparation_finds_the_first_and_a_forced_one_does_not(
    lab: Lab, corpus: Path
) -> None:
    out = prepared(lab, corpus)
    before = content_of(out)
    flags = (f"data.output_dir={out}", "data.tokenizer=bpe")
    assert lab.prepare(corpus, *flags).hit
    (store,) = (out / "dataset" / "tokens").iterdir()
    made = store.stat().st_ctime_ns
    assert not lab.prepare(corpus, *flags, "data.force_preprocess=true").hit
    assert store.stat().st_ctime_ns != made  # an inode number may be given again
    assert content_of(out) == before


@pytest.mark.parametrize(
    "other",
    ["training.context_length=8", "data.bpe_vocab_size=310", "data.validation=held=0.2", "text"],
)
def test_another_preparation_is_not_replaced_unless_somebody_says_so(
    lab: Lab, corpus: Path, other: str
) -> None:
    out = prepared(lab, corpus)
    before = content_of(out)
    overrides = [other]
    if other == "text":
        (corpus / "00.txt").write_text(f"{WORDS * 12}\n")
        overrides = []
    with pytest.raises(DataError, match=r"holds 12 documents of raw, .* --force-preprocess"):
        prepared(lab, corpus, *overrides)
    assert content_of(out) == before
    prepared(lab, corpus, *overrides, "data.force_preprocess=true")
    assert content_of(out)["metadata.json"] != before["metadata.json"]
    assert prepared(lab, corpus, *overrides) == out


def test_a_text_that_only_moved_is_the_same_preparation(lab: Lab, corpus: Path) -> None:
    out = prepared(lab, corpus)
    prepared(lab, corpus.rename(lab.dir / "moved"))
    assert settings_from("--preprocessed-data", str(out)).data.dataset == str(out)


def test_a_forced_preparation_replaces_metadata_that_nobody_understands(
    lab: Lab, corpus: Path
) -> None:
    out = prepared(lab, corpus)
    (out / "metadata.json").write_text("{}")
    with pytest.raises(ConfigError, match="--force-preprocess"):
        prepared(lab, corpus)
    prepared(lab, corpus, "data.force_preprocess=true")
    assert json.loads((out / "metadata.json").read_text())["num_documents"] == CORPUS


def test_files_of_somebody_else_are_not_replaced(lab: Lab, corpus: Path) -> None:
    theirs = lab.text('{"mine": 1}', "out/tokenizer.json")
    with pytest.raises(DataError, match=r"has a tokenizer.json and is no prepared directory"):
        prepared(lab, corpus)
    assert theirs.read_text() == '{"mine": 1}'


def test_an_output_directory_that_cannot_be_made_names_its_own_option(
    lab: Lab, corpus: Path
) -> None:
    out = lab.text("a file", "blocked") / "out"
    with pytest.raises(StorageError) as refused:
        lab.prepare(corpus, f"data.output_dir={out}")
    assert str(refused.value).startswith(f"{out}/dataset: cannot be written: Not a directory; ")
    assert "set --output-dir (data.output_dir) to a directory that can" in str(refused.value)
    assert "cache_dir" not in str(refused.value)


def test_a_directory_whose_tool_was_killed_at_the_end_is_gone_on_with(
    lab: Lab, corpus: Path
) -> None:
    out = prepared(lab, corpus)
    before = content_of(out)
    (out / "metadata.json").unlink()  # it is written last
    prepared(lab, corpus)
    assert content_of(out) == before


def test_a_damaged_directory_says_what_to_do(lab: Lab, corpus: Path) -> None:
    out = prepared(lab, corpus)
    settings = settings_from("--preprocessed-data", str(out))
    (store,) = (out / "dataset" / "tokens").iterdir()
    (store / "tokens-00000.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"tokens-00000.bin: has 0 bytes .* again"):
        prepare(settings, print)
    (out / "metadata.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"metadata.json: not the metadata"):
        settings_from("--preprocessed-data", str(out))


def test_the_flags_of_the_workflow_guide_are_settings(tmp_path: Path) -> None:
    data = settings_from("--raw-data", str(tmp_path), "--force-preprocess", "--offline-mode").data
    assert (data.dataset, data.output_dir) == (str(tmp_path), "preprocessed_data")
    assert data.force_preprocess
    assert data.offline
    again = ("--raw-data", str(tmp_path), "--preprocessed-data", "there", "--force-preprocess")
    data = settings_from(*again).data
    assert (data.dataset, data.output_dir) == (str(tmp_path), "there")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--preprocessed-data", "nowhere"], "nowhere: no such file or directory"),
        (["--preprocessed-data", "."], r"\.: not a prepared directory"),
        (["--raw-data", "wikitext"], "--raw-data wikitext: no such file or directory"),
        (["--input_dir", "wikitext"], "--input-dir wikitext: no such file or directory"),
        (["--data-dir", "nowhere"], "--data-dir nowhere: no such file or directory"),
        (["--data-dir", "."], r"--data-dir \.: not a prepared directory"),
        (["--raw-data", ".", "--preprocessed-data", "a"], "with --force-preprocess the text"),
        (["--input-dir", ".", "--data-dir", "a"], "--input-dir and --data-dir: give one"),
        (["--input-dir", ".", "--raw-data", "a"], "--input-dir and --raw-data are the same option"),
        (["--preprocessed-data", "a", "--output-dir", "b"], "name the same thing"),
        (["--data-dir", "a", "--output-dir", "b"], "--data-dir and --output-dir name the same"),
        (["--preprocessed-data", "a", "--force-preprocess"], "give the text to prepare again"),
    ],
)
def test_options_that_do_not_go_together_are_refused(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        settings_from(*argv)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokenizer_type", "unigram"], "it is one of bpe, wordpiece, tiktoken"),
        (["--preset", "cpu", "--stride", "256"], "tokens that neighbours share, from 0 to --max-l"),
        (["--stride", "64", "--max_length", "64"], "from 0 to --max-length - 1 (63)"),
        (["--stride", "64", "context_length=64"], "from 0 to --max-length - 1 (63)"),
        (["--stride", "-4"], "--stride"),
        (["--tokenizer_type", "wordpiece", "--vocab_size", "500"], "wordpiece needs 1024 or more"),
        (["--tokenizer_type", "tiktoken", "--vocab_size", "5000"], "has its own vocabulary"),
    ],
)
def test_the_tool_refuses_what_cannot_be(
    lab: Lab, corpus: Path, arguments: list[str], message: str
) -> None:
    code, said = run_tool("--input_dir", corpus, "--output_dir", lab.dir / "out", *arguments)
    assert code == 2
    assert message in said
    assert said.count("\n") == 1
