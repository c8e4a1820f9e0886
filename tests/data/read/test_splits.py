"""Validation splits: by document, disjoint, every token accounted for."""

import json
import shutil
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from model_check.data.build.prepare import prepare
from model_check.data.build.splits import document_hashes
from model_check.data.read.loader import evaluation_batches
from model_check.data.read.manifest import runs_name, store_of
from model_check.data.read.token_cache import TokenCache
from model_check.data.read.token_split import PADDING, Split
from model_check.data.read.token_store import TokenStore
from model_check.data.read.windows import Windows
from model_check.errors import ConfigError, DataError, ModelCheckError
from tests.data.lab import WORDS, Lab, settings_for
from tests.data.numbers import END_ID, NumberText, number_cache

TWENTY = NumberText(*(range(10 * n, 10 * n + 3 + n % 5) for n in range(20)))


def everything(split: Split) -> list[list[int]]:
    """All windows, without padding."""
    rows = split.gather(np.arange(split.num_sequences))
    return [[int(token) for token in row if token != PADDING] for row in rows]


def stream_of(split: Split) -> list[int]:
    """The split's tokens in order, from windows that overlap by one token."""
    windows = everything(split)
    return [token for window in windows for token in window[:-1]] + windows[-1][-1:]


def documents_in(tokens: list[int]) -> Counter[tuple[int, ...]]:
    found: Counter[tuple[int, ...]] = Counter()
    begin = 0
    for position, token in enumerate(tokens):
        if token == END_ID:
            found[tuple(tokens[begin:position])] += 1
            begin = position + 1
    assert begin == len(tokens)
    return found


@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_windows_are_what_their_definition_says(tail: str) -> None:
    for num_tokens, length, stride in product(range(1, 40), (1, 4, 7), (1, 3, 7)):
        if stride > length:
            continue
        windows = Windows(length, stride, "pad" if tail == "pad" else "drop")
        whole = [s for s in range(0, num_tokens, stride) if s + length + 1 <= num_tokens]
        labels = {t for s in whole for t in range(s + 1, s + length + 1)}
        left = tail == "pad" and labels != set(range(1, num_tokens))
        assert windows.num_sequences(num_tokens) == len(whole) + left
        if whole and not left:
            assert windows.num_used(len(whole), num_tokens) == max(labels) + 1
        if left:
            assert windows.num_used(len(whole) + 1, num_tokens) == num_tokens


def test_a_stride_makes_windows_overlap_exactly(tmp_path: Path) -> None:
    cache = number_cache(tmp_path, NumberText(range(50)), 9, stride=4)
    assert cache.num_sequences == 11
    stream = [*range(50), END_ID]
    assert everything(cache) == [stream[s : s + 10] for s in range(0, 41, 4)]


def test_a_padded_tail_holds_the_last_labels_and_nothing_else(tmp_path: Path) -> None:
    cache = number_cache(tmp_path, NumberText(range(12)), 5, tail="pad")
    assert cache.num_sequences == 3
    last = cache.gather(np.array([2]))[0].tolist()
    assert last == [10, 11, END_ID, PADDING, PADDING, PADDING]


def test_a_split_is_whole_documents_and_no_document_is_in_two(tmp_path: Path) -> None:
    cache = number_cache(tmp_path, TWENTY, 4, tail="pad", fractions={"held": 0.2, "test": 0.1})
    assert cache.splits == ("train", "held", "test")
    parts = [documents_in(stream_of(cache.split(name))) for name in cache.splits]
    assert [part.total() for part in parts] == [14, 4, 2]
    every = NumberText(*(range(10 * n, 10 * n + 3 + n % 5) for n in range(20)))
    whole = number_cache(tmp_path / "whole", every, 4, tail="pad")
    assert sum(parts, Counter()) == documents_in(stream_of(whole))


def test_equal_documents_stand_on_one_side(tmp_path: Path) -> None:
    twice = NumberText(*(range(10 * (n % 10), 10 * (n % 10) + 4) for n in range(20)))
    cache = number_cache(tmp_path, twice, 4, tail="pad", fractions={"held": 0.3})
    train, held = (documents_in(stream_of(cache.split(name))) for name in cache.splits)
    assert not set(train) & set(held)
    assert held.total() == 6


def test_the_order_of_the_text_does_not_decide_what_validates(tmp_path: Path) -> None:
    documents = [range(10 * n, 10 * n + 5) for n in range(20)]
    splits = [
        number_cache(tmp_path / name, NumberText(*order), 4, fractions={"held": 0.2}).split("held")
        for name, order in (("there", documents), ("back", documents[::-1]))
    ]
    assert documents_in(stream_of(splits[0])) == documents_in(stream_of(splits[1]))


def test_every_token_knows_its_document(tmp_path: Path) -> None:
    for fractions in ({}, {"held": 0.25}):
        root = tmp_path / str(len(fractions))
        cache = number_cache(root, TWENTY, 7, tail="pad", fractions=fractions)
        for name in cache.splits:
            split = cache.split(name)
            indices = np.arange(split.num_sequences)
            rows = split.gather(indices)
            for row, numbers in zip(rows, split.documents(indices), strict=True):
                expected = [0]
                for token in row[:-1]:
                    expected.append(expected[-1] + (token == END_ID))
                real = row != PADDING
                assert numbers[real].tolist() == np.array(expected)[real].tolist()
                assert (np.diff(numbers) >= 0).all()


def test_the_number_of_a_document_follows_from_its_tokens_alone(tmp_path: Path) -> None:
    documents = [range(3), range(50, 55), range(3), range(1), range(40), range(4), range(50, 55)]
    numbers = number_cache(tmp_path / "one", NumberText(*documents), 4)
    store = TokenStore(store_of(numbers.path, numbers.view), numbers.tokens)
    hashes = document_hashes(store)
    assert hashes[0] == hashes[2]
    assert hashes[1] == hashes[6]
    assert len(set(hashes.tolist())) == 5
    for chunk_tokens in (1, 4, 7):
        assert document_hashes(store, chunk_tokens).tolist() == hashes.tolist()


@pytest.mark.parametrize("share", ["0.999999", "0.000001"])
def test_a_share_at_the_edge_leaves_a_document_on_each_side_or_is_refused(
    lab: Lab, share: str
) -> None:
    text = lab.text(lines_of("bach"), "notes.jsonl")
    if share == "0.000001":
        splits = lab.prepare(text, f"data.validation=held={share}").splits
        assert (splits["train"].num_documents, splits["held"].num_documents) == (39, 1)
        return
    with pytest.raises(DataError, match=r"the text has 40 documents, too few for 0.999999"):
        lab.prepare(text, f"data.validation=held={share}")


def test_too_few_documents_to_hold_some_out_is_refused(lab: Lab) -> None:
    with pytest.raises(DataError, match="the text has 1 documents, too few"):
        lab.prepare(lab.text(), "data.validation=held=0.1")


AUTO = "data.validation=auto"


@pytest.mark.parametrize("num_documents", [1, 99])
def test_auto_validates_with_the_end_of_a_text_of_few_documents(
    lab: Lab, num_documents: int
) -> None:
    """Every token is trained on or validates, and none does both."""
    rows = (json.dumps({"text": f"{WORDS * 12} {n}"}) + "\n" for n in range(num_documents))
    text = lab.text("".join(rows), "few.jsonl")
    cut = TokenCache.open(lab.prepare(text, AUTO, "data.tail=pad").path)
    whole = TokenCache.open(lab.prepare(text, "data.tail=pad").path)
    train, held = (stream_of(cut.split(name)) for name in cut.splits)
    assert train + held == stream_of(whole.split("train"))
    assert len(held) == max(17, round(0.01 * len(train + held)))
    assert sum(s.num_documents for s in lab.prepare(text, AUTO).splits.values()) == num_documents


def test_auto_validates_with_documents_where_there_are_many(lab: Lab) -> None:
    text = lab.text(lines_of("bach", count=300), "many.jsonl")
    splits = lab.prepare(text, AUTO).splits
    assert {name: split.num_documents for name, split in splits.items()} == {
        "train": 297,
        "held": 3,
    }


def test_auto_takes_nothing_of_a_text_that_is_too_short(lab: Lab) -> None:
    prepared = lab.prepare(lab.text("a b", "short.txt"), AUTO, "data.tail=pad")
    assert prepared.splits.keys() == {"train"}
    few = "".join(json.dumps({"prompt": "a", "completion": f"b {n}"}) + "\n" for n in range(9))
    examples = lab.prepare(lab.text(few, "f.jsonl"), AUTO, "training.stage=prompt_target")
    assert examples.splits.keys() == {"train"}


def test_a_split_without_a_token_to_predict_is_refused(tmp_path: Path) -> None:
    text = NumberText(range(0), range(5))  # a normalizer may leave nothing of a document
    with pytest.raises(DataError, match="held: its 1 documents have no token to predict"):
        number_cache(tmp_path, text, 2, fractions={"held": 0.5})


def lines_of(*composers: str, count: int = 40) -> str:
    rows = [{"text": f"{WORDS} {c} {i}", "composer": c} for i in range(count) for c in composers]
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_another_fraction_or_length_does_not_tokenize_again(lab: Lab) -> None:
    text = lab.text(lines_of("bach"), "notes.jsonl")
    for arguments in ([], ["data.validation=a=0.1"], ["data.validation=a=0.2", "data.stride=8"]):
        lab.prepare(text, *arguments)
    assert len(lab.stores()) == 1
    assert len(lab.views()) == 3


def test_tokens_are_conserved(lab: Lab) -> None:
    text = lab.text(lines_of("bach", "chopin"), "notes.jsonl")
    prepared = lab.prepare(text, "data.validation=held=0.1")
    splits = prepared.splits.values()
    assert sum(split.num_tokens + split.num_dropped for split in splits) == prepared.view.num_tokens
    assert sum(split.num_documents for split in splits) == 80
    assert prepared.splits["held"].num_dropped == 0


def test_rows_with_a_value_validate_and_are_not_trained_on(lab: Lab) -> None:
    text = lab.text(lines_of("bach", "chopin", "liszt"), "notes.jsonl")
    asked = "data.validation=chopin=composer:chopin,held=0.1,bach=composer:bach"
    path = lab.prepare(text, asked).path
    cache = TokenCache.open(path, "full")
    assert cache.splits == ("train", "chopin", "held", "bach")
    words = {name: decoded(cache, name) for name in cache.splits}
    assert [name for name, text in words.items() if " chopin " in text] == ["chopin"]
    assert [name for name, text in words.items() if " bach " in text] == ["bach"]
    assert words["chopin"].count(" chopin ") == 40
    assert lab.prepare(text, asked).hit


def test_rows_of_parquet_are_divided_too(lab: Lab) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [json.loads(line) for line in lines_of("bach", "liszt").splitlines()]
    path = lab.dir / "notes.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=30)
    asked = ("data.validation=bach=composer:bach", "data.tail=pad")
    cache = TokenCache.open(lab.prepare(path, *asked).path)
    assert decoded(cache, "bach").count(" bach ") == 40
    assert decoded(cache, "train").count(" liszt ") == 40
    assert " bach " not in decoded(cache, "train")


def decoded(cache: TokenCache, name: str) -> str:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(cache.store.path / "tokenizer.json"))
    return str(tokenizer.decode(stream_of(cache.split(name)), skip_special_tokens=False))


def test_a_file_of_the_training_directory_validates_and_is_not_trained_on(lab: Lab) -> None:
    lab.text("never to be trained on " * 20, "corpus/held/out.txt")
    lab.text(WORDS * 20, "corpus/a.txt")
    path = lab.prepare(lab.dir / "corpus", f"data.validation=held={lab.dir}/corpus/held").path
    cache = TokenCache.open(path)
    assert "never" not in decoded(cache, "train")
    assert decoded(cache, "held").count("never") == 20


def test_a_split_inside_the_directory_of_another_is_not_in_that_one_too(lab: Lab) -> None:
    lab.text("inner words " * 20, "held/inner/a.txt")
    lab.text("outer words " * 20, "held/b.txt")
    asked = f"data.validation=outer={lab.dir}/held,inner={lab.dir}/held/inner"
    cache = TokenCache.open(lab.prepare(lab.text(WORDS * 20), asked).path)
    assert "inner" not in decoded(cache, "outer")
    assert decoded(cache, "inner").count("inner") == 20


def unmarked(text: str) -> list[str]:
    return sorted(filter(None, text.split("<|endoftext|>")))


@pytest.mark.parametrize("fraction", ["", ",held=0.2"])
@pytest.mark.parametrize("what", ["own=composer:bach", "own={file}", "own={directory}"])
def test_a_document_equal_to_one_that_validates_is_not_trained_on(
    lab: Lab, what: str, fraction: str
) -> None:
    """Other rows have the text of Bach's, under another name."""
    rows = [json.loads(line) for line in lines_of("bach", "liszt").splitlines()]
    rows += [row | {"composer": "copyist"} for row in rows if row["composer"] == "bach"][:25]
    train = lab.text("".join(json.dumps(row) + "\n" for row in rows), "train.jsonl")
    bach = "".join(json.dumps(row) + "\n" for row in rows if row["composer"] == "bach")
    file = lab.text(bach, "bach/rows.jsonl")
    asked = what.format(file=file, directory=file.parent) + fraction
    arguments = (train, f"data.validation={asked}", "data.tail=pad")
    prepared = lab.prepare(*arguments)
    cache = TokenCache.open(prepared.path, "full")
    words = {name: unmarked(decoded(cache, name)) for name in cache.splits}
    assert sorted(set(words["own"])) == sorted({r["text"] for r in rows if "bach" in r["text"]})
    assert not set(words["train"]) & {text for n in cache.splits[1:] for text in words[n]}
    validating = [text for name in cache.splits[1:] for text in words[name]]
    assert {r["text"] for r in rows} == {*words["train"], *validating}
    counts = prepared.splits["train"]
    assert counts.num_documents == len(words["train"])
    assert counts.num_left_out > 0
    line = f"data: {counts.num_left_out} documents of train.jsonl are equal to one that validates"
    assert lab.said[-1].startswith(line)
    assert lab.prepare(*arguments).hit
    assert lab.said[-1].startswith(line)


def test_a_validation_text_with_no_equal_document_leaves_the_training_whole(lab: Lab) -> None:
    train, held = (lab.text(lines_of(c), f"{c}.jsonl") for c in ("bach", "liszt"))
    prepared = lab.prepare(train, f"data.validation=held={held}")
    assert (prepared.splits["train"].num_documents, prepared.splits["train"].num_left_out) == (
        40,
        0,
    )
    assert not prepared.view.files


def test_nothing_left_to_train_on_is_refused(lab: Lab) -> None:
    train = lab.text(lines_of("bach", count=3), "train.jsonl")
    held = lab.text(lines_of("bach"), "held.jsonl")
    with pytest.raises(DataError, match=r"each document of train\.jsonl validates, or is equal to"):
        lab.prepare(train, f"data.validation=held={held}")


def test_a_value_with_a_comma_names_its_rows(lab: Lab) -> None:
    text = lab.text(lines_of("Bach, J. S.", "Bach"), "notes.jsonl")
    cache = TokenCache.open(lab.prepare(text, r"data.validation=js=composer:Bach\, J. S.").path)
    assert decoded(cache, "js").count("Bach, J. S.") == 40
    assert "J. S." not in decoded(cache, "train")


def test_fewer_sequences_than_asked_for_are_told_of_what_was_read(lab: Lab) -> None:
    train = lab.text(lines_of("bach", "liszt"), "train.jsonl")
    held = lab.text(lines_of("bach", count=3), "held.jsonl")
    lab.prepare(train, f"data.validation=held={held}", "data.num_samples=20")
    assert any("sequences: what was read of train.jsonl has no more" in line for line in lab.said)


@pytest.mark.parametrize(
    ("validation", "error", "message"),
    [
        ("held=missing.txt", ConfigError, "held = missing.txt: no such file"),
        ("held={text}", DataError, "is the same text as the training text"),
        ("bach=composer:Bacch", DataError, "bach: notes.jsonl, composer = Bacch: no usable text"),
        ("held={empty}", DataError, r"held: empty\.jsonl: no usable text: 1 x line skipped"),
        ("val=split:validation", DataError, "split:validation is for hub datasets, not for notes"),
    ],
)
def test_what_cannot_validate_is_refused(
    lab: Lab, validation: str, error: type[ModelCheckError], message: str
) -> None:
    text = lab.text(lines_of("bach"), "notes.jsonl")
    empty = lab.text("no row", "empty.jsonl")
    with pytest.raises(error, match=message):
        lab.prepare(text, f"data.validation={validation.format(text=text, empty=empty)}")
    assert lab.stores() == [], "text was tokenized before"


def test_a_split_that_is_removed_while_the_next_one_is_made_is_one_message(lab: Lab) -> None:
    train, first, second = (
        lab.text(f"{name} {'some text. ' * 60}", f"{name}.txt") for name in ("t", "first", "second")
    )
    validation = f"data.validation=a={first},b={second}"

    def collect_too_early(line: str) -> None:
        if "preparing second.txt" in line:
            (view,) = lab.views()
            shutil.rmtree(view)

    with pytest.raises(DataError, match=r"first__.*: was removed meanwhile .*; prepare again"):
        prepare(settings_for(lab.cache, train, validation), collect_too_early)
    assert not lab.prepare(train, validation).hit


def test_columns_do_not_divide_what_has_none(lab: Lab) -> None:
    with pytest.raises(ConfigError, match="only rows of local JSONL and parquet"):
        lab.prepare("embedded", "data.validation=a=b:c")


def test_a_stride_beyond_the_context_is_refused(lab: Lab) -> None:
    with pytest.raises(ConfigError, match="would never be read"):
        lab.prepare(lab.text(), "data.stride=17")


@pytest.mark.parametrize("damage", ["gone", "torn"])
def test_a_damaged_split_is_made_again(lab: Lab, damage: str) -> None:
    text = lab.text(lines_of("bach"), "notes.jsonl")
    path = lab.prepare(text, "data.validation=held=0.1").path
    runs = path / runs_name("held")
    content = runs.read_bytes()
    runs.unlink()
    if damage == "torn":
        runs.write_bytes(content[:-1])
    assert not lab.prepare(text, "data.validation=held=0.1").hit
    assert runs.read_bytes() == content


def test_a_split_whose_own_entry_is_gone_is_made_again(lab: Lab) -> None:
    text = lab.text(lines_of("bach", "liszt"), "notes.jsonl")
    arguments = (text, "data.validation=bach=composer:bach")
    cache = TokenCache.open(lab.prepare(*arguments).path)
    entry = cache.view.splits["bach"].view
    assert entry is not None
    (lab.cache / entry / "manifest.json").unlink()
    lab.prepare(*arguments)
    assert any("set aside as" in line for line in lab.said)
    assert TokenCache.open(cache.path, "full").split("bach").num_sequences > 0


def test_evaluation_reads_every_sequence_once_in_order(tmp_path: Path) -> None:
    cache = number_cache(tmp_path, TWENTY, 4, fractions={"held": 0.4})
    held = cache.split("held")
    batches = list(evaluation_batches(held, 3))
    assert [len(b.inputs) for b in batches[:-1]] == [3] * (len(batches) - 1)
    assert sum(len(b.inputs) for b in batches) == held.num_sequences
    labels = [t for b in batches for t in b.targets.flatten().tolist() if t != PADDING]
    assert labels == stream_of(held)[1:]
    assert len(list(evaluation_batches(held, 3, limit=2))) == 2


def test_evaluation_counts_a_label_once_where_windows_overlap(tmp_path: Path) -> None:
    cache = number_cache(tmp_path, TWENTY, 6, stride=2, fractions={"held": 0.4})
    plain = number_cache(tmp_path / "plain", TWENTY, 6, fractions={"held": 0.4})
    batches = evaluation_batches(cache.split("held"), 4)
    labels = [t for b in batches for t in b.targets.flatten().tolist() if t != PADDING]
    assert labels == stream_of(plain.split("held"))[1:]


def test_an_unknown_split_is_named_with_those_that_are(tmp_path: Path) -> None:
    cache = number_cache(tmp_path, TWENTY, 4, fractions={"held": 0.2})
    with pytest.raises(DataError, match=r"no split 'val' \(there are train, held\)"):
        cache.split("val")
