"""Every setting: name, type, default, range, meaning. Nothing else knows them; config/README.md is
made from here."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Natural = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Size = Annotated[int, Meta(ge=2)]
ByteVocabulary = Annotated[int, Meta(ge=300)]  # 256 bytes, the special tokens, and some merges
TailLines = Annotated[int, Meta(ge=0, le=50)]  # the supervisor keeps no more
NonNegative = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
AtLeastOne = Annotated[float, Meta(ge=1)]
AboveOne = Annotated[float, Meta(gt=1)]
Fraction = Annotated[float, Meta(ge=0, lt=1)]


def _doc(text: str) -> Meta:
    return Meta(description=text)


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class RopeScaling(_Section, frozen=True):
    """Llama 3.1's stretching of the rotary embedding beyond the context it was trained with."""

    factor: Annotated[AtLeastOne, _doc("How far low frequencies are stretched.")] = 8.0
    low_freq_factor: Annotated[
        Positive, _doc("Wavelengths above original/this are stretched whole.")
    ] = 1.0
    high_freq_factor: Annotated[
        Positive, _doc("Wavelengths below original/this are left alone.")
    ] = 4.0
    original_context_length: Annotated[Count, _doc("Context of the original training, tokens.")] = (
        8192
    )


class ModelSettings(_Section, frozen=True):
    """The LLaMA that is trained. The defaults are Llama-3.1-8B's geometry, cut to 4 layers."""

    model_path: Annotated[
        str,
        _doc("Hub id or local directory that the tokenizer is taken from (see data.tokenizer)."),
    ] = "meta-llama/Llama-3.1-8B-Instruct"
    num_layers: Annotated[Count, _doc("Transformer blocks.")] = 4
    hidden_size: Annotated[Size, _doc("Width of the residual stream.")] = 4096
    intermediate_size: Annotated[Count, _doc("Width of the SwiGLU feed-forward.")] = 14336
    num_heads: Annotated[Count, _doc("Query heads.")] = 32
    num_kv_heads: Annotated[Count, _doc("Key/value heads; divides num_heads.")] = 8
    head_dim: Annotated[
        Size | None, _doc("Width of a head, even; null: hidden_size / num_heads.")
    ] = None
    vocab_size: Annotated[
        Size | None, _doc("Rows of the embedding and of the head; null: the tokenizer's own.")
    ] = 128256
    rope_theta: Annotated[AboveOne, _doc("Base of the rotary frequencies.")] = 500000.0
    rope_scaling: Annotated[RopeScaling | None, _doc("Llama 3.1's scaling; null: none.")] = (
        RopeScaling()
    )
    rms_norm_eps: Annotated[Positive, _doc("Added to the mean square in RMSNorm.")] = 1e-5
    tie_word_embeddings: Annotated[bool, _doc("The head uses the embedding's weight.")] = False
    init_std: Annotated[Positive, _doc("Standard deviation of every initial matrix.")] = 0.02
    attention_backend: Annotated[
        Literal["auto", "flash_attn", "sdpa", "eager"],
        _doc(
            "auto: flash_attn where the package, the device and the dtype allow it, else sdpa. "
            "By name: that or an error."
        ),
    ] = "auto"


class TrainingSettings(_Section, frozen=True):
    """One optimizer step and how many of them."""

    max_steps: Annotated[Count, _doc("Optimizer steps.")] = 100
    batch_size: Annotated[Count, _doc("Sequences in a micro-batch of one worker.")] = 1
    grad_accum_nums: Annotated[Count, _doc("Micro-batches in an optimizer step.")] = 1
    global_batch_size: Annotated[
        Count | None,
        _doc(
            "Sequences in an optimizer step; null: batch_size x grad_accum_nums. Given, it "
            "replaces grad_accum_nums."
        ),
    ] = None
    context_length: Annotated[Count, _doc("Tokens in a sequence.")] = 8192
    learning_rate: Annotated[Positive, _doc("Peak learning rate of AdamW.")] = 1e-5
    min_lr: Annotated[NonNegative, _doc("The schedule never goes below this.")] = 0.0
    warmup_steps: Annotated[
        Natural, _doc("Steps of linear warm-up, the first of them at learning_rate / warmup_steps.")
    ] = 0
    lr_schedule: Annotated[
        Literal["constant", "cosine", "linear"],
        _doc("Shape after the warm-up, reaching min_lr at max_steps."),
    ] = "constant"
    max_grad_norm: Annotated[
        Positive | None, _doc("Gradients are scaled down to this global L2 norm; null: never.")
    ] = 1.0
    weight_decay: Annotated[
        NonNegative, _doc("AdamW's decay of matrices; norms are never decayed.")
    ] = 0.1
    adam_beta1: Annotated[Fraction, _doc("Decay of the first moment.")] = 0.9
    adam_beta2: Annotated[Fraction, _doc("Decay of the second moment.")] = 0.95
    adam_eps: Annotated[Positive, _doc("Added to the root of the second moment.")] = 1e-8
    use_amp: Annotated[
        bool, _doc("Matrix products in bfloat16 under autocast; weights stay float32.")
    ] = True
    gradient_checkpointing: Annotated[
        bool, _doc("Recompute each block in the backward pass: less memory, a third more work.")
    ] = False
    num_workers: Annotated[
        Natural, _doc("Background threads that prepare batches ahead; 0: none.")
    ] = 1
    save_interval: Annotated[
        Count | None, _doc("Write step_N.pt every so many steps; null: never.")
    ] = None
    save_last: Annotated[bool, _doc("Write last.pt at the end of the run.")] = False


class DataSettings(_Section, frozen=True):
    """What the model reads."""

    dataset: Annotated[
        str,
        _doc(
            "auto (wikitext where the hub answers, else embedded), wikitext, c4, embedded, a hub "
            "id, or a local "
            "file or directory of .txt, .jsonl(.gz), .parquet. A name never falls back to another."
        ),
    ] = "auto"
    dataset_config: Annotated[
        str | None, _doc("Configuration of a hub dataset; null: its usual one.")
    ] = None
    split: Annotated[str, _doc("Split of a hub dataset.")] = "train"
    text_column: Annotated[
        str, _doc("Column of JSONL, parquet and hub datasets that holds the text.")
    ] = "text"
    tokenizer: Annotated[
        str,
        _doc(
            "auto (model.model_path's for hub and local text; a byte-level BPE trained on the "
            "spot for embedded, or "
            "where model_path cannot be had), model (model.model_path's or an error), bpe "
            "(trained on the data), "
            "or a tokenizer.json."
        ),
    ] = "auto"
    bpe_vocab_size: Annotated[
        ByteVocabulary, _doc("Vocabulary of a tokenizer trained on the data.")
    ] = 8192
    num_samples: Annotated[
        Count | None,
        _doc(
            "Sequences of context_length tokens to prepare; null: all of the text, or what the "
            "run needs of a stream."
        ),
    ] = None
    cache_dir: Annotated[
        str, _doc("Where token caches live; also the variable DATASET_CACHE_DIR.")
    ] = ".cache/datasets"
    verify: Annotated[
        Literal["full", "size", "off"],
        _doc(
            "What opening a cache checks: full: every checksum; size: sizes; off: the manifest "
            "alone."
        ),
    ] = "size"
    offline: Annotated[bool, _doc("Never ask the hub; also the variable HF_HUB_OFFLINE.")] = False
    hub_timeout_s: Annotated[
        Positive, _doc("How long the one probe of the hub may take, seconds.")
    ] = 3.0
    num_proc: Annotated[Count | None, _doc("Threads that tokenize; null: one a core.")] = None


class SystemSettings(_Section, frozen=True):
    """The device and what is reproducible on it."""

    device: Annotated[
        Literal["auto", "cuda", "cpu"], _doc("auto: cuda where a GPU is usable, else cpu.")
    ] = "auto"
    device_id: Annotated[
        Natural, _doc("Which of the VISIBLE devices; a supervised worker sees one, so 0.")
    ] = 0
    seed: Annotated[Natural, _doc("Seeds initial weights and the order of the data.")] = 42
    deterministic: Annotated[
        bool, _doc("Only deterministic kernels, so that identical runs give identical bits.")
    ] = True
    num_threads: Annotated[
        Count | None, _doc("CPU threads of a worker; null: the cores divided among the workers.")
    ] = None
    checkpoint_dir: Annotated[
        str,
        _doc("Checkpoints and dumps; under the launcher a directory for each worker inside."),
    ] = ".checkpoints"


class LoggingSettings(_Section, frozen=True):
    """What is printed and kept."""

    log_interval: Annotated[
        Count, _doc("Print a step line every so many steps (events carry every step).")
    ] = 1
    log_dir: Annotated[
        str | None,
        _doc("Parent of run directories; null: /tmp/model_check_logs_<PID>_<timestamp>/."),
    ] = None
    tail_lines: Annotated[TailLines, _doc("Last lines of the culprit that end a failed run.")] = 20


class DebugSettings(_Section, frozen=True):
    """What is looked at harder, and alarms that are tried on purpose."""

    dump_tensors: Annotated[
        bool,
        _doc("On NaN or Inf also write debug/nan_debug_step_N.pkl: every parameter and gradient."),
    ] = False
    drill: Annotated[
        str | None,
        _doc(
            "A fault to inject, to see the alarm work: KIND@STEP[:WORKER[:PARAMETER]], KIND one "
            "of nan, inf (into a "
            "gradient), loss_nan (into the loss), flip (one bit of a weight), raise, exit7, "
            "kill, hang. "
            "Example: nan@3:GPU1:layers.0.attention.wq.weight"
        ),
    ] = None


class LaunchSettings(_Section, frozen=True):
    """How the supervisor runs its workers."""

    gpus: Annotated[
        str, _doc("all, auto, auto:N, indices (0,2,5) or UUID prefixes (GPU-8f3a).")
    ] = "all"
    require_idle: Annotated[
        bool, _doc("Refuse a GPU that runs or holds somebody else's work; false: say so and share.")
    ] = False
    workers: Annotated[Count, _doc("CPU workers, where no GPU is used.")] = 2
    mode: Annotated[
        Literal["replicate"], _doc("replicate: one isolated, identical run a worker.")
    ] = "replicate"
    grace_s: Annotated[NonNegative, _doc("From SIGTERM to SIGKILL in every teardown, seconds.")] = (
        10.0
    )
    hang_timeout_s: Annotated[
        NonNegative,
        _doc(
            "A worker silent for longer hangs, seconds; 0: never. Start-up and compilation get "
            "10 times as long."
        ),
    ] = 300.0


class Settings(_Section, frozen=True):
    """The whole tree, checked and frozen. Derived values are in `model_check.config.derived`."""

    model: ModelSettings = ModelSettings()
    training: TrainingSettings = TrainingSettings()
    data: DataSettings = DataSettings()
    system: SystemSettings = SystemSettings()
    logging: LoggingSettings = LoggingSettings()
    debug: DebugSettings = DebugSettings()
    launch: LaunchSettings = LaunchSettings()


ALIASES: dict[str, str] = {
    # model.* of the other documents
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
"""Names that the other documents of this field use -> ours. Two names of one setting in one source
are an error."""
