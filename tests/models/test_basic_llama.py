"""The model is LLaMA: held against transformers' own, in every gradient."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from model_check.attention import eager, sdpa
from model_check.config.schema import RopeScaling, Settings
from model_check.config.shape import geometry
from model_check.init import empty_model
from model_check.model import Llama

Tiny = Callable[..., Llama]

THEIR_NAMES = {
    "tok_embed.": "model.embed_tokens.",
    "layers.": "model.layers.",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "output.": "lm_head.",
}


def their_name(name: str) -> str:
    if name == "norm.weight":
        return "model.norm.weight"
    for ours, theirs in THEIR_NAMES.items():
        name = name.replace(ours, theirs)
    return name


def their_model(num_kv_heads: int, model: Llama, *, tied: bool = False) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=num_kv_heads,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        attn_implementation="sdpa",
    )
    theirs = LlamaForCausalLM(config)
    weights = {their_name(name): value for name, value in model.state_dict().items()}
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"] if tied else [], [])
    return theirs


def exact_norms(module: nn.Module) -> None:
    """Their RMSNorm computes in float32 even for float64 inputs: put torch's own in its place."""
    for name, child in module.named_children():
        if type(child).__name__ == "LlamaRMSNorm":
            norm = nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon)
            norm.weight = child.weight
            setattr(module, name, norm)
        exact_norms(child)


def tokens(length: int = 64) -> torch.Tensor:
    return torch.randint(0, 257, (2, length + 1), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_logits_and_every_gradient_equal_those_of_transformers(
    tiny: Tiny, num_kv_heads: int
) -> None:
    scaling = RopeScaling(original_context_length=32)
    ours = tiny(num_kv_heads=num_kv_heads, rope_scaling=scaling, init_std=0.2).double()
    theirs = their_model(num_kv_heads, ours).double()
    exact_norms(theirs)
    batch = tokens()
    inputs, targets = batch[:, :-1], batch[:, 1:]
    their_logits = theirs(inputs).logits
    assert (ours(inputs) - their_logits).abs().max() <= 1e-10
    loss = ours.summed_loss(inputs, targets) / targets.numel()
    their_loss = nn.functional.cross_entropy(their_logits.flatten(0, 1), targets.flatten())
    assert loss.item() == pytest.approx(their_loss.item(), rel=1e-12)
    loss.backward()
    their_loss.backward()
    their_gradients = {name: p.grad for name, p in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        difference = (parameter.grad - their_gradients[their_name(name)]).abs().max()
        assert difference <= 1e-10, name


def test_in_float32_it_equals_transformers_as_they_ship_it(tiny: Tiny) -> None:
    ours = tiny(rope_scaling=RopeScaling(original_context_length=32), attend=sdpa)
    theirs = their_model(2, ours)
    batch = tokens()[:, :-1]
    assert (ours(batch) - theirs(batch).logits).abs().max() <= 1e-5


def test_a_tied_head_reads_the_embedding(tiny: Tiny) -> None:
    ours = tiny(
        rope_scaling=RopeScaling(original_context_length=32), tie_word_embeddings=True
    ).double()
    assert "output.weight" not in ours.state_dict()
    theirs = their_model(2, ours, tied=True).double()
    exact_norms(theirs)
    batch = tokens()[:, :-1]
    assert (ours(batch) - theirs(batch).logits).abs().max() <= 1e-10


def test_a_head_width_of_its_own_is_used(tiny: Tiny) -> None:
    model = tiny(head_dim=32)
    assert model.layers[0].attention.wq.weight.shape == (4 * 32, 64)  # type: ignore[union-attr]
    assert model(tokens()[:, :-1]).shape == (2, 64, 257)


def test_the_first_loss_is_that_of_guessing(tiny: Tiny) -> None:
    batch = tokens()
    loss = tiny().summed_loss(batch[:, :-1], batch[:, 1:]).item() / batch[:, 1:].numel()
    assert loss == pytest.approx(math.log(257), rel=0.02)


def test_checkpointing_gives_the_same_loss_and_gradients(tiny: Tiny) -> None:
    batch = tokens()
    results: list[dict[str, torch.Tensor]] = []
    for checkpointing in (False, True):
        model = tiny(training={"gradient_checkpointing": checkpointing})
        assert model.args.gradient_checkpointing is checkpointing
        loss = model.summed_loss(batch[:, :-1], batch[:, 1:])
        loss.backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        results.append({"loss": loss.detach(), **gradients})
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


def test_the_default_geometry_has_the_documented_number_of_parameters() -> None:
    settings = Settings()
    shape = geometry(settings.model, 128256)
    model = empty_model(settings, shape, eager, torch.device("meta"))
    assert sum(p.numel() for p in model.parameters()) == 1_923_125_248
    assert shape.num_parameters == 1_923_125_248


def test_no_checkpoint_carries_rotary_tables(tiny: Tiny) -> None:
    assert not [name for name in tiny().state_dict() if "rope" in name]


def test_parameters_have_the_names_of_the_report(tiny: Tiny) -> None:
    names = [name for name, _ in tiny(num_layers=1).named_parameters()]
    assert names == [
        "tok_embed.weight",
        "layers.0.attention_norm.weight",
        *(f"layers.0.attention.w{x}.weight" for x in "qkvo"),
        "layers.0.ffn_norm.weight",
        *(f"layers.0.feed_forward.w{n}.weight" for n in (1, 2, 3)),
        "norm.weight",
        "output.weight",
    ]
