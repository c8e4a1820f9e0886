"""What a drill does to the bits of a run, beside NaN and Inf (test_origin)."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from model_check.config.drill import KINDS, PROCESS_KINDS
from model_check.engine.results import StepData, StepResult
from model_check.errors import ConfigError
from model_check.hooks.inject import Injector
from tests.engine.conftest import FakeSource, Run

MakeRun = Callable[..., Run]
NAME = "layers.0.feed_forward.w2.weight"
MODULE = "layers.0.feed_forward"


def bits_of(tensor: Tensor) -> Tensor:
    return (
        tensor.detach().clone().flatten().view(torch.int16 if tensor.itemsize == 2 else torch.int32)
    )


def turned(before: Tensor, after: Tensor) -> dict[int, int]:
    """Element -> the bits that differ."""
    width = 8 * before.itemsize
    changed = (bits_of(before) ^ bits_of(after)).tolist()
    return {number: bits % (1 << width) for number, bits in enumerate(changed) if bits}


def kept_gradient(run: Run) -> list[Tensor]:
    """Of NAME, as each micro-batch's backward pass leaves it; hooks of a drill came before."""
    kept: list[Tensor] = []
    parameter = run.trainer.state.model.get_parameter(NAME)
    parameter.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad.clone()))
    return kept


@pytest.mark.parametrize(("number", "expected"), [("", 1 << 16), (":3", 8), (":31", 1 << 31)])
def test_a_flipped_gradient_differs_in_one_bit_of_its_first_value(
    tiny_run: MakeRun, number: str, expected: int
) -> None:
    clean, flipped = tiny_run(), tiny_run(debug__drill=f"flip_gradient@1:all:{NAME}{number}")
    before, after = kept_gradient(clean), kept_gradient(flipped)
    clean(), flipped()
    # Before step 0 its passes are computed once.
    changes = [turned(*pair) for pair in zip(before[:3], after[:3], strict=True)]
    assert changes == [{}, {}, {0: expected}]


@pytest.mark.parametrize("kind", ["exp_avg", "exp_avg_sq"])
def test_a_flipped_moment_differs_in_one_bit(tiny_run: MakeRun, kind: str) -> None:
    run = tiny_run(debug__drill=f"flip_moment@1:all:{kind}.{NAME}:5")
    optimizer, injector = run.trainer.state.optimizer, run.hook(Injector)
    before = {name: [m.clone() for m in moments] for name, moments in optimizer.moments.items()}
    injector.before_step(StepData(1, [], 0, 0))
    names = [name for name, _ in run.trainer.state.model.named_parameters()]
    found = {
        (moment, names[number]): turned(old, new)
        for moment, moments in optimizer.moments.items()
        for number, (old, new) in enumerate(zip(before[moment], moments, strict=True))
        if turned(old, new)
    }
    assert found == {(kind, NAME): {0: 1 << 5}}


@pytest.mark.parametrize(
    ("use_amp", "bit", "expected"),
    [("false", "", 1 << 16), ("false", ":31", 1 << 31), ("true", "", 1), ("true", ":15", 1 << 15)],
)
def test_a_flipped_activation_differs_in_one_bit(
    tiny_run: MakeRun, use_amp: str, bit: str, expected: int
) -> None:
    runs = [
        tiny_run(training__use_amp=use_amp, **({"debug__drill": drill} if drill else {}))
        for drill in (None, f"flip_activation@1:all:{MODULE}.w2{bit}")
    ]
    made: list[list[Tensor]] = [[], []]
    for run, kept in zip(runs, made, strict=True):
        # Called by hand: what the caller of the module gets, after the drill's own hook.
        injector, module = (
            run.hook(Injector),
            run.trainer.state.model.get_submodule(f"{MODULE}.w2"),
        )
        injector.before_step(StepData(1, [], 0, 0))
        with run.step_context.forward_context():
            x = torch.ones(2, 3, module.in_features, requires_grad=True)
            out = module(x)
            out.sum().backward()
        kept += [out.detach(), x.grad]
    (clean, clean_grad), (flipped, flipped_grad) = made
    assert turned(clean, flipped) == {0: expected}
    assert torch.equal(clean_grad, flipped_grad)


def test_a_bit_that_an_activation_lacks_ends_the_run_with_the_reason(tiny_run: MakeRun) -> None:
    run = tiny_run(training__use_amp="true", debug__drill=f"flip_activation@1:all:{MODULE}.w2:16")
    with pytest.raises(ConfigError, match=r"w2 makes bfloat16, whose bits are 0 to 15"):
        run()


@pytest.mark.parametrize(("number", "count"), [("", 32), (":2", 2), (":64", 64)])
def test_a_burst_turns_one_bit_of_each_neighbour(
    tiny_run: MakeRun, number: str, count: int
) -> None:
    run = tiny_run(debug__drill=f"burst@1:all:{NAME}{number}")
    parameter = run.trainer.state.model.get_parameter(NAME)
    before = parameter.detach().clone()
    run.hook(Injector).before_step(StepData(1, [], 0, 0))
    assert turned(before, parameter) == dict.fromkeys(range(count), 1 << 16)


@pytest.mark.parametrize("kind", sorted({*KINDS} - {*PROCESS_KINDS}))
def test_every_kind_that_ends_no_process_is_injected(tiny_run: MakeRun, kind: str) -> None:
    tiny_run(debug__drill=f"{kind}@1").hook(Injector).before_step(StepData(1, [], 0, 0))


def test_a_burst_longer_than_its_tensor_is_refused(tiny_run: MakeRun) -> None:
    with pytest.raises(ConfigError, match=r"norm\.weight has 32 values, fewer than a burst of 33"):
        tiny_run(debug__drill="burst@1:all:norm.weight:33")
    tiny_run(debug__drill="burst@1:all:norm.weight:32")


@pytest.mark.parametrize("kind", ["flip_gradient", "flip_activation"])
@pytest.mark.parametrize(("always", "expected"), [("", [1, 0, 0]), (":always", [1, 1, 0])])
def test_once_is_the_first_time_that_the_step_is_computed(
    tiny_run: MakeRun, kind: str, always: str, expected: list[bool]
) -> None:
    run = tiny_run(debug__drill=f"{kind}@0:all{always}")
    injector, results = run.hook(Injector), []
    for step in (0, None, 1):  # None: step 0 once more, as a run's first step is
        if step is not None:
            injector.before_step(StepData(step, [], 0, 0))
        results.append(gradients_of(run))
    flipped = [not all(map(torch.equal, result, results[-1])) for result in results]
    assert flipped == expected


def gradients_of(run: Run) -> list[Tensor]:
    state, batch = run.trainer.state, FakeSource().random(0)
    state.optimizer.zero_grad()
    state.model.summed_loss(batch.inputs, batch.targets).backward()
    return [gradient.clone() for gradient in state.optimizer.gradients()]


@pytest.mark.parametrize("first", [0, 2])
def test_a_slow_step_is_busy_for_so_much_longer(tiny_run: MakeRun, first: int) -> None:
    run, zero = tiny_run(debug__drill=f"slow@{first}:GPU6:3x"), torch.zeros(())
    result = StepResult(zero, zero, zero.bool(), zero)
    for step in range(4):
        data = StepData(step, [], 0, 0)
        torch.randn(200, 200) @ torch.randn(200, 200)
        data.busy.end()
        before_ms = data.busy.ms or 0.0
        run.hook(Injector).after_update(data, result)
        data.busy.end()
        is_slow = (data.busy.ms or 0.0) >= 3 * before_ms
        assert is_slow or step < first


def test_a_resumed_run_is_slow_from_its_first_step_on(tiny_run: MakeRun) -> None:
    tiny_run(debug__drill="slow@1").hook(Injector).check_reached(from_step=3)
    with pytest.raises(ConfigError, match="never reached"):
        tiny_run(debug__drill="burst@1").hook(Injector).check_reached(from_step=3)
