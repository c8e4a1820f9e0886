"""prepare_dataset.py --list, --verify, --gc."""

import os
from pathlib import Path

import pytest
from filelock import UnixFileLock

from model_check.data.cache import inventory, publish
from model_check.data.read.manifest import MANIFEST, shard_name
from model_check.utils.held import HeldDirectory, NotPlainError
from tests.data.lab import Lab, build_here, run_tool, snapshot

YEARS_AGO = (1, 1)


def keep_house(lab: Lab, *arguments: str, dataset: str | None = "embedded") -> tuple[int, str]:
    if dataset is None:
        return run_tool(*arguments, f"data.cache_dir={lab.cache}")
    return build_here(lab.cache, dataset, *arguments)


def unused_for_long(*entries: Path) -> None:
    for entry in entries:
        os.utime(entry / MANIFEST, YEARS_AGO)


@pytest.mark.parametrize("wish", ["--list", "--verify"])
def test_a_cache_that_does_not_exist_is_said(lab: Lab, wish: str) -> None:
    code, output = keep_house(lab, wish)
    assert code == 2
    assert output.startswith(f"error: {lab.cache}: no such directory")
    assert output.count("\n") == 1
    assert not lab.cache.exists()


def test_what_another_process_took_away_first_counts_for_that_one_alone(tmp_path: Path) -> None:
    for name in ("entry", ".bad-entry"):
        (tmp_path / name).mkdir()
        taken = [publish.take_away(tmp_path, "key", tmp_path / name) for _ in range(2)]
        assert taken == [True, False]


def flip(shard: Path) -> None:
    content = bytearray(shard.read_bytes())
    content[7] ^= 1
    shard.write_bytes(content)


def test_list_names_every_entry_and_is_no_use_of_it(lab: Lab) -> None:
    lab.prepare(lab.text())
    unused_for_long(*lab.stores(), *lab.views())
    (lab.cache / ".bad-20260101T000000-1-x").mkdir()
    before = snapshot(lab.cache)
    code, output = keep_house(lab, "--list")
    assert code == 0, output
    lines = output.splitlines()
    assert [line.split()[0] for line in lines] == ["view", "tokens", "set", "3"]
    assert lab.views()[0].name in lines[0]
    assert "KiB" in lines[0]
    assert f"sequences of 16 from {lab.stores()[0].name}" in lines[0]
    assert "tokens of notes.txt, bpe300" in lines[1]
    assert snapshot(lab.cache) == before
    assert (lab.stores()[0] / MANIFEST).stat().st_atime == 1


def test_verify_finds_the_changed_byte_and_names_the_file(lab: Lab) -> None:
    lab.prepare(lab.text())
    assert keep_house(lab, "--verify")[0] == 0
    shard = lab.stores()[0] / shard_name(0)
    flip(shard)
    code, output = keep_house(lab, "--verify")
    assert code == 2
    assert f"{shard}: its content changed (sha256 differs)" in output
    assert "error: " in output
    assert "1 of 2 entries are not whole" in output


def test_what_verify_finds_bad_is_set_aside_and_built_again_by_the_next_preparation(
    lab: Lab,
) -> None:
    text = lab.text()
    lab.prepare(text)
    (store,) = lab.stores()
    good = (store / shard_name(0)).read_bytes()
    flip(store / shard_name(0))
    output = keep_house(lab, "--verify")[1]
    (aside,) = lab.cache.glob(".bad-*")
    assert f"set aside as {aside}" in output
    assert not store.exists()
    assert not lab.prepare(text).hit  # data.verify=size
    assert (store / shard_name(0)).read_bytes() == good
    assert keep_house(lab, "--verify")[0] == 0


def test_a_bad_prepared_directory_is_made_again_after_verify(lab: Lab) -> None:
    text, out = lab.text(), lab.dir / "out"
    lab.prepare(text, f"data.output_dir={out}")
    (store,) = (out / "dataset" / "tokens").iterdir()
    flip(store / shard_name(0))
    for where in (["--output-dir", str(out)], ["--preprocessed-data", str(out)]):
        code, output = keep_house(lab, "--verify", *where, dataset=None)
        assert code == 2, output
        assert f"prepare {out} again" in output
    assert not lab.prepare(text, f"data.output_dir={out}").hit
    assert keep_house(lab, "--verify", "--output-dir", str(out))[0] == 0


def test_verify_leaves_what_somebody_builds(lab: Lab) -> None:
    lab.prepare(lab.text())
    (store,) = lab.stores()
    flip(store / shard_name(0))
    (lock,) = (lab.cache / ".locks").glob("*.lock")
    with UnixFileLock(lock):
        code, output = keep_house(lab, "--verify")
    assert code == 2
    assert "left there: somebody builds it" in output
    assert store.is_dir()


def test_gc_keeps_what_is_used_and_what_it_needs(lab: Lab) -> None:
    lab.prepare(lab.text())
    unused_for_long(*lab.stores())
    code, output = keep_house(lab, "--gc")
    assert code == 0
    assert "removed 0 entries" in output
    assert len(lab.stores()) == len(lab.views()) == 1


def test_gc_removes_what_was_not_used_for_long_and_says_how_big_it_was(lab: Lab) -> None:
    text = lab.text()
    lab.prepare(text)
    kept = lab.prepare(text, "training.context_length=8").path
    (old,) = [view for view in lab.views() if view != kept]
    unused_for_long(old, *lab.stores())
    code, output = keep_house(lab, "--gc", "--older-than", "7")
    assert code == 0
    assert f"removed {old.name}: " in output
    assert lab.views() == [kept]
    assert len(lab.stores()) == 1  # the other view needs it
    unused_for_long(kept, *lab.stores())
    keep_house(lab, "--gc")
    assert (lab.stores(), lab.views()) == ([], [])


def test_gc_removes_what_was_set_aside_and_what_the_dead_left(lab: Lab) -> None:
    lab.prepare(lab.text())
    (lab.cache / ".bad-20260101T000000-1-x").mkdir()
    dead = lab.cache / f".tmp-0123456789abcdef-{publish.place_id()}-{os.getpid()}-12345-0"
    dead.mkdir()
    (dead / publish.UNFINISHED).write_text("{}")
    with publish.staging(lab.cache, "feedfeedfeedfeed") as living:
        code, output = keep_house(lab, "--gc")
        assert code == 0
        assert living.path.is_dir()
    assert not dead.exists()
    assert list(lab.cache.glob(".bad-*")) == []
    assert len(lab.stores()) == len(lab.views()) == 1
    assert "removed 2 entries" in output


def test_gc_keeps_what_a_prepared_directory_is_and_takes_what_it_was(lab: Lab) -> None:
    out, held = lab.dir / "out", lab.text("held out. " * 40, "held.txt")
    keys = (f"data.output_dir={out}", f"data.validation=held={held}")
    lab.prepare(lab.text(), keys[0])
    old = lab.prepare(lab.text(), keys[0], "data.force_preprocess=true").path
    lab.prepare(lab.text(), *keys, "data.force_preprocess=true")
    code, output = keep_house(lab, "--gc", "--output-dir", str(out), "--older-than", "0")
    assert code == 0, output
    assert f"removed {old.name}" in output
    assert not old.exists()
    assert keep_house(lab, "--verify", "--output-dir", str(out))[0] == 0
    assert lab.prepare(lab.text(), *keys).hit


def test_an_age_is_for_gc_alone(lab: Lab) -> None:
    for wish in ([], ["--list"], ["--verify"]):
        code, output = keep_house(lab, *wish, "--older-than", "3")
        assert code == 2
        assert "--older-than: is for --gc" in output


@pytest.mark.parametrize("days", ["nan", "-1"])
def test_an_age_that_is_none_removes_nothing(lab: Lab, days: str) -> None:
    lab.prepare(lab.text())
    code, output = keep_house(lab, "--gc", f"--older-than={days}")
    assert code == 2, output
    assert f"--older-than {float(days):g}: days, 0 or more" in output
    assert len(lab.views()) == 1


def test_gc_leaves_alone_what_somebody_builds(lab: Lab) -> None:
    lab.prepare(lab.text())
    unused_for_long(*lab.stores(), *lab.views())
    (lock,) = (lab.cache / ".locks").glob("*.lock")
    with UnixFileLock(lock):
        code, output = keep_house(lab, "--gc")
    assert code == 0
    assert "somebody builds it" in output
    assert len(lab.stores()) == len(lab.views()) == 1


def test_gc_removes_nothing_that_is_not_ours(lab: Lab) -> None:
    lab.text("mine", "cache/my__notes/manifest.json")
    lab.text("mine", "cache/tokens/mine/manifest.json")
    for name in (".tmp-notes", ".tmp-old-drafts-of-2-books", ".bad-habits"):
        lab.text("mine", f"cache/{name}/list.txt")
        os.utime(lab.cache / name, YEARS_AGO)
    lab.prepare(lab.text())
    code, output = keep_house(lab, "--gc")
    assert (code, output.count("\n")) == (0, 1)
    assert "removed 0 entries" in output
    assert (lab.cache / "my__notes/manifest.json").read_text() == "mine"
    assert (lab.cache / "tokens/mine/manifest.json").read_text() == "mine"
    for name in (".tmp-notes", ".tmp-old-drafts-of-2-books", ".bad-habits"):
        assert (lab.cache / name / "list.txt").read_text() == "mine"


def test_gc_takes_a_link_and_not_what_it_leads_to(lab: Lab) -> None:
    theirs = lab.text("mine", "elsewhere/manifest.json")
    lab.prepare(lab.text())
    (lab.cache / "link__0123456789abcdef").symlink_to(theirs.parent)
    os.utime(theirs, YEARS_AGO)
    assert keep_house(lab, "--gc")[0] == 0
    assert not (lab.cache / "link__0123456789abcdef").is_symlink()
    assert theirs.read_text() == "mine"


def test_verify_names_an_entry_that_cannot_be_read_and_goes_on(lab: Lab) -> None:
    text = lab.text()
    lab.prepare(text)
    lab.prepare(text, "training.context_length=8")
    view = lab.views()[0]
    (view / MANIFEST).unlink()
    (view / MANIFEST).mkdir()
    code, output = keep_house(lab, "--verify")
    assert code == 2
    assert f"BAD    {view.name}" in output
    assert "cannot be read: Is a directory" in output
    assert "1 of 3 entries are not whole" in output


def test_an_entry_that_goes_while_it_is_looked_at_hides_no_other(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Vanishing(HeldDirectory):
        looked_at = 0

        def directory(self, *names: str) -> HeldDirectory:
            try:
                return super().directory(*names)
            except NotPlainError:
                self.looked_at += 1
                if self.looked_at == 2:  # for its manifest, then for its size
                    self.unlink(names[0])
                raise

    lab.prepare(lab.text())
    (lab.cache / "file__0123456789abcdef").write_text("no directory")
    held = Vanishing(os.open(lab.cache, os.O_RDONLY), lab.cache)
    monkeypatch.setattr(inventory, "hold_cache", lambda root: held)
    found = [entry.kind for entry in inventory.entries(lab.cache)]
    assert found == ["view", "view", "tokens"]


def test_two_wishes_at_once_are_refused(lab: Lab) -> None:
    code, output = keep_house(lab, "--list", "--gc")
    assert code == 2
    assert "not allowed with" in output
