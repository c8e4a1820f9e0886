"""One step: weights are cast once for all its micro-batches, nothing waits for the device, and an
overflow in float16 is told from a fault."""

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from model_check.engine.metrics import Meter
from model_check.engine.results import AsyncMetrics, StepData
from model_check.errors import NonFiniteError
from model_check.events import Note
from model_check.forensics.fingerprint import eager_fingerprint
from model_check.hooks.checksum_log import ChecksumLog
from model_check.hooks.checksums import Checksums, StateCheck
from model_check.hooks.fingerprints import Fingerprints
from model_check.hooks.observe.scalars import ScalarLog
from model_check.hooks.site_monitor import SiteMonitor
from model_check.loss_scale import FIRST_SCALE, LossScale, loss_scale
from model_check.optim import AdamW
from model_check.train import StepContext, accumulate, train_step
from tests.engine.conftest import VOCABULARY, FakeBatch, FakeSource, Run

MakeRun = Callable[..., Run]
CPU = torch.device("cpu")
OWNER = "layers.0.feed_forward.w2"
WEIGHT = f"{OWNER}.weight"
TOO_LARGE = 2.0**24
"""A loss scale at which the gradients of the tiny model overflow in float16."""


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
    data, context = micro_batches(4), ours.step_context
    accumulate(context, data)
    for pair in data.micro_batches:
        with context.forward_context():
            loss = recast.trainer.state.model.summed_loss(*pair) / data.num_targets
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
            accumulate(run.step_context, micro_batches(num_micro_batches))
        counts.append(sum(address in weights for address in calls.cast))
    assert counts == [7, 7]  # wq, wk, wv, wo, w1, w2, w3


def test_the_copies_of_one_step_are_not_those_of_the_next(tiny_run: MakeRun) -> None:
    run, fresh = tiny_run(training__use_amp="true"), tiny_run(training__use_amp="true")
    before = run.weights()
    for _ in range(2):
        train_step(run.step_context, micro_batches(2), 0.1)
    assert not torch.equal(run.weights()[WEIGHT], before[WEIGHT])
    fresh.trainer.state.model.load_state_dict(run.trainer.state.model.state_dict())
    for each in (run, fresh):
        accumulate(each.step_context, micro_batches(2))
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
        tiny_run(training__use_amp="true", training__precision=precision)
        if precision != "fp32"
        else tiny_run()
    )
    with Calls() as calls:
        train_step(run.step_context, micro_batches(2), 1e-3, run.trainer.trainer.hooks)
    assert "_fused_adamw_" in calls.names
    assert WAITING.isdisjoint(calls.names)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # a prototype, says torch once
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("attention", ["full", "infini"])
def test_no_step_on_a_gpu_waits_for_it(tiny_run: MakeRun, precision: str, attention: str) -> None:
    device = torch.device("cuda")
    segments = {} if attention == "full" else {"model__infini__segment_length": 4}
    run = tiny_run(model__attention=attention, **segments)
    state = run.trainer.state
    model = state.model.to(device)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    scale = loss_scale(dtype, device)
    optimizer = AdamW(model.named_parameters(), state.settings.training, scale)
    fingerprints = Fingerprints(model, optimizer, eager_fingerprint, sites=model.sites, last_step=3)
    monitor, log = SiteMonitor(model.sites), ChecksumLog()
    watchers = (monitor, fingerprints)
    context = StepContext(
        model, optimizer, device, dtype, 1.0, watchers=watchers, update_watcher=fingerprints
    )
    checksums = Checksums(fingerprints, log, run.hook(StateCheck))
    logging = state.settings.logging
    gates_of = ScalarLog(4, logging, Mock(), Mock(), Meter(), gates=optimizer.gates)
    data, reader = micro_batches(2, device), AsyncMetrics(lag=1)
    try:
        for step in range(4):
            torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first allocates
            result = train_step(context, data, 1e-3, [checksums, gates_of])
            reader.push(data, 1e-3, result)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    (last,) = reader.flush()
    assert not last.bad
    gates = optimizer.gates()
    assert (gates is None) == ("gates" not in last.result.notes) == (attention == "full")
    if gates is not None:
        assert torch.equal(last.result.notes["gates"], gates.cpu())


def fp16(tiny_run: MakeRun, **changes: Any) -> Run:
    return tiny_run(training__precision="fp16", training__use_amp="true", **changes)


def test_float16_trains_with_the_norm_and_loss_of_float32(tiny_run: MakeRun) -> None:
    half, whole = fp16(tiny_run)(), tiny_run()()
    for ours, theirs in zip(half.bits(), whole.bits(), strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert float.fromhex(one) == pytest.approx(float.fromhex(other), rel=1e-2)


def scale_of(run: Run) -> LossScale:
    scale = run.trainer.state.optimizer.loss_scale
    assert scale is not None
    return scale


def notes(run: Run) -> list[str]:
    return [event.text for event in run.kept.events if isinstance(event, Note)]


def test_a_step_that_overflows_is_repeated_at_half_the_scale_until_it_fits(
    tiny_run: MakeRun,
) -> None:
    run, plain = fp16(tiny_run), fp16(tiny_run)()
    scale_of(run).value.fill_(TOO_LARGE)
    run()
    (note,) = notes(run)
    assert f"step 0: gradients not finite in float16 at a loss scale of {TOO_LARGE:g}" in note
    assert f"an overflow; repeated at {scale_of(run).value:g}" in note
    assert note in run.kept.lines
    assert scale_of(run).value.item() < TOO_LARGE
    # Another scale gives other bits: that is no proof that kernels vary.
    assert [step.repeated for step in run.kept.steps()] == [None] * 4
    assert [step.repeated for step in plain.kept.steps()] == [True, None, None, None]
    assert run.trainer.state.optimizer.num_steps.item() == 4
    for ours, theirs in zip(run.bits(), plain.bits(), strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert float.fromhex(one) == pytest.approx(float.fromhex(other), rel=1e-2)


@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_one_gradient_that_is_not_finite_at_any_scale_is_a_fault(
    tiny_run: MakeRun, kind: str
) -> None:
    clean = fp16(tiny_run, training__max_steps=1)()
    run = fp16(tiny_run, debug__drill=f"{kind}@1:GPU6:{WEIGHT}:always")
    with pytest.raises(NonFiniteError, match=f"step 1, GPU6: gradient.* {OWNER} .*came again"):
        run()
    (note,) = notes(run)
    assert f"scale of {FIRST_SCALE:g}, nor at 1: not an overflow" in note
    assert all(torch.equal(w, run.weights()[n]) for n, w in clean.weights().items())
    assert (scale_of(run).value.item(), scale_of(run).num_good.item()) == (FIRST_SCALE, 1.0)


def once(value: float, time: int = 2) -> Callable[[Tensor], Tensor]:
    """A hook: one gradient is spoilt, as by a GPU that errs now and then. The first that it sees is
    that of the rehearsal of step 0."""
    seen: list[Tensor] = []

    def spoil(gradient: Tensor) -> Tensor:
        seen.append(gradient)
        return gradient * value if len(seen) == time else gradient

    return spoil


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_finite_when_computed_again_is_a_fault_too(
    tiny_run: MakeRun, value: float
) -> None:
    run = fp16(tiny_run)
    run.trainer.state.model.get_parameter(WEIGHT).register_hook(once(value))
    with pytest.raises(NonFiniteError, match=f"step 0, GPU6: gradient.* {OWNER} .*not come again"):
        run()
    assert "and finite when computed again: not an overflow" in notes(run)[0]


def test_without_determinism_only_a_smaller_scale_can_tell(tiny_run: MakeRun) -> None:
    run = fp16(tiny_run, system__deterministic="false")
    run.trainer.state.model.get_parameter(WEIGHT).register_hook(once(float("inf"), time=1))
    run()
    assert scale_of(run).value.item() == FIRST_SCALE / 2


def test_a_loss_that_is_not_finite_is_no_overflow(tiny_run: MakeRun) -> None:
    with pytest.raises(NonFiniteError, match="step 1"):
        fp16(tiny_run, debug__drill="loss_nan@1")()


def test_gradients_that_overflow_at_the_smallest_scale_are_a_failure(tiny_run: MakeRun) -> None:
    run = fp16(tiny_run, debug__drill=f"nan@2:GPU6:{WEIGHT}")
    scale_of(run).value.fill_(1.0)
    with pytest.raises(NonFiniteError, match="step 2"):
        run()


def test_a_batch_without_a_label_trains_nothing_and_is_not_bad(tiny_run: MakeRun) -> None:
    tokens = torch.randint(0, VOCABULARY, (2, 16))
    source = FakeSource(make=lambda _: FakeBatch(tokens, torch.full_like(tokens, -100)))
    run = tiny_run(source, training__max_steps=1)()
    assert float.fromhex(run.kept.steps()[0].loss) == 0.0
