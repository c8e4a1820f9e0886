"""transformers' LlamaForCausalLM, trained by its Trainer (`--trainer`) or by a plain loop with
torch's fused AdamW: the loop that an expert of both would write."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from workload import (
    BETAS,
    EPS,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    NORM_EPS,
    ROPE_THETA,
    WEIGHT_DECAY,
    Turn,
    Workload,
)

from model_check.config.shape import hf_name


def their_model(work: Workload, weights: Path) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=work.vocab_size,
        hidden_size=work.hidden_size,
        intermediate_size=work.intermediate_size,
        num_hidden_layers=work.num_layers,
        num_attention_heads=work.num_heads,
        num_key_value_heads=work.num_kv_heads,
        max_position_embeddings=work.context_length,
        rms_norm_eps=NORM_EPS,
        rope_theta=ROPE_THETA,
        attn_implementation="sdpa",
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    state = torch.load(weights, weights_only=True)
    model.load_state_dict({hf_name(name): value for name, value in state.items()})
    return model


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices are decayed, norms are not: what both Trainer and ours do."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]


def run_loop(work: Workload, num_steps: int, weights: Path) -> None:
    turn = Turn()
    model = their_model(work, weights).train()
    optimizer = torch.optim.AdamW(
        decay_groups(model), lr=LEARNING_RATE, betas=BETAS, eps=EPS, fused=True
    )
    batches = iter(work.tokens(num_steps).split(work.batch_size))
    while turn.begin_step():
        loss = accumulate(model, batches, work.num_micro_batches)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        turn.end_step(loss.item)


def accumulate(model: nn.Module, batches: Iterator[Tensor], num_micro_batches: int) -> Tensor:
    """Add the gradients of a step's mean loss; returns that loss."""
    losses = []
    for _ in range(num_micro_batches):
        tokens = next(batches)
        loss = model(input_ids=tokens, labels=tokens).loss / num_micro_batches
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def run_trainer(work: Workload, num_steps: int, weights: Path) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    turn = Turn()

    class Pace(TrainerCallback):
        """Makes the trainer wait until it is its turn."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if not turn.begin_step():
                raise SystemExit(0)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            parts = trainer.parts
            trainer.parts = []
            turn.end_step(lambda: torch.stack(parts).sum().item())

    class InOrder(Trainer):
        parts: list[Tensor]

        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            self.parts.append(super().training_step(*args, **kwargs))
            return self.parts[-1]

    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            max_steps=num_steps,
            per_device_train_batch_size=work.batch_size,
            gradient_accumulation_steps=work.num_micro_batches,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            weight_decay=WEIGHT_DECAY,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            adam_epsilon=EPS,
            max_grad_norm=MAX_GRAD_NORM,
            optim="adamw_torch_fused",
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            dataloader_num_workers=0,
            average_tokens_across_devices=False,
        )
        dataset = [{"input_ids": row, "labels": row} for row in work.tokens(num_steps)]
        trainer = InOrder(
            model=their_model(work, weights),
            args=arguments,
            train_dataset=dataset,
            callbacks=[Pace()],
        )
        trainer.parts = []
        trainer.train()


if __name__ == "__main__":
    work = Workload.parse(sys.argv[1])
    torch.set_num_threads(work.num_threads)
    run = run_trainer if "--trainer" in sys.argv else run_loop
    run(work, int(sys.argv[2]), Path(sys.argv[3]))
