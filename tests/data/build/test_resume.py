"""A killed build goes on where it had come to, and nobody ever sees it half done. Real processes,
killed at an exact document by a gate, not by luck."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from model_check.data.build.make import make
from model_check.data.build.request import CacheRequest
from model_check.data.cache import publish
from model_check.data.cache.publish import UNFINISHED, BrokenOffError
from model_check.data.sources.text import Repairs
from tests.data.gated_builder import ONE_DOCUMENT_A_TASK, Choice, wanted
from tests.data.lab import ROOT, WORDS, Lab, ends_with_the_test, write_tokenizer
from tests.deadline import DEADLINE_S

NUM_DOCUMENTS = 20


@pytest.fixture
def corpus(lab: Lab) -> Path:
    """A document a file, each with something to repair."""
    for number in range(NUM_DOCUMENTS):
        lab.text(f"document {number}\r\n" + WORDS * (3 + number), f"corpus/{number:02}.txt")
    return lab.dir / "corpus"


@pytest.fixture
def tokenizer(lab: Lab) -> Path:
    return write_tokenizer(lab.dir / "tokenizer.json")


def gated(lab: Lab, corpus: Path, tokenizer: Path, gate: object) -> subprocess.Popen[str]:
    """A builder that has come to its gate."""
    arguments = [lab.cache, corpus, tokenizer, gate]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.data.gated_builder", *map(str, arguments)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    ends_with_the_test(process)
    assert process.stdout is not None
    for line in process.stdout:
        if line == "at the gate\n":
            return process
    raise AssertionError("the builder never came to its gate")


def kill(process: subprocess.Popen[str], signum: int = signal.SIGKILL) -> None:
    process.send_signal(signum)
    process.communicate(timeout=DEADLINE_S)


def build(lab: Lab, corpus: Path, tokenizer: Path) -> int:
    """How many documents this process had to tokenize."""
    lab.said.clear()
    choice = Choice(tokenizer)
    make(wanted(lab.cache, corpus, choice), "full", lab.said.append, ONE_DOCUMENT_A_TASK)
    return choice.tokenizer.num_texts


def files_of(store: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in store.iterdir()}


@pytest.fixture
def undisturbed(lab: Lab, corpus: Path, tokenizer: Path) -> dict[str, bytes]:
    other = Lab(lab.dir / "other")
    other.dir.mkdir()
    assert build(other, corpus, tokenizer) == NUM_DOCUMENTS
    (store,) = other.stores()
    return files_of(store)


@pytest.mark.parametrize("done", [2, 10, 18])
def test_a_killed_build_goes_on_where_it_was_and_ends_with_the_same_bytes(
    lab: Lab, corpus: Path, tokenizer: Path, undisturbed: dict[str, bytes], done: int
) -> None:
    kill(gated(lab, corpus, tokenizer, done))
    assert (lab.stores(), lab.views()) == ([], [])
    assert build(lab, corpus, tokenizer) == NUM_DOCUMENTS - done
    assert any("going on after" in line for line in lab.said)
    assert any(f"{NUM_DOCUMENTS} x document with CR line ends" in line for line in lab.said)
    (store,) = lab.stores()
    assert files_of(store) == undisturbed
    assert lab.unfinished() == []


def test_twice_killed_is_gone_on_with_twice(
    lab: Lab, corpus: Path, tokenizer: Path, undisturbed: dict[str, bytes]
) -> None:
    kill(gated(lab, corpus, tokenizer, 5))
    kill(gated(lab, corpus, tokenizer, 6))  # counted anew by the second process: 11 in all
    assert build(lab, corpus, tokenizer) == NUM_DOCUMENTS - 11
    (store,) = lab.stores()
    assert files_of(store) == undisturbed


@pytest.mark.parametrize(("gate", "stores"), [("rename", 0), ("renamed", 1)])
def test_a_kill_around_the_rename_leaves_a_whole_store_or_none(
    lab: Lab,
    corpus: Path,
    tokenizer: Path,
    undisturbed: dict[str, bytes],
    gate: str,
    stores: int,
) -> None:
    kill(gated(lab, corpus, tokenizer, gate))
    assert len(lab.stores()) == stores
    assert lab.views() == []
    build(lab, corpus, tokenizer)
    (store,) = lab.stores()
    assert files_of(store) == undisturbed


def test_what_lies_behind_the_last_note_is_not_trusted(
    lab: Lab, corpus: Path, tokenizer: Path, undisturbed: dict[str, bytes]
) -> None:
    kill(gated(lab, corpus, tokenizer, 10))
    (left,) = lab.unfinished()
    for name in ("tokens-00000.bin", "documents.bin"):
        with (left / name).open("ab") as file:
            file.write(b"half a write")
    for name in ("tokens-00009.bin", ".unfinished.json.0badcafe.tmp"):
        (left / name).write_bytes(b"never finished")
    assert build(lab, corpus, tokenizer) == NUM_DOCUMENTS - 10
    (store,) = lab.stores()
    assert files_of(store) == undisturbed


def test_a_changed_byte_of_what_was_finished_is_not_gone_on_with(
    lab: Lab, corpus: Path, tokenizer: Path, undisturbed: dict[str, bytes]
) -> None:
    kill(gated(lab, corpus, tokenizer, 10))
    (left,) = lab.unfinished()
    shard = left / "tokens-00000.bin"
    content = bytearray(shard.read_bytes())
    content[3] ^= 1
    shard.write_bytes(content)
    assert build(lab, corpus, tokenizer) == NUM_DOCUMENTS
    (store,) = lab.stores()
    assert files_of(store) == undisturbed


def test_what_another_key_left_is_never_used(lab: Lab, corpus: Path, tokenizer: Path) -> None:
    kill(gated(lab, corpus, tokenizer, 10))
    (left,) = lab.unfinished()
    note = json.loads((left / UNFINISHED).read_text())
    (left / UNFINISHED).write_text(json.dumps({**note, "hash": "0" * 64}))
    assert build(lab, corpus, tokenizer) == NUM_DOCUMENTS


@dataclass
class Streamed:
    """A text that comes in one piece, and may break off."""

    texts: list[str]
    whole: bool
    name = label = "streamed"
    size_bytes = None
    endless = False

    def identity(self) -> dict[str, Any]:
        return {"kind": "streamed"}

    def documents(self, repairs: Repairs) -> Iterator[str]:
        yield from self.texts if self.whole else self.texts[:-1]
        if not self.whole:
            raise BrokenOffError("streamed: the line is dead")


def test_a_stream_that_broke_off_is_gone_on_with(lab: Lab, tokenizer: Path) -> None:
    texts = [f"{number} " + WORDS * 16_000 for number in range(2)]  # each a batch
    choice = Choice(tokenizer)
    broken, whole = (
        CacheRequest(lab.cache, Streamed(texts, whole), choice, 16, None) for whole in (False, True)
    )
    with pytest.raises(BrokenOffError):
        make(broken, "size", lab.said.append, ONE_DOCUMENT_A_TASK)
    (left,) = lab.unfinished()
    assert json.loads((left / UNFINISHED).read_text())["num_documents"] == 1
    key = left.name.split("-")[1]
    left.rename(lab.cache / f".tmp-{key}-{publish.place_id()}-{os.getpid()}-1-0")  # of the dead
    make(whole, "size", lab.said.append, ONE_DOCUMENT_A_TASK)
    assert any("going on after" in line for line in lab.said)
    assert lab.unfinished() == []


def test_a_living_builder_is_not_robbed(lab: Lab, corpus: Path, tokenizer: Path) -> None:
    """Its lock file is deleted, so a second builder comes in: the work is done twice, once kept."""
    first = gated(lab, corpus, tokenizer, 10)
    for lock in (lab.cache / ".locks").glob("*.lock"):
        lock.unlink()
    assert build(lab, corpus, tokenizer) == NUM_DOCUMENTS
    output, _ = first.communicate(timeout=DEADLINE_S)
    assert first.returncode == 0, output
    assert f"tokenized {NUM_DOCUMENTS} documents" in output
    assert len(lab.stores()) == len(lab.views()) == 1
    assert lab.unfinished() == []


def test_left_over_work_waits_a_week_and_no_longer(lab: Lab, corpus: Path, tokenizer: Path) -> None:
    kill(gated(lab, corpus, tokenizer, 10))
    (left,) = lab.unfinished()
    publish.sweep(lab.cache)
    assert left.is_dir()
    os.utime(left / UNFINISHED, (1, 1))
    publish.sweep(lab.cache)
    assert not left.exists()


def test_who_waits_is_told_how_far_it_is(lab: Lab, corpus: Path, tokenizer: Path) -> None:
    first = gated(lab, corpus, tokenizer, 10)
    (status,) = (lab.cache / ".locks").glob("*.status.json")
    told = json.loads(status.read_text())
    assert told["pid"] == first.pid
    kill(first)
