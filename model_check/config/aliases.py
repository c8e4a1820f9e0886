"""Other names of settings: those of the trainers and documents that people come from.

A name serves with its section, alone (`max_iters=5`), as an option (`--max-iters 5`) and as a key
of a settings file. Two names of one setting in one source are an error.
"""

from typing import Any, NamedTuple

MICRO_BATCH = "training.micro_batch_size"
_ACCUMULATION = "training.gradient_accumulation_steps"
_PER_DEVICE = "training.per_device_train_batch_size"
_EVAL_STEPS = "training.eval_steps"

BESIDE: dict[str, dict[str, str]] = {
    MICRO_BATCH: {"training.batch_size": "training.global_batch_size"},
    # Hugging Face counts micro-batches per GPU, nanoGPT those of all GPUs together.
    _PER_DEVICE: {_ACCUMULATION: "training.grad_accum_nums"},
    # Hugging Face evaluates every `eval_steps` steps, others evaluate that many batches.
    "eval_strategy": {_EVAL_STEPS: "training.eval_interval"},
    "evaluation_strategy": {_EVAL_STEPS: "training.eval_interval"},
}
"""A name -> what other names mean when it is given too, in any source."""

DECIDED_LATER = (MICRO_BATCH, _PER_DEVICE, _ACCUMULATION, _EVAL_STEPS)
"""Names that stay as they are until all sources are read: BESIDE decides what they mean."""

ALIASES: dict[str, str] = {
    # model
    "model.num_hidden_layers": "model.num_layers",
    "model.num_attention_heads": "model.num_heads",
    "model.num_key_value_heads": "model.num_kv_heads",
    "model.n_layer": "model.num_layers",
    "model.n_head": "model.num_heads",
    "model.n_embd": "model.hidden_size",
    "model.attn_implementation": "model.attention_backend",
    "model.tokenizer_name": "model.model_path",
    # training
    "training.max_iters": "training.max_steps",
    "training.train_steps": "training.max_steps",
    MICRO_BATCH: "training.batch_size",
    "data.batch_size": "training.batch_size",
    _PER_DEVICE: "training.batch_size",
    _ACCUMULATION: "training.global_grad_accum_nums",
    "training.context_size": "training.context_length",
    "training.sequence_length": "training.context_length",
    "training.max_length": "training.context_length",
    "data.context_size": "training.context_length",
    "data.packing": "data.document_masking",
    "training.packing": "data.document_masking",
    "training.warmup_iters": "training.warmup_steps",
    "training.grad_clip": "training.max_grad_norm",
    "training.clip_grad": "training.max_grad_norm",
    "training.mixed_precision": "training.precision",
    "training.bf16": "training.precision",
    "training.fp16": "training.precision",
    _EVAL_STEPS: "training.eval_batches",
    "training.eval_iters": "training.eval_batches",
    "training.save_steps": "training.save_interval",
    "training.save_total_limit": "training.keep_last",
    "training.lr_scheduler_type": "training.lr_schedule",
    "training.beta1": "training.adam_beta1",
    "training.beta2": "training.adam_beta2",
    "training.adam_epsilon": "training.adam_eps",
    "training.block_size": "training.context_length",
    "training.max_seq_length": "training.context_length",
    "training.dataloader_num_workers": "training.num_workers",
    "training.torch_compile": "training.compile",
    "training.resume_from_checkpoint": "training.resume",
    "data.dataset_name": "data.dataset",
    "data.train_file": "data.dataset",
    "data.dataset_config_name": "data.dataset_config",
    "logging.logging_steps": "logging.log_interval",
    "logging.logging_dir": "logging.tensorboard_dir",
    "logging.wandb_log": "logging.wandb",
    "launch.gpu_ids": "launch.gpus",
    "system.use_cpu": "system.device",
    "system.no_cuda": "system.device",
    "system.cpu": "system.device",
    "system.dtype": "training.precision",
    "system.compile": "training.compile",
    "system.out_dir": "system.checkpoint_dir",
    "system.save_dir": "system.checkpoint_dir",
    "training.compile_model": "training.compile",
    "training.data_workers": "training.num_workers",
    "system.data_workers": "training.num_workers",
    "optimizer.gradient_accumulation_steps": "training.global_grad_accum_nums",
    "optimizer.max_iters": "training.max_steps",
    "optimizer.weight_decay": "training.weight_decay",
    "optimizer.grad_clip": "training.max_grad_norm",
    "lr.learning_rate": "training.learning_rate",
    "lr.min_lr": "training.min_lr",
    "lr.warmup_iters": "training.warmup_steps",
    "lr.decay_lr": "training.lr_schedule",
    # nanotron's files; of data_stages the first stage is read (nanotron.py)
    "checkpoints.checkpoint_interval": "training.save_interval",
    "checkpoints.checkpoints_path": "system.checkpoint_dir",
    "checkpoints.resume_checkpoint_path": "training.resume",
    "checkpoints.save_final_state": "training.save_last",
    "data_stages.data.dataset.hf_dataset_config_name": "data.dataset_config",
    "data_stages.data.dataset.hf_dataset_or_datasets": "data.dataset",
    "data_stages.data.dataset.hf_dataset_splits": "data.split",
    "data_stages.data.dataset.text_column_name": "data.text_column",
    "data_stages.data.num_loading_workers": "training.num_workers",
    "general.seed": "system.seed",
    "infini_attention.balance_factor_lr": "model.infini.gate_lr",
    "infini_attention.segment_length": "model.infini.segment_length",
    "infini_attention.turn_on_memory": "model.attention",
    "logging.iteration_step_info_interval": "logging.log_interval",
    "model.dtype": "training.precision",
    "model.init_method.std": "model.init_std",
    **{
        f"model.model_config.{theirs}": f"model.{ours}"
        for theirs, ours in (
            ("hidden_size", "hidden_size"),
            ("intermediate_size", "intermediate_size"),
            ("num_attention_heads", "num_heads"),
            ("num_hidden_layers", "num_layers"),
            ("num_key_value_heads", "num_kv_heads"),
            ("rms_norm_eps", "rms_norm_eps"),
            ("rope_theta", "rope_theta"),
            ("tie_word_embeddings", "tie_word_embeddings"),
            ("vocab_size", "vocab_size"),
        )
    },
    "optimizer.adam_beta1": "training.adam_beta1",
    "optimizer.adam_beta2": "training.adam_beta2",
    "optimizer.adam_eps": "training.adam_eps",
    "optimizer.clip_grad": "training.max_grad_norm",
    "optimizer.optimizer_factory.adam_beta1": "training.adam_beta1",
    "optimizer.optimizer_factory.adam_beta2": "training.adam_beta2",
    "optimizer.optimizer_factory.adam_eps": "training.adam_eps",
    "optimizer.learning_rate_scheduler.learning_rate": "training.learning_rate",
    "optimizer.learning_rate_scheduler.lr_decay_style": "training.lr_schedule",
    "optimizer.learning_rate_scheduler.lr_warmup_steps": "training.warmup_steps",
    "optimizer.learning_rate_scheduler.min_decay_lr": "training.min_lr",
    "tokenizer.tokenizer_name_or_path": "model.model_path",
    "tokens.batch_accumulation_per_replica": "training.grad_accum_nums",
    "tokens.limit_val_batches": "training.eval_batches",
    "tokens.micro_batch_size": "training.batch_size",
    "tokens.sequence_length": "training.context_length",
    "tokens.train_steps": "training.max_steps",
    "tokens.val_check_interval": "training.eval_interval",
}
"""Name -> ours."""

_ON_CPU = {"true": "cpu", "false": "auto"}
VALUES: dict[str, dict[str, Any]] = {
    "training.bf16": {"true": "bf16", "false": "fp32"},
    "training.fp16": {"true": "fp16", "false": "fp32"},
    "training.mixed_precision": {"true": "bf16", "false": "fp32", "no": "fp32"},
    "training.lr_scheduler_type": {"constant_with_warmup": "constant"},
    "training.resume_from_checkpoint": {"true": "auto", "false": None},
    "model.attn_implementation": {"flash_attention_2": "flash_attn"},
    "logging.wandb_log": {"true": "online", "false": "off"},
    **dict.fromkeys(("system.use_cpu", "system.no_cuda", "system.cpu"), _ON_CPU),
    "tokens.val_check_interval": {"-1": None},
    "tokens.limit_val_batches": {"0": None},
    "infini_attention.turn_on_memory": {"true": "infini", "false": "local"},
    "lr.decay_lr": {"true": "cosine", "false": "constant"},
    "model.init_from": {"scratch": None, "scratch_next_token": None},
    "training.stage": {"next_token_pretraining": "next_token", "piano_task": "prompt_target"},
}
"""Name -> its words for values of the setting; any other value is the setting's own."""


class Unneeded(NamedTuple):
    """An option that other projects need."""

    why: str
    """Why nothing changes here."""
    is_switch: bool = True
    """The option takes no value."""
    only: tuple[str, ...] = ()
    """The values that change nothing; empty: any."""


_NO_NAME = Unneeded("a run has the name of its directory (--run-dir)", is_switch=False)
_BACKEND = Unneeded("NCCL joins GPUs, gloo joins CPUs", is_switch=False)
_EVERY_STEPS = Unneeded("steps are counted, and no epochs", is_switch=False, only=("steps",))

UNNEEDED: dict[str, Unneeded] = {
    "verbose": Unneeded("the logs hold every line"),
    "no_gpu_dataloader": Unneeded("batches are made on the CPU"),
    "enable_fused_adam": Unneeded("AdamW is always fused"),
    "training.bf16_copies": Unneeded("autocast casts the weights of each step", is_switch=False),
    "run_name": _NO_NAME,
    "wandb_run_name": _NO_NAME,
    "ddp.backend": _BACKEND,
    "backend": _BACKEND,
    "do_train": Unneeded("a run always trains"),
    "overwrite_output_dir": Unneeded("an earlier run's checkpoints are renamed and kept"),
    "per_device_eval_batch_size": Unneeded(
        "an evaluation reads batches of training.batch_size", is_switch=False
    ),
    "eval_strategy": _EVERY_STEPS,
    "evaluation_strategy": _EVERY_STEPS,
    "save_strategy": _EVERY_STEPS,
    "logging_strategy": _EVERY_STEPS,
    "optim": Unneeded(
        "AdamW is always fused", is_switch=False, only=("adamw_torch", "adamw_torch_fused")
    ),
    "tf32": Unneeded("float32 products are exact", only=("false",)),
    "dropout": Unneeded("the model has no dropout", is_switch=False, only=("0", "0.0")),
    "bias": Unneeded("the model has no biases", only=("false",)),
}
"""Names that are accepted, with a line that says why nothing changes."""

_ONE_JOB = "`bash run.sh --mode ddp --gpus auto:N` trains one job on N GPUs (all: without --gpus)"
_BY_TORCHRUN = (
    f"is an option of torchrun: {_ONE_JOB}; `torchrun --nproc-per-node=N pretrain_main.py` works, "
    "too"
)
_SEVERAL_MACHINES = (
    "Slurm says which machines make one job: `srun --ntasks-per-node=1 bash run.sh --mode ddp`; or "
    "start `torchrun --nnodes=N ... pretrain_main.py` (docs/nodes.md)"
)
_NOTES = (
    "what a record of notes holds is for examples/midi/make_tasks.py (--notes N), which makes the "
    "examples"
)
_STEPS = "there are steps here, and no epochs: training.max_steps"
_SHARED = "`bash run.sh --mode fsdp` shares one model among the GPUs"
_NO_UPLOAD = "nothing is uploaded: `run.sh export CHECKPOINT OUT`, then the hub's own command"
_OF_ACCELERATE = f"accelerate's own file is not read: {_ONE_JOB}"
_EVALUATION = "training.eval_interval=N evaluates every N steps; without it there is no evaluation"
_BEST = "training.save_best=true keeps the best as best.pt"
ABSENT: dict[str, str] = {
    "lr": "its name here is training.learning_rate",
    "epochs": _STEPS,
    "num_epochs": _STEPS,
    "num_train_epochs": _STEPS,
    "data.notes_per_record": _NOTES,
    "warmup_ratio": "training.warmup_steps=N counts the steps: the ratio times training.max_steps",
    "lr_decay_iters": "the rate falls until training.max_steps: leave it out",
    "report_to": "give logging.tensorboard=true, logging.wandb=online or logging.wandb=offline",
    "model_name_or_path": (
        "model.init_from=NAME takes the weights, model.geometry=NAME the shape, and "
        "model.model_path=NAME the tokenizer"
    ),
    "validation_file": "data.validation=held_out=FILE names what validates",
    "eval_strategy": f"`steps` alone is taken: {_EVALUATION}",
    "evaluation_strategy": f"`steps` alone is taken: {_EVALUATION}",
    "do_eval": _EVALUATION,
    "eval_only": "`run.sh generate` and model_check.load_model need no training",
    "save_strategy": "`steps` alone is taken: training.save_interval=N saves every N steps",
    "logging_strategy": "`steps` alone is taken: logging.log_interval=N prints every N steps",
    "always_save_checkpoint": f"training.save_interval=N saves every N steps, {_BEST}",
    "load_best_model_at_end": _BEST,
    "optim": "AdamW is the only optimizer: leave it out",
    "tf32": "float32 products are exact; training.precision=bf16 makes products fast",
    "dropout": "the model has no dropout: leave it out",
    "bias": "the model has no biases: leave it out",
    "push_to_hub": _NO_UPLOAD,
    "hub_model_id": _NO_UPLOAD,
    "local_rank": _BY_TORCHRUN,
    "deepspeed": _SHARED,
    "--fsdp": _SHARED,
    "use_fsdp": _SHARED,
    "use_deepspeed": _SHARED,
    "multi_gpu": _ONE_JOB,
    "num_processes": _ONE_JOB,
    "compute_environment": _OF_ACCELERATE,
    "distributed_type": _OF_ACCELERATE,
    "--stride": "is an option of `run.sh prepare`; data.stride=N sets the distance of sequences",
    "--tokenizer-type": "is an option of `run.sh prepare`; data.tokenizer=bpe is that of a run",
    **dict.fromkeys(("--nproc-per-node", "--standalone"), _BY_TORCHRUN),
    **dict.fromkeys(
        (
            *("--nnodes", "--node-rank", "--master-addr", "--master-port"),
            *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf"),
            *("num_machines", "machine_rank", "main_process_ip", "main_process_port"),
        ),
        _SEVERAL_MACHINES,
    ),
    "--tee": "each worker has a log of its own in the run directory (--run-dir)",
    "--redirects": "each worker has a log of its own in the run directory (--run-dir)",
    "-m": "run.sh trains by itself: leave it out (`-- python -m NAME` runs your own module)",
}
"""Settings and options that are known and refused, and why. One without a section and dashes is
refused as an option, and in [training], too. One that is UNNEEDED as well is refused with the other
values."""

_NEWER_FLASH = (
    "FlashAttention 3 and 4 are not offered: torch.compile could not keep them within a block; set "
    "model.attention_backend=auto, which takes cuDNN or FlashAttention 2 where they can be had"
)

ABSENT_VALUES: dict[str, dict[str, str]] = {
    "model.attention_backend": {
        "flash_attn_2": "it is named flash_attn (FlashAttention 2, or sdpa where it is not there)",
        **dict.fromkeys(("flash_attn_3", "flash_attn_4", "flash_attention_3"), _NEWER_FLASH),
    },
    "model.init_from": {
        "resume": "`--resume auto` goes on from the newest checkpoint",
        "gpt2": "GPT-2 is no LLaMA; a LLaMA of the hub is named ORGANISATION/MODEL",
    },
    "training.use_amp": {
        word: f"it is true or false; training.precision={word} names the type"
        for word in ("bf16", "fp16", "fp32", "bfloat16", "float16", "float32")
    },
}
"""Setting -> its values that are known and refused, and why."""


def why_absent(name: str) -> str | None:
    """Why there is no setting or option (`--epochs`) of that name; None: it is not known."""
    bare = name.removeprefix("--").replace("-", "_").removeprefix("training.")
    return ABSENT.get(name) or ABSENT.get(bare)


CONFIG_NAMES: dict[str, str] = {
    "debugging_pretraining": "debug",
    "gpt2_pretraining": "train",
    "gpt2_piano_finetuning": "finetune",
}
"""Names of another project's configurations -> presets."""
