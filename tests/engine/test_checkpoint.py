"""Checkpoint files: plain, whole, verified, and where they belong."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.doctor.storage import try_to_write
from model_check.engine.checkpoint import (
    SCHEMA,
    read_checkpoint,
    write_checkpoint,
)
from model_check.engine.saving.checkpoint_files import sweep_leftovers
from model_check.engine.saving.earlier import keep_file
from model_check.errors import EXIT_USAGE, CheckpointError, StorageError
from model_check.forensics.dump import dump_tensors
from tests.data.canary import make_private, untouched
from tests.deadline import DEADLINE_S


def write_dump(path: Path, state: dict[str, Any]) -> None:
    dump_tensors(path, torch.nn.Linear(2, 2))


def state(**changes: Any) -> dict[str, Any]:
    weights = torch.arange(64.0).reshape(8, 8)
    usual = {"schema": SCHEMA, "step": 7, "model": {"weight": weights}, "loss": 2.5}
    return usual | {"settings": {"model": {}}} | changes


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "new" / "step_7.pt", state())
    read = read_checkpoint(tmp_path / "new" / "step_7.pt")
    assert torch.equal(read.pop("model")["weight"], state()["model"]["weight"])
    assert read == {"schema": SCHEMA, "step": 7, "loss": 2.5, "settings": {"model": {}}}


def test_a_place_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"file/step_7\.pt: cannot be written.*checkpoint_dir"):
        write_checkpoint(tmp_path / "file" / "step_7.pt", state())


def test_a_save_that_fails_leaves_the_older_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    write_checkpoint(path, state())
    before = path.read_bytes()
    with pytest.raises((TypeError, AttributeError)):
        write_checkpoint(path, state(loss=lambda: None))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("write", [write_checkpoint, write_dump], ids=["checkpoint", "dump"])
def test_nothing_is_written_through_a_name_that_was_taken_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[..., None]
) -> None:
    """Another user who may write to the directory replaces the unfinished file by a link."""
    precious, directory = tmp_path / "precious", tmp_path / "checkpoints"
    precious.write_text("precious")
    directory.mkdir()
    create = os.open

    def taken(path: Any, flags: int, *arguments: Any, **more: Any) -> int:
        descriptor = create(path, flags, *arguments, **more)
        if flags & os.O_EXCL:
            (beside,) = directory.iterdir()
            beside.rename(directory / "away")
            beside.symlink_to(precious)
        return descriptor

    monkeypatch.setattr(os, "open", taken)
    write(directory / "last.pt", state())
    monkeypatch.undo()
    assert precious.read_text() == "precious"


@pytest.mark.root
@pytest.mark.parametrize("mode", [0o1777, 0o2770], ids=["of all", "of a group"])
@pytest.mark.parametrize("below", [".", "cpu0", "cpu0/debug"])
def test_a_link_that_another_user_made_where_others_may_write_is_not_followed(
    tmp_path: Path, mode: int, below: str
) -> None:
    public, private = tmp_path / "public", make_private(tmp_path / "private")
    public.mkdir()
    public.chmod(mode)
    (public / "checkpoints").symlink_to(private)
    os.chown(public / "checkpoints", 4711, 4711, follow_symlinks=False)
    path = public / "checkpoints" / below / "canary.txt"
    with untouched(private):
        for use in (keep_file, lambda path: write_checkpoint(path, state()), try_to_write):
            with pytest.raises((OSError, StorageError), match="another user may have made"):
                use(path)


def test_a_flipped_byte_anywhere_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    path, spoilt = tmp_path / "last.pt", tmp_path / "spoilt.pt"
    write_checkpoint(path, state())
    content, messages = path.read_bytes(), []
    for at in range(0, len(content), 7):
        spoilt.write_bytes(content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :])
        try:
            read = read_checkpoint(spoilt)
        except CheckpointError as error:
            messages.append(str(error))
            continue
        assert torch.equal(read["model"]["weight"], state()["model"]["weight"]), at
        assert (read["step"], read["loss"]) == (7, 2.5)
    assert len(messages) > len(content) / 7 / 4
    assert all(text.startswith(f"{spoilt}: ") and "\n" not in text for text in messages)


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.9, 0.999])
def test_a_torn_file_is_refused_in_one_line(tmp_path: Path, kept: float) -> None:
    path = tmp_path / "last.pt"
    write_checkpoint(path, state())
    os.truncate(path, int(path.stat().st_size * kept))
    with pytest.raises(CheckpointError, match=r"last\.pt: damaged: .*") as caught:
        read_checkpoint(path)
    assert caught.value.exit_code == EXIT_USAGE
    assert "\n" not in str(caught.value)


def test_other_files_are_told_for_what_they_are(tmp_path: Path) -> None:
    torch.save({"schema": 1}, tmp_path / "old.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"model": state()["model"], "iter_num": 3}, tmp_path / "theirs.pt")
    torch.save(state()["model"], tmp_path / "bare.pt")
    torch.save({"schema": SCHEMA, "code": Path("x")}, tmp_path / "code.pt")
    for name, words in {
        "old.pt": r"another version \(schema 1",
        "list.pt": "list.pt: not a checkpoint of Model Check: it holds one list, where a dict",
        "theirs.pt": r"theirs.pt: not a checkpoint of Model Check: it has no schema, settings$",
        "bare.pt": "it has no schema, model, settings$",
        "code.pt": "more than tensors and plain values.*nothing of it was loaded",
        "none.pt": "No such file",
    }.items():
        with pytest.raises(CheckpointError, match=words) as caught:
            read_checkpoint(tmp_path / name)
        assert "trust" not in str(caught.value)
        assert "weights_only" not in str(caught.value)


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.made), "w")


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_checkpoint_is_not_run_and_no_advice_says_how(
    tmp_path: Path, zipped: bool
) -> None:
    path, made = tmp_path / "last.pt", tmp_path / "made"
    torch.save({"model": Bomb(made)}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path)
    assert not made.exists()
    for advice in ("weights_only", "trust", "safe_globals", "\n"):
        assert advice not in str(caught.value)


LEFTOVER = ".step_5.pt.0123abcd.tmp"


def test_a_link_in_place_of_a_leftover_is_not_opened(tmp_path: Path) -> None:
    private, directory = make_private(tmp_path / "private"), tmp_path / "checkpoints"
    directory.mkdir()
    (directory / f".last.pt.{'0' * 16}.tmp").symlink_to(private / "canary.txt")
    with untouched(private):
        sweep_leftovers(directory)


def test_leftovers_of_dead_writers_are_removed_and_nothing_else(tmp_path: Path) -> None:
    others = [".mine.tmp", "step_5.pt", ".step_5.pt.tmp", "notes.txt"]
    for name in [*others, LEFTOVER, ".last.pt.ff.tmp", ".step_9.pt.77.tmp"]:
        (tmp_path / name).touch()
    sweep_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)
    sweep_leftovers(tmp_path / "none")


def test_a_file_that_somebody_is_writing_stays(tmp_path: Path) -> None:
    path = tmp_path / LEFTOVER
    path.touch()
    code = (
        "import fcntl, sys; f = open(sys.argv[1], 'r+b'); fcntl.flock(f, fcntl.LOCK_EX);"
        "print('locked', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"locked\n"
        sweep_leftovers(tmp_path)
        assert path.exists()
        writer.communicate(timeout=DEADLINE_S)
    sweep_leftovers(tmp_path)
    assert not path.exists()
