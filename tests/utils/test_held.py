"""A held directory stays the same one, and a name in it leads nowhere else."""

import os
import socket
from pathlib import Path

import pytest

from model_check.utils.held import NotPlainError, hold, make_unlinked, refuse_planted


def test_what_is_held_stays_the_same_whatever_becomes_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "held").mkdir()
    (tmp_path / "other").mkdir()
    with hold(tmp_path / "held") as held:
        (tmp_path / "held").rename(tmp_path / "away")
        (tmp_path / "held").symlink_to(tmp_path / "other")
        with held.create("file") as file:
            file.write(b"content")
        held.replace("whole", b"content")
        assert held.names() == ["file", "whole"]
    assert os.listdir(tmp_path / "other") == []
    assert (tmp_path / "away" / "file").read_bytes() == b"content"


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "socket", "directory", "hard link"])
def test_what_is_no_plain_file_is_not_opened(tmp_path: Path, kind: str) -> None:
    (tmp_path / "private").write_bytes(b"private")
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    path = shared / "name"
    with socket.socket(socket.AF_UNIX) as listening, hold(shared) as held:
        match kind:
            case "link":
                path.symlink_to(tmp_path / "private")
            case "dangling":
                path.symlink_to(tmp_path / "nowhere")
            case "pipe":
                os.mkfifo(path)
            case "socket":
                listening.bind(str(path))
            case "directory":
                path.mkdir()
            case "hard link":
                os.link(tmp_path / "private", path)
        with pytest.raises(NotPlainError):
            held.read("name", 100)
        with pytest.raises(OSError, match=r"is no plain|is a hard link|directory"):
            held.append("name")
        if kind != "directory":
            held.create("name").close()
            assert held.read("name", 100) == b""
    assert (tmp_path / "private").read_bytes() == b"private"
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc/passwd", "../private", "a\0b"])
def test_a_name_is_one_component(tmp_path: Path, name: str) -> None:
    with hold(tmp_path) as held:
        for use in (held.open, held.create, held.append, held.lstat, held.unlink, held.directory):
            with pytest.raises(NotPlainError, match="is no name"):
                use(name)


def test_a_link_is_removed_and_not_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "file").write_text("mine")
    (tmp_path / "shared" / "inner").mkdir(parents=True)
    (tmp_path / "shared" / "inner" / "link").symlink_to(tmp_path / "private")
    (tmp_path / "shared" / "link").symlink_to(tmp_path / "private")
    with hold(tmp_path / "shared") as held:
        held.clear()
        assert held.names() == []
    assert (tmp_path / "private" / "file").read_text() == "mine"


def test_a_directory_that_was_replaced_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "name").mkdir()
    with hold(tmp_path) as held, held.directory("name") as inner:
        (tmp_path / "name").rename(tmp_path / "away")
        (tmp_path / "name").mkdir()
        held.remove_held(inner)
        assert held.names() == ["away", "name"]


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    with hold(tmp_path) as held:
        assert held.read("file", 5) == b"12345"
        with pytest.raises(NotPlainError, match="is larger than 4 bytes"):
            held.read("file", 4)


@pytest.mark.root
@pytest.mark.parametrize("below", ["link/run", "link/logs/run", "link"])
def test_nothing_is_made_where_a_link_of_another_user_leads(tmp_path: Path, below: str) -> None:
    shared, home = tmp_path / "shared", tmp_path / "home"
    shared.mkdir()
    shared.chmod(0o1777)
    home.mkdir(0o700)
    (shared / "link").symlink_to(home if "/" in below else home / "absent")
    os.lchown(shared / "link", 4711, 4711)
    with pytest.raises(OSError, match="is a link that another user may have made"):
        make_unlinked(shared / below / "x")
    assert not list(home.iterdir())
    os.lchown(shared / "link", os.geteuid(), -1)
    home.joinpath("absent").mkdir()
    make_unlinked(shared / below / "x", 0o700)
    assert (shared / below / "x").stat().st_mode & 0o777 == 0o700


def test_a_file_in_place_of_a_directory_to_make_is_told_with_its_whole_path(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    make_unlinked(tmp_path / "a" / "b")
    make_unlinked(tmp_path / "a" / "b")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(NotADirectoryError) as caught:
            make_unlinked(path)
        assert caught.value.filename == str(path)


@pytest.mark.root
@pytest.mark.parametrize(
    ("mode", "owner", "refused"),
    [
        (0o1777, 4711, True),
        (0o1777, 0, False),
        (0o1770, 4711, True),
        (0o2775, 4711, False),
        (0o755, 4711, False),
    ],
    ids=["as in /tmp", "our own", "of a group", "a colleague's", "its owner's"],
)
def test_a_link_is_refused_where_the_kernel_may_refuse_it(
    tmp_path: Path, mode: int, owner: int, refused: bool
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(mode)
    (tmp_path / "cache").mkdir()
    (shared / "link").symlink_to(tmp_path / "cache")
    os.lchown(shared / "link", owner, owner)
    for path in (shared / "link", shared / "link" / "below"):
        if refused:
            with pytest.raises(NotPlainError, match="link is a link that another user may have"):
                refuse_planted(path)
        else:
            refuse_planted(path)
    refuse_planted(shared / "absent" / "below")
