"""What a worker tells of its bits each step, and what it notices by itself."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from model_check import optim
from model_check.config.schema import Settings
from model_check.config.shape import Geometry
from model_check.engine import assembly
from model_check.engine.results import StepMetrics
from model_check.errors import BrokenStateError
from model_check.events import Break, Evidence, Step, Vectors, encode
from model_check.forensics.checksums import ChecksumIndex, ChecksumKey, ChecksumVector
from model_check.hooks import fingerprints
from model_check.hooks.checksum_log import ChecksumLog
from model_check.hooks.checksums import Checksums
from model_check.hooks.hook import RunObserver
from model_check.utils.fingerprint import QUANTITIES, weight
from tests.engine.conftest import Run, trace_alone

MakeRun = Callable[..., Run]
TAKEN = set(QUANTITIES) - {"loss", "grad_norm", "audit", "inputs"}
WQ = "layers.0.attention.wq.weight"
TWO = {"training__grad_accum_nums": 2, "model__num_layers": 2}


def fingerprints_of(run: Run) -> list[Mapping[str, str]]:
    return [step.fp for step in run.kept.steps()]


def vectors_of(run: Run) -> Vectors:
    (vectors,) = [event for event in run.kept.events if isinstance(event, Vectors)]
    return vectors


def broken(run: Run) -> Break:
    with pytest.raises(BrokenStateError, match="nothing in this program did that"):
        run()
    (event,) = [event for event in run.kept.events if isinstance(event, Break)]
    return event


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_equal_runs_tell_equal_fingerprints_of_everything(
    tiny_run: MakeRun, precision: str
) -> None:
    amp = str(precision != "fp32").lower()
    runs = [tiny_run(training__precision=precision, training__use_amp=amp, **TWO)() for _ in "ab"]
    one, other = map(fingerprints_of, runs)
    assert one == other
    assert [set(fp) for fp in one] == [TAKEN] * 4
    # The state moves, and each update begins with what the one before left.
    assert len({fp["weights"] for fp in one}) == 4
    for quantity in ("weights", "exp_avg", "exp_avg_sq"):
        left = [fp[quantity] for fp in one]
        assert [fp[f"before.{quantity}"] for fp in one][1:] == left[:-1]


def test_a_step_takes_less_than_a_kibibyte_to_tell(tiny_run: MakeRun) -> None:
    run = tiny_run(model__num_layers=8)()
    assert max(len(encode(step)) for step in run.kept.steps()) < 1024


@pytest.mark.filterwarnings("ignore")  # the tracer's own
@pytest.mark.parametrize("how", ["gradient_checkpointing", "compile"])
def test_what_flows_is_taken_however_it_is_computed(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    trace_alone(monkeypatch.setattr)
    run = tiny_run(**{f"training__{how}": "true"}, **TWO)()
    assert run.trainer.state.model.loss.is_compiled is (how == "compile"), run.kept.lines
    assert [set(fp) for fp in fingerprints_of(run)] == [TAKEN] * 4


def test_a_roll_up_is_one_number_for_a_quantity() -> None:
    entries = [ChecksumKey("weights", name, 9, 32) for name in "abc"]
    index = ChecksumIndex((entries[0], ChecksumKey("forward", "norm", 9, 32), *entries[1:]))
    values = torch.tensor([-5, 7, 1 << 62, 3])
    rolled = {
        "weights": -5 * weight(0) + (1 << 62) * weight(1) + 3 * weight(2),
        "forward": 7 * weight(0),
    }
    wanted = {quantity: f"{value % (1 << 64):016x}" for quantity, value in rolled.items()}
    assert index.roll_ups(values) == wanted
    assert list(index.roll_ups(values)) == ["weights", "forward"]
    for number in range(4):
        changed = values.clone()
        changed[number] ^= 1 << 61
        assert index.roll_ups(changed) != wanted


def test_off_tells_none_and_computes_nothing_twice(tiny_run: MakeRun) -> None:
    run = tiny_run(debug__fingerprints="off")()
    assert fingerprints_of(run) == [{}] * 4
    assert [step.repeated for step in run.kept.steps()] == [None] * 4
    assert not any(isinstance(event, Vectors) for event in run.kept.events)


def test_the_fingerprints_change_no_bit_of_a_run(tiny_run: MakeRun) -> None:
    assert tiny_run(**TWO)().bits() == tiny_run(debug__fingerprints="off", **TWO)().bits()


def rotating(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch, num_slots: int, **changes: Any
) -> Run:
    """About so many slots."""

    def budget(_settings: Settings, shape: Geometry, *_: object) -> float:
        return 7 * 4 * shape.num_parameters / num_slots

    monkeypatch.setattr(assembly, "_fingerprint_budget", budget)
    return tiny_run(training__max_steps=8, model__num_layers=2, **changes)


def taken(run: Run, step: int) -> set[tuple[str, str]]:
    vectors = run.hook(Checksums)._log.vectors(step)
    return {(quantity, name) for quantity, tensors in vectors.fp.items() for name in tensors}


def test_a_rotation_takes_everything_once_in_turn_and_all_at_both_ends(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = rotating(tiny_run, monkeypatch, 3)()
    num_slots = run.hook(Checksums)._fingerprints.num_slots
    assert 3 <= num_slots <= 6
    everything = taken(run, 0)
    assert taken(run, 7) == {p for p in everything if not p[0].startswith("before.")} | {
        p for p in taken(run, 7) if p[0].startswith("before.")
    }
    slots = [taken(run, step) for step in range(1, 1 + num_slots)]
    assert set().union(*slots) == everything
    assert all(slot < everything for slot in slots[1:])
    # Each step looks again at what the step before left.
    for now, then in zip(slots[1:], slots[:-1], strict=True):
        left = {(q, n) for q, n in then if q in ("weights", "exp_avg", "exp_avg_sq")}
        assert {(q.removeprefix("before."), n) for q, n in now if "before." in q} == left


@pytest.mark.parametrize("num_slots", [1, 3])
def test_fingerprints_and_bits_are_those_of_an_update_in_one_block(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch, num_slots: int
) -> None:
    """A matrix of 2,048 values is divided; the norms and the embedding share a block."""
    whole = rotating(tiny_run, monkeypatch, num_slots, training__grad_accum_nums=2)()
    monkeypatch.setattr(optim, "BLOCK_VALUES", 1024)
    divided = rotating(tiny_run, monkeypatch, num_slots, training__grad_accum_nums=2)()
    assert len(divided.trainer.state.optimizer.blocks) > len(whole.trainer.state.optimizer.blocks)
    assert vectors_of(divided).fp == vectors_of(whole).fp
    assert fingerprints_of(divided) == fingerprints_of(whole)
    assert divided.bits() == whole.bits()


def test_a_large_tensor_is_taken_in_parts(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprints, "PART_VALUES", 500)
    run = tiny_run(debug__drill=f"flip@2:all:{WQ}:5")
    event = broken(run)
    assert (event.tensor, event.found) == (f"{WQ}[0:500]", [(0, 5)])


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize(
    ("drill", "quantity", "tensor", "found"),
    [
        (f"flip@2:all:{WQ}:0", "weights", WQ, [(0, 0)]),
        ("flip@2:all:rope_cos:31", "weights", "rope_cos", [(0, 31)]),
        (f"flip_moment@2:all:{WQ}:7", "exp_avg", WQ, [(0, 7)]),
        (f"flip_moment@2:all:exp_avg_sq.{WQ}:7", "exp_avg_sq", WQ, [(0, 7)]),
        (f"burst@2:all:{WQ}:32", "weights", WQ, []),
    ],
)
def test_state_that_changes_by_itself_is_named_without_a_peer(
    tiny_run: MakeRun, drill: str, quantity: str, tensor: str, found: list[Any], lag: int
) -> None:
    event = broken(tiny_run(lag=lag, debug__drill=drill))
    assert (event.step, event.since) == (2, 1)
    assert (event.quantity, event.tensor, event.found) == (quantity, tensor, found)


def test_a_change_before_the_first_step_is_noticed(tiny_run: MakeRun) -> None:
    """Its passes are those of another state, so that they differ from the rehearsal's proves
    nothing of kernels."""
    run = tiny_run(debug__drill=f"flip@0:all:{WQ}:3")
    event = broken(run)
    assert (event.step, event.since, event.found) == (0, None, [(0, 3)])
    assert "after the start" in event.what
    assert [step.repeated for step in run.kept.steps()] == [None]


class Flips(RunObserver):
    """One bit of a weight, when a step is told."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.weight = torch.empty(0)

    def on_result(self, metrics: StepMetrics) -> None:
        if metrics.step == self.step:
            self.weight.data.view(torch.int32).view(-1)[9] ^= 1


def test_a_change_after_the_last_step_is_noticed_before_it_is_saved(
    tiny_run: MakeRun, tmp_path: Path
) -> None:
    flips = Flips(step=3)
    run = tiny_run(observers=(flips,), training__save_last="true")
    flips.weight = run.trainer.state.model.get_parameter(WQ)
    event = broken(run)
    assert (event.step, event.since, event.found) == (4, 3, [(9, 0)])
    assert not list(tmp_path.rglob("last.pt"))
    assert [e.what for e in run.kept.events if isinstance(e, Evidence)] == ["dossier"]


def differing(tiny_run: MakeRun, drill: str, **changes: Any) -> list[str]:
    """The quantities of step 2 that a drill changes."""
    clean = fingerprints_of(tiny_run(**TWO, **changes)())[2]
    other = fingerprints_of(tiny_run(debug__drill=drill, **TWO, **changes)())[2]
    return [quantity for quantity in QUANTITIES if clean.get(quantity) != other.get(quantity)]


@pytest.mark.parametrize("bit", [0, 16, 31])
def test_a_bit_of_a_gradient_is_first_seen_in_the_gradients(tiny_run: MakeRun, bit: int) -> None:
    assert differing(tiny_run, f"flip_gradient@2:all:{WQ}:{bit}")[0] == "gradients"


def test_a_bit_of_what_flows_is_first_seen_there(tiny_run: MakeRun) -> None:
    found = differing(tiny_run, "flip_activation@2:all:layers.0.feed_forward:9")
    assert found[0] == "forward"
    assert {"backward", "gradients", "weights"} < set(found)


def varying(module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
    return output + torch.rand(()) * 1e-3


def test_a_first_step_that_does_not_repeat_itself_says_so(tiny_run: MakeRun) -> None:
    run = tiny_run()
    run.trainer.state.model.layers[0].register_forward_hook(varying)
    run()
    told = [step.repeated for step in run.kept.steps()]
    # The rehearsal drew the same random numbers: only an own source of them varies.
    assert told == [True, None, None, None]
    run = tiny_run()
    calls: list[int] = []

    def count(module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        calls.append(1)
        return output + len(calls) * 1e-3

    run.trainer.state.model.layers[0].register_forward_hook(count)
    run()
    assert [step.repeated for step in run.kept.steps()] == [False, None, None, None]


def test_a_loss_that_its_rehearsal_did_not_give_does_not_repeat_itself(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes and gradients are those of the rehearsal; the number alone is wrong."""
    take = ChecksumLog.take

    def erring(log: ChecksumLog, metrics: StepMetrics, vector: ChecksumVector) -> None:
        wrong = replace(metrics, result=replace(metrics.result, loss=metrics.result.loss + 2**-18))
        take(log, wrong if metrics.step == 0 else metrics, vector)

    monkeypatch.setattr(ChecksumLog, "take", erring)
    run = tiny_run()()
    assert [step.repeated for step in run.kept.steps()] == [False, None, None, None]


def test_without_determinism_nothing_has_to_repeat(tiny_run: MakeRun) -> None:
    run = tiny_run(system__deterministic="false")()
    assert [step.repeated for step in run.kept.steps()] == [None] * 4
    assert fingerprints_of(run)[0]["weights"]


def test_the_vectors_of_the_last_steps_are_kept(tiny_run: MakeRun) -> None:
    run = tiny_run(training__max_steps=12)()
    log = run.hook(Checksums)._log
    assert vectors_of(run).fp == log.vectors(11).fp
    assert log.vectors(4).fp["weights"].keys() == log.vectors(11).fp["weights"].keys()
    assert log.vectors(3) == Vectors(step=3)
    # As they are computed: the head's gradient is the first.
    assert list(log.vectors(4).fp["gradients"])[-1] == "tok_embed.weight"
    assert list(log.vectors(4).fp["backward"]) == ["norm", "layers.0", "tok_embed"]


def test_a_resumed_run_tells_what_the_whole_one_does(tiny_run: MakeRun, tmp_path: Path) -> None:
    whole = tiny_run(training__max_steps=6, directory=tmp_path / "whole")()
    tiny_run(training__max_steps=6, training__save_interval=3, directory=tmp_path / "a")()
    resume = str(tmp_path / "a" / "step_3.pt")
    rest = tiny_run(training__max_steps=6, training__resume=resume, directory=tmp_path / "a")()
    assert fingerprints_of(rest) == fingerprints_of(whole)[3:]
    assert [step.repeated for step in rest.kept.steps()] == [True, None, None]
    assert isinstance(rest.kept.steps()[0], Step)


def test_a_flip_that_makes_the_step_not_finite_is_told_as_what_it_is(tiny_run: MakeRun) -> None:
    """Infinity comes again when the step is computed again: it would pass for software."""
    event = broken(tiny_run(debug__drill=f"flip@2:all:{WQ}:30"))
    assert (event.tensor, event.found) == (WQ, [(0, 30)])


def test_a_rotation_with_float16_looks_again_at_what_the_step_before_left(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"training__precision": "fp16", "training__use_amp": "true"}
    overflows = Overflows(step=2)
    run = rotating(tiny_run, monkeypatch, 3, observers=(overflows,), **changes)
    scale = run.trainer.state.optimizer.loss_scale
    assert scale is not None
    overflows.scale = scale.value
    run()
    assert any("an overflow" in line for line in run.kept.lines)
    left = {(q, n) for q, n in taken(run, 2) if q in ("weights", "exp_avg", "exp_avg_sq")}
    assert {(q.removeprefix("before."), n) for q, n in taken(run, 3) if "before." in q} == left


class Overflows(RunObserver):
    """The step after this one."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.scale = torch.empty(0)

    def on_result(self, metrics: StepMetrics) -> None:
        if metrics.step == self.step:
            self.scale.fill_(2.0**30)
