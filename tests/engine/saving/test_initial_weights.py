"""model.init_from: weights of a checkpoint or of safetensors, before the first step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model_check.data.sources.weights import weights_directory
from model_check.errors import ConfigError, DataError, UsageError
from model_check.export import export
from tests.engine.conftest import OTHER_ARCHITECTURES, FakeBatch, FakeSource, make_settings

MakeRun = Callable[..., Any]


@pytest.fixture
def trained(tiny_run: MakeRun, tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    run = tiny_run(training__save_last="true", training__max_steps=2, system__seed=7)()
    checkpoint = next((tmp_path / "checkpoints").glob("last.pt"))
    return checkpoint.rename(tmp_path / "first.pt"), run.weights()


@pytest.mark.parametrize("form", ["checkpoint", "safetensors"])
def test_a_run_begins_with_the_weights_that_are_named(
    tiny_run: MakeRun,
    tmp_path: Path,
    trained: tuple[Path, dict[str, torch.Tensor]],
    form: str,
) -> None:
    source, weights = trained
    if form == "safetensors":
        source = tmp_path / "exported"
        export(trained[0], source)
    run = tiny_run(model__init_from=source, model__vocab_size=31)
    assert all(torch.equal(value, weights[name]) for name, value in run.weights().items())
    assert f"weights: taken from {source}" in run.kept.lines


def test_a_checkpoint_of_another_shape_is_refused_by_name(
    tiny_run: MakeRun, trained: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    with pytest.raises(ConfigError, match=r"does not fit.*layers\.1\..* more"):
        tiny_run(model__init_from=trained[0], model__num_layers=2)


@pytest.mark.parametrize("key", OTHER_ARCHITECTURES)
def test_a_checkpoint_of_another_architecture_with_equal_shapes_is_refused(
    tiny_run: MakeRun, trained: tuple[Path, dict[str, torch.Tensor]], key: str
) -> None:
    expected = rf"holds the weights of another model: .*\b{key}\S* .* here, .* there"
    with pytest.raises(ConfigError, match=expected):
        tiny_run(model__init_from=trained[0], **OTHER_ARCHITECTURES[key])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda state: state.pop("settings"),
            "not a checkpoint of Model Check: .* missing required field `settings`",
        ),
        (
            lambda state: state["settings"].pop("model"),
            r"not a checkpoint of Model Check: its settings have no \[model\]",
        ),
        (lambda state: state["settings"]["model"].update(num_heads=None), "settings .* damaged"),
        (lambda state: state["settings"]["model"].update(num_heads=0), "settings .* are damaged"),
    ],
)
@pytest.mark.parametrize("setting", ["model__init_from", "training__resume"])
def test_a_checkpoint_that_does_not_say_which_model_it_holds_is_refused(
    tiny_run: MakeRun,
    trained: tuple[Path, dict[str, torch.Tensor]],
    change: Callable[[dict[str, Any]], object],
    words: str,
    setting: str,
) -> None:
    state = torch.load(trained[0], weights_only=True)
    change(state)
    torch.save(state, trained[0])
    with pytest.raises((ConfigError, UsageError), match=words):
        tiny_run(**{setting: trained[0]})


def test_a_head_width_that_is_spelt_out_is_the_same_model(
    tiny_run: MakeRun, trained: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    tiny_run(model__init_from=trained[0], model__head_dim=16, model__vocab_size=31)


def test_weights_that_are_nowhere_are_refused() -> None:
    settings = make_settings(model__init_from="nowhere/first.pt")
    with pytest.raises(DataError, match="no file or directory that is here, and no hub id"):
        weights_directory(settings, print)


def test_documents_of_a_batch_reach_the_model(tiny_run: MakeRun) -> None:
    def batch(number: int) -> FakeBatch:
        plain = FakeSource().random(number)
        documents = torch.arange(16).div(5, rounding_mode="floor").expand(2, 16)
        return FakeBatch(plain.inputs, plain.targets, documents)

    masked = tiny_run(FakeSource(make=batch), model__init_std=0.5)()
    assert masked.bits() != tiny_run(model__init_std=0.5)().bits()


def test_safetensors_that_are_not_finite_are_refused_by_name(
    tiny_run: MakeRun, tmp_path: Path, trained: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    export(trained[0], tmp_path / "exported")
    file = tmp_path / "exported" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] = float("inf")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"init_from: .*exported: weights not finite: norm\.weight"
    ):
        tiny_run(model__init_from=tmp_path / "exported", model__vocab_size=31)
