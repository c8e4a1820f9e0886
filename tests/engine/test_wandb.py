"""W&B: refused with a way out where it cannot be had; the key from .env; offline runs."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from model_check.engine.wandb import read_key
from model_check.errors import ConfigError
from tests.engine.conftest import Run

INSTALLED = importlib.util.find_spec("wandb") is not None


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("WANDB_API_KEY=abc\nHF_TOKEN=def\n", "abc"),
        ("export WANDB_API_KEY='abc'\n", "abc"),
        ('# a comment\n WANDB_API_KEY = "abc" \n', "abc"),
        ("HF_TOKEN=def\nWANDB_API_KEY=\n", None),
    ],
)
def test_the_key_is_read_from_a_file(tmp_path: Path, text: str, key: str | None) -> None:
    (tmp_path / ".env").write_text(text)
    assert read_key({}, tmp_path / ".env") == key
    assert read_key({"WANDB_API_KEY": "first"}, tmp_path / ".env") == "first"


def test_no_file_and_no_variable_is_no_key(tmp_path: Path) -> None:
    assert read_key({}, tmp_path / ".env") is None


@pytest.mark.skipif(INSTALLED, reason="wandb is installed")
def test_without_the_package_the_hint_says_what_to_install(tiny_run: Callable[..., Run]) -> None:
    with pytest.raises(ConfigError, match=r"wandb is not installed \(pip install wandb\)"):
        tiny_run(logging__wandb="offline")


@pytest.mark.skipif(not INSTALLED, reason="needs wandb")
def test_an_offline_run_is_kept_on_disk_and_its_id_in_checkpoints(
    tiny_run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    run = tiny_run(logging__wandb="offline")()
    (directory,) = (tmp_path / "wandb").glob("offline-run-*")
    assert list(directory.glob("*.wandb"))
    kept = next(o.kept() for o in run.trainer.observers if "wandb_id" in o.kept())
    assert directory.name.endswith(str(kept["wandb_id"]))
    written = b"".join(p.read_bytes() for p in (tmp_path / "wandb").rglob("*") if p.is_file())
    assert b"train/loss" in written
    assert b"a" * 40 not in written
