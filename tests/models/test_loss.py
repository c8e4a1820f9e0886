"""The chunked head equals the plain one, whatever the chunk, and keeps a float32 loss."""

import shutil
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from model_check import products
from model_check.config.derived import loss_chunk_rows
from model_check.config.schema import Settings, TrainingSettings
from model_check.model import IGNORED, ChunkedCrossEntropy
from model_check.products import adds_in_float32

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


def head_loss(
    *of_head: Tensor,
    chunk_rows: int = 2048,
    grad_scale: Tensor | None = None,
    compiled: bool = False,
) -> Tensor:
    """`of_head`: hidden, weight, targets. `compiled`: as compiled code is called."""
    head = ChunkedCrossEntropy(chunk_rows, chunk_rows)
    if compiled:
        vars(head)["of_chunk"] = ChunkedCrossEntropy.of_chunk
    loss: Tensor = head(*of_head, grad_scale=grad_scale)
    return loss


@pytest.mark.parametrize("chunk_rows", [*range(1, 12), 2048])
def test_loss_and_gradients_equal_those_of_the_plain_head(chunk_rows: int) -> None:
    hidden, weight, targets = inputs()
    ours = head_loss(hidden, weight, targets, chunk_rows=chunk_rows)
    plain = F.cross_entropy(hidden @ weight.T, targets, ignore_index=IGNORED)
    torch.testing.assert_close(ours / 8, plain, rtol=1e-12, atol=0)
    wanted = torch.autograd.grad(plain, (hidden, weight))
    found = torch.autograd.grad(ours / 8, (hidden, weight))
    for ours_, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours_, theirs, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("chunk_rows", [1, 4, 2048])
@pytest.mark.parametrize("factor", [0.375, 3.0, float("nan")])
def test_in_16_bits_the_gradient_that_comes_is_taken_whatever_was_expected(
    chunk_rows: int, factor: float
) -> None:
    """The loss_nan drill and a hook on the loss give another one."""
    results = []
    for grad_scale in (None, torch.tensor(0.375)):
        hidden, weight, targets = inputs(torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = head_loss(
                *(hidden, weight, targets),
                chunk_rows=chunk_rows,
                grad_scale=grad_scale,
                compiled=True,
            )
        found = torch.autograd.grad(loss * factor, (hidden, weight))
        results.append([loss.detach(), *found])
    for plain, folded in zip(*results, strict=True):
        assert folded.dtype == torch.float32
        torch.testing.assert_close(plain, folded, rtol=2e-2, atol=5e-2, equal_nan=True)


def test_a_second_backward_pass_is_refused_and_loses_no_gradient() -> None:
    hidden, weight, targets = inputs(torch.float32)
    loss = head_loss(hidden, weight, targets)
    torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    with pytest.raises(RuntimeError, match="the chunked loss has no second backward pass"):
        torch.autograd.grad(loss, (hidden, weight))


def test_16_bit_logits_become_their_scaled_gradient_in_place() -> None:
    logits = torch.randn(6, 23).bfloat16()
    targets = torch.tensor([0, 22, IGNORED, 5, 5, 1])
    exact = logits.double().requires_grad_()
    F.cross_entropy(exact, targets, reduction="sum").backward()
    for factor in (None, torch.tensor(0.3)):
        own = logits.clone()
        loss, gradient = ChunkedCrossEntropy.of_chunk(own, targets, factor, True)
        assert gradient is not None
        assert factor is None or gradient.data_ptr() == own.data_ptr()
        assert exact.grad is not None
        wanted = exact.grad * (1.0 if factor is None else 0.3)
        counted = targets != IGNORED
        torch.testing.assert_close(
            gradient[counted].double(), wanted[counted], rtol=2**-8, atol=1e-9
        )
        assert loss.dtype == torch.float32


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
    compiled = torch.compile(ChunkedCrossEntropy.of_chunk, fullgraph=True)
    with torch.no_grad():
        _, (code, *_) = run_and_get_code(compiled, logits, targets, grad, True)
    assert "64, 1000" in code
    assert "empty_strided_cpu((64, 1000)" not in code


def test_a_cpu_adds_no_16_bit_product_to_a_float32_sum() -> None:
    """If this fails, torch can now: let the CPU do it, too."""
    assert not adds_in_float32(torch.device("cpu"), torch.bfloat16)
    assert not adds_in_float32(torch.device("cpu"), torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_gpu_that_adds_in_float32_gives_the_same_gradient_less_rounded(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight, targets = (x.detach().cuda() for x in inputs(torch.float32))
    if not adds_in_float32(hidden.device, dtype):
        pytest.skip(f"torch {torch.__version__} has no such kernel")
    gradients = []
    for adds in (False, True):
        monkeypatch.setattr(products, "adds_in_float32", lambda *_, adds=adds: adds)
        own = weight.clone().requires_grad_()
        with torch.autocast("cuda", dtype=dtype):
            loss = head_loss(hidden, own, targets, chunk_rows=4)
        gradients += torch.autograd.grad(loss, own)
    torch.testing.assert_close(*gradients, rtol=1e-2, atol=1e-2)


def test_without_gradients_only_the_loss_is_computed() -> None:
    hidden, weight, targets = inputs()
    with torch.no_grad():
        loss = head_loss(hidden, weight, targets, chunk_rows=3)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, head_loss(hidden, weight, targets).detach())


def test_under_autocast_products_are_bfloat16_and_the_loss_float32() -> None:
    hidden, weight, targets = inputs(torch.float32)
    exact = head_loss(hidden, weight, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = head_loss(hidden, weight, targets)
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
        head_loss(hidden, weight, targets, chunk_rows=10).backward()
    assert largest.numel == max(10 * 100, weight.numel())


def test_rows_without_a_target_give_no_gradient_and_hide_no_other() -> None:
    hidden, weight, targets = inputs()
    head_loss(hidden, weight, targets, chunk_rows=4).backward()
    assert hidden.grad is not None
    silent = (hidden.grad == 0).all(dim=1)
    assert silent.nonzero().flatten().tolist() == [2, 9]


def test_a_batch_of_ignored_targets_has_loss_and_gradients_zero() -> None:
    hidden, weight, _ = inputs()
    loss = head_loss(hidden, weight, torch.full((10,), IGNORED), chunk_rows=4)
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
        head_loss(hidden, weight, targets)
