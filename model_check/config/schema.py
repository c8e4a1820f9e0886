"""Every setting: name, type, default, range, meaning. Nothing else knows them; config/README.md is
made from here."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Natural = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Size = Annotated[int, Meta(ge=2)]
Items = Annotated[int, Meta(ge=1, le=2**31)]  # of a batch or a sequence
Threads = Annotated[int, Meta(ge=1, le=4096)]
Helpers = Annotated[int, Meta(ge=0, le=256)]  # background threads
ByteVocabulary = Annotated[int, Meta(ge=300)]  # 256 bytes, the special tokens, and some merges
Workers = Annotated[int, Meta(ge=1, le=1024)]  # each is a process of its own
Interval = Annotated[float, Meta(ge=0, le=3600)]
TailLines = Annotated[int, Meta(ge=0, le=50)]  # the supervisor keeps no more
NonNegative = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
AtLeastOne = Annotated[float, Meta(ge=1)]
AboveOne = Annotated[float, Meta(gt=1)]
Fraction = Annotated[float, Meta(ge=0, lt=1)]
Share = Annotated[float, Meta(gt=0, le=1)]

Failing = Literal["isolate", "reset", "monitor", "speed"]
EVERY_FAILING: tuple[Failing, ...] = ("isolate", "reset", "monitor", "speed")
FAIL_ON: tuple[Failing, ...] = ("isolate", "reset")


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
    geometry: Annotated[
        str | None,
        _doc(
            "The keys from num_layers to tie_word_embeddings by one word: a size (tiny, small, "
            "medium, large, xl), a local directory or config.json, or a hub id. It stands over "
            "presets; a key that a file or the command line gives stands over it."
        ),
    ] = None
    init_from: Annotated[
        str | None,
        _doc(
            "First weights: a checkpoint of ours (.pt), a local directory with safetensors, or a "
            "hub id; null: drawn with init_std."
        ),
    ] = None
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
        Literal[
            "auto",
            "flash_attn",
            "flash_attn_2",
            "flash_attn_3",
            "flash_attn_4",
            "cudnn",
            "sdpa",
            "eager",
        ],
        _doc(
            "auto: sdpa with system.deterministic=true, else the fastest that package, device and "
            "dtype allow (FlashAttention 4 or 3, cuDNN, FlashAttention 2, sdpa). flash_attn: the "
            "newest FlashAttention that is installed; with system.deterministic=true that is 2, "
            "since 3 and 4 are not known to be deterministic. By name: that or an error."
        ),
    ] = "auto"


class TrainingSettings(_Section, frozen=True):
    """One optimizer step and how many of them."""

    max_steps: Annotated[Count, _doc("Optimizer steps.")] = 100
    batch_size: Annotated[Items, _doc("Sequences in a micro-batch of one worker.")] = 1
    grad_accum_nums: Annotated[Count, _doc("Micro-batches in an optimizer step.")] = 1
    global_batch_size: Annotated[
        Items | None,
        _doc(
            "Sequences in an optimizer step; null: batch_size x grad_accum_nums. Given, it "
            "replaces grad_accum_nums."
        ),
    ] = None
    context_length: Annotated[Items, _doc("Tokens in a sequence.")] = 8192
    learning_rate: Annotated[Positive, _doc("Peak learning rate of AdamW.")] = 1e-5
    min_lr: Annotated[NonNegative, _doc("The schedule never goes below this.")] = 0.0
    warmup_steps: Annotated[
        Natural, _doc("Steps of linear warm-up, the first of them at learning_rate / warmup_steps.")
    ] = 0
    lr_schedule: Annotated[
        Literal["constant", "cosine", "linear", "wsd"],
        _doc(
            "Shape after the warm-up. cosine and linear reach min_lr at max_steps; wsd (warm-up, "
            "stable, decay) stays at learning_rate and falls in a line over the last "
            "wsd_decay_share of the run."
        ),
    ] = "constant"
    wsd_decay_share: Annotated[
        Share, _doc("With lr_schedule wsd: share of max_steps in which the rate falls to min_lr.")
    ] = 0.2
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
        bool,
        _doc(
            "Matrix products in 16 bits under autocast (training.precision says which; bf16 "
            "unless given); weights stay float32."
        ),
    ] = True
    precision: Annotated[
        Literal["bf16", "fp16", "fp32", "bfloat16", "float16", "float32"] | None,
        _doc(
            "Of matrix products: bf16, fp16 (with dynamic loss scaling) or fp32; torch's names "
            "mean the same. null: bf16 where use_amp, else fp32. Given, it replaces use_amp."
        ),
    ] = None
    compile: Annotated[
        bool,
        _doc("Compile each block with torch.compile before the first step; false: eager."),
    ] = False
    gradient_checkpointing: Annotated[
        bool, _doc("Recompute each block in the backward pass: less memory, a third more work.")
    ] = False
    loss_chunk_rows: Annotated[
        Count | None,
        _doc(
            "Tokens whose logits exist at once; null: 2048 on a GPU, on a CPU as many as fit 8 MiB."
        ),
    ] = None
    num_workers: Annotated[
        Helpers, _doc("Background threads that prepare batches ahead; 0: none.")
    ] = 1
    save_interval: Annotated[
        Count | None, _doc("Write step_N.pt every so many steps; null: never.")
    ] = None
    keep_last: Annotated[
        Count | None,
        _doc("Keep only so many step_N.pt of this run, the newest; null: all."),
    ] = None
    save_last: Annotated[bool, _doc("Write last.pt at the end of the run.")] = False
    save_best: Annotated[
        bool, _doc("Write best.pt when best_split reaches its lowest loss; needs eval_interval.")
    ] = False
    async_save: Annotated[
        bool | None,
        _doc(
            "Copy the state into host memory, then write it while training goes on; false: "
            "training waits for the disk. null: true on a GPU, false on a CPU."
        ),
    ] = None
    save_on_signal: Annotated[
        bool,
        _doc(
            "On SIGUSR1 (and on SIGTERM, for a run by hand) finish the step, write last.pt and end "
            "with exit code 0; false: SIGUSR1 is ignored, SIGTERM ends the run unsaved."
        ),
    ] = False
    resume: Annotated[
        str | None,
        _doc(
            "Go on from a checkpoint: auto (the newest sound last.pt or step_N.pt of "
            "system.checkpoint_dir; none: start afresh), a file, or a checkpoint directory."
        ),
    ] = None
    resume_anyway: Annotated[
        bool,
        _doc(
            "Resume although architecture, batch, seed or data are not the checkpoint's; the run "
            "is then no longer the one that was interrupted."
        ),
    ] = False
    eval_interval: Annotated[
        Count | None,
        _doc("Evaluate every validation split every so many steps and at the end; null: never."),
    ] = None
    eval_batches: Annotated[
        Count | None, _doc("Batches of each split that are evaluated; null: all.")
    ] = None
    best_split: Annotated[
        str | None, _doc("The validation split that decides what is best; null: the first.")
    ] = None


class DataSettings(_Section, frozen=True):
    """What the model reads."""

    dataset: Annotated[
        str,
        _doc(
            "auto (wikitext where the hub answers, else embedded), wikitext, c4, embedded, a hub "
            "id, a local file or directory of .txt, .jsonl (both also .gz, .zst), .parquet, or a "
            "prepared directory (data.output_dir). A name never falls back to another."
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
            "or wordpiece (trained on the data; both byte-level), tiktoken or tiktoken:ENCODING "
            "(cl100k_base), or a tokenizer.json."
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
    stride: Annotated[
        Count | None,
        _doc(
            "Tokens between the starts of neighbouring sequences; null: context_length. Less makes "
            "them overlap: labels are then trained on more than once, and evaluated once."
        ),
    ] = None
    tail: Annotated[
        Literal["drop", "pad"],
        _doc(
            "Last tokens, too few for a sequence: drop them, or pad a last sequence, whose padding "
            "is no label. Validation splits always pad: each of their tokens is evaluated."
        ),
    ] = "drop"
    validation: Annotated[
        str | None,
        _doc(
            "Validation splits, NAME=WHAT, separated by commas. WHAT: a fraction of the documents "
            "(0.01), a file or directory of text, COLUMN:VALUE (the rows of JSONL and parquet that "
            "have it), or split:NAME of a hub dataset. What validates is never trained on. "
            "Example: held_out=0.01,bach=composer:Bach"
        ),
    ] = None
    document_masking: Annotated[
        bool,
        _doc("Attention stays within a document, and positions start again with each."),
    ] = False
    output_dir: Annotated[
        str | None,
        _doc(
            "Leave a prepared directory here: tokenizer.json, dataset/, metadata.json. null: "
            "prepare into cache_dir."
        ),
    ] = None
    force_preprocess: Annotated[
        bool, _doc("Prepare again, although what is asked for is there.")
    ] = False
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
    num_proc: Annotated[
        Count | None,
        _doc("Processes that tokenize a long text (threads, a short one); null: one a core."),
    ] = None
    tokenizer_backend: Annotated[
        Literal["auto", "tokenizers", "gigatoken", "tiktoken"],
        _doc(
            "What turns text into ids. auto: the fastest that is installed and gives the ids that "
            "tokenizers gives. It is not part of the cache's key."
        ),
    ] = "auto"


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
        Threads | None, _doc("CPU threads of a worker; null: the cores divided among the workers.")
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
    tensorboard: Annotated[
        bool, _doc("Write scalars for `tensorboard --logdir` below tensorboard_dir.")
    ] = False
    tensorboard_dir: Annotated[
        str | None,
        _doc("Parent of TensorBoard logs, switches them on; null: tensorboard_logs."),
    ] = None
    wandb: Annotated[
        Literal["off", "online", "offline"],
        _doc(
            "Log to Weights & Biases (pip install wandb); the key is the variable WANDB_API_KEY, "
            "also from .env. offline: into ./wandb, to be sent with `wandb sync`."
        ),
    ] = "off"
    wandb_project: Annotated[str, _doc("The W&B project.")] = "model-check"
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
    profile_steps: Annotated[
        str | None,
        _doc(
            "Steps, FIRST-LAST or one, that torch's profiler records into "
            "profile/steps_FIRST-LAST.json.gz beside the checkpoints; null: none. Example: 3-5"
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
    workers: Annotated[Workers, _doc("CPU workers, where no GPU is used.")] = 2
    mode: Annotated[
        Literal["replicate"], _doc("replicate: one isolated, identical run a worker.")
    ] = "replicate"
    grace_s: Annotated[NonNegative, _doc("From SIGTERM to SIGKILL in every teardown, seconds.")] = (
        10.0
    )
    telemetry_interval_s: Annotated[
        Interval,
        _doc("How often NVML is asked for the state of the GPUs of a run, seconds; 0: never."),
    ] = 1.0
    expect_gpus: Annotated[
        Count | None,
        _doc(
            "How many GPUs (or MIG instances) CUDA_VISIBLE_DEVICES must leave this run: fewer end "
            "it with exit code 69; a GPU missing besides is told. null: every GPU that the machine "
            "or CUDA_VISIBLE_DEVICES names must be there."
        ),
    ] = None
    fail_on: Annotated[
        tuple[Failing, ...],
        _doc(
            "Which symptoms of a GPU end a run with exit code 22 that did not fail otherwise; []: "
            "none, they are only told. isolate: uncorrected memory errors, a failed remap, a GPU "
            "that is lost; reset: a remap that waits for one; monitor: heat, power brake, a slow "
            "PCIe link, other Xids, and health that could not be told; speed: slower than its "
            "equals (not judged yet)."
        ),
    ] = FAIL_ON
    fail_on_health: Annotated[
        bool, _doc("true: launch.fail_on with all four; false: launch.fail_on decides.")
    ] = False
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
