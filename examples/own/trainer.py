"""transformers' Trainer. Needs transformers and accelerate."""

import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(1)  # the Trainer seeds, too, when the model is there already
config = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
rows = [{"input_ids": [(7 * i + j) % 128 for j in range(32)]} for i in range(64)]
arguments = TrainingArguments(
    output_dir=f"out-{os.environ.get('MODEL_CHECK_WORKER', 'alone')}",
    max_steps=8,
    per_device_train_batch_size=4,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
)
model = LlamaForCausalLM(config)
Trainer(
    model=model,
    args=arguments,
    train_dataset=[{**row, "labels": row["input_ids"]} for row in rows],
).train()
