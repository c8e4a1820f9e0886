"""The chunked head equals the plain one, whatever the chunk, and keeps a float32 loss."""

import shutil
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from model_check.config.derived import loss_chunk_rows
from model_check.config.schema import Settings, TrainingSettings
from model_check.models.loss import (
    IGNORED,
    can_add_in_float32,
    linear_cross_entropy,
    loss_and_gradient,
    root,
)

COMPILER = shutil.which("g++") or shutil.which("clang++")
SLOW = (
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler"),
    pytest.mark.timeout(900),
)


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(10, 8, dtype=dtype, generator=generator)
    weight = torch.randn(23, 8, dtype=dtype, generator=generator)
    targets = torch.randint(0, 23, (10,), generator=generator)
    targets[[2, 9]] = IGNORED
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def gradients_of(loss: Tensor, *of: Tensor, grad: Tensor | None = None) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, of, grad)


@pytest.mark.parametrize("chunk_rows", [*range(1, 12), 2048])
@pytest.mark.parametrize("is_expected", [False, True], ids=["any", "expected"])
def test_loss_and_gradients_equal_those_of_the_plain_head(
    chunk_rows: int, is_expected: bool
) -> None:
    hidden, weight, targets = inputs()
    grad = torch.tensor(1 / 8, dtype=torch.float64)
    ours = linear_cross_entropy(hidden, weight, targets, chunk_rows, grad if is_expected else None)
    plain = F.cross_entropy(hidden @ weight.T, targets, ignore_index=IGNORED)
    torch.testing.assert_close(ours / 8, plain, rtol=1e-12, atol=0)
    wanted = gradients_of(plain, hidden, weight)
    for ours_, theirs in zip(gradients_of(ours, hidden, weight, grad=grad), wanted, strict=True):
        torch.testing.assert_close(ours_, theirs, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("chunk_rows", [1, 4, 2048])
@pytest.mark.parametrize("grad", [0.375, 3.0, float("nan")])
def test_in_16_bits_the_gradient_that_comes_is_taken_whatever_was_expected(
    chunk_rows: int, grad: float
) -> None:
    """The loss_nan drill and a hook on the loss give another one."""
    results = []
    for expected in (None, torch.tensor(0.375)):
        hidden, weight, targets = inputs(torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = linear_cross_entropy(
                hidden, weight, targets, chunk_rows, expected, loss_and_gradient
            )
        is_it = expected is not None and grad == 0.375
        came = expected if is_it else torch.tensor(grad)
        results.append([loss.detach(), *gradients_of(loss, hidden, weight, grad=came)])
    for plain, folded in zip(*results, strict=True):
        assert folded.dtype == torch.float32
        torch.testing.assert_close(plain, folded, rtol=2e-2, atol=5e-2, equal_nan=True)


class _Passes(TorchDispatchMode):
    """The operators that write a tensor of so many numbers, or more."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel = numel
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (
            isinstance(result, Tensor)
            and result.numel() >= self.numel
            and "detach" not in str(func)
        ):
            self.names.append(func.overloadpacket.__name__)
        return result


def test_the_expected_gradient_leaves_backward_no_pass_over_the_weights_gradient() -> None:
    hidden, weight, targets = inputs(torch.float32)
    expected = torch.tensor(0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets, 4, expected, loss_and_gradient)
    with _Passes(hidden.numel()) as passes:
        gradients_of(root(loss, expected), hidden, weight)
    assert passes.names == []


@pytest.mark.parametrize("is_expected", [False, True], ids=["any", "expected"])
def test_a_second_backward_pass_is_refused_and_loses_no_gradient(is_expected: bool) -> None:
    hidden, weight, targets = inputs(torch.float32)
    expected = torch.tensor(0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(
            *(hidden, weight, targets, 4), expected if is_expected else None, loss_and_gradient
        )
    total = root(loss, expected)
    torch.autograd.grad(total, (hidden, weight), retain_graph=True)
    with pytest.raises(RuntimeError, match="linear_cross_entropy has no second backward pass"):
        torch.autograd.grad(total, (hidden, weight))


def test_16_bit_logits_become_their_scaled_gradient_in_place() -> None:
    logits = torch.randn(6, 23).bfloat16()
    targets = torch.tensor([0, 22, IGNORED, 5, 5, 1])
    exact = logits.double().requires_grad_()
    F.cross_entropy(exact, targets, reduction="sum").backward()
    for factor in (None, torch.tensor(0.3)):
        own = logits.clone()
        loss, gradient = loss_and_gradient(own, targets, factor, True)
        assert gradient is not None
        assert factor is None or gradient.data_ptr() == own.data_ptr()
        assert exact.grad is not None
        wanted = exact.grad * (1.0 if factor is None else 0.3)
        counted = targets != IGNORED
        torch.testing.assert_close(
            gradient[counted].double(), wanted[counted], rtol=2**-8, atol=1e-9
        )
        assert loss.dtype == torch.float32


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=SLOW)])
def test_it_is_one_graph_to_the_compiler(dtype: torch.dtype, backend: str) -> None:
    def head(hidden: Tensor, weight: Tensor, targets: Tensor, grad: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, targets, 4, grad)

    torch._dynamo.reset()
    results, grad = [], torch.tensor(0.3)
    for function in (head, torch.compile(head, fullgraph=True, backend=backend)):
        hidden, weight, targets = inputs(torch.float64 if dtype == torch.float64 else torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = function(hidden, weight, targets, grad)
        results.append(
            [loss.detach(), *gradients_of(loss, hidden, weight, grad=grad.to(loss.dtype))]
        )
    limit = 1e-12 if dtype == torch.float64 else 1e-2
    for plain, compiled in zip(*results, strict=True):
        torch.testing.assert_close(plain, compiled, rtol=limit, atol=limit)


@pytest.mark.slow  # eager code: test_the_logits_of_all_rows_never_exist_at_once
@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_compiled_it_has_nothing_but_the_logits_in_memory(dtype: torch.dtype) -> None:
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    grad = torch.tensor(0.3)
    logits, targets = torch.randn(64, 1000).to(dtype), torch.zeros(64, dtype=torch.int64)
    compiled = torch.compile(loss_and_gradient, fullgraph=True)
    with torch.no_grad():
        _, (code, *_) = run_and_get_code(compiled, logits, targets, grad, True)
    assert "64, 1000" in code
    assert "empty_strided_cpu((64, 1000)" not in code


def test_a_cpu_adds_no_16_bit_product_to_a_float32_sum() -> None:
    """If this fails, torch can now: let the CPU do it, too."""
    assert not can_add_in_float32(torch.device("cpu"), torch.bfloat16)
    assert not can_add_in_float32(torch.device("cpu"), torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_gpu_that_adds_in_float32_gives_the_same_gradient_less_rounded(
    dtype: torch.dtype,
) -> None:
    hidden, weight, targets = (x.detach().cuda() for x in inputs(torch.float32))
    if not can_add_in_float32(hidden.device, dtype):
        pytest.skip(f"torch {torch.__version__} has no such kernel")
    gradients = []
    for adds in (False, True):
        own = weight.clone().requires_grad_()
        with torch.autocast("cuda", dtype=dtype):
            loss = linear_cross_entropy(hidden, own, targets, 4, adds_in_float32=adds)
        gradients += gradients_of(loss, own)
    torch.testing.assert_close(*gradients, rtol=1e-2, atol=1e-2)


def test_without_gradients_only_the_loss_is_computed() -> None:
    hidden, weight, targets = inputs()
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, targets, 3)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, linear_cross_entropy(hidden, weight, targets, 2048).detach())


def test_under_autocast_products_are_bfloat16_and_the_loss_float32() -> None:
    hidden, weight, targets = inputs(torch.float32)
    exact = linear_cross_entropy(hidden, weight, targets, 2048)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets, 2048)
    assert loss.dtype == torch.float32
    assert loss.item() != exact.item()
    assert loss.item() == pytest.approx(exact.item(), rel=1e-2)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


class _Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operator made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def test_the_logits_of_all_rows_never_exist_at_once() -> None:
    hidden = torch.randn(64, 8, requires_grad=True)
    weight = torch.randn(100, 8, requires_grad=True)
    targets = torch.zeros(64, dtype=torch.int64)
    with _Largest() as largest:
        linear_cross_entropy(hidden, weight, targets, chunk_rows=10).backward()
    assert largest.numel == max(10 * 100, weight.numel())


def test_rows_without_a_target_give_no_gradient_and_hide_no_other() -> None:
    hidden, weight, targets = inputs()
    linear_cross_entropy(hidden, weight, targets, 4).backward()
    assert hidden.grad is not None
    silent = (hidden.grad == 0).all(dim=1)
    assert silent.nonzero().flatten().tolist() == [2, 9]


def test_a_batch_of_ignored_targets_has_loss_and_gradients_zero() -> None:
    hidden, weight, _ = inputs()
    loss = linear_cross_entropy(hidden, weight, torch.full((10,), IGNORED), 4)
    loss.backward()
    assert loss.item() == 0
    assert weight.grad is not None
    assert not weight.grad.any()


@pytest.mark.parametrize(
    ("chunk", "vocab_size", "device", "rows"),
    [
        (None, 128256, "cuda", 2048),
        (None, 8192, "cpu", 256),
        (None, 128256, "cpu", 128),
        (None, 31, "cpu", 2048),
        (77, 8192, "cpu", 77),
    ],
)
def test_chunks_follow_the_device_unless_they_are_set(
    chunk: int | None, vocab_size: int, device: str, rows: int
) -> None:
    settings = Settings(training=TrainingSettings(loss_chunk_rows=chunk))
    assert loss_chunk_rows(settings, vocab_size, device) == rows


@pytest.mark.parametrize("label", [-1, -99, 23])
def test_a_label_that_is_no_token_is_refused(label: int) -> None:
    hidden, weight, targets = inputs()
    targets[4] = label
    with pytest.raises(RuntimeError, match=f"index {label} is out of bounds"):
        linear_cross_entropy(hidden, weight, targets, 2048)
