"""Other names of settings: those of the trainers and documents that people come from.

A name serves with its section, alone (`max_iters=5`), as an option (`--max-iters 5`) and as a key
of a settings file. Two names of one setting in one source are an error.
"""

from typing import Any, NamedTuple

MICRO_BATCH = "training.micro_batch_size"
"""Beside a batch_size it is the batch of one backward pass, and batch_size that of a step."""

ALIASES: dict[str, str] = {
    # model
    "model.num_hidden_layers": "model.num_layers",
    "model.num_attention_heads": "model.num_heads",
    "model.num_key_value_heads": "model.num_kv_heads",
    # training
    "training.max_iters": "training.max_steps",
    "training.train_steps": "training.max_steps",
    MICRO_BATCH: "training.batch_size",
    "data.batch_size": "training.batch_size",
    "training.gradient_accumulation_steps": "training.global_grad_accum_nums",
    "training.context_size": "training.context_length",
    "training.sequence_length": "training.context_length",
    "training.max_length": "training.context_length",
    "data.context_size": "training.context_length",
    "data.packing": "data.document_masking",
    "training.packing": "data.document_masking",
    "training.warmup_iters": "training.warmup_steps",
    "training.grad_clip": "training.max_grad_norm",
    "training.clip_grad": "training.max_grad_norm",
    "training.mixed_precision": "training.use_amp",
    "training.eval_steps": "training.eval_batches",
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
}
"""Name -> ours."""

VALUES: dict[str, dict[str, Any]] = {
    "lr.decay_lr": {"true": "cosine", "false": "constant"},
    "model.init_from": {"scratch": None, "scratch_next_token": None},
    "training.stage": {"next_token_pretraining": "next_token", "piano_task": "prompt_target"},
}
"""Name -> its words for values of the setting; any other value is the setting's own."""


class Unneeded(NamedTuple):
    """What another project has to be told."""

    why: str
    """Why nothing changes here."""
    is_switch: bool = True
    """The option takes no value."""
    only: str | None = None
    """The one value that changes nothing; None: any."""


UNNEEDED: dict[str, Unneeded] = {
    "verbose": Unneeded("the logs hold every line"),
    "no_gpu_dataloader": Unneeded("batches are made on the CPU"),
    "enable_fused_adam": Unneeded("AdamW is always fused"),
    "run_name": Unneeded("a run has the name of its directory (--run-dir)", is_switch=False),
    "ddp.backend": Unneeded("NCCL joins GPUs, gloo joins CPUs", is_switch=False),
}
"""Names that are accepted, with a line that says why nothing changes."""

_BY_TORCHRUN = (
    "is an option of torchrun: `bash run.sh --mode ddp` starts the ranks itself, and "
    "`torchrun --nproc-per-node=N pretrain_main.py` works, too"
)
_SEVERAL_MACHINES = (
    "Slurm says which machines make one job: `srun --ntasks-per-node=1 bash run.sh --mode ddp`, or "
    "it is an option of torchrun: `torchrun --nnodes=N ... pretrain_main.py` (docs/nodes.md)"
)
_NOTES = (
    "what a record of notes holds is for examples/midi/make_tasks.py (--notes N), which makes the "
    "examples"
)
_STEPS = "there are steps here, and no epochs: training.max_steps"
ABSENT: dict[str, str] = {
    "lr": "its name here is training.learning_rate",
    "epochs": _STEPS,
    "num_epochs": _STEPS,
    "data.notes_per_record": _NOTES,
    "--stride": "is an option of `run.sh prepare`; data.stride=N sets the distance of sequences",
    "--tokenizer-type": "is an option of `run.sh prepare`; data.tokenizer=bpe is that of a run",
    "--nproc-per-node": _BY_TORCHRUN,
    "--nnodes": _SEVERAL_MACHINES,
    "--node-rank": _SEVERAL_MACHINES,
    "--master-addr": _SEVERAL_MACHINES,
    "--master-port": _SEVERAL_MACHINES,
}
"""Settings and options that are known and refused, and why. One without a section and dashes is
refused as an option, and in [training], too."""

ABSENT_VALUES: dict[str, dict[str, str]] = {
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
