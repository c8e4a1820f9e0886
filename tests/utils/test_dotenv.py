"""Secrets of a `.env` file: of ours, never of another user's, never a pipe."""

import os
from pathlib import Path

import pytest

from model_check.utils.dotenv import dotenv_value, why_unread

NAME = "WANDB_API_KEY"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("WANDB_API_KEY=abc\nHF_TOKEN=def\n", "abc"),
        ("export WANDB_API_KEY='abc'\n", "abc"),
        ('# a comment\n WANDB_API_KEY = "abc" \n', "abc"),
        ("HF_TOKEN=def\nWANDB_API_KEY=\n", None),
        ("MY_WANDB_API_KEY=abc\n", None),
        ("\ufeffWANDB_API_KEY=abc\n", "abc"),
        ("WANDB_API_KEY=abc\r\nHF_TOKEN=def\r\n", "abc"),
        ('WANDB_API_KEY="a b#c" # mine\n', "a b#c"),
        ("WANDB_API_KEY=$HOME\n", "$HOME"),
        ("what is this?\nWANDB_API_KEY=abc\n", "abc"),
    ],
)
def test_a_value_is_read(tmp_path: Path, text: str, value: str | None) -> None:
    (tmp_path / ".env").write_text(text)
    assert dotenv_value(NAME, tmp_path) == value
    assert why_unread(tmp_path) == ""


@pytest.mark.parametrize("text", ["WANDB_API_KEY=a\0bc\n", "\0", "WANDB_API_KEY=abc\n\0\0"])
def test_a_file_with_nul_characters_is_not_read_and_it_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / ".env").write_text(text)
    assert dotenv_value(NAME, tmp_path) is None
    assert "is not read: it holds a NUL character" in why_unread(tmp_path)


def test_without_a_file_there_is_nothing_to_tell(tmp_path: Path) -> None:
    assert dotenv_value(NAME, tmp_path) is None
    assert why_unread(tmp_path) == ""


def test_a_link_in_a_directory_of_our_own_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("WANDB_API_KEY=abc\n")
    (tmp_path / ".env").symlink_to("real")
    assert dotenv_value(NAME, tmp_path) == "abc"


@pytest.mark.root
def test_that_of_another_user_is_not_read_and_it_is_told(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("WANDB_API_KEY=abc\n")
    os.chown(tmp_path / ".env", 4711, 4711)
    assert dotenv_value(NAME, tmp_path) is None
    expected = f" ({tmp_path}/.env is not read: it belongs to another user)"
    assert why_unread(tmp_path) == expected


def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".env")
    assert dotenv_value(NAME, tmp_path) is None
    assert "is not read" in why_unread(tmp_path)
