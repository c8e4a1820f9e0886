"""A whole run in this process: it learns the next token, and every documented knob acts."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from model_check.config.flops import flops_per_token
from model_check.engine import assembly, results
from model_check.engine.memory import OutOfMemory
from model_check.engine.results import AsyncMetrics, StepData, StepResult
from model_check.engine.stop import Terminated
from model_check.errors import BrokenStateError, ConfigError, NonFiniteError
from model_check.events import Break, Evidence, NonFinite, Phase
from model_check.forensics.fingerprint import Kernel, eager_fingerprint
from model_check.forensics.manifest import read_manifest
from model_check.hooks import progress
from tests.engine.conftest import VOCABULARY, FakeBatch, FakeSource, Run

MakeRun = Callable[..., Run]


def counting(number: int) -> FakeBatch:
    """0 1 2 ... 30 0 1 ..., each row from another place."""
    starts = torch.arange(number, number + 4)[:, None]
    tokens = (starts + torch.arange(17)) % VOCABULARY
    return FakeBatch(tokens[:, :-1], tokens[:, 1:])


def test_it_learns_that_the_label_is_the_next_token(tiny_run: MakeRun) -> None:
    run = tiny_run(
        FakeSource(make=counting), training__max_steps=60, training__learning_rate=0.02
    )()
    assert float.fromhex(run.kept.steps()[-1].loss) < 0.05
    tokens = torch.arange(16)[None]
    predicted = run.trainer.state.model(tokens).argmax(-1)  # type: ignore[operator]
    assert torch.equal(predicted, tokens + 1)


def test_the_same_settings_give_the_same_bits(tiny_run: MakeRun) -> None:
    first, second = tiny_run()(), tiny_run()()
    assert first.bits() == second.bits()
    assert len(first.bits()) == 4
    assert all(torch.equal(w, second.weights()[n]) for n, w in first.weights().items())


def test_another_seed_gives_other_bits(tiny_run: MakeRun) -> None:
    assert tiny_run()().bits() != tiny_run(system__seed=43)().bits()


def test_every_step_has_a_line_and_an_event_with_exact_bits(tiny_run: MakeRun) -> None:
    run = tiny_run()()
    lines = [line for line in run.kept.lines if line.startswith("Step [")]
    steps = run.kept.steps()
    assert [line.split("]")[0] for line in lines] == [f"Step [{n}/4" for n in range(4)]
    for number, (line, step) in enumerate(zip(lines, steps, strict=True)):
        loss = float.fromhex(step.loss)
        assert step.step == number
        assert step.tokens == 2 * 16
        assert f"Loss: {loss:.4f} |" in line
        assert torch.tensor(loss, dtype=torch.float32).item() == loss, "not a float32"


def test_phases_come_in_order_and_say_what_was_built(tiny_run: MakeRun) -> None:
    run = tiny_run()()
    phases = [event for event in run.kept.events if isinstance(event, Phase)]
    assert [phase.name for phase in phases] == ["build", "train"]
    detail = phases[0].detail
    assert detail["attention_backend"] == "sdpa"
    assert detail["attention_reason"]
    assert detail["dtype"] == "float32"
    assert detail["num_parameters"] == 11_296
    state = run.trainer.state
    assert detail["flops_per_token"] == flops_per_token(state.settings, state.shape).causal
    assert detail["fingerprints"] == "full, schema 1"


def test_workers_whose_fingerprints_differ_say_so_before_they_are_compared(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Kernel("eager", eager_fingerprint, "no compiler")
    monkeypatch.setattr(assembly, "fingerprint_for", lambda device: slow)
    run = tiny_run()()
    (build,) = (e for e in run.kept.events if isinstance(e, Phase) and e.name == "build")
    assert build.detail["fingerprints"] == "rotate, schema 1"
    assert any("(no compiler)" in line for line in run.kept.lines)


@pytest.mark.parametrize(
    ("name", "steps", "how"),
    [
        ("triton", 200, "full"),
        ("triton", 201, "rotate"),
        ("eager", 4, "rotate"),
        ("c", 999, "full"),
    ],
)
def test_a_run_so_short_that_it_is_a_check_sees_all_on_a_gpu_too(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch, name: Any, steps: int, how: str
) -> None:
    kernel = Kernel(name, eager_fingerprint)
    monkeypatch.setattr(assembly, "fingerprint_for", lambda device: kernel)
    run = tiny_run(training__max_steps=steps)
    (build,) = (e for e in run.kept.events if isinstance(e, Phase) and e.name == "build")
    assert build.detail["fingerprints"] == f"{how}, schema 1"


@pytest.mark.parametrize("lag", [0, 1])
def test_a_step_takes_the_time_to_its_end_not_to_its_reading(
    tiny_run: MakeRun, monkeypatch: pytest.MonkeyPatch, lag: int
) -> None:
    """A GPU's numbers are read late: the first step's when the second has begun."""
    ends = itertools.count(1.0)
    monkeypatch.setattr(results, "moment", lambda device, awaited: next(ends))
    monkeypatch.setattr(progress, "moment", lambda device: 0.0)
    run = tiny_run(lag=lag)()
    assert [step.ms for step in run.kept.steps()] == [1000.0] * 4


def test_only_every_so_many_steps_are_printed_and_always_the_last(tiny_run: MakeRun) -> None:
    run = tiny_run(logging__log_interval=3, training__max_steps=6)()
    lines = [line.split("/")[0] for line in run.kept.lines if line.startswith("Step [")]
    assert lines == ["Step [0", "Step [3", "Step [5"]
    assert len(run.kept.steps()) == 6


def with_ignored(number: int) -> FakeBatch:
    """Micro-batches that count unequal numbers of targets."""
    batch = FakeSource(batch_size=1).random(number)
    targets = batch.targets.clone()
    targets[:, : number % 4 * 3] = -100
    return FakeBatch(batch.inputs, targets)


def joined(number: int) -> FakeBatch:
    parts = [with_ignored(4 * number + n) for n in range(4)]
    return FakeBatch(
        torch.cat([part.inputs for part in parts]), torch.cat([part.targets for part in parts])
    )


def test_accumulation_equals_the_big_batch_with_unequal_token_counts(tiny_run: MakeRun) -> None:
    big = tiny_run(FakeSource(make=joined), training__batch_size=4)()
    parts = tiny_run(
        FakeSource(make=with_ignored), training__batch_size=1, training__grad_accum_nums=4
    )()
    for ours, theirs in zip(parts.bits(), big.bits(), strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert float.fromhex(one) == pytest.approx(float.fromhex(other), rel=1e-5)
    assert [step.tokens for step in parts.kept.steps()] == [4 * 16] * 4


def test_global_batch_size_sets_the_number_of_micro_batches(tiny_run: MakeRun) -> None:
    run = tiny_run(training__global_batch_size=6)()
    assert {step.tokens for step in run.kept.steps()} == {6 * 16}


@pytest.mark.parametrize(
    "changes",
    [
        {"training__max_grad_norm": 0.01},
        {"training__warmup_steps": 3},
        {"training__learning_rate": 0.01},
        {"training__weight_decay": 0.9},
        {"training__adam_beta2": 0.5},
        {"training__lr_schedule": "linear"},
        {"model__init_std": 0.1},
        {"model__rope_theta": 100.0},
        {"training__use_amp": "true"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_every_documented_knob_acts(tiny_run: MakeRun, changes: dict[str, object]) -> None:
    assert tiny_run(**changes)().bits() != tiny_run()().bits()


def test_clipping_bounds_the_update_and_not_the_reported_norm(tiny_run: MakeRun) -> None:
    # Without decay and with a huge eps, AdamW's first step is the gradient times a constant.
    plain = {"training__max_steps": 1, "training__weight_decay": 0, "training__adam_eps": 1e3}
    moved = []
    for limit in ("null", "0.01"):
        run = tiny_run(training__max_grad_norm=limit, training__learning_rate=1.0, **plain)
        before = run.weights()
        norm = float.fromhex(run().bits()[0][1])
        squares = [((w - before[n]).double() ** 2).sum() for n, w in run.weights().items()]
        moved.append(torch.stack(squares).sum().sqrt().item())
    assert norm > 0.1
    assert moved[1] / moved[0] == pytest.approx(0.01 / norm, rel=1e-2)


def test_amp_computes_in_bfloat16_and_keeps_float32_weights(tiny_run: MakeRun) -> None:
    run = tiny_run(training__use_amp="true")
    seen = []
    layer = run.trainer.state.model.layers[0].attention.wq  # type: ignore[index,union-attr]
    layer.register_forward_hook(lambda _m, _i, out: seen.append(out.dtype))  # type: ignore[union-attr,operator]
    run()
    assert set(seen) == {torch.bfloat16}
    assert {p.dtype for p in run.trainer.state.model.parameters()} == {torch.float32}


def test_reading_late_gives_the_same_bits_and_every_line(tiny_run: MakeRun) -> None:
    prompt, late = tiny_run()(), tiny_run(lag=1)()
    assert late.bits() == prompt.bits()
    assert len([line for line in late.kept.lines if line.startswith("Step [")]) == 4


def test_a_reader_returns_steps_in_order_as_late_as_it_may() -> None:
    reader, returned = AsyncMetrics(lag=2), []
    for number in range(4):
        data = StepData(number, [], num_positions=1, num_targets=1)
        loss, norm = torch.tensor(number / 3), torch.tensor(1.0)
        result = StepResult(loss, norm, torch.tensor(number == 3), norm[None])
        returned.append([reading.step for reading in reader.push(data, 0.1, result)])
    assert returned == [[], [], [0], [1]]
    third, fourth = reader.flush()
    assert (third.step, third.bad, fourth.step, fourth.bad) == (2, False, 3, True)
    assert torch.tensor(third.loss, dtype=torch.float32) == torch.tensor(2 / 3)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_a_bad_gradient_ends_the_run_with_weights_as_before_it(
    tiny_run: MakeRun, kind: str, lag: int, tmp_path: Path
) -> None:
    name = "layers.0.feed_forward.w2.weight"
    clean = tiny_run(training__max_steps=2)()
    run = tiny_run(
        lag=lag,
        debug__drill=f"{kind}@2:GPU6:{name}:always",
        training__max_steps=9,
        training__learning_rate=0.001,
    )
    with pytest.raises(
        NonFiniteError, match=r"step 2, GPU6: gradient.* layers\.0\.feed_forward\.w2 .*came again"
    ):
        run()
    assert run.bits() == clean.bits()
    assert all(torch.equal(w, clean.weights()[n]) for n, w in run.weights().items())
    for event in (event for event in run.kept.events if isinstance(event, NonFinite)):
        told = (event.step, event.where, event.names, event.grad_norm)
        assert told == (2, "gradient", [name], kind)
    assert run.source.closed
    saved = torch.load(tmp_path / "checkpoints" / "nan_grad_step_2.pt", weights_only=True)
    assert saved["step"] == 2
    assert torch.equal(saved["model"][name], clean.weights()[name])
    evidence = [event.path for event in run.kept.events if isinstance(event, Evidence)]
    assert evidence[-1] == str(tmp_path / "checkpoints" / "nan_grad_step_2.pt")


def test_a_bad_loss_is_reported_as_one(tiny_run: MakeRun) -> None:
    run = tiny_run(debug__drill="loss_nan@1")
    with pytest.raises(NonFiniteError):
        run()
    first, last = (event for event in run.kept.events if isinstance(event, NonFinite))
    assert (last.where, last.loss, last.step) == ("loss", "nan", 1)
    assert (first.repeated, last.repeated) == (None, False)
    assert (last.grad_norm, len(last.names)) == ("nan", len(run.weights()))
    assert "Loss: nan" in run.kept.lines


def test_a_drill_for_another_worker_changes_nothing(tiny_run: MakeRun) -> None:
    assert tiny_run(debug__drill="nan@1:GPU5")().bits() == tiny_run()().bits()


def test_a_flipped_bit_is_named_in_its_step(tiny_run: MakeRun) -> None:
    clean, run = tiny_run()(), tiny_run(debug__drill="flip@2:all:layers.0.attention.wk.weight:3")
    with pytest.raises(BrokenStateError, match=r"wk\.weight changed \(bit 3 of value 0\)"):
        run()
    assert run.bits()[:2] == clean.bits()[:2]
    event = next(event for event in run.kept.events if isinstance(event, Break))
    assert (event.step, event.since, event.quantity) == (2, 1, "weights")
    assert (event.found, event.num_tensors) == ([(0, 3)], 1)


def test_an_unknown_parameter_of_a_drill_names_the_nearest(tiny_run: MakeRun) -> None:
    with pytest.raises(ConfigError, match=r"did you mean layers\.0\.attention\.wq\.weight"):
        tiny_run(debug__drill="nan@1:GPU6:layers.0.attention.wqq.weight")


def test_a_tokenizer_larger_than_the_model_is_refused(tiny_run: MakeRun) -> None:
    with pytest.raises(ConfigError, match=r"vocab_size = 30 is smaller.*\(31\).*vocab_size=null"):
        tiny_run(model__vocab_size=30)


def test_a_model_that_does_not_fit_is_told_with_what_to_change(tiny_run: MakeRun) -> None:
    with pytest.raises(
        OutOfMemory, match=r"out of memory on cpu.*; lower training\.batch_size \(2\)"
    ):
        tiny_run(model__vocab_size=10**13)


def test_a_signal_ends_the_run_after_the_step_that_is_under_way(tiny_run: MakeRun) -> None:
    run = tiny_run(training__max_steps=1000, lag=1)

    def stopping(number: int) -> FakeBatch:
        if number == 3:
            run.stop.signum = 15
        return FakeSource().random(number)

    run.source.make = stopping
    with pytest.raises(Terminated):
        run()
    assert len(run.bits()) == 4
    assert run.source.closed


def test_saves_come_when_asked_for_and_are_told(tiny_run: MakeRun, tmp_path: Path) -> None:
    run = tiny_run(
        training__max_steps=5, training__save_interval=2, training__save_last="true", lag=1
    )()
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["last.pt", "step_2.pt", "step_4.pt"]
    phases = [event.name for event in run.kept.events if isinstance(event, Phase)]
    assert phases == ["build", "train", *itertools.chain(*[["save", "train"]] * 3)]
    last = torch.load(tmp_path / "checkpoints" / "last.pt", weights_only=True)
    assert (last["step"], last["loader"], last["loss"]) == (
        5,
        {"sequences": 10},
        float.fromhex(run.bits()[-1][0]),
    )
    # The names of nanoGPT-like trainers: pickle writes one object once, so these are no copies.
    assert (last["iter_num"], last["train_loss"]) == (5, last["loss"])
    assert last["run_config"] is last["settings"]
    assert last["tokenizer_desc"] == last["data"].get("tokenizer")
    others = [last[name] for name in ("wandb", "wandb_id", "piano_tasks_config")]
    assert others == [None, None, None]


def spoil(run: Run, step: int) -> None:
    """A row of the embedding that no batch uses becomes NaN before `step`, as by a faulty memory:
    loss and gradients stay finite."""
    embedding = run.trainer.state.model.get_parameter("tok_embed.weight")

    def batch(number: int) -> FakeBatch:
        if number == step:
            embedding.data[VOCABULARY - 1] = float("nan")
        plain = FakeSource().random(number)
        return FakeBatch(plain.inputs.clamp(max=VOCABULARY - 2), plain.targets)

    run.source.make = batch


@pytest.mark.parametrize("saving", [{}, {"training__save_last": "true"}])
@pytest.mark.parametrize("lag", [0, 1])
def test_weights_that_are_not_finite_fail_the_run_although_every_loss_is(
    tiny_run: MakeRun, tmp_path: Path, saving: dict[str, str], lag: int
) -> None:
    run = tiny_run(lag=lag, debug__fingerprints="off", **saving)
    spoil(run, step=3)
    with pytest.raises(NonFiniteError, match=r"step 3, GPU6: 1 weight.* tok_embed\.weight"):
        run()
    assert len(run.bits()) == 4
    assert "NaN PARAMETER DETECTED [GPU 6]" in run.kept.lines
    (event,) = (event for event in run.kept.events if isinstance(event, NonFinite))
    assert (event.step, event.where, event.names) == (3, "weight", ["tok_embed.weight"])
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["dossier"]
    manifest = read_manifest(tmp_path / "checkpoints" / "dossier")
    assert (manifest.step, manifest.state_after) == (3, 4)
    guilty = [name for name, tensor in manifest.tensors.items() if tensor.guilty]
    assert guilty[0] == "weights/tok_embed.weight"
    assert not any(name.startswith("gradients/") for name in manifest.tensors)


def test_weights_that_are_not_finite_are_not_saved(tiny_run: MakeRun, tmp_path: Path) -> None:
    run = tiny_run(training__save_interval=1, debug__fingerprints="off")
    spoil(run, step=2)
    with pytest.raises(NonFiniteError, match=r"step 2.* not saved"):
        run()
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["dossier", "step_1.pt", "step_2.pt"]


def test_an_update_that_overflows_fails_the_run(tiny_run: MakeRun) -> None:
    with pytest.raises(NonFiniteError, match=r"step 0, GPU6: .* not finite after the update"):
        tiny_run(training__max_steps=1, training__learning_rate=1e39)()


@pytest.mark.parametrize(
    ("drill", "is_advised"),
    [("nan@1", False), ("nan_forward@1:all:layers.0:always", True), ("inf_weight@1", True)],
)  # whether a weight had changed by itself, fingerprints would tell
def test_advice_ends_the_block_of_a_fault_that_came_again(
    tiny_run: Callable[..., Run], drill: str, is_advised: bool
) -> None:
    run = tiny_run(debug__drill=drill, training__save_interval=1, debug__fingerprints="off")
    with pytest.raises(NonFiniteError):
        run()
    found = [line for line in run.kept.lines if line.startswith("If the settings made it: lower")]
    assert found == (run.kept.lines[-1:] if is_advised else [])
