"""Whatever happens to builders, an entry is whole or not there."""

import errno
import gzip
import json
import os
import random
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import UnixFileLock

from model_check.data.cache import publish
from model_check.data.cache.publish import PlaceError, storage_errors
from model_check.data.read.manifest import MANIFEST, shard_name
from model_check.errors import StorageError
from tests.data.lab import ROOT, WORDS, Lab, build_here, snapshot, start_builder, write_tokenizer

GATED = str(ROOT / "tests/data/gated_program.py")


def long_text(lab: Lab, name: str = "long.jsonl") -> Path:
    """Takes a builder a second or more."""
    words = [f"w{number}" for number in range(5000)]
    chosen = random.Random(1).choices(words, k=250_000)
    parts = [" ".join(chosen[start : start + 1000]) for start in range(0, len(chosen), 1000)]
    return lab.text("\n".join(json.dumps({"text": part}) for part in parts), name)


def test_many_builders_at_once_build_once(lab: Lab) -> None:
    text = lab.text(WORDS * 5000)
    builders = [
        start_builder(lab.cache, text, "--result", str(lab.dir / f"{number}.json"))
        for number in range(4)
    ]
    ends = [builder.finish() for builder in builders]
    assert [code for code, _ in ends] == [0] * 4
    assert sum("data: preparing" in output for _, output in ends) == 1
    results = [json.loads((lab.dir / f"{number}.json").read_text()) for number in range(4)]
    assert len({result["path"] for result in results}) == 1
    assert len(lab.stores()) == len(lab.views()) == 1
    assert not lab.unfinished()


def test_who_waits_says_for_whom(lab: Lab) -> None:
    text = lab.text()
    lab.prepare(text)
    (lock,) = (lab.cache / ".locks").glob("*.lock")
    other = lab.dir / "other"
    locks = other / ".locks"
    locks.mkdir(parents=True)
    held = UnixFileLock(locks / lock.name)
    with held:
        (locks / f"{lock.stem}.status.json").write_text('{"pid": 4711, "host": "node7"}')
        builder = start_builder(other, text)
        builder.wait_for("waiting for process 4711 on node7, which prepares this data")
    assert builder.finish()[0] == 0


def test_an_unusable_lock_is_said_and_the_work_is_done(lab: Lab) -> None:
    lab.cache.mkdir()
    (lab.cache / ".locks").write_text("a file where the directory belongs")
    assert not lab.prepare(lab.text()).hit
    assert "no lock in" in lab.said[0]
    assert lab.prepare(lab.text()).hit


@pytest.mark.parametrize("error", ["ENOSYS", "ENOLCK", "EOPNOTSUPP"])
def test_where_flock_fails_builders_race_and_one_wins(lab: Lab, error: str) -> None:
    """By a seccomp filter: the system call itself is refused, as on an NFS without locks."""
    text = lab.text(WORDS * 2000)
    without = [sys.executable, str(ROOT / "tests/data/without_flock.py"), error, GATED]
    builders = [start_builder(lab.cache, text, program=without) for _ in range(2)]
    for builder in builders:
        builder.wait_for("at the gate")
    for builder in builders:
        code, output = builder.finish()
        assert code == 0, output
        assert "no lock in" in output
    assert len(lab.stores()) == len(lab.views()) == 1
    assert not lab.unfinished()


def test_a_killed_builder_leaves_no_entry_and_the_next_one_finishes(lab: Lab) -> None:
    text = long_text(lab)
    builder = start_builder(lab.cache, text, program=[sys.executable, GATED])
    builder.wait_for("at the gate")
    builder.process.kill()
    assert builder.finish()[0] == -signal.SIGKILL
    assert (lab.stores(), lab.views()) == ([], [])
    (left,) = lab.unfinished()
    code, output = build_here(lab.cache, text)
    assert code == 0, output
    assert not left.exists()
    assert len(lab.stores()) == len(lab.views()) == 1


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_builder_and_leaves_no_entry(lab: Lab, signum: int, code: int) -> None:
    builder = start_builder(lab.cache, long_text(lab), program=[sys.executable, GATED])
    builder.wait_for("at the gate")
    assert lab.unfinished()
    builder.process.send_signal(signum)
    ended, output = builder.finish()
    assert ended == code
    assert f"stopped by {signal.Signals(signum).name}" in output
    assert (lab.stores(), lab.views()) == ([], [])


def test_directories_of_living_builders_are_not_swept(lab: Lab) -> None:
    lab.cache.mkdir()
    with publish.staging(lab.cache, "key") as ours:
        publish.sweep(lab.cache)
        assert ours.path.is_dir()
    assert not ours.path.exists()


def test_the_directory_of_a_pid_that_lives_again_is_swept(lab: Lab) -> None:
    lab.cache.mkdir()
    pid = os.getpid()
    dead = lab.cache / f".tmp-key-{publish.place_id()}-{pid}-12345-x"
    dead.mkdir()
    publish.sweep(lab.cache)
    assert not dead.exists()


def test_a_young_directory_of_another_machine_stays_and_an_old_one_goes(lab: Lab) -> None:
    lab.cache.mkdir()
    young, old = (lab.cache / f".tmp-key-0badcafe-1-1-{age}" for age in ("young", "old"))
    young.mkdir()
    old.mkdir()
    os.utime(old, (1, 1))
    publish.sweep(lab.cache)
    assert young.is_dir()
    assert not old.exists()


def test_who_renames_second_keeps_the_first_ones_work(lab: Lab) -> None:
    lab.cache.mkdir()
    final = lab.cache / "entry"
    for content, won in (("first", True), ("second", False)):
        with publish.staging(lab.cache, "key") as directory:
            (directory.path / "file").write_text(content)
            assert publish.publish(directory, final) is won
    assert (final / "file").read_text() == "first"


def test_a_changed_byte_is_set_aside_and_built_again(lab: Lab) -> None:
    text = lab.text()
    lab.prepare(text)
    (store,) = lab.stores()
    shard = store / shard_name(0)
    good = shard.read_bytes()
    shard.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert not lab.prepare(text, "data.verify=full").hit
    assert "its content changed" in lab.said[0]
    (aside,) = lab.cache.glob(".bad-*")
    assert str(aside) in lab.said[0]
    assert shard.read_bytes() == good
    assert lab.prepare(text, "data.verify=full").hit


def test_two_who_set_the_same_aside_do_not_disturb_each_other(lab: Lab) -> None:
    entry = lab.text("bad", "cache/entry/file").parent
    first = publish.set_aside(lab.cache, entry)
    publish.set_aside(lab.cache, entry)
    assert list(lab.cache.iterdir()) == [first]


@pytest.mark.parametrize("entry", ["stores", "views"])
def test_an_entry_without_its_manifest_is_built_again(lab: Lab, entry: str) -> None:
    text = lab.text()
    lab.prepare(text)
    (directory,) = getattr(lab, entry)()
    (directory / MANIFEST).unlink()
    assert not lab.prepare(text).hit
    assert lab.prepare(text).hit


def test_a_hit_writes_nothing(lab: Lab) -> None:
    text = lab.text()
    lab.prepare(text)
    before = snapshot(lab.cache)
    assert lab.prepare(text).hit
    assert snapshot(lab.cache) == before


def test_a_hit_works_on_a_read_only_file_system(lab: Lab, small_disk: Path) -> None:
    text = lab.text()
    lab.cache.symlink_to(small_disk)
    lab.prepare(text)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert lab.prepare(text).hit
    with pytest.raises(StorageError, match=r"Read-only file system; set data.cache_dir"):
        lab.prepare(text, "training.context_length=8")


@pytest.mark.parametrize("kind", ["text", "tiny rows", "packed"])
def test_a_disk_that_will_be_too_small_is_refused_at_the_beginning(
    lab: Lab, small_disk: Path, kind: str
) -> None:
    """By what the first part of this text takes, where each document ends included."""
    subprocess.run(["mount", "-o", "remount,size=3m", str(small_disk)], check=True)
    lab.cache.symlink_to(small_disk)
    match kind:
        case "text":
            text = lab.text(f"{WORDS * 20}\n\n" * 3_000)
        case "tiny rows":
            text = lab.text('{"text":"a"}\n' * 400_000, "rows.jsonl")
        case _:
            chance = random.Random(7)
            rows = "".join(f'{{"text": "{chance.randbytes(700).hex()}"}}\n' for _ in range(3_000))
            text = lab.text(gzip.compress(rows.encode()), "rows.jsonl.gz")
    with pytest.raises(StorageError, match=r"needs about [\d.]+ MiB, has [\d.]+ MiB free"):
        lab.prepare(text, f"data.tokenizer={write_tokenizer(lab.dir / 't.json')}")
    assert (lab.stores(), lab.views(), lab.unfinished()) == ([], [], [])


def test_a_text_that_fits_is_not_refused_for_what_its_rows_hold_besides(
    lab: Lab, small_disk: Path
) -> None:
    """All texts of a task are written before the bytes of its lines are counted."""
    lab.cache.symlink_to(small_disk)
    row = json.dumps({"text": WORDS, "more": "x" * 2_000}) + "\n"
    text = lab.text(row * 4_000, "rows.jsonl")
    lab.prepare(text, f"data.tokenizer={write_tokenizer(lab.dir / 't.json')}")


def test_a_disk_that_fills_up_is_named_and_nothing_is_left(lab: Lab, small_disk: Path) -> None:
    lab.cache.symlink_to(small_disk)
    text = lab.text(gzip.compress(long_text(lab).read_bytes(), 1), "long.jsonl.gz")
    with pytest.raises(StorageError, match=rf"{lab.cache}.*: the disk is full \([\d.]+ MiB free\)"):
        lab.prepare(text)
    assert (lab.stores(), lab.views(), lab.unfinished()) == ([], [], [])


def test_a_disk_without_room_for_another_file_is_not_called_full(
    lab: Lab, small_disk: Path
) -> None:
    subprocess.run(["mount", "-o", "remount,nr_inodes=6", str(small_disk)], check=True)
    lab.cache.symlink_to(small_disk)
    with pytest.raises(StorageError, match=r"no room for another file \(no inodes are left\)"):
        lab.prepare(lab.text())


def test_a_limit_of_a_files_size_is_named(lab: Lab) -> None:
    text = long_text(lab)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit[1]))
    try:
        with pytest.raises(StorageError, match=r"no file may have more than 1.0 MiB \(ulimit -f"):
            lab.prepare(text)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def test_a_quota_that_is_used_up_is_named(tmp_path: Path) -> None:
    """A quota takes a disk of its own and the kernel's: the error alone is made up."""
    with (
        pytest.raises(PlaceError, match="your quota on its disk is used up"),
        storage_errors(tmp_path),
    ):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


def test_a_cache_directory_that_cannot_be_made_names_the_cure(lab: Lab) -> None:
    blocked = lab.text("a file", "blocked") / "cache"
    code, output = build_here(blocked, lab.text())
    assert code == 2
    assert output.count("\n") == 1
    assert f"error: {blocked}: cannot be written: Not a directory" in output
    assert "set data.cache_dir (or DATASET_CACHE_DIR)" in output
