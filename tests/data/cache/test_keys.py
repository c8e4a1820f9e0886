"""What changes the cache's key, and what must not."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from model_check.data.build.request import CacheRequest, cache_request
from model_check.data.cache import memo
from model_check.data.cache.housekeeping import verify_cache
from model_check.data.cache.memo import Memo, file_sha256, settled, stat_signature
from model_check.data.read.manifest import (
    MANIFEST,
    SCHEMA,
    TokensManifest,
    ViewManifest,
    hash_of,
    short,
)
from model_check.data.sources import hashed_files
from model_check.errors import DataError
from tests.data.lab import WORDS, Lab, settings_for, wait_until, write_tokenizer
from tests.data.numbers import NumberChoice, NumberText


def key_part(path: Path) -> str:
    return path.name.rpartition("__")[2]


def test_the_same_text_at_another_place_and_time_is_a_hit(lab: Lab) -> None:
    first = lab.prepare(lab.text())
    copy = lab.text(name="elsewhere/notes.txt")
    os.utime(copy, (1, 1))
    second = lab.prepare(copy)
    assert (first.hit, second.hit, second.path) == (False, True, first.path)


def test_the_same_text_under_another_name_is_not_tokenized_again(lab: Lab) -> None:
    first = lab.prepare(lab.text())
    second = lab.prepare(lab.text(name="other.txt"))
    assert key_part(second.path) == key_part(first.path)
    assert len(lab.stores()) == 1


def test_one_changed_byte_is_a_new_key_even_with_the_old_times(lab: Lab) -> None:
    path = lab.text()
    first = lab.prepare(path)
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"T")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    second = lab.prepare(path)
    assert not second.hit
    assert key_part(second.path) != key_part(first.path)


def test_an_edit_that_restores_the_times_does_not_pass_for_the_old_file(lab: Lab) -> None:
    path = lab.text()
    before, stat = stat_signature(path), path.stat()

    def edited() -> bool:  # the kernel's clock for files ticks every few milliseconds
        path.write_bytes(path.read_bytes().swapcase())
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        return stat_signature(path) != before

    wait_until(edited, "another signature")


def test_the_hash_of_a_big_file_is_remembered_once_it_is_at_rest(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memo, "_SETTLED_S", 3600.0)
    path = lab.text(bytes(1 << 20), "big.txt")
    known = Memo(lab.cache)
    assert not settled(path)
    file_sha256(path, known)
    assert known.get(f"sha256 {stat_signature(path)}") is None
    known.put(f"sha256 {stat_signature(path)}", "remembered")
    assert file_sha256(path, known) == "remembered"


def test_many_files_are_hashed_once_until_one_of_them_changes(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memo, "_SETTLED_S", -1.0)
    hashed: list[Path] = []

    def counted(path: Path, known: Memo) -> str:
        hashed.append(path)
        return file_sha256(path, known)

    monkeypatch.setattr(hashed_files, "file_sha256", counted)
    files = [lab.text(f"{number} {WORDS}", f"many/{number:03}.txt") for number in range(100)]

    def key() -> str:
        hashed.clear()
        return key_part(lab.prepare(files[0].parent).path)

    first = key()
    assert len(hashed) == 100
    assert (key(), hashed) == (first, [])
    os.utime(files[7])
    assert (key(), len(hashed)) == (first, 100)
    stat, text = files[7].stat(), files[7].read_text()
    files[7].write_text(text.swapcase())
    os.utime(files[7], ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other = key()
    assert other != first
    files[7].write_text(text)
    files[7].rename(files[7].with_suffix(".x"))
    files[8].rename(files[7])
    files[7].with_suffix(".x").rename(files[8])
    assert key() not in (first, other)


def test_touching_the_text_is_still_a_hit(lab: Lab) -> None:
    path = lab.text()
    lab.prepare(path)
    os.utime(path)
    assert lab.prepare(path).hit


@pytest.mark.parametrize(
    "change",
    [
        "training.context_length=8",
        "data.num_samples=3",
        "data.bpe_vocab_size=310",
        "data.document_tokens=begin_end",
    ],
)
def test_what_changes_the_sequences_is_a_new_key(lab: Lab, change: str) -> None:
    path = lab.text()
    own = f"data.tokenizer={write_tokenizer(lab.dir / 'tokenizer.json', begin='<s>')}"
    tokenizer = () if "bpe" in change else (own,)
    first = lab.prepare(path, *tokenizer)
    second = lab.prepare(path, *tokenizer, change)
    assert not second.hit
    assert key_part(second.path) != key_part(first.path)


@pytest.mark.parametrize(
    "change",
    ["training.batch_size=7", "system.seed=1", "data.num_proc=1", "training.max_steps=3"],
)
def test_what_does_not_change_the_tokens_is_a_hit(lab: Lab, change: str) -> None:
    path = lab.text()
    lab.prepare(path)
    assert lab.prepare(path, change).hit


def test_another_context_length_does_not_tokenize_again(lab: Lab) -> None:
    path = lab.text()
    lab.prepare(path)
    lab.prepare(path, "training.context_length=8")
    assert len(lab.views()) == 2
    assert len(lab.stores()) == 1


def test_a_directory_is_keyed_by_the_contents_in_order(lab: Lab) -> None:
    lab.text("one " * 40, "corpus/a.txt")
    lab.text("two " * 40, "corpus/sub/b.txt")
    first = lab.prepare(lab.dir / "corpus")
    shutil.copytree(lab.dir / "corpus", lab.dir / "copy" / "corpus")
    assert lab.prepare(lab.dir / "copy" / "corpus").path == first.path
    lab.text("two " * 40, "corpus/a.txt")
    lab.text("one " * 40, "corpus/sub/b.txt")
    assert lab.prepare(lab.dir / "corpus").path != first.path


def test_the_same_build_twice_is_the_same_bytes(lab: Lab) -> None:
    path = lab.text()

    def build() -> str:
        lab.prepare(path)
        (store,) = lab.stores()
        files = json.loads((store / MANIFEST).read_bytes())["files"]
        shutil.rmtree(lab.cache)
        return json.dumps(files)

    assert build() == build()


def test_the_name_of_an_entry_can_be_read(lab: Lab) -> None:
    path = lab.prepare(lab.text(), "data.num_samples=3").path
    assert path.parent == lab.cache
    assert path.name.startswith("notes__bpe300__ctx16__n3__")


def test_num_samples_limits_the_sequences(lab: Lab) -> None:
    assert lab.prepare(lab.text(), "data.num_samples=3").view.num_sequences == 3


def test_more_samples_than_there_are_is_said(lab: Lab) -> None:
    prepared = lab.prepare(lab.text(), "data.num_samples=5000")
    assert 0 < prepared.view.num_sequences < 5000
    assert f"{prepared.view.num_sequences} sequences: notes.txt has no more" in lab.said[-1]


@pytest.mark.parametrize("which", ["tokens/*", "*__*"])
def test_an_entry_of_another_schema_is_left_alone_and_told(lab: Lab, which: str) -> None:
    text = lab.text()
    lab.prepare(text)
    (manifest,) = lab.cache.glob(f"{which}/manifest.json")
    theirs = manifest.read_text().replace('"schema": 1', '"schema": 2')
    manifest.write_text(theirs)
    with pytest.raises(DataError, match=r"another version .*schema 2, .* 1\); another data\.cache"):
        lab.prepare(text)
    said: list[str] = []
    verify_cache(lab.cache, said.append)
    assert any(line.startswith("other ") and "schema 2" in line for line in said)
    assert manifest.read_text() == theirs


OLD_KEYS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "0140adc4dd946ede", "b81cd42dfd803314"),
    ({"stride": 4, "tail": "pad"}, "0140adc4dd946ede", "ff003a1ecb002b12"),
    (
        {"fractions": {"held": 0.1}, "num_samples": 7, "validation": ("held",)},
        "13b9f342f8a96300",
        "ee36d367a124c9a3",
    ),
]
"""What is asked for, and the hashes that its store and its view had before the setting existed."""


@pytest.mark.parametrize(("asked", "tokens", "view"), OLD_KEYS)
def test_a_setting_that_is_not_used_leaves_the_keys_as_they_were(
    asked: dict[str, Any], tokens: str, view: str
) -> None:
    request = CacheRequest(
        root=Path(),
        source=NumberText(),
        tokenizer=NumberChoice(),
        context_length=8,
        **({"num_samples": None} | asked),
    )
    assert (short(request.tokens_hash), short(hash_of(request.view_key))) == (tokens, view)


def test_the_schema_is_a_part_of_every_key(lab: Lab) -> None:
    request = cache_request(settings_for(lab.cache, lab.text()), print)
    assert request.tokens_key["version"] == request.view_key["version"] == SCHEMA
    assert {kind.__struct_defaults__[0] for kind in (ViewManifest, TokensManifest)} == {SCHEMA}
