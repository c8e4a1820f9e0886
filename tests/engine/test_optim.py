"""AdamW: torch's own bits, decay where it belongs, and a gate that holds."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from model_check import optim
from model_check.config.schema import TrainingSettings
from model_check.optim import AdamW, clip_divisor

TRAINING = TrainingSettings(learning_rate=1e-2, weight_decay=0.3)
NO, YES = torch.tensor(False), torch.tensor(True)
NAMES = ("tok_embed.weight", "norm.weight", "output.weight", "layers.0.attention.wq.weight")


def parameters(device: str = "cpu") -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(s, generator=generator) for s in [(5, 7), (7,), (3, 5)]]
    return [nn.Parameter(value.to(device)) for value in values]


def named(owners: list[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    """As the model names such: two matrices, and a norm between them."""
    return list(zip(["tok_embed.weight", "norm.weight", "output.weight"], owners, strict=True))


def give_gradients(owners: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in owners:
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = gradient.to(parameter.device)


def torchs_own(owners: list[nn.Parameter]) -> torch.optim.AdamW:
    groups = [
        {"params": [p for p in owners if p.ndim >= 2], "weight_decay": 0.3},
        {"params": [p for p in owners if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, fused=True)


def test_blocks_hold_each_value_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim, "BLOCK_VALUES", 8)
    owners = [*parameters(), nn.Parameter(torch.zeros(3))]
    optimizer = AdamW(dict(zip(NAMES, owners, strict=True)).items(), TRAINING)
    parts = [[(p.owner, p.first, p.end) for p in block.parts] for block in optimizer.blocks]
    assert parts == [
        *([(0, 0, 8)], [(0, 8, 16)], [(0, 16, 24)], [(0, 24, 32)]),
        *([(0, 32, 35), (2, 0, 8)], [(2, 8, 15), (3, 0, 3)], [(1, 0, 7)]),
    ]
    assert [block.group.weight_decay for block in optimizer.blocks] == [0.3] * 6 + [0.0]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_divided_tensors_get_the_bits_of_whole_ones(
    monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    owners = [nn.Parameter(torch.randn(7001)) for _ in range(2)]
    owners[1].data.copy_(owners[0])
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    for size, owner in zip((1 << 18, 1024), owners, strict=True):
        monkeypatch.setattr(optim, "BLOCK_VALUES", size)
        optimizer = AdamW([("tok_embed.weight", owner)], TRAINING)
        for step in range(3):
            give_gradients([owner], step)
            optimizer.step(1e-2, NO, torch.tensor(1.7))
    torch.set_num_threads(before)
    assert torch.equal(*owners)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_ten_steps_equal_torchs_fused_adamw_bit_for_bit(device: str) -> None:
    ours, theirs = parameters(device), parameters(device)
    optimizer, reference = AdamW(named(ours), TRAINING), torchs_own(theirs)
    for step in range(10):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        optimizer.step(1e-2, NO.to(device), None)
        reference.step()
    for parameter, wanted in zip(ours, theirs, strict=True):
        assert torch.equal(parameter, wanted)


def test_decay_shrinks_matrices_and_leaves_vectors() -> None:
    owners = parameters()
    before = [p.detach().clone() for p in owners]
    for parameter in owners:
        parameter.grad = torch.zeros_like(parameter)
    AdamW(named(owners), TRAINING).step(1e-2, NO, None)
    matrix, vector, _ = owners
    torch.testing.assert_close(matrix.detach(), before[0] * (1 - 1e-2 * 0.3))
    assert torch.equal(vector, before[1])


def test_gradients_are_divided_before_they_are_used() -> None:
    ours, plain = parameters(), parameters()
    clipped, reference = AdamW(named(ours), TRAINING), AdamW(named(plain), TRAINING)
    give_gradients(ours, 0)
    give_gradients(plain, 0)
    for parameter in plain:
        assert parameter.grad is not None
        parameter.grad /= 4.0
    clipped.step(1e-2, NO, torch.tensor(4.0))
    reference.step(1e-2, NO, None)
    assert all(torch.equal(a, b) for a, b in zip(clipped.first_moments, reference.first_moments))  # noqa: B905


def snapshot(optimizer: AdamW) -> list[torch.Tensor]:
    tensors = [*optimizer.parameters, *optimizer.first_moments, *optimizer.second_moments]
    return [t.detach().clone() for t in [*tensors, optimizer.num_steps]]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_step_leaves_weights_moments_and_count_as_they_were(value: float) -> None:
    owners = parameters()
    optimizer = AdamW(named(owners), TRAINING)
    give_gradients(owners, 0)
    optimizer.step(1e-2, NO, None)
    before = snapshot(optimizer)
    give_gradients(owners, 1)
    owners[0].grad[1, 1] = value  # type: ignore[index]
    optimizer.step(1e-2, YES, torch.tensor(value))
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(optimizer), strict=True))
    assert owners[0].grad[0, 0].isfinite()  # type: ignore[index]


def test_after_a_bad_step_good_ones_are_refused_too() -> None:
    owners = parameters()
    optimizer = AdamW(named(owners), TRAINING)
    give_gradients(owners, 0)
    before = snapshot(optimizer)
    optimizer.step(1e-2, YES, None)
    optimizer.step(1e-2, NO, None)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(optimizer), strict=True))


def test_torchs_adamw_goes_on_from_its_state() -> None:
    ours, theirs = parameters(), parameters()
    optimizer, reference = AdamW(named(ours), TRAINING), torchs_own(theirs)
    give_gradients(ours, 0)
    optimizer.step(1e-2, NO, None)
    state: dict[str, Any] = optimizer.state_dict()
    for parameter, value in zip(theirs, ours, strict=True):
        parameter.data.copy_(value.data)
    for number, (group, matrix_first) in enumerate(
        zip(reference.param_groups, [0, 1], strict=True)
    ):
        indices = state["param_groups"][number]["params"]
        assert matrix_first == number
        for parameter, index in zip(group["params"], indices, strict=True):
            entry = {name: value.clone() for name, value in state["state"][index].items()}
            reference.state[parameter] = entry
    give_gradients(ours, 1)
    give_gradients(theirs, 1)
    optimizer.step(1e-2, NO, None)
    reference.step()
    for parameter, wanted in zip(ours, theirs, strict=True):
        assert torch.equal(parameter, wanted)


@pytest.mark.parametrize(("norm", "divisor"), [(0.5, 1.0), (1.0, 1.000001), (8.0, 8.000001)])
def test_only_norms_above_the_limit_are_scaled_down(norm: float, divisor: float) -> None:
    got = clip_divisor(torch.tensor(norm), 1.0)
    assert got is not None
    assert got.item() == pytest.approx(divisor)


def test_without_a_limit_nothing_is_divided() -> None:
    assert clip_divisor(torch.tensor(8.0), None) is None


def test_its_moments_go_with_it_at_once() -> None:
    """Not with the next garbage collection: they may be gigabytes of a GPU."""
    optimizer = AdamW(named(parameters()), TRAINING)
    moment = weakref.ref(optimizer.first_moments[0])
    gc.disable()
    del optimizer
    gc.enable()
    assert moment() is None
