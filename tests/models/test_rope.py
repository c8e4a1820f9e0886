"""Frequencies bit for bit as transformers computes them; rotation by relative position."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from model_check.config.schema import RopeScaling
from model_check.model import ModelArgs, Rope, rope_frequencies, rotate

SCALINGS = [None, RopeScaling(), RopeScaling(factor=32.0, high_freq_factor=3.0)]


def args(
    head_dim: int, scaling: RopeScaling | None = None, theta: float = 500000.0, num: int = 50
) -> ModelArgs:
    return ModelArgs(
        *(1, 4 * head_dim, 8, 4, 4, head_dim, 16),
        tie_word_embeddings=False,
        max_seq_len=num,
        rope_theta=theta,
        rope_scaling=scaling,
    )


def reference(head_dim: int, scaling: RopeScaling | None) -> LlamaRotaryEmbedding:
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": 500000.0}
    if scaling is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context_length,
        }
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters=rope,
    )
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("scaling", SCALINGS, ids=["none", "llama3", "other factors"])
@pytest.mark.parametrize("head_dim", [16, 128])
def test_frequencies_equal_those_of_transformers_bit_for_bit(
    head_dim: int, scaling: RopeScaling | None
) -> None:
    ours = rope_frequencies(args(head_dim, scaling))
    assert torch.equal(ours, reference(head_dim, scaling).inv_freq)


def test_tables_equal_those_of_transformers_beyond_the_original_context() -> None:
    scaling = RopeScaling(original_context_length=32)
    cos, sin = Rope.of(args(16, scaling, num=100))
    theirs = reference(16, scaling)(torch.zeros(1), torch.arange(100)[None])
    assert torch.equal(cos, theirs[0][0])
    assert torch.equal(sin, theirs[1][0])


def test_scores_of_rotated_vectors_depend_on_the_distance_alone() -> None:
    cos, sin = Rope.of(args(16, theta=10000.0))
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 16, dtype=torch.float64, generator=generator)
    queries = rotate(query.expand(50, 16), cos.double(), sin.double())
    keys = rotate(key.expand(50, 16), cos.double(), sin.double())
    near = (queries[10] * keys[7]).sum()
    far = (queries[43] * keys[40]).sum()
    assert near.item() == pytest.approx(far.item(), rel=1e-5)
    assert (queries[10] * keys[8]).sum().item() != pytest.approx(near.item(), rel=1e-3)


def test_rotation_keeps_the_dtype_of_its_input() -> None:
    cos, sin = Rope.of(args(16, num=8))
    assert rotate(torch.ones(1, 1, 8, 16, dtype=torch.bfloat16), cos, sin).dtype == torch.bfloat16
