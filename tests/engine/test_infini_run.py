"""A run with Infini-attention: its gates have a rate of their own, are seen, kept and resumed."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from model_check.config.schema import TrainingSettings
from model_check.errors import ConfigError
from model_check.events import Metrics
from model_check.export import export
from model_check.hooks.observe.gates import gate_reach, scalars_of
from model_check.optim import AdamW
from model_check.train import train_step
from tests.engine.conftest import Run, make_settings
from tests.engine.test_step import micro_batches

MakeRun = Callable[..., Run]
INFINI = {"model__attention": "infini", "model__infini__segment_length": 4}
NO = torch.tensor(False)


def gates(run: Run) -> list[torch.Tensor]:
    return [value for name, value in run.weights().items() if name.endswith("gate")]


def test_a_gate_follows_the_schedule_at_its_own_rate_and_is_never_decayed() -> None:
    training = TrainingSettings(learning_rate=1e-2, weight_decay=0.3)
    ours, theirs = (
        [nn.Parameter(torch.full((3, 3), 2.0)), nn.Parameter(torch.full((4,), 2.0))] for _ in "ab"
    )
    names = ("layers.0.attention.wq.weight", "layers.0.attention.gate")
    optimizer = AdamW(zip(names, ours, strict=True), training, gate_lr=0.05)
    groups = [
        {"params": theirs[:1], "weight_decay": 0.3},
        {"params": theirs[1:], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for lr in (1e-2, 5e-3, 1e-3):
        for parameter in (*ours, *theirs):
            parameter.grad = torch.full_like(parameter, 0.5)
        reference.param_groups[0]["lr"], reference.param_groups[1]["lr"] = lr, lr * 5
        optimizer.step(lr, NO, None)
        reference.step()  # type: ignore[no-untyped-call]
    assert all(torch.equal(own, other) for own, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("update", ["linear", "delta"])
def test_ten_steps_are_five_and_five(tiny_run: MakeRun, tmp_path: Path, update: str) -> None:
    given = {**INFINI, "model__infini__update": update, "training__max_steps": 10}
    whole = tiny_run(**given, directory=tmp_path / "whole")()
    tiny_run(**{**given, "training__max_steps": 5}, training__save_last="true")()
    resumed = tiny_run(**given, training__resume="auto")()
    assert all(torch.equal(value, resumed.weights()[n]) for n, value in whole.weights().items())
    assert any((gate != 0).all() for gate in gates(whole))


def test_what_they_say_is_measured(tiny_run: MakeRun) -> None:
    run = tiny_run(**INFINI, training__max_steps=3)()
    assert any("attention infini by sdpa (" in line for line in run.kept.lines)
    last = [event for event in run.kept.events if isinstance(event, Metrics)][-1]
    assert last.gates == [torch.sigmoid(gate).tolist() for gate in gates(run)]
    full = tiny_run(training__max_steps=3)()
    assert all(e.gates is None for e in full.kept.events if isinstance(e, Metrics))


def measured(run: Run) -> list[list[list[float]] | None]:
    """The gates of each step, as its event shows them."""
    return [event.gates for event in run.kept.events if isinstance(event, Metrics)]


def test_a_step_that_is_read_late_shows_the_gates_of_its_own_update(tiny_run: MakeRun) -> None:
    prompt, late = (tiny_run(lag=lag, **INFINI, logging__log_interval=1)() for lag in (0, 1))
    assert measured(late) == measured(prompt)
    assert len({str(gates) for gates in measured(prompt)}) == 4


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_step_carries_the_gates_that_its_update_leaves(tiny_run: MakeRun, precision: str) -> None:
    half = {"training__precision": "fp16", "training__use_amp": "true"}
    given = {**INFINI, "model__num_layers": 2, **(half if precision == "fp16" else {})}
    run = tiny_run(**given)
    carried, left = [], [torch.stack(gates(run))]
    for _ in range(2):
        result = train_step(run.step_context, micro_batches(2), 0.1, run.trainer.trainer.hooks)
        assert "gates" in result.notes
        carried.append(result.notes["gates"])
        left.append(torch.stack(gates(run)))
    assert carried[0].shape == (2, 2), "[layers, query heads]"
    assert all(torch.equal(own, after) for own, after in zip(carried, left[1:], strict=True))
    assert not any(torch.equal(*pair) for pair in itertools.pairwise(left))


def test_tensorboard_shows_how_many_are_open_or_shut() -> None:
    shown = scalars_of([[0.05, 0.5, 0.95, 0.91], [0.5, 0.5, 0.5, 0.5]])
    assert shown["gates/share_below_0.1"] == 1 / 8
    assert shown["gates/share_above_0.9"] == 2 / 8
    assert shown["gates/layer_0/min"] == 0.05
    assert shown["gates/layer_0/max"] == 0.95
    assert shown["gates/layer_1/mean"] == 0.5


def test_a_run_in_which_no_gate_can_open_says_how_far_they_reach(tiny_run: MakeRun) -> None:
    def told(**changes: Any) -> list[str]:
        lines = tiny_run(**{**INFINI, **changes}).kept.lines
        return [line for line in lines if "to open a gate" in line]

    (line,) = told(training__max_steps=100)
    assert line == (
        "warning: 100 steps are too few to open a gate: set model.infini.gate_lr=0.04, or train "
        "longer"
    )
    assert told(training__max_steps=100, model__infini__gate_lr=0.04) == []
    assert (
        told(training__max_steps=100, model__attention="full", model__infini__segment_length="null")
        == []
    )


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_the_reach_is_the_sum_of_the_gates_rates(schedule: str) -> None:
    from model_check.engine.schedule import learning_rate

    settings = make_settings(
        **INFINI, training__max_steps=777, training__lr_schedule=schedule, training__warmup_steps=50
    )
    training = settings.training
    rates = [learning_rate(step, training) for step in range(777)]
    share = settings.model.infini.gate_lr / training.learning_rate
    assert gate_reach(settings) == pytest.approx(sum(rates) * share)


def test_a_full_model_begins_one_with_a_memory(tiny_run: MakeRun, tmp_path: Path) -> None:
    full = tiny_run(training__save_last="true", training__max_steps=2)()
    source = next((tmp_path / "checkpoints").glob("last.pt")).rename(tmp_path / "full.pt")
    directory = tmp_path / "exported"
    export(source, directory)
    for given in (source, directory):
        run = tiny_run(**INFINI, model__init_from=given, model__infini__gate_init=-0.5)
        weights = run.weights()
        assert all(torch.equal(value, weights[name]) for name, value in full.weights().items())
        assert all(torch.equal(gate, torch.full_like(gate, -0.5)) for gate in gates(run))


def test_a_model_with_a_memory_is_no_full_one(tiny_run: MakeRun, tmp_path: Path) -> None:
    tiny_run(**INFINI, training__save_last="true", training__max_steps=2)()
    source = next((tmp_path / "checkpoints").glob("last.pt")).rename(tmp_path / "infini.pt")
    assert tiny_run(model__init_from=source).trainer.state.settings.model.attention == "infini"
    with pytest.raises(ConfigError, match=r"need model\.attention=infini"):
        tiny_run(model__init_from=source, model__attention="full")
    with pytest.raises(ConfigError, match=r"need model.infini\.segment_length=4, not infini"):
        tiny_run(**{**INFINI, "model__infini__segment_length": 8}, model__init_from=source)
    with pytest.raises(ConfigError, match="attention = infini: transformers' LLaMA has no such"):
        export(source, tmp_path / "exported")


def test_a_gates_rate_may_change_at_a_resume(tiny_run: MakeRun) -> None:
    tiny_run(**INFINI, training__max_steps=2, training__save_last="true")()
    run = tiny_run(
        **INFINI, model__infini__gate_lr=0.5, training__max_steps=4, training__resume="auto"
    )
    assert any("model.infini.gate_lr 0.01 -> 0.5" in line for line in run.kept.lines)
