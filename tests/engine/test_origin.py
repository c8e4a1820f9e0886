"""Where a NaN or Inf was born: the module, and whether it came again."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from model_check.config.drill import Drill, check_name
from model_check.config.shape import parameters
from model_check.engine.checkpoint import set_earlier_aside
from model_check.errors import BrokenStateError, ConfigError, NonFiniteError
from model_check.events import Break, NonFinite
from model_check.forensics.scan import BadTensor, counted
from model_check.hooks.recompute import repeated_origin
from model_check.train import accumulate, gather, repeat
from tests.engine.conftest import FakeSource, Run

MakeRun = Callable[..., Run]
TWO_LAYERS: dict[str, Any] = {"model__num_layers": 2, "training__grad_accum_nums": 2}


@pytest.mark.parametrize("attention", ["full", "infini"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_drill_may_name_all_that_the_model_has(
    tiny_run: MakeRun, tied: bool, attention: str
) -> None:
    """The launcher refuses other names without torch."""
    changes = {**TWO_LAYERS, "model__tie_word_embeddings": str(tied).lower()}
    state = tiny_run(**changes, model__attention=attention).trainer.state
    model, rows = state.model, [row.name for row in parameters(state.settings.model)]
    tensors = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    # The head is not called, nor is the list of blocks.
    modules = {name for name, _ in model.named_modules()} - {"", "layers", "output"}
    others = {"layers.2", "layers", "output", "norm.bias"}
    for kind, there in (("nan_weight", tensors), ("nan_forward", modules)):
        for name in there:
            check_name(Drill(kind, 0, name=name), rows)
        for name in others - there:
            with pytest.raises(ConfigError, match="the model has no"):
                check_name(Drill(kind, 0, name=name), rows)


def last_event(run: Run) -> NonFinite:
    """The last word of a run that ends by its alarm."""
    with pytest.raises(NonFiniteError):
        run()
    return [event for event in run.kept.events if isinstance(event, NonFinite)][-1]


def born(event: NonFinite) -> tuple[str, str, str]:
    assert event.origin is not None
    return event.origin.direction, event.origin.module, event.origin.tensor


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("way", ["eager", "checkpointed"])
@pytest.mark.parametrize(
    ("kind", "name", "tensor"),
    [
        ("nan_forward", "tok_embed", "output"),
        ("inf_forward", "layers.1.attention.wk", "output"),
        ("nan_forward", "layers.1.feed_forward", "output"),
        ("nan_forward", "loss", "output"),
        ("nan_backward", "layers.1.attention.wk", "gradient of input"),
        ("inf_backward", "layers.0", "gradient of input"),
        ("nan_backward", "norm", "gradient of input"),
        ("nan_backward", "tok_embed", "gradient of weight"),
        ("nan", "layers.1.attention.wv.weight", "gradient of weight"),
        ("inf", "output.weight", "gradient of weight"),
    ],
)
def test_what_comes_again_is_named_by_its_module(
    tiny_run: MakeRun, kind: str, name: str, tensor: str, way: str, lag: int
) -> None:
    checkpointed = str(way == "checkpointed").lower()
    run = tiny_run(
        lag=lag,
        debug__drill=f"{kind}@2:all:{name}:always",
        training__gradient_checkpointing=checkpointed,
        **TWO_LAYERS,
    )
    event = last_event(run)
    direction = "forward" if "forward" in kind else "backward"
    assert born(event) == (direction, name.removesuffix(".weight"), tensor)
    assert event.repeated is True
    assert event.origin is not None
    assert not event.origin.by_position


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize(
    ("kind", "name", "block"),
    [
        ("nan_forward", "tok_embed", "tok_embed"),
        ("inf_forward", "layers.1.attention.wk", "layers.1"),
        ("nan_backward", "layers.0.feed_forward.w1", "layers.0"),
        ("inf_backward", "norm", "norm"),
        ("nan_backward", "loss", "loss"),
        ("nan_forward", "loss", "loss"),
    ],
)
def test_what_does_not_come_again_is_named_by_its_block(
    tiny_run: MakeRun, kind: str, name: str, block: str, lag: int
) -> None:
    event = last_event(tiny_run(lag=lag, debug__drill=f"{kind}@2:all:{name}", **TWO_LAYERS))
    assert event.repeated is False
    assert born(event)[:2] == ("forward" if "forward" in kind else "backward", block)


def test_the_positions_of_a_fault_that_does_not_come_again_are_counted(tiny_run: MakeRun) -> None:
    event = last_event(tiny_run(debug__drill="nan_forward@1:all:layers.1.ffn_norm", **TWO_LAYERS))
    origin = event.origin
    assert origin is not None
    assert origin.by_position
    # Two micro-batches of two sequences of 16; the first position of all.
    assert (origin.shape, origin.num_nan, origin.num_inf, origin.first) == ([64], 1, 0, [0])


SPOILT = pytest.mark.parametrize(
    ("drill", "owner", "tensor"),
    [
        ("nan_weight@2:all:layers.1.attention.wq.weight", "layers.1.attention.wq", "weight"),
        ("inf_weight@2:all:output.weight", "output", "weight"),
        ("nan_weight@2:all:rope_cos", "the model", "rope_cos"),
        ("nan_moment@1:all:layers.0.ffn_norm.weight", "layers.0.ffn_norm", "exp_avg of weight"),
    ],
)


@pytest.mark.parametrize("lag", [0, 1])
@SPOILT
def test_what_was_not_finite_before_the_step_is_named_first(
    tiny_run: MakeRun, drill: str, owner: str, tensor: str, lag: int
) -> None:
    """That the step, computed again from there, is not finite again proves nothing."""
    off = {"debug__fingerprints": "off"} | TWO_LAYERS
    event = last_event(tiny_run(lag=lag, debug__drill=drill, **off))
    assert event.step == 2  # a moment spoils the weights of the step behind it
    assert born(event) == ("state", owner, tensor)
    assert event.repeated is None


@pytest.mark.parametrize("lag", [0, 1])
@SPOILT
def test_what_became_not_finite_by_itself_has_changed(
    tiny_run: MakeRun, drill: str, owner: str, tensor: str, lag: int
) -> None:
    run = tiny_run(lag=lag, debug__drill=drill, **TWO_LAYERS)
    with pytest.raises(BrokenStateError, match="to what is not finite, after the update of step"):
        run()
    (found,) = (event for event in run.kept.events if isinstance(event, Break))
    assert f"@{found.step}:{'all:' + found.tensor}" in drill
    assert not found.is_finite
    assert not any(isinstance(event, NonFinite) for event in run.kept.events)


def test_one_bit_that_makes_a_weight_infinite_is_named(tiny_run: MakeRun) -> None:
    """1.0 has the exponent 127: bit 30 makes it 255."""
    weight = "layers.0.ffn_norm.weight"
    run = tiny_run(debug__drill=f"flip@0:all:{weight}:30", **TWO_LAYERS)
    with pytest.raises(BrokenStateError):
        run()
    (found,) = (event for event in run.kept.events if isinstance(event, Break))
    assert (found.tensor, found.found, found.is_finite) == (weight, [(0, 30)], False)


def scaled(run: Run, name: str, factor: float) -> Run:
    with torch.no_grad():
        run.trainer.state.model.get_parameter(name).mul_(factor)
    return run


@pytest.mark.parametrize(
    ("scales", "direction", "module"),
    [
        # q . k exceeds float32 inside the attention: wq and wk are finite.
        (
            {"layers.1.attention.wq.weight": 1e21, "layers.1.attention.wk.weight": 1e21},
            "forward",
            "layers.1.attention",
        ),
        # silu(w1 x) * w3 x exceeds it: w1 and w3 are finite.
        (
            {"layers.0.feed_forward.w1.weight": 1e21, "layers.0.feed_forward.w3.weight": 1e21},
            "forward",
            "layers.0.feed_forward",
        ),
        ({"layers.0.feed_forward.w2.weight": 1e38, "layers.0.ffn_norm.weight": 1e4}, "forward",
         "layers.0.feed_forward.w2"),
        ({"norm.weight": 3e38}, "forward", "norm"),
        # The logits are finite, the sum of the losses is not.
        ({"output.weight": 1e38}, "forward", "loss"),
        ({"output.weight": 1e38, "norm.weight": 1e3}, "forward", "output"),
    ],
)  # fmt: skip
def test_a_real_overflow_is_named_by_the_module_that_overflowed(
    tiny_run: MakeRun, scales: dict[str, float], direction: str, module: str
) -> None:
    run = tiny_run(**TWO_LAYERS)
    for name, factor in scales.items():
        scaled(run, name, factor)
    event = last_event(run)
    assert born(event)[:2] == (direction, module)
    assert event.repeated is True


@pytest.mark.parametrize("drill", ["nan_forward@0:all:layers.1", "nan_backward@0:all:loss"])
def test_bad_gradients_that_follow_from_a_fault_are_not_held(
    tiny_run: MakeRun, drill: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held, they would take as much memory as the model, on a GPU that may be full."""
    told: list[str] = []

    def counting(name: str, tensor: torch.Tensor) -> BadTensor:
        told.append(name)
        return counted(name, tensor)

    monkeypatch.setattr("model_check.forensics.origin.counted", counting)
    assert last_event(tiny_run(debug__drill=f"{drill}:always", **TWO_LAYERS)).repeated is True
    assert len(told) == 1


def test_the_first_bad_logit_is_told_by_its_place_in_the_batch(tiny_run: MakeRun) -> None:
    """Behind the first chunk of logits that are computed again."""
    batch: dict[str, Any] = {"training__batch_size": 70, "training__grad_accum_nums": 1}
    run = tiny_run(**(TWO_LAYERS | batch))
    model = scaled(run, "output.weight", 1e10).trainer.state.model

    def enlarge(_module: nn.Module, _inputs: object, hidden: torch.Tensor) -> torch.Tensor:
        row = torch.zeros_like(hidden)
        row[68, 3] = 1e30
        return hidden + row

    model.norm.register_forward_hook(enlarge)
    event = last_event(run)
    assert born(event) == ("forward", "output", "output")
    assert event.origin is not None
    assert event.origin.first[:2] == [68, 3]


def test_a_step_that_cannot_be_computed_again_keeps_what_it_has_noted(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run(debug__drill="nan_forward@2:all:layers.1", **TWO_LAYERS)

    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("model_check.hooks.nonfinite.repeated_origin", out_of_memory)
    event = last_event(run)
    assert (born(event)[:2], event.repeated) == (("forward", "layers.1"), None)
    assert "step 2 could not be computed again: CUDA out of memory" in run.kept.lines


@pytest.mark.parametrize("lag", [0, 1])
def test_a_norm_that_exceeds_float32_comes_again_although_no_gradient_is_bad(
    tiny_run: MakeRun, lag: int
) -> None:
    run = scaled(tiny_run(lag=lag, **TWO_LAYERS), "norm.weight", 1e25)
    event = last_event(scaled(run, "output.weight", 1e-25))
    assert (event.where, event.repeated, event.origin) == ("gradient", True, None)
    assert event.names == ["output.weight"]
    assert "All gradients are finite: the sum of their squares exceeds float32" in run.kept.lines
    assert "Where it was born is not known; it came again" in run.kept.lines


@pytest.mark.parametrize("lag", [0, 1])
def test_a_loss_that_is_spoilt_behind_every_module_comes_again(tiny_run: MakeRun, lag: int) -> None:
    event = last_event(tiny_run(lag=lag, debug__drill="loss_nan@2:always", **TWO_LAYERS))
    assert (born(event), event.repeated) == (("forward", "loss", "output"), True)


def test_gradients_that_could_not_be_computed_again_are_not_called_finite(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run(lag=1, debug__drill="nan_forward@2:all:layers.1", **TWO_LAYERS)

    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("model_check.hooks.nonfinite.repeated_origin", out_of_memory)
    assert last_event(run).repeated is None
    assert "The gradients are not known: a later step has overwritten them" in run.kept.lines
    assert not any("transient" in line for line in run.kept.lines)


def test_a_gradient_that_a_later_step_has_overwritten_is_not_counted(
    tiny_run: MakeRun, tmp_path: Path
) -> None:
    drill = "nan@2:all:layers.1.attention.wv.weight"
    run = tiny_run(lag=1, debug__drill=drill, **TWO_LAYERS)
    assert last_event(run).repeated is False
    manifest = json.loads((tmp_path / "checkpoints/dossier/manifest.json").read_text())
    assert manifest["event"]["names"] == ["layers.1.attention.wv.weight"]
    place = "layers.1.attention.wv (backward: gradient of its weight)"
    assert f"Born in {place}: 512 values, not counted; it did not come again" in run.kept.lines


def test_the_dossier_holds_the_finding_and_the_tensors_around_it(
    tiny_run: MakeRun, tmp_path: Path
) -> None:
    drill = "nan_forward@2:all:layers.1.attention.wq:always"
    event = last_event(tiny_run(debug__drill=drill, **TWO_LAYERS))
    dossier = tmp_path / "checkpoints" / "dossier"
    manifest = json.loads((dossier / "manifest.json").read_text())
    assert (manifest["worker"], manifest["kind"], manifest["state_after"]) == (
        "GPU6",
        "nonfinite",
        2,
    )
    finding = manifest["event"]
    assert (finding["origin"]["module"], finding["repeated"]) == ("layers.1.attention.wq", True)
    tensors = load_file(dossier / "tensors.safetensors")
    guilty = [name for name, kept in manifest["tensors"].items() if kept["guilty"]]
    weight = "weights/layers.1.attention.wq.weight"
    assert guilty[:3] == ["around/output", "around/input 0", weight]
    assert tensors.keys() == manifest["tensors"].keys()
    assert tensors.keys() > {"exp_avg/norm.weight", "gradients/norm.weight"}
    made = nn.functional.linear(tensors["around/input 0"], tensors[weight])
    wrong = made != tensors["around/output"]
    assert wrong.nonzero().tolist() == [[0, 0, 0]]
    assert event.origin is not None
    assert event.origin.first == [0, 0, 0]


def test_evidence_of_an_earlier_run_stays(tmp_path: Path) -> None:
    path = tmp_path / "nan_grad_step_3.pt"
    for content in "abc":
        set_earlier_aside(path)
        path.write_text(content)
    kept = {p.name: p.read_text() for p in tmp_path.iterdir()}
    assert kept == {
        "nan_grad_step_3.pt": "c",
        "nan_grad_step_3.earlier1.pt": "a",
        "nan_grad_step_3.earlier2.pt": "b",
    }


def test_the_repeat_computes_the_step(tiny_run: MakeRun) -> None:
    """Hooks change no number but by the order of sums."""
    run = tiny_run(**TWO_LAYERS)()
    state, context = run.trainer.state, run.step_context
    data = gather(FakeSource().batches(), 0, 2, torch.device("cpu"))
    accumulate(context, data)
    before = [gradient.clone() for gradient in state.optimizer.gradients()]
    again = partial(repeat, context)
    repeated = repeated_origin(state.model, state.optimizer, context.world, again, data)
    assert repeated == (None, False)
    torch.testing.assert_close(state.optimizer.gradients(), before, rtol=1e-5, atol=1e-7)
