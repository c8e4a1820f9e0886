"""One cache, several users: a second user with other rights, an umask that hides things."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from model_check.data.build import prepare
from model_check.data.cache.memo import Memo
from model_check.data.cache.publish import UNFINISHED, place_id
from model_check.data.read.manifest import DOCUMENTS, ViewManifest, strangers_of
from model_check.errors import DataError
from model_check.utils.held import HeldDirectory
from tests.data.lab import ROOT, WORDS, Builder, Lab, start_builder
from tests.deadline import DEADLINE_S

NOBODY = "65534"
AS_NOBODY = ("setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups")
AS_ANOTHER = ("setpriv", "--reuid", "61113", "--regid", "61113", "--clear-groups")
SQUASHED = """
import os, runpy, sys
os.geteuid = lambda: 0
del sys.argv[:2]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""root on NFS with root_squash: it takes itself for root, its files belong to nobody."""


def can_be_nobody() -> bool:
    """Root alone can become somebody else, who then must be able to run this Python."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        return False
    code = f"import os, numpy, tokenizers; os.listdir({str(ROOT)!r})"
    done = subprocess.run(
        [*AS_NOBODY, sys.executable, "-c", code], capture_output=True, check=False
    )
    return done.returncode == 0


pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(not can_be_nobody(), reason="needs root, and setpriv"),
]


@pytest.fixture
def shared() -> Iterator[Lab]:
    """A directory that everybody reaches: pytest's own are its user's alone."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o755)
    yield Lab(directory)
    shutil.rmtree(directory)


def build(
    shared: Lab, text: Path, *program: str, umask: int = 0o022, arguments: tuple[str, ...] = ()
) -> tuple[int, str]:
    previous = os.umask(umask)
    try:
        builder: Builder = start_builder(
            shared.cache,
            text,
            *arguments,
            program=[*program, sys.executable],
            environ={"HOME": "/tmp"},
        )
    finally:
        os.umask(previous)
    return builder.finish()


def test_a_second_user_reads_what_the_first_prepared(shared: Lab) -> None:
    text = shared.text()
    code, output = build(shared, text)
    assert code == 0, output
    code, output = build(shared, text, *AS_NOBODY)
    assert code == 0, output
    assert "data: found notes.txt" in output


def strangers_in(output: str) -> list[str]:
    return [line for line in output.splitlines() if "who can put any tokens there" in line]


def test_whose_tokens_they_are_is_told_if_another_user_made_them(shared: Lab) -> None:
    shared.cache.mkdir()
    shared.cache.chmod(0o777)
    text = shared.text()
    code, output = build(shared, text, *AS_NOBODY)
    assert code == 0, output
    assert strangers_in(output) == []
    for length in ("16", "8"):  # the second makes a view of its own over the same tokens
        code, output = build(shared, text, arguments=(f"training.context_length={length}",))
        assert code == 0, output
        (line,) = strangers_in(output)
        assert "nobody (uid 65534)" in line


def test_one_file_of_another_user_in_an_entry_of_ours_is_told(shared: Lab) -> None:
    text = shared.text()
    build(shared, text)
    code, output = build(shared, text)
    assert strangers_in(output) == []
    (store,) = shared.stores()
    os.chown(next(store.glob("*.bin")), 61113, 61113)
    code, output = build(shared, text)
    assert code == 0, output
    (line,) = strangers_in(output)
    assert "uid 61113" in line
    code, output = build(shared, text, *AS_NOBODY)
    assert len(strangers_in(output)) == 1, "root's files are not told"


def test_a_second_user_who_may_not_write_is_told_the_cure(shared: Lab) -> None:
    build(shared, shared.text())
    code, output = build(shared, shared.text("another " * 99, "other.txt"), *AS_NOBODY)
    assert code == 2
    assert f"error: {shared.cache}" in output
    assert "Permission denied; set data.cache_dir (or DATASET_CACHE_DIR)" in output
    assert "Traceback" not in output


def test_what_an_umask_hides_is_named_with_the_chmod_that_shows_it(shared: Lab) -> None:
    text = shared.text()
    build(shared, text, umask=0o077)
    code, output = build(shared, text, *AS_NOBODY)
    assert code == 2
    assert "Permission denied" in output
    assert f"chmod -R a+rX {shared.cache}" in output
    assert "Traceback" not in output


def test_what_another_users_killed_builder_left_is_no_obstacle(shared: Lab) -> None:
    """It cannot be gone on with: its files are the other's."""
    shared.cache.mkdir()
    shared.cache.chmod(0o777)
    text = shared.text()
    code, output = build(shared, text)
    assert code == 0, output
    (store,) = shared.stores()
    (view,) = shared.views()
    shutil.rmtree(view)
    left = shared.cache / f".tmp-{store.name}-{place_id()}-{os.getpid()}-1-0"
    store.rename(left)
    left.chmod(0o755)
    (left / UNFINISHED).write_text("{}")
    code, output = build(shared, text, *AS_NOBODY)
    assert code == 0, output
    assert len(shared.stores()) == len(shared.views()) == 1


@pytest.mark.parametrize("umask", [0o077, 0o022, 0o002])
def test_in_a_directory_for_all_two_users_build_and_read(shared: Lab, umask: int) -> None:
    """Whoever opened the cache directory to others meant its contents, too."""
    shared.cache.mkdir()
    shared.cache.chmod(0o777)
    mine, other = shared.text(), shared.text(WORDS * 30, "other.txt")
    for program in ((), AS_NOBODY):
        for text in (mine, other):
            code, output = build(shared, text, *program, umask=umask)
            assert code == 0, output
        mine = shared.text(WORDS * 40, "third.txt")
    assert "no lock" not in output
    assert len(shared.stores()) == 3


@pytest.mark.parametrize("mode", [0o000, 0o444], ids=["unlisted", "listed, but not entered"])
def test_a_directory_of_text_that_another_user_may_not_read_is_named(
    shared: Lab, mode: int
) -> None:
    shared.text(name="corpus/a.txt")
    shared.text("another " * 99, "corpus/locked/b.txt")
    shared.cache.mkdir(mode=0o777)
    shared.cache.chmod(0o777)
    (shared.dir / "corpus" / "locked").chmod(mode)
    code, output = build(shared, shared.dir / "corpus", *AS_NOBODY)
    assert code == 2
    assert "locked" in output
    assert "cannot be read: Permission denied" in output
    assert "Traceback" not in output


def test_root_whom_nfs_makes_nobody_shares_what_it_makes(shared: Lab) -> None:
    shared.cache.mkdir()
    shared.cache.chmod(0o777)
    program = (*AS_NOBODY, sys.executable, "-c", SQUASHED)
    code, output = build(shared, shared.text(), *program)
    assert code == 0, output
    for directory in (".locks", "tokens"):
        assert (shared.cache / directory).stat().st_mode & 0o777 == 0o777, directory
    for lock in (shared.cache / ".locks").glob("*.lock"):
        assert lock.stat().st_mode & 0o666 == 0o666
    code, output = build(shared, shared.text(WORDS * 30, "other.txt"), *AS_ANOTHER)
    assert code == 0, output
    assert "no lock" not in output


def test_in_a_sticky_cache_one_collects_ones_own(shared: Lab) -> None:
    shared.cache.mkdir()
    shared.cache.chmod(0o1777)
    for text, program in ((shared.text(), ()), (shared.text(WORDS * 30, "b.txt"), AS_NOBODY)):
        assert build(shared, text, *program)[0] == 0
    theirs = [view for view in shared.views() if view.stat().st_uid == 0]
    (shared.cache / ".bad-20260101T000000-1-x").mkdir()
    builder = start_builder(
        *(shared.cache, text, "--gc", "--older-than", "0"),
        program=[*AS_NOBODY, sys.executable],
        environ={"HOME": "/tmp"},
    )
    code, output = builder.finish()
    assert code == 0, output
    for path in (*theirs, shared.cache / ".bad-20260101T000000-1-x"):
        assert f"kept    {path.name}: belongs to another user" in output
        assert path.is_dir()
    assert shared.views() == theirs


def test_gc_leaves_an_entry_that_it_may_not_remove_in_its_place(shared: Lab) -> None:
    text = shared.text()
    shared.cache.mkdir()
    shared.cache.chmod(0o777)
    assert build(shared, text)[0] == 0
    for view in shared.views():
        view.chmod(0o755)
    before = (shared.views(), shared.stores())
    tool = (sys.executable, str(ROOT / "prepare_dataset.py"), f"data.cache_dir={shared.cache}")
    done = subprocess.run(
        [*AS_NOBODY, *tool, "--gc", "--older-than", "0"],
        cwd="/",
        env={**os.environ, "HOME": "/tmp"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert "belongs to another user" in done.stdout, done.stdout + done.stderr
    assert (shared.views(), shared.stores()) == before


def test_an_entry_that_another_user_lets_nobody_list_is_one_message(shared: Lab) -> None:
    """Its owner cannot be told, so it is not trained on."""
    shared.cache.mkdir()
    shared.cache.chmod(0o777)
    text = shared.text()
    assert build(shared, text, *AS_ANOTHER)[0] == 0
    (store,) = shared.stores()
    store.chmod(0o711)
    code, output = build(shared, text, *AS_NOBODY)
    assert code == 2, output
    assert "Permission denied; its owner shares the cache with: chmod" in output
    assert "Traceback" not in output


@pytest.mark.parametrize("part", ["view", "store"])
def test_an_entry_that_vanishes_before_its_owner_is_looked_up_is_one_message(
    shared: Lab, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    text = shared.text()
    path = shared.prepare(text).path
    gone = path if part == "view" else shared.stores()[0]

    def vanish(directory: Path, view: ViewManifest) -> list[str]:
        gone.rename(shared.dir / "gone")
        return strangers_of(directory, view)

    monkeypatch.setattr(prepare, "strangers_of", vanish)
    with pytest.raises(DataError, match="cannot be read: it is gone"):
        shared.prepare(text)


def test_a_file_that_vanishes_while_its_owner_is_looked_up_is_one_message(
    shared: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = shared.text()
    shared.prepare(text)
    names = HeldDirectory.names

    def vanish(held: HeldDirectory) -> list[str]:
        found = names(held)
        if DOCUMENTS in found:
            (held.path / DOCUMENTS).unlink()
        return found

    monkeypatch.setattr(HeldDirectory, "names", vanish)
    with pytest.raises(DataError, match="cannot be read: No such file"):
        shared.prepare(text)


def test_what_another_user_noted_of_a_text_is_not_believed(shared: Lab) -> None:
    """It would decide which entry is taken: one of our own, of another text, without a word."""
    memo = Memo(shared.cache)
    memo.put("signature", "value")
    (note,) = (shared.cache / ".memo").iterdir()
    assert memo.get("signature") == "value"
    os.chown(note, 61113, 61113)
    assert memo.get("signature") is None
