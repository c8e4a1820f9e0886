"""Training is transformers' LLaMA trained: ten steps, far positions, and the work per token."""

from collections.abc import Callable

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from model_check.attention import sdpa
from model_check.config.schema import ModelSettings, RopeScaling, Settings, TrainingSettings
from model_check.config.shape import geometry, hf_name
from model_check.export import config_json
from model_check.init import build_model, empty_model
from model_check.model import Llama
from model_check.optim import AdamW, clip_divisor

Make = Callable[..., Settings]
SCALING = RopeScaling(original_context_length=32)
NUM_STEPS = 10


def pair(settings: Settings) -> tuple[Llama, LlamaForCausalLM]:
    """The same weights in both, in float64; their norm, which computes in float32, made exact."""
    ours = build_model(settings, geometry(settings.model, 257), sdpa, torch.device("cpu")).double()
    config = LlamaConfig(**config_json(settings, 257, "float32"), attn_implementation="sdpa")
    theirs = LlamaForCausalLM(config)
    weights = {hf_name(name): value for name, value in ours.state_dict().items()}
    theirs.load_state_dict(weights, strict=not settings.model.tie_word_embeddings)
    return ours, theirs.double()


@pytest.fixture
def exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their RMSNorm goes through float32; only the reference is changed, never what is tested."""

    def forward(norm: LlamaRMSNorm, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
        result: torch.Tensor = norm.weight * x * scale
        return result

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_ten_steps_of_adamw_equal_torch_on_their_model(
    settings: Make, num_kv_heads: int, tied: bool
) -> None:
    wanted = settings(
        training={"learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5},
        num_kv_heads=num_kv_heads,
        rope_scaling=SCALING,
        tie_word_embeddings=tied,
    )
    ours, theirs = pair(wanted)
    optimizer = AdamW(ours.named_parameters(), wanted.training)
    matrices = [p for p in theirs.parameters() if p.ndim >= 2]
    vectors = [p for p in theirs.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    generator = torch.Generator().manual_seed(11)
    for _ in range(NUM_STEPS):
        batch = torch.randint(0, 257, (2, 33), generator=generator)
        inputs, targets = batch[:, :-1], batch[:, 1:]
        optimizer.zero_grad()
        loss = ours.summed_loss(inputs, targets) / targets.numel()
        loss.backward()
        norm = torch.nn.utils.get_total_norm(optimizer.gradients())
        optimizer.step(1e-3, torch.tensor(False), clip_divisor(norm.float(), 0.5))
        reference.zero_grad()
        logits = theirs(inputs).logits
        their_loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        their_loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        reference.step()
        assert loss.item() == pytest.approx(their_loss.item(), rel=1e-7)
    their_weights = theirs.state_dict()
    for name, value in ours.state_dict().items():
        # The optimizer's moments and divisor are float32, theirs float64.
        assert (value - their_weights[hf_name(name)]).abs().max() <= 2e-6, name


def test_positions_beyond_8192_under_llama3_scaling_equal_theirs() -> None:
    model = ModelSettings(
        num_layers=1,
        hidden_size=32,
        intermediate_size=48,
        num_heads=2,
        num_kv_heads=1,
        vocab_size=257,
        init_std=0.2,
    )
    settings = Settings(model=model, training=TrainingSettings(context_length=9000))
    ours, theirs = pair(settings)
    ours, theirs = ours.float(), theirs.float()
    tokens = torch.randint(0, 257, (1, 9000), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        far = ours(tokens)[0, 8192:]
        theirs_far = theirs(tokens, logits_to_keep=9000 - 8192).logits[0]
    assert (far - theirs_far).abs().max() <= 1e-4


def test_the_default_workload_has_the_documented_work_per_token() -> None:
    settings = Settings()
    shape = geometry(settings.model, 128256)
    meta = torch.device("meta")
    with torch.device(meta):
        model = empty_model(settings, shape, sdpa, meta)
        tokens = torch.empty(1, 8192, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    assert counter.get_total_flops() / 8192 == 9_997_123_584
