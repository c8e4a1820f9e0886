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
    with pytest.raises(ConfigError, match=r"need model\.num_layers=1, not num_layers 2"):
        tiny_run(model__init_from=trained[0], model__num_layers=2)


@pytest.mark.parametrize("key", OTHER_ARCHITECTURES)
def test_a_checkpoint_of_another_architecture_with_equal_shapes_is_refused(
    tiny_run: MakeRun, trained: tuple[Path, dict[str, torch.Tensor]], key: str
) -> None:
    expected = rf"init_from need .*model\.{key}\S*=.*, not .*\b{key}\S* "
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
        (lambda state: state["settings"]["model"].update(num_heads=0), "settings .*damaged"),
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


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("inf"), r"init_from: .*exported: weights not finite: norm\.weight"),
        (float("nan"), r"init_from: .*exported: weights not finite: norm\.weight"),
        (-6.8e36, r"init_from: .*exported: holds values beyond 1e\+19, .* in norm\.weight"),
    ],
)
def test_safetensors_with_values_that_no_training_left_are_refused_by_name(
    tiny_run: MakeRun,
    tmp_path: Path,
    trained: tuple[Path, dict[str, torch.Tensor]],
    value: float,
    message: str,
) -> None:
    """The last is 0.02 with its highest exponent bit flipped: its loss would be NaN."""
    export(trained[0], tmp_path / "exported")
    file = tmp_path / "exported" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] = value
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=message):
        tiny_run(model__init_from=tmp_path / "exported", model__vocab_size=31)


Change = Callable[[dict[str, torch.Tensor]], object]


@pytest.fixture(params=["checkpoint", "safetensors"])
def with_changed(
    request: pytest.FixtureRequest, trained: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> Callable[[Change], tuple[Path, str]]:
    """Change the weights of a checkpoint, or of a directory of safetensors; where they are, and
    what their embedding is called there."""

    def change_them(change: Change) -> tuple[Path, str]:
        if request.param == "checkpoint":
            state = torch.load(trained[0], weights_only=True)
            change(state["model"])
            torch.save(state, trained[0])
            return trained[0], "tok_embed.weight"
        source = tmp_path / "exported"
        export(trained[0], source)
        tensors = load_file(source / "model.safetensors")
        change(tensors)
        save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
        return source, "model.embed_tokens.weight"

    return change_them


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_another_dtype_are_cast_and_a_line_says_so(
    tiny_run: MakeRun,
    with_changed: Callable[[Change], tuple[Path, str]],
    trained: tuple[Path, dict[str, torch.Tensor]],
    dtype: torch.dtype,
) -> None:
    source, _ = with_changed(lambda own: own.update({n: t.to(dtype) for n, t in own.items()}))
    run = tiny_run(model__init_from=source, model__vocab_size=31)
    name = str(dtype).removeprefix("torch.")
    assert f"weights: 12 tensors cast from {name} to float32" in run.kept.lines
    for name, weight in run.weights().items():
        assert torch.equal(weight, trained[1][name].to(dtype).float())


@pytest.mark.parametrize("shape", [(), (1,), (31,), (1, 1), (31, 1), (1, 31, 32)])
def test_an_embedding_that_would_be_broadcast_is_refused_by_name(
    tiny_run: MakeRun, with_changed: Callable[[Change], tuple[Path, str]], shape: tuple[int, ...]
) -> None:
    def reshape(own: dict[str, torch.Tensor]) -> None:
        own[next(name for name in own if "embed" in name)] = torch.ones(shape)

    source, name = with_changed(reshape)
    with pytest.raises(ConfigError, match=rf"{name} \[.*\] \(here \[31, 32\]\) of another shape"):
        tiny_run(model__init_from=source, model__vocab_size=31)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn])
def test_weights_that_no_run_computes_with_are_refused_by_name(
    tiny_run: MakeRun, with_changed: Callable[[Change], tuple[Path, str]], dtype: torch.dtype
) -> None:
    def cast(own: dict[str, torch.Tensor]) -> None:
        name = next(name for name in own if "embed" in name)
        own[name] = own[name].to(dtype)

    source, name = with_changed(cast)
    with pytest.raises(UsageError, match=rf"{name} \("):
        tiny_run(model__init_from=source, model__vocab_size=31)
