"""Other names of settings."""

ALIASES: dict[str, str] = {
    # model
    "model.num_hidden_layers": "model.num_layers",
    "model.num_attention_heads": "model.num_heads",
    "model.num_key_value_heads": "model.num_kv_heads",
    # training
    "training.max_iters": "training.max_steps",
    "training.train_steps": "training.max_steps",
    "training.micro_batch_size": "training.batch_size",
    "data.batch_size": "training.batch_size",
    "training.gradient_accumulation_steps": "training.grad_accum_nums",
    "training.context_size": "training.context_length",
    "training.sequence_length": "training.context_length",
    "training.max_length": "training.context_length",
    "data.context_size": "training.context_length",
    "training.warmup_iters": "training.warmup_steps",
    "training.grad_clip": "training.max_grad_norm",
    "training.clip_grad": "training.max_grad_norm",
    "training.mixed_precision": "training.use_amp",
    "system.dtype": "training.precision",
    "system.compile": "training.compile",
    "training.compile_model": "training.compile",
    "training.data_workers": "training.num_workers",
    "system.data_workers": "training.num_workers",
    "optimizer.gradient_accumulation_steps": "training.grad_accum_nums",
    "optimizer.max_iters": "training.max_steps",
    "optimizer.weight_decay": "training.weight_decay",
    "optimizer.grad_clip": "training.max_grad_norm",
    "lr.learning_rate": "training.learning_rate",
    "lr.min_lr": "training.min_lr",
    "lr.warmup_iters": "training.warmup_steps",
}
"""Names that other trainers and their documents use -> ours. Two names of one setting in one source
are an error."""
