"""Checkpoint files: plain, whole, where they belong, and free of secrets."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from model_check.config.schema import Settings
from model_check.engine.checkpoint import checkpoint_directory, save_checkpoint
from model_check.engine.optim import AdamW
from model_check.errors import StorageError


def save(path: Path, **changes: Any) -> nn.Linear:
    model = nn.Linear(3, 2)
    state: dict[str, Any] = {"settings": Settings(), "step": 7, "loader_position": 14, "loss": 2.5}
    optimizer = AdamW(model.parameters(), Settings().training)
    save_checkpoint(path, model=model, optimizer=optimizer, **(state | changes))
    return model


def test_it_loads_with_weights_only_and_has_all_that_resuming_needs(tmp_path: Path) -> None:
    model = save(tmp_path / "new" / "step_7.pt")
    loaded = torch.load(tmp_path / "new" / "step_7.pt", weights_only=True)
    assert torch.equal(loaded["model"]["weight"], model.weight)
    assert loaded["optimizer"]["state"].keys() == {0, 1}
    assert loaded["settings"] == msgspec.to_builtins(Settings())
    assert {"python", "numpy", "torch", "cuda"} == loaded["rng"].keys()
    assert torch.equal(loaded["rng"]["torch"], torch.get_rng_state())
    assert (loaded["schema"], loaded["step"], loaded["loader"], loaded["loss"]) == (
        1,
        7,
        {"position": 14},
        2.5,
    )


def test_a_loss_that_is_nan_is_kept(tmp_path: Path) -> None:
    save(tmp_path / "a.pt", loss=float("nan"))
    loss = torch.load(tmp_path / "a.pt", weights_only=True)["loss"]
    assert loss != loss


def test_a_place_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"file/step_7\.pt: cannot be written.*checkpoint_dir"):
        save(tmp_path / "file" / "step_7.pt")


def test_a_save_that_fails_leaves_the_older_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    save(path)
    before = path.read_bytes()
    with pytest.raises((TypeError, AttributeError)):
        save(path, loss=lambda: None)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("supervised", "expected"), [(False, "here"), (True, "here/gpu3")])
def test_no_two_supervised_workers_share_a_directory(supervised: bool, expected: str) -> None:
    assert checkpoint_directory("here", supervised, "GPU3") == Path(expected)
