"""torch's fused AdamW is private: it is held against AdamW written out before a run trusts it."""

import itertools
from typing import Any

import pytest
import torch

from model_check import kernels
from model_check.engine.kernels import choose_update
from model_check.kernels import plain_adamw_
from model_check.optim import AdamW
from tests.engine.test_optim import NO, TRAINING, YES, give_gradients, named, parameters, snapshot

CPU, FUSED = torch.device("cpu"), torch._fused_adamw_


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_torchs_own_passes(device: str) -> None:
    assert choose_update(torch.device(device)) == (FUSED, None)


def without(name: str) -> Any:
    def update(*tensors: Any, **options: Any) -> None:
        FUSED(*tensors, **{**options, name: None})

    return update


def slower(*tensors: Any, lr: float, **options: Any) -> None:
    FUSED(*tensors, lr=lr * 1.001, **options)


CALLS = itertools.count(1)


def varying(weights: Any, *tensors: Any, **options: Any) -> None:
    """No call gives the bits of the one before."""
    FUSED(weights, *tensors, **options)
    weights[2].mul_(1 + 1e-6 * (next(CALLS) % 4))


def gone(*_: Any, **__: Any) -> None:
    raise TypeError("_fused_adamw_() got an unexpected keyword argument 'found_inf'")


@pytest.mark.parametrize(
    ("update", "said"),
    [
        (without("grad_scale"), "gave weights that are off by"),
        (without("found_inf"), "changed weights in a step that it must refuse"),
        (slower, "gave weights that are off by"),
        (varying, "gave other bits of weights in two equal calls"),
        (gone, "raised TypeError: _fused_adamw_() got an unexpected"),
    ],
)
def test_one_that_errs_is_replaced(monkeypatch: pytest.MonkeyPatch, update: Any, said: str) -> None:
    monkeypatch.setattr(torch, "_fused_adamw_", update)
    taken, obstacle = choose_update(CPU)
    assert taken is plain_adamw_
    assert str(obstacle).startswith(said)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_values_that_nearly_cancel_raise_no_false_alarm(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Some weights of so many are all but undone by their update."""
    monkeypatch.setattr(kernels, "_SEED", seed)
    assert choose_update(CPU)[1] is None


def test_plain_operators_train_as_the_fused_one_does() -> None:
    ours, plain = parameters(), parameters()
    fused = AdamW(named(ours), TRAINING)
    written_out = AdamW(named(plain), TRAINING, update=plain_adamw_)
    for step in range(10):
        for owners, optimizer in ((ours, fused), (plain, written_out)):
            give_gradients(owners, step)
            optimizer.step(1e-2, NO, torch.tensor(1.7))
    for x, y in zip(snapshot(written_out), snapshot(fused), strict=True):
        torch.testing.assert_close(x, y, rtol=2e-5, atol=1e-6)


def test_plain_operators_refuse_what_the_fused_one_refuses() -> None:
    owners = parameters()
    optimizer = AdamW(named(owners), TRAINING, update=plain_adamw_)
    give_gradients(owners, 0)
    before = snapshot(optimizer)
    owners[0].grad[0, 0] = float("nan")  # type: ignore[index]
    optimizer.step(1e-2, YES, torch.tensor(float("nan")))
    assert all(map(torch.equal, before, snapshot(optimizer)))
