"""What another user lays into a shared cache (links, pipes, directories in place of others) leads
nowhere: nothing of ours outside is read, written, changed or deleted, and nothing hangs. Each
attack alone, at its exact moment; all of them at once are in `test_hostile_user`."""

import json
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import UnixFileLock

from model_check.config.prepared_dir import read_metadata
from model_check.data.build.make import make
from model_check.data.build.request import CacheRequest
from model_check.data.cache import publish
from model_check.data.cache.memo import Memo
from model_check.data.cache.publish import UNFINISHED
from model_check.data.read.manifest import MANIFEST, CorruptEntryError, read_view, shard_name
from model_check.data.read.sharing import hold_cache
from model_check.data.read.token_cache import TokenCache
from model_check.data.sources.text import Repairs
from model_check.errors import ConfigError, DataError, StorageError
from tests.data.canary import NAMES, make_private, state_of, untouched
from tests.data.gated_builder import Choice
from tests.data.lab import WORDS, Lab, build_here, run_tool, start_builder, write_tokenizer

ANOTHER_USER = 65534
needs_root = pytest.mark.root


@pytest.fixture
def private(tmp_path: Path) -> Path:
    return make_private(tmp_path / "private")


@pytest.fixture
def shared(lab: Lab) -> Lab:
    lab.cache.mkdir()
    lab.cache.chmod(0o777)
    return lab


@pytest.fixture
def key(lab: Lab) -> str:
    """Of the token store that `build` makes."""
    other = Lab(lab.dir / "other")
    other.prepare(lab.text())
    (store,) = other.stores()
    return store.name


def build(lab: Lab, *arguments: str) -> tuple[int, str]:
    """One that hangs is an error."""
    code, output = build_here(lab.cache, lab.text(), *arguments)
    assert code == 0 or output.count("error: ") == 1, output
    return code, output


# Links that lie there before


def test_a_link_in_place_of_the_status_file_is_replaced(
    shared: Lab, key: str, private: Path
) -> None:
    (shared.cache / ".locks").mkdir()
    (shared.cache / ".locks" / f"{key}.status.json").symlink_to(private / "canary.txt")
    with untouched(private):
        code, output = build(shared)
    assert code == 0, output


def test_a_hard_link_in_place_of_the_status_file_is_replaced(
    shared: Lab, key: str, private: Path
) -> None:
    (shared.cache / ".locks").mkdir()
    os.link(private / "canary.txt", shared.cache / ".locks" / f"{key}.status.json")
    with untouched(private):
        code, output = build(shared)
    assert code == 0, output


def test_a_link_in_place_of_the_lock_file_is_no_lock(shared: Lab, key: str, private: Path) -> None:
    (shared.cache / ".locks").mkdir()
    (shared.cache / ".locks" / f"{key}.lock").symlink_to(private / "canary.txt")
    with untouched(private):
        code, output = build(shared)
    assert code == 0, output
    assert "no lock in" in output


@pytest.mark.parametrize("kind", ["hard link", "file", "pipe"])
def test_what_lies_in_place_of_the_lock_file_stays_as_it_is(
    shared: Lab, key: str, private: Path, kind: str
) -> None:
    """Neither emptied nor given other rights; a file is a lock whoever made it."""
    (shared.cache / ".locks").mkdir()
    (shared.cache / ".locks").chmod(0o777)
    lock = shared.cache / ".locks" / f"{key}.lock"
    if kind == "hard link":
        os.link(private / "canary.txt", lock)
    elif kind == "pipe":
        os.mkfifo(lock, 0o600)
    else:
        lock.write_text("of somebody")
        lock.chmod(0o600)
    before = lock.stat()
    with untouched_content(private):
        code, output = build(shared)
    assert code == 0, output
    assert ("no lock in" in output) == (kind != "file")
    after = lock.stat()
    assert (after.st_mode, after.st_size) == (before.st_mode, before.st_size)
    assert after.st_mtime_ns == before.st_mtime_ns


@contextmanager
def untouched_content(directory: Path) -> Iterator[None]:
    """Opening a hard link to find that it is one is an access, too."""
    before = state_of(directory)
    yield
    assert state_of(directory) == before


@pytest.mark.parametrize("name", [".locks", ".memo"])
def test_a_link_in_place_of_a_directory_is_done_without(
    shared: Lab, private: Path, name: str
) -> None:
    (shared.cache / name).symlink_to(private)
    tokenizer = write_tokenizer(shared.dir / "tokenizer.json")
    with untouched(private):
        Memo(shared.cache).put("signature", "value")
        code, output = build(shared, f"data.tokenizer={tokenizer}")
    assert code == 0, output
    assert Memo(shared.cache).get("signature") == ("value" if name == ".locks" else None)


def test_a_link_in_place_of_the_stores_is_an_error_in_one_line(shared: Lab, private: Path) -> None:
    (shared.cache / "tokens").symlink_to(private)
    with untouched(private):
        code, output = build(shared)
    assert code == 2
    assert (
        f"{shared.cache}: cannot be written: is no directory ({shared.cache}/tokens is a link"
        in output
    )


@pytest.mark.parametrize("part", ["stores", "views"])
def test_a_link_in_place_of_an_entry_is_set_aside(shared: Lab, private: Path, part: str) -> None:
    """It leads to a whole entry of ours, which is not for this cache."""
    shared.prepare(shared.text())
    (entry,) = getattr(shared, part)()
    own = entry.rename(private / entry.name)
    entry.symlink_to(own)
    with untouched(private):
        code, output = build(shared)
        assert build(shared)[0] == 0
    assert code == 0, output
    assert "set aside as" in output
    assert entry.is_dir()
    assert not entry.is_symlink()
    (aside,) = shared.cache.glob(".bad-*")
    assert aside.is_symlink()


# In a cache that its owner alone writes


ENTRIES = ("tokens", "tokens/*", "*__*")
FILES = (f"tokens/*/{shard_name(0)}", f"tokens/*/{MANIFEST}", "tokens/*/tokenizer.json")


def link_elsewhere(lab: Lab, which: str) -> Path:
    (lab.dir / "disk").mkdir()
    (path,) = lab.cache.glob(which)
    path.symlink_to(path.rename(lab.dir / "disk" / path.name))
    return path


@pytest.mark.parametrize("which", [*ENTRIES, *FILES])
def test_ones_own_link_in_a_cache_of_ones_own_is_followed(lab: Lab, which: str) -> None:
    """`tokens` on a larger disk, a store on another, the links of DVC and git-annex."""
    lab.prepare(lab.text())
    link = link_elsewhere(lab, which)
    for wish in (("data.verify=full",), ("--verify",), ("--list",)):
        code, output = build(lab, *wish)
        assert code == 0, output
        assert ("data: found" in output) == (wish[0] == "data.verify=full"), output
    assert TokenCache.open(lab.views()[0], "full").num_sequences
    assert link.is_symlink()
    assert not list(lab.cache.glob(".bad-*"))


@pytest.mark.parametrize("which", ["tokens", "tokens/*", f"tokens/*/{shard_name(0)}"])
def test_a_link_of_ones_own_that_leads_nowhere_is_named(lab: Lab, which: str) -> None:
    """A disk that is not mounted; what is on it stays the cache's."""
    lab.prepare(lab.text())
    link = link_elsewhere(lab, which)
    (lab.dir / "disk").rename(lab.dir / "unmounted")
    code, output = build(lab)
    assert code == 2
    assert f"the link {link} leads to {lab.dir}/disk/{link.name}: No such file" in output
    assert link.is_symlink()


def test_what_is_removed_of_a_link_of_ones_own_is_the_link(lab: Lab) -> None:
    lab.prepare(lab.text())
    link = link_elsewhere(lab, "*__*")
    assert build(lab, "--gc", "--older-than", "0")[0] == 0
    assert not link.is_symlink()
    assert (lab.dir / "disk" / link.name / MANIFEST).is_file()


@needs_root
@pytest.mark.parametrize("which", [*ENTRIES, *FILES])
def test_another_users_link_in_a_cache_of_ones_own_is_not_followed(lab: Lab, which: str) -> None:
    """Made while the directory was open to others."""
    lab.prepare(lab.text())
    link = link_elsewhere(lab, which)
    os.lchown(link, ANOTHER_USER, ANOTHER_USER)
    with pytest.raises(DataError, match="is a link that another user may have made"):
        TokenCache.open(lab.views()[0])


@needs_root
def test_a_link_in_another_users_directory_is_not_followed(shared: Lab, private: Path) -> None:
    """Nobody else may write to that, but it lies in a cache that its owner may write to."""
    planted = shared.cache / "tokens"
    planted.mkdir(mode=0o755)
    (planted / "0123456789abcdef").symlink_to(private / "deep")
    for path in (planted, planted / "0123456789abcdef"):
        os.lchown(path, ANOTHER_USER, ANOTHER_USER)
    with untouched(private):
        for wish in ("--list", "--verify", "--gc"):
            assert "Traceback" not in start_builder(shared.cache, "embedded", wish).finish()[1]


@needs_root
@pytest.mark.parametrize("user", ["root", "bob"])
def test_the_owner_of_a_prepared_directory_may_link_its_data_elsewhere(lab: Lab, user: str) -> None:
    """Whoever else uses it: nobody but its owner can have made that link."""
    out = lab.dir / "out"
    lab.prepare(lab.text(), f"data.output_dir={out}")
    (out / "dataset").rename(lab.dir / "disk")
    lab.dir.chmod(0o755)
    (out / "dataset").symlink_to("../disk")
    alice = 61_114
    for path in (out, out / "dataset"):
        os.chown(path, alice, alice, follow_symlinks=False)
    held = run_as(0 if user == "root" else 61_115, out / "dataset")
    assert held == os.stat(lab.dir / "disk").st_ino


def run_as(uid: int, root: Path) -> int:
    """The inode of the cache that is held, by a process of that user."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.chdir(root.parents[1])
            os.setresuid(uid, uid, uid)
            with hold_cache(Path(root.parent.name) / root.name) as cache:
                os.write(writing, str(cache.status().st_ino).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as answer:
        return int(answer.read() or -1)


def test_a_cache_directory_named_dataset_may_be_a_link(lab: Lab) -> None:
    (lab.dir / "disk").mkdir()
    (lab.dir / "dataset").symlink_to(lab.dir / "disk")
    for _ in range(2):
        assert build(lab, f"data.cache_dir={lab.dir / 'dataset'}")[0] == 0


# Entries under other names


@pytest.mark.parametrize("verify", ["off", "size", "full"])
@pytest.mark.parametrize("part", ["view", "store"])
def test_an_entry_under_the_name_of_another_one_is_not_taken(
    shared: Lab, verify: str, part: str
) -> None:
    """All files are whole and our own: nothing else would tell that the tokens are of another
    text."""
    texts = [shared.text(WORDS * 20), shared.text(WORDS.upper() * 20, "other.txt")]
    paths = [shared.prepare(text).path for text in texts]
    right = TokenCache.open(paths[0]).gather(np.array([0]))
    first, second = paths if part == "view" else shared.stores()
    away = shared.dir / "away"
    for source, target in ((first, away), (second, first), (away, second)):
        source.rename(target)
    prepared = shared.prepare(texts[0], f"data.verify={verify}")
    assert np.array_equal(TokenCache.open(prepared.path).gather(np.array([0])), right)
    assert not prepared.hit
    assert any("is of another entry" in line for line in shared.said)


# Links in an entry that others may write to


@pytest.mark.parametrize("verify", ["off", "size", "full"])
@pytest.mark.parametrize("file", [shard_name(0), "documents.bin", MANIFEST])
def test_a_link_in_place_of_a_file_is_not_trained_on(
    shared: Lab, private: Path, verify: Any, file: str
) -> None:
    path = shared.prepare(shared.text()).path
    (store,) = shared.stores()
    own = (store / file).rename(private / "own")
    (store / file).symlink_to(own)

    def train() -> None:
        cache = TokenCache.open(path, verify)
        cache.gather(np.array([0]))
        cache.documents(np.array([0]))

    with (
        untouched(private),
        pytest.raises(DataError, match="is a link that another user may have made"),
    ):
        train()


def test_a_hard_link_in_place_of_a_file_is_not_trained_on(shared: Lab, private: Path) -> None:
    path = shared.prepare(shared.text()).path
    (store,) = shared.stores()
    own = (store / shard_name(0)).rename(private / "own")
    os.link(own, store / shard_name(0))
    with pytest.raises(DataError, match="is a hard link, which another user may have made"):
        TokenCache.open(path)


def test_in_a_cache_of_ones_own_a_hard_link_is_a_file(lab: Lab) -> None:
    """`cp -al` makes such a copy."""
    path = lab.prepare(lab.text()).path
    (store,) = lab.stores()
    os.link(store / shard_name(0), lab.dir / "copy")
    assert TokenCache.open(path, "full").num_sequences


def test_a_cache_directory_of_ones_own_may_be_a_link(lab: Lab) -> None:
    (lab.dir / "disk").mkdir()
    lab.cache.symlink_to(lab.dir / "disk")
    assert build(lab)[0] == 0
    assert "data: found" in build(lab)[1]


def test_what_a_manifest_names_outside_of_its_entry_is_not_read(shared: Lab, private: Path) -> None:
    shared.prepare(shared.text())
    (store,) = shared.stores()
    manifest = json.loads((store / MANIFEST).read_text())
    size = (private / "canary.txt").stat().st_size
    manifest["files"]["../../../private/canary.txt"] = {"size": size, "sha256": "0" * 64}
    (store / MANIFEST).write_text(json.dumps(manifest))
    with untouched(private):
        code, output = build(shared, "data.verify=full")
    assert code == 0, output
    assert "is no name of a file here; set aside" in output


# Unfinished directories


def plant_dead(shared: Lab, key: str) -> Path:
    return shared.cache / f".tmp-{key}-{publish.place_id()}-{os.getpid()}-1-0"


def test_a_link_in_place_of_an_unfinished_directory_is_not_gone_on_with(
    shared: Lab, key: str, private: Path
) -> None:
    plant_dead(shared, key).symlink_to(private)
    with untouched(private):
        code, output = build(shared)
    assert code == 0, output


def test_an_unfinished_directory_that_others_may_write_to_is_not_gone_on_with(
    shared: Lab, key: str
) -> None:
    left = plant_dead(shared, key)
    left.mkdir()
    (left / UNFINISHED).write_text("{}")
    left.chmod(0o777)
    with publish.staging(shared.cache, key, resume=True) as directory:
        assert directory.names() == []
    assert left.is_dir()


def test_a_pipe_in_place_of_an_unfinished_directory_hangs_nobody(shared: Lab, key: str) -> None:
    os.mkfifo(plant_dead(shared, key))
    assert build(shared)[0] == 0


@dataclass
class Swapping:
    """A text whose second document takes a moment, in which somebody does something."""

    then: Callable[[], None]
    name = label = "swapping"
    size_bytes = None
    endless = False

    def identity(self) -> dict[str, Any]:
        return {"kind": "swapping"}

    def documents(self, repairs: Repairs) -> Iterator[str]:
        yield WORDS
        self.then()
        yield WORDS


def swap_for_link(shared: Lab, private: Path) -> None:
    (staging,) = shared.unfinished()
    staging.rename(shared.cache / "stolen")
    staging.symlink_to(private)


def make_swapping(shared: Lab, then: Callable[[], None]) -> None:
    choice = Choice(write_tokenizer(shared.dir / "tokenizer.json"))
    make(CacheRequest(shared.cache, Swapping(then), choice, 16, None), "size", shared.said.append)


def test_a_staging_directory_swapped_while_the_text_is_tokenized_is_not_left(
    shared: Lab, private: Path
) -> None:
    with (
        untouched(private),
        pytest.raises(StorageError, match=r"another user replaced .tmp-\w+-.*; set data.cache_dir"),
    ):
        make_swapping(shared, lambda: swap_for_link(shared, private))
    assert {path.name for path in private.iterdir()} == {*NAMES, "deep"}


def test_a_directory_swapped_in_for_the_staging_one_is_not_deleted(shared: Lab) -> None:
    def swap() -> None:
        (staging,) = shared.unfinished()
        staging.rename(shared.cache / "stolen")
        staging.mkdir()
        (staging / "work").write_text("of somebody")

    with pytest.raises(StorageError, match="another user replaced"):
        make_swapping(shared, swap)
    assert [path.read_text() for path in shared.stores()[0].iterdir()] == ["of somebody"]


def test_what_is_published_is_what_was_filled(shared: Lab) -> None:
    final = shared.cache / "entry"

    def publish_swapped() -> None:
        with publish.staging(shared.cache, "key") as directory:
            (staging,) = shared.unfinished()
            staging.rename(shared.cache / "stolen")
            staging.mkdir()
            publish.publish(directory, final)

    with pytest.raises(StorageError, match="another user replaced"):
        publish_swapped()


def test_the_end_of_a_build_deletes_by_the_directory_not_by_its_name(shared: Lab) -> None:
    with publish.staging(shared.cache, "key"):
        (staging,) = shared.unfinished()
        staging.rename(shared.cache / "stolen")
        staging.mkdir()
        (staging / "work").write_text("of somebody")
    assert (staging / "work").read_text() == "of somebody"


def test_in_a_staging_directory_nobody_else_may_write(shared: Lab) -> None:
    before = os.umask(0)
    try:
        with publish.staging(shared.cache, "key"):
            (staging,) = shared.unfinished()
            assert stat.S_IMODE(staging.stat().st_mode) == 0o755
    finally:
        os.umask(before)


@pytest.mark.parametrize("kind", ["link", "pipe", "file"])
def test_a_name_taken_while_the_entry_was_built_is_an_error_in_one_line(
    shared: Lab, private: Path, kind: str
) -> None:
    def take() -> None:
        (staging,) = shared.unfinished()
        final = shared.cache / "tokens" / staging.name.split("-")[1]
        if kind == "link":
            final.symlink_to(private)
        elif kind == "pipe":
            os.mkfifo(final)
        else:
            final.write_text("a file")

    with untouched(private), pytest.raises(DataError, match="cannot be read: is no directory"):
        make_swapping(shared, take)


# Pipes


@pytest.mark.parametrize(
    ("part", "name"),
    [("stores", shard_name(0)), *product(("stores", "views"), (MANIFEST, ""))],
)
def test_a_pipe_in_an_entry_hangs_nobody(shared: Lab, part: str, name: str) -> None:
    shared.prepare(shared.text())
    (entry,) = getattr(shared, part)()
    if name:
        (entry / name).unlink()
    else:
        shutil.rmtree(entry)
    os.mkfifo(entry / name)
    for wish in (["--list"], ["data.verify=full"], ["data.verify=full"], ["--verify"], ["--gc"]):
        code, output = build(shared, *wish)
        assert code == 0, output


def test_a_pipe_in_place_of_the_status_file_hangs_nobody_who_waits(shared: Lab, key: str) -> None:
    locks = shared.cache / ".locks"
    locks.mkdir()
    os.mkfifo(locks / f"{key}.status.json")
    with UnixFileLock(locks / f"{key}.lock"):
        builder = start_builder(shared.cache, shared.text())
        builder.wait_for("waiting for another process, which prepares this data")
    assert builder.finish()[0] == 0


@pytest.mark.parametrize("content", ["[]", "[" * 4096, '"pid"', '{"pid": 1}', "9" * 4096])
def test_what_is_no_status_names_nobody(shared: Lab, key: str, content: str) -> None:
    locks = shared.cache / ".locks"
    locks.mkdir()
    (locks / f"{key}.status.json").write_text(content)
    with UnixFileLock(locks / f"{key}.lock"):
        builder = start_builder(shared.cache, shared.text())
        builder.wait_for("waiting for another process, which prepares this data")
    assert builder.finish()[0] == 0


def test_what_a_status_file_says_cannot_move_the_cursor(shared: Lab, key: str) -> None:
    locks = shared.cache / ".locks"
    locks.mkdir()
    status = {"pid": 1, "host": "\x1b[2J\x1b]0;owned\x07", "progress": "\r\n99 %"}
    (locks / f"{key}.status.json").write_text(json.dumps(status))
    with UnixFileLock(locks / f"{key}.lock"):
        builder = start_builder(shared.cache, shared.text())
        builder.wait_for(r"waiting for process 1 on \x1b[2J\x1b]0;owned\x07, which prepares this")
    assert builder.finish()[0] == 0


# Looking after it


def test_listing_verifying_and_collecting_follow_no_link(shared: Lab, private: Path) -> None:
    shared.prepare(shared.text())
    hexadecimal = "0123456789abcdef"
    for name in (
        f"link__{hexadecimal}",
        f"tokens/{hexadecimal}",
        ".bad-20260101T000000-1-x",
        plant_dead(shared, hexadecimal).name,
    ):
        (shared.cache / name).symlink_to(private)
    with untouched(private):
        assert build(shared, "--list")[0] == 0
        assert build(shared, "--verify")[0] == 2
        code, output = build(shared, "--gc", "--older-than", "0")
    assert code == 0, output
    assert not any(path.is_symlink() for path in shared.cache.rglob("*"))


def test_a_name_that_holds_escapes_does_not_reach_the_terminal(shared: Lab) -> None:
    (shared.cache / "\x1b[2J__0123456789abcdef").mkdir()
    for wish in ("--list", "--verify", "--gc"):
        assert "\x1b" not in start_builder(shared.cache, "embedded", wish).finish()[1]


@pytest.fixture
def nested(shared: Lab) -> Iterator[Lab]:
    """A cache with directories a thousand deep."""
    here = os.open(shared.cache, os.O_RDONLY)
    for name in [".bad-20260101T000000-1-x", *["d"] * 1500]:
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    yield shared
    subprocess.run(["rm", "-rf", str(shared.cache)], check=True)  # pytest's own way recurses


def test_directories_nested_a_thousand_deep_are_no_traceback(nested: Lab) -> None:
    assert build(nested, "--list")[0] == 0
    code, output = build(nested, "--gc")
    assert code == 0, output
    assert not list(nested.cache.glob(".[bt]*"))


@pytest.mark.parametrize("name", ["tokens/\0", "\0", "..", "tokens/x/../y", "tokens/\x1b[2J"])
def test_a_view_that_names_no_store_is_collected_like_any_other(shared: Lab, name: str) -> None:
    view = shared.prepare(shared.text()).path
    manifest = json.loads((view / MANIFEST).read_text())
    (view / MANIFEST).write_text(json.dumps({**manifest, "tokens": name}))
    assert build(shared, "--list")[0] == 0
    code, output = build(shared, "--gc", "--older-than", "0")
    assert code == 0, output
    assert shared.views() == shared.stores() == []


def test_what_cannot_be_removed_is_named_and_stays_as_it_is(shared: Lab) -> None:
    """A directory that others fill while it is emptied; here: one that something is mounted on, or
    that the file system protects."""
    first, last = (shared.cache / f".bad-2026010{day}T000000-1-x" for day in (1, 2))
    (first / "a").mkdir(parents=True)
    last.mkdir()
    with immutable(first):
        for _ in range(2):
            code, output = build(shared, "--gc")
            assert code == 2, output
            assert f"left    {first.name}: cannot be removed: Operation not permitted" in output
            assert "1 entries cannot be removed" in output
            last.mkdir(exist_ok=True)
    assert not shared.unfinished()


@contextmanager
def immutable(path: Path) -> Iterator[None]:
    if subprocess.run(["chattr", "+i", str(path)], capture_output=True).returncode:
        pytest.skip("the file system has no immutable files")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", str(path)], check=True)


@pytest.mark.parametrize("wish", [(), ("data.force_preprocess=true",)])
def test_forged_manifests_are_no_traceback(shared: Lab, wish: tuple[str, ...]) -> None:
    def rebuilt() -> tuple[int, str]:
        for aside in shared.cache.glob(".bad-*"):  # named by process and second
            shutil.rmtree(aside)
        return build(shared, *wish)

    shared.prepare(shared.text())
    (store,), (view,) = shared.stores(), shared.views()
    for entry, changes in (
        (store, {"shard_tokens": 0}),
        (store, {"num_tokens": 10**15, "shard_tokens": 1}),
        (store, {"num_documents": -1}),
        (view, {"num_sequences": 10**9}),
        (view, {"context_length": 10**15, "tail": "pad"}),
        (view, {"tokens": ".."}),
        (view, {"tokens": "tokens/\0"}),
    ):
        good = (entry / MANIFEST).read_text()
        (entry / MANIFEST).write_text(json.dumps({**json.loads(good), **changes}))
        code, output = rebuilt()
        assert code == 0, (changes, output)
        assert "data: prepared" in output, changes
    (view / MANIFEST).write_bytes(b'{"a":' * 100_000)
    assert rebuilt()[0] == 0
    (view / MANIFEST).write_bytes(b"")
    os.truncate(view / MANIFEST, 1 << 40)
    assert rebuilt()[0] == 0


def test_a_view_that_names_itself_as_its_split_does_not_recurse(shared: Lab) -> None:
    path = shared.prepare(shared.text()).path
    manifest = json.loads((path / MANIFEST).read_text())
    split = {"num_sequences": 1, "num_tokens": 20, "num_documents": 1, "view": path.name}
    (path / MANIFEST).write_text(json.dumps({**manifest, "splits": {"held": split}}))
    view, _ = read_view(path, "full")
    assert list(view.splits) == ["held"]


# Prepared directories


@pytest.fixture
def prepared(lab: Lab) -> Path:
    out = lab.dir / "out"
    out.mkdir()
    out.chmod(0o777)
    return out


@needs_root
@pytest.mark.parametrize("link", ["dataset", "dataset/tokens", "dataset/.locks"])
def test_a_prepared_directory_is_not_laid_out_through_another_users_link(
    lab: Lab, prepared: Path, private: Path, link: str
) -> None:
    (prepared / link).parent.mkdir(exist_ok=True)
    (prepared / link).symlink_to(private)
    os.lchown(prepared / link, ANOTHER_USER, ANOTHER_USER)
    with untouched(private):
        code, output = run_tool(
            *("--input_dir", lab.text(), "--output-dir", prepared, "--max_length", 16),
            *("--tokenizer_type", "bpe", "--vocab_size", 300),
        )
    assert "Traceback" not in output
    assert code == (0 if link.endswith(".locks") else 2), output


def test_the_data_of_a_prepared_directory_may_lie_behind_a_link_of_ones_own(
    lab: Lab, prepared: Path
) -> None:
    (lab.dir / "disk").mkdir()
    (prepared / "dataset").symlink_to(lab.dir / "disk")
    for _ in range(2):
        lab.prepare(lab.text(), f"data.output_dir={prepared}")
    assert any((lab.dir / "disk" / "tokens").iterdir())


@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize("name", ["tokenizer.json", "metadata.json"])
def test_what_is_planted_in_a_prepared_directory_is_refused_or_replaced(
    lab: Lab, prepared: Path, private: Path, kind: str, name: str
) -> None:
    flags = ("--output-dir", str(prepared), "--tokenizer_type", "bpe", "--vocab_size", "300")
    code, output = run_tool("--input_dir", lab.text(), *flags, "--max_length", "16")
    assert code == 0, output
    (prepared / name).unlink()
    if kind == "link":
        (prepared / name).symlink_to(private / name.replace("metadata", "manifest"))
    else:
        os.mkfifo(prepared / name)
    with untouched(private):
        code, output = run_tool("--input_dir", lab.text(), *flags, "--max_length", "16")
        assert code == (2 if name == "metadata.json" else 0), output
        again = (*flags, "--max_length", "16", "--force-preprocess")
        code, output = run_tool("--input_dir", lab.text(), *again)
    assert code == 0, output
    assert (prepared / name).is_file()
    assert not (prepared / name).is_symlink()


def test_a_pipe_in_place_of_the_metadata_hangs_nobody(prepared: Path) -> None:
    (prepared / "dataset").mkdir()
    os.mkfifo(prepared / "metadata.json")
    with pytest.raises(ConfigError, match="is no plain file"):
        read_metadata(prepared)


def test_a_corrupt_entry_says_what_it_is(shared: Lab, private: Path) -> None:
    (shared.cache / "view").symlink_to(private)
    with untouched(private), pytest.raises(CorruptEntryError, match="view: cannot be read: is no"):
        read_view(shared.cache / "view", "size")
