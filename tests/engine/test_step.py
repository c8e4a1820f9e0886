"""One step: weights are cast once for all its micro-batches, nothing waits for the device, and an
overflow in float16 only skips."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from model_check.engine.batches import StepData
from model_check.engine.loss_scale import FIRST_SCALE, loss_scale
from model_check.engine.optim import AdamW
from model_check.engine.reading import Reader
from model_check.engine.step import StepPlan, accumulate, train_step
from model_check.engine.stop import EndedEarly
from model_check.errors import NonFiniteError
from model_check.events import Note
from tests.engine.conftest import VOCABULARY, FakeBatch, FakeSource, Run

MakeRun = Callable[..., Run]
CPU = torch.device("cpu")
WEIGHT = "layers.0.feed_forward.w2.weight"


def micro_batches(count: int, device: torch.device = CPU) -> StepData:
    batches = [FakeSource().random(number) for number in range(count)]
    pairs: list[tuple[Tensor, ...]] = [(b.inputs.to(device), b.targets.to(device)) for b in batches]
    return StepData(0, pairs, num_positions=32 * count, num_targets=32 * count)


def gradients(run: Run) -> list[Tensor]:
    return [gradient.clone() for gradient in run.trainer.state.optimizer.gradients()]


class Calls(TorchDispatchMode):
    """Keeps the names of operators, and the addresses of what is cast to bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.cast: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        if self.names[-1] == "_to_copy" and (kwargs or {}).get("dtype") == torch.bfloat16:
            self.cast.append(args[0].data_ptr())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("checkpointing", ["false", "true"])
def test_casting_once_a_step_changes_no_bit_of_a_gradient(
    tiny_run: MakeRun, checkpointing: str
) -> None:
    settings = {"training__use_amp": "true", "training__gradient_checkpointing": checkpointing}
    ours, recast = tiny_run(**settings), tiny_run(**settings)
    data, plan = micro_batches(4), ours.trainer.plan
    accumulate(ours.trainer.state.model, data, ours.trainer.state.optimizer, plan)
    for pair in data.micro_batches:
        with plan.forward_context():
            loss = recast.trainer.state.model(*pair) / data.num_targets
        loss.backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(ours), gradients(recast), strict=True))


def test_the_blocks_weights_are_cast_as_often_for_four_micro_batches_as_for_one(
    tiny_run: MakeRun,
) -> None:
    run = tiny_run(training__use_amp="true")
    weights = {p.data_ptr() for p in run.trainer.state.model.get_submodule("layers").parameters()}
    counts = []
    for num_micro_batches in (1, 4):
        with Calls() as calls:
            accumulate(
                run.trainer.state.model,
                micro_batches(num_micro_batches),
                run.trainer.state.optimizer,
                run.trainer.plan,
            )
        counts.append(sum(address in weights for address in calls.cast))
    assert counts == [7, 7]  # wq, wk, wv, wo, w1, w2, w3


def test_the_copies_of_one_step_are_not_those_of_the_next(tiny_run: MakeRun) -> None:
    run, fresh = tiny_run(training__use_amp="true"), tiny_run(training__use_amp="true")
    model, optimizer, plan = run.trainer.state.model, run.trainer.state.optimizer, run.trainer.plan
    before = run.weights()
    for _ in range(2):
        train_step(model, micro_batches(2), optimizer, 0.1, plan)
    assert not torch.equal(run.weights()[WEIGHT], before[WEIGHT])
    fresh.trainer.state.model.load_state_dict(model.state_dict())
    for trainer in (run.trainer, fresh.trainer):
        accumulate(trainer.state.model, micro_batches(2), trainer.state.optimizer, plan)
    assert all(torch.equal(a, b) for a, b in zip(gradients(run), gradients(fresh), strict=True))


WAITING = {
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "nonzero",
    "equal",
    "unique_dim",
    "_unique2",
}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_no_operator_of_a_step_hands_a_number_to_the_host(
    tiny_run: MakeRun, precision: str
) -> None:
    run = (
        tiny_run(training__use_amp="true", training__precision=precision).trainer
        if precision != "fp32"
        else tiny_run().trainer
    )
    with Calls() as calls:
        train_step(run.state.model, micro_batches(2), run.state.optimizer, 1e-3, run.plan)
    assert "_fused_adamw_" in calls.names
    assert WAITING.isdisjoint(calls.names)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # a prototype, says torch once
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_no_step_on_a_gpu_waits_for_it(tiny_run: MakeRun, precision: str) -> None:
    device = torch.device("cuda")
    run = tiny_run().trainer
    model = run.state.model.to(device)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    scale = loss_scale(dtype, device)
    optimizer = AdamW(model.named_parameters(), run.state.settings.training, scale)
    data, plan, reader = micro_batches(2, device), StepPlan(device, dtype, 1.0), Reader(lag=1)
    try:
        for step in range(4):
            torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first allocates
            result = train_step(model, data, optimizer, 1e-3, plan)
            reader.push(data, 1e-3, result)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not any(reading.bad for reading in reader.flush())


def fp16(tiny_run: MakeRun, **changes: Any) -> Run:
    return tiny_run(training__precision="fp16", training__use_amp="true", **changes)


def test_float16_trains_with_the_norm_and_loss_of_float32(tiny_run: MakeRun) -> None:
    half, whole = fp16(tiny_run)(), tiny_run()()
    for ours, theirs in zip(half.bits(), whole.bits(), strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert float.fromhex(one) == pytest.approx(float.fromhex(other), rel=1e-2)


def test_an_overflow_skips_its_step_tells_it_and_halves_the_scale(tiny_run: MakeRun) -> None:
    run = fp16(tiny_run, debug__drill=f"inf@1:GPU6:{WEIGHT}")
    scale = run.trainer.state.optimizer.loss_scale
    assert scale is not None
    run()
    steps = run.kept.steps()
    assert [step.skipped for step in steps] == [False, True, False, False]
    assert steps[1].grad_norm == "inf"
    assert scale.value.item() == FIRST_SCALE / 2
    assert run.trainer.state.optimizer.num_steps.item() == 3
    (note,) = (event.text for event in run.kept.events if isinstance(event, Note))
    assert note.startswith("step 1 skipped: its gradients overflow in float16 at a loss scale of")
    assert note in run.kept.lines


def test_a_skipped_step_changes_no_weight(tiny_run: MakeRun) -> None:
    clean = fp16(tiny_run, training__max_steps=1)()
    skipped = fp16(tiny_run, training__max_steps=2, debug__drill=f"nan@1:GPU6:{WEIGHT}")()
    assert all(torch.equal(w, skipped.weights()[n]) for n, w in clean.weights().items())


def test_a_loss_that_is_not_finite_is_no_overflow(tiny_run: MakeRun) -> None:
    with pytest.raises(NonFiniteError, match="step 1"):
        fp16(tiny_run, debug__drill="loss_nan@1")()


def test_gradients_that_overflow_at_the_smallest_scale_are_a_failure(tiny_run: MakeRun) -> None:
    run = fp16(tiny_run, debug__drill=f"nan@2:GPU6:{WEIGHT}")
    scale = run.trainer.state.optimizer.loss_scale
    assert scale is not None
    scale.value.fill_(1.0)
    with pytest.raises(NonFiniteError, match="step 2"):
        run()


@pytest.mark.parametrize("lag", [0, 1])
def test_a_run_whose_every_step_was_skipped_proves_nothing(tiny_run: MakeRun, lag: int) -> None:
    run = fp16(tiny_run, lag=lag, training__max_steps=3)
    weight = run.trainer.state.model.get_parameter(WEIGHT)
    weight.register_hook(lambda gradient: gradient * float("nan"))  # as a broken GPU would
    with pytest.raises(EndedEarly, match=r"changed no weight: .* in all of 3 steps"):
        run()


def test_reading_float16_late_gives_the_same_bits(tiny_run: MakeRun) -> None:
    drill = {"debug__drill": f"inf@1:GPU6:{WEIGHT}"}
    prompt, late = fp16(tiny_run, **drill)(), fp16(tiny_run, lag=1, **drill)()
    assert late.bits() == prompt.bits()
    assert [s.skipped for s in late.kept.steps()] == [s.skipped for s in prompt.kept.steps()]


def test_a_batch_without_a_label_trains_nothing_and_is_not_bad(tiny_run: MakeRun) -> None:
    tokens = torch.randint(0, VOCABULARY, (2, 16))
    source = FakeSource(make=lambda _: FakeBatch(tokens, torch.full_like(tokens, -100)))
    run = tiny_run(source, training__max_steps=1)()
    assert float.fromhex(run.kept.steps()[0].loss) == 0.0
