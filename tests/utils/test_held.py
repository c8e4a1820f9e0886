"""A held directory stays the same one, and a name in it leads nowhere else."""

import os
import socket
from pathlib import Path

import pytest

from model_check.utils.held import NotPlainError, hold


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
