"""What a checkpoint says of its model and its run need not be typed again."""

import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.arguments import parse_run
from model_check.config.checkpoint_settings import settings_in
from model_check.config.load import Loaded, load
from model_check.errors import ConfigError
from tests.config.test_geometry import LLAMA


def typed(*argv: str) -> Loaded:
    return load(parse_run(argv, {}).request, lambda: False)


def checkpoint(path: Path, step: int = 3, attempt: int = 1, **settings: dict[str, Any]) -> Path:
    state = {"schema": 2, "step": step, "attempt": attempt, "settings": settings}
    torch.save(state | {"model": {"w": torch.ones(2, dtype=torch.bfloat16)}}, path)
    return path


SHAPE = {
    **{"num_layers": 2, "hidden_size": 96, "intermediate_size": None, "num_heads": 3},
    **{"num_kv_heads": None, "vocab_size": None, "rope_scaling": None},
}


@pytest.mark.parametrize("name", ["model.init_from", "model.geometry", "training.resume"])
def test_the_shape_of_a_model_comes_from_its_checkpoint(tmp_path: Path, name: str) -> None:
    path = checkpoint(tmp_path / "last.pt", model=SHAPE)
    settings = typed(f"{name}={path}", "--preset=train").settings
    model, tokenizer = settings.model, settings.data.tokenizer
    assert tokenizer == ("bpe" if name == "model.geometry" else "auto")
    assert (model.num_layers, model.hidden_size, model.num_heads) == (2, 96, 3)
    assert (model.intermediate_size, model.vocab_size) == (None, None)


def test_the_shape_of_a_model_comes_from_a_directory_of_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    ours = typed(f"model.geometry={tmp_path}").settings.model
    model = typed(f"model.init_from={tmp_path}").settings.model
    assert (model.num_layers, model.hidden_size) == (ours.num_layers, ours.hidden_size)


def test_segments_come_with_the_weights_that_need_them(tmp_path: Path) -> None:
    infini = {"attention": "infini", "infini": {"segment_length": 32}}
    path = checkpoint(tmp_path / "last.pt", model=SHAPE | infini)
    model = typed(f"model.init_from={path}").settings.model
    assert (model.attention, model.infini.segment_length) == ("infini", 32)
    plain = checkpoint(tmp_path / "plain.pt", model=SHAPE | {"attention": "full"})
    assert typed(f"model.init_from={plain}", "model.attention=local").settings.model.num_layers == 2


def test_a_conflict_names_the_settings_to_give_once(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "last.pt", model=SHAPE)
    with pytest.raises(ConfigError) as caught:
        typed(f"model.init_from={path}", "model.num_layers=7", "model.rope_theta=5e4")
    assert str(caught.value) == (
        "the weights of model.init_from need model.num_layers=2 model.rope_theta=500000.0, not "
        "num_layers 7, rope_theta 50000.0: give these values, or none"
    )


def test_a_resumed_run_has_the_settings_of_its_checkpoint_where_none_is_given(
    tmp_path: Path,
) -> None:
    training = {"batch_size": 5, "max_steps": 40, "learning_rate": 0.5, "keep_last": 3}
    settings = {
        "model": SHAPE,
        "training": training,
        "data": {"dataset": "embedded", "cache_dir": "theirs", "tail": "pad"},
        "system": {"seed": 7, "checkpoint_dir": "theirs"},
        "logging": {"log_interval": 9},
    }
    path = checkpoint(tmp_path / "last.pt", **settings)
    loaded = typed("--resume", str(path), "--max-steps=50", "--preset=train")
    ours = loaded.settings
    assert (ours.training.batch_size, ours.training.learning_rate) == (5, 0.5)
    assert (ours.training.max_steps, ours.system.seed, ours.data.tail) == (50, 7, "pad")
    assert (ours.data.cache_dir, ours.system.checkpoint_dir) == (".cache/datasets", ".checkpoints")
    assert ours.logging.log_interval == 10  # the preset's
    assert any(line.startswith(f"checkpoint {path}: its settings") for line in loaded.decisions)


def test_a_directory_of_workers_stands_for_their_newest_checkpoint(tmp_path: Path) -> None:
    for name, step, seed in (("cpu0", 3, 1), ("cpu1", 5, 2)):
        (tmp_path / name).mkdir()
        checkpoint(tmp_path / name / "last.pt", step, model=SHAPE, system={"seed": seed})
    assert typed("--resume", str(tmp_path)).settings.system.seed == 2


def test_a_directory_stands_for_its_newest_checkpoint(tmp_path: Path) -> None:
    for name, step, attempt, seed in (("step_9", 9, 1, 1), ("step_4", 4, 2, 2), ("last", 4, 1, 3)):
        checkpoint(tmp_path / f"{name}.pt", step, attempt, model=SHAPE, system={"seed": seed})
    assert typed("--resume", str(tmp_path)).settings.system.seed == 2


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("made",)


def write_pickle(path: Path, content: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", content)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no pickle",
        pickle.dumps([1]),
        pickle.dumps({"settings": 3}),
        pickle.dumps({"settings": Evil()}),
        b"\x80\x02\x82\x01.",
        b"\x80\x02}r\xff\xff\xff\x0f.",  # a memo of 268 million values
        b"\x80\x02" + b"]" * 5000 + b"a" * 4999 + b".",
    ],
)
def test_what_is_no_checkpoint_gives_nothing_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    write_pickle(tmp_path / "last.pt", content)
    assert settings_in(tmp_path / "last.pt") is None
    assert typed("--resume", "last.pt").preset == "cpu"
    assert not (tmp_path / "made").exists()


def test_a_run_that_began_with_other_weights_goes_on_without_them(tmp_path: Path) -> None:
    """They may be gone, and the checkpoint has their tokenizer."""
    path = checkpoint(tmp_path / "last.pt", model=SHAPE | {"init_from": "gone.pt"})
    for resume in (path, tmp_path):
        assert typed("--resume", str(resume)).settings.model.init_from == str(path)


def test_what_is_typed_wins_over_a_checkpoint(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "last.pt", model=SHAPE, training={"grad_accum_nums": 3})
    resume = ("--resume", str(path), "--preset=finetune")
    loaded = typed(*resume, "model.geometry=tiny", "training.global_batch_size=8")
    assert (loaded.settings.model.num_layers, loaded.settings.training.global_batch_size) == (6, 8)
    (note,) = [line for line in loaded.decisions if line.startswith("checkpoint ")]
    assert note.endswith("where none is given, also over those of preset finetune")


def test_settings_that_this_version_does_not_know_are_left_out(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "last.pt", model=SHAPE | {"colour": "red"}, training={"x": 1})
    assert typed("--resume", str(path)).settings.model.hidden_size == 96


@pytest.mark.parametrize("settings", [{"model": {"num_layers": "many"}}, {}, {"model": 3}])
def test_settings_that_are_damaged_give_nothing(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Who loads the checkpoint says why."""
    write_pickle(tmp_path / "last.pt", pickle.dumps({"step": 1, "settings": settings}))
    assert settings_in(tmp_path / "last.pt") is None
    for name in ("model.init_from", "training.resume"):
        assert typed(f"{name}={tmp_path}/last.pt").settings.model.num_layers == 2
    with pytest.raises(ConfigError, match="no checkpoint that can be read"):
        typed(f"model.geometry={tmp_path}/last.pt")


def test_settings_that_hold_themselves_are_names_that_nobody_knows(tmp_path: Path) -> None:
    model: dict[str, Any] = {"num_layers": 3}
    model["model"] = model
    write_pickle(tmp_path / "last.pt", pickle.dumps({"step": 1, "settings": {"model": model}}))
    found = settings_in(tmp_path / "last.pt")
    assert found is not None
    assert found.model.num_layers == 3
