"""The loss scale: halved by an overflow, doubled by patience, within its bounds."""

import torch

from model_check.config.schema import TrainingSettings
from model_check.loss_scale import LARGEST_SCALE, LossScale, loss_scale
from model_check.optim import AdamW

CPU = torch.device("cpu")
YES, NO = torch.tensor(True), torch.tensor(False)


def history(scale: LossScale, overflows: str) -> list[float]:
    """The scale after each step; `x` is one that overflows."""
    values = []
    for overflow in overflows:
        if overflow == "x":
            scale.halve()
        scale.count(torch.tensor(overflow != "x"))
        values.append(scale.value.item())
    return values


def test_an_overflow_halves_it_and_so_many_good_steps_double_it() -> None:
    scale = LossScale(CPU, first=8.0, steps_until_doubled=3)
    assert history(scale, "...x...") == [8, 8, 16, 8, 8, 8, 16]


def test_an_overflow_starts_the_count_again() -> None:
    scale = LossScale(CPU, first=8.0, steps_until_doubled=3)
    assert history(scale, "..x..") == [8, 8, 4, 4, 4]


def test_it_never_leaves_its_bounds() -> None:
    low = LossScale(CPU, first=2.0)
    assert history(low, "xxx") == [1, 1, 1]
    high = LossScale(CPU, first=LARGEST_SCALE, steps_until_doubled=1)
    assert history(high, "..") == [LARGEST_SCALE] * 2


def test_it_is_exhausted_only_when_gradients_overflow_at_the_smallest_scale() -> None:
    scale = LossScale(CPU, first=2.0)
    assert not scale.exhausted(YES)
    scale.halve()
    assert scale.exhausted(YES)
    assert not scale.exhausted(NO)


def test_a_step_that_is_not_good_leaves_it_as_it_was() -> None:
    scale = LossScale(CPU, first=8.0, steps_until_doubled=3)
    history(scale, "..")
    scale.count(NO)
    assert (scale.value.item(), scale.num_good.item()) == (8.0, 2.0)


def test_a_checkpoint_keeps_it() -> None:
    weights = [("output.weight", torch.nn.Parameter(torch.ones(2, 2)))]
    old = AdamW(
        weights,
        TrainingSettings(),
        LossScale(CPU, first=8.0, steps_until_doubled=3),
    )
    assert old.loss_scale is not None
    history(old.loss_scale, "x..")
    new = AdamW(weights, TrainingSettings(), LossScale(CPU, steps_until_doubled=3))
    new.load_state_dict(old.state_dict())
    assert new.loss_scale is not None
    assert history(new.loss_scale, ".") == [8.0]


def test_only_float16_has_one() -> None:
    assert loss_scale(torch.float16, CPU) is not None
    assert loss_scale(torch.bfloat16, CPU) is None
    assert loss_scale(torch.float32, CPU) is None
