"""Every backend equals the definition; the choice among them says why."""

import importlib.util

import pytest
import torch
from torch import Tensor

from model_check.errors import ConfigError
from model_check.models.attention import BACKENDS, FLASH_MODULES, attend_cached, bound, eager
from model_check.models.backends import candidates_for, needs_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NO_FLASH_ATTN = importlib.util.find_spec("flash_attn") is None


def inputs(num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 4, 33, 16), (2, num_kv_heads, 33, 16), (2, num_kv_heads, 33, 16)]
    q, k, v = (torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_sdpa_equals_eager_in_values_and_gradients(num_kv_heads: int) -> None:
    q, k, v = inputs(num_kv_heads)
    weights = torch.randn(2, 4, 33, 16, dtype=torch.float64)
    results = [
        (out, *torch.autograd.grad((out * weights).sum(), (q, k, v)))
        for out in (BACKENDS[name](q, k, v) for name in ("eager", "sdpa"))
    ]
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_a_later_token_changes_nothing_before_it(name: str) -> None:
    q, k, v = (x.detach() for x in inputs(2))
    before = BACKENDS[name](q, k, v)
    for x in (q, k, v):
        x[:, :, 20:] += 1.0
    after = BACKENDS[name](q, k, v)
    torch.testing.assert_close(after[:, :, :20], before[:, :, :20], rtol=0, atol=1e-12)
    assert not torch.equal(after[:, :, 20:], before[:, :, 20:])


@pytest.mark.parametrize("num_new", [1, 2, 20, 33])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_the_last_positions_alone_read_what_they_read_among_all(
    num_kv_heads: int, num_new: int
) -> None:
    q, k, v = (x.detach() for x in inputs(num_kv_heads))
    whole = eager(q, k, v)[:, :, -num_new:]
    torch.testing.assert_close(attend_cached(q[:, :, -num_new:], k, v), whole, rtol=0, atol=1e-12)


def test_eager_attends_to_itself_at_the_first_position() -> None:
    q, k, v = (x.detach() for x in inputs(4))
    assert torch.equal(eager(q, k, v)[:, :, 0], v[:, :, 0])


def test_auto_on_a_cpu_is_sdpa_and_says_why() -> None:
    names, reason = candidates_for("auto", needs_of(CPU, torch.bfloat16))
    assert (names, "CUDA" in reason) == (["sdpa", "eager"], True)


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_a_named_backend_is_taken(name: str) -> None:
    assert candidates_for(name, needs_of(CPU, torch.float32))[0] == [name]


def test_flash_attn_2_on_a_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.attention_backend = 'flash_attn_2'.*CUDA GPU"):
        candidates_for("flash_attn_2", needs_of(CPU, torch.bfloat16))


def test_flash_attn_2_in_float32_names_the_setting() -> None:
    with pytest.raises(ConfigError, match="use_amp=true"):
        candidates_for("flash_attn_2", needs_of(CUDA, torch.float32))


@pytest.mark.skipif(not NO_FLASH_ATTN, reason="flash_attn is installed")
def test_a_missing_package_tells_how_to_install_it() -> None:
    with pytest.raises(ConfigError, match="pip install flash-attn --no-build-isolation"):
        candidates_for("flash_attn_2", needs_of(CUDA, torch.bfloat16))


@pytest.mark.skipif(not NO_FLASH_ATTN, reason="flash_attn is installed")
def test_auto_without_a_package_is_a_kernel_of_torch() -> None:
    assert candidates_for("auto", needs_of(CUDA, torch.bfloat16))[0][0] in ("cudnn", "sdpa")


@pytest.mark.gpu
@pytest.mark.parametrize("name", FLASH_MODULES)
def test_flash_attn_equals_eager_within_its_precision(name: str) -> None:
    try:
        candidates_for(name, needs_of(CUDA, torch.bfloat16))
    except ConfigError as error:
        pytest.skip(str(error))
    q, k, v = (x.detach().bfloat16().cuda() for x in inputs(2))
    exact = eager(q.double(), k.double(), v.double())
    error = (bound(name)(q, k, v, None).double() - exact).abs().max()
    torch_error = (BACKENDS["sdpa"](q, k, v, None).double() - exact).abs().max()
    assert error <= 2 * torch_error + 1e-3
