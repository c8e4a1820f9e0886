"""Every setting: name, type, default, range, what a resumed run makes of it, and meaning.

Nothing else knows them; config/README.md is made from here. The text below a setting is its meaning
(`fields.Field.doc` reads it).
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from model_check.config.attention import KINDS, AttentionName

Natural = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Size = Annotated[int, Meta(ge=2)]
# Items of a batch or of a sequence.
Items = Annotated[int, Meta(ge=1, le=2**31)]
Lead = Annotated[int, Meta(ge=1, le=6)]
"""Workers keep the fingerprints of 8 steps."""
Threads = Annotated[int, Meta(ge=1, le=4096)]
# Background threads.
Helpers = Annotated[int, Meta(ge=0, le=256)]
# 256 bytes, the special tokens, and some merges.
ByteVocabulary = Annotated[int, Meta(ge=300)]
# Each worker is a process of its own.
Workers = Annotated[int, Meta(ge=1, le=1024)]
# One alone would share nothing.
Shards = Annotated[int, Meta(ge=2, le=1 << 20)]
Interval = Annotated[float, Meta(ge=0, le=3600)]
# The supervisor keeps no more.
TailLines = Annotated[int, Meta(ge=0, le=50)]
NonNegative = Annotated[float, Meta(ge=0)]
Gib = Annotated[float, Meta(ge=0, le=65536)]
Positive = Annotated[float, Meta(gt=0)]
# Beyond it sigmoid is 0 or 1.
Gate = Annotated[float, Meta(ge=-100, le=100)]
AtLeastOne = Annotated[float, Meta(ge=1)]
AboveOne = Annotated[float, Meta(gt=1)]
Fraction = Annotated[float, Meta(ge=0, lt=1)]
Share = Annotated[float, Meta(gt=0, le=1)]

AttentionBackend = Literal["auto", "flash_attn", "cudnn", "sdpa", "eager"]
PrecisionName = Literal["bf16", "fp16", "fp32", "bfloat16", "float16", "float32"]
DocumentTokens = Literal["end", "begin_end"]
TokenizerBackend = Literal["auto", "tokenizers", "gigatoken", "tiktoken"]
Stage = Literal["next_token", "prompt_target"]
Truncation = Literal["keep_start", "keep_end", "drop"]
Seeds = Annotated[int, Meta(ge=1, le=1000)]
Failing = Literal["isolate", "reset", "monitor", "speed"]
EVERY_FAILING: tuple[Failing, ...] = ("isolate", "reset", "monitor", "speed")
FAIL_ON: tuple[Failing, ...] = ("isolate", "reset")

# What --resume does where a setting is not the checkpoint's; each setting says one of them.
# With another value the next batches would not be those that the interrupted run would have read,
# or the same weights would be another model: refused, unless training.resume_anyway.
MUST_EQUAL = Meta(extra={"on_resume": "must_equal"})
# The steps become other ones, which may be the purpose: the log reports the change.
TELL = Meta(extra={"on_resume": "tell"})
# No step changes, or another check covers it: the data has an identity of its own.
SILENT = Meta(extra={"on_resume": "silent"})

# Of a text that is an answer when it is empty: none. Any other empty text is refused.
MAY_BE_EMPTY = Meta(extra={"may_be_empty": True})


_SEES = Meta(extra={"words": {name: kind.sees for name, kind in KINDS.items()}})


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class RopeScaling(_Section, frozen=True):
    """Llama 3.1's stretching of the rotary embedding beyond the context it was trained with."""

    factor: Annotated[AtLeastOne, MUST_EQUAL] = 8.0
    """How far low frequencies are stretched."""
    low_freq_factor: Annotated[Positive, MUST_EQUAL] = 1.0
    """Wavelengths above original/this are stretched whole."""
    high_freq_factor: Annotated[Positive, MUST_EQUAL] = 4.0
    """Wavelengths below original/this are left alone."""
    original_context_length: Annotated[Count, MUST_EQUAL] = 8192
    """Context of the original training, tokens."""


class InfiniSettings(_Section, frozen=True):
    """Segments, of model.attention local and infini, and infini's memory of them."""

    segment_length: Annotated[Count | None, MUST_EQUAL] = None
    """Tokens of a segment; null: a quarter of training.context_length, rounded up."""
    update: Annotated[Literal["linear", "delta"], MUST_EQUAL] = "linear"
    """How the memory is written: linear adds each value, delta what the memory does not give
    already."""
    gate_init: Annotated[Gate, SILENT] = 0.0
    """First value of every gate; 0: half memory, half segment."""
    gate_lr: Annotated[Positive, TELL] = 0.01
    """Peak learning rate of the gates, which follows the schedule; they are never decayed."""


class ModelSettings(_Section, frozen=True):
    """The LLaMA that is trained. The defaults are Llama-3.1-8B's geometry, cut to 4 layers."""

    model_path: Annotated[str, SILENT] = "meta-llama/Llama-3.1-8B-Instruct"
    """Hub id or local directory that the tokenizer is taken from (see data.tokenizer)."""
    geometry: Annotated[str | None, SILENT] = None
    """Gives the keys from num_layers to tie_word_embeddings by one word: a size (tiny, small,
    medium, large, xl), a local directory or config.json, or a hub id. It overrides presets; a key
    that a file or the command line gives overrides it."""
    init_from: Annotated[str | None, SILENT] = None
    """Initial weights: a checkpoint of ours (step_N.pt, or a sharded step_N), a local directory
    with safetensors, or a hub id; null (scratch): random, drawn with init_std."""
    num_layers: Annotated[Count, MUST_EQUAL] = 4
    """Transformer blocks."""
    hidden_size: Annotated[Size, MUST_EQUAL] = 4096
    """Width of the residual stream."""
    intermediate_size: Annotated[Count | None, MUST_EQUAL] = 14336
    """Width of the SwiGLU feed-forward; null, and where hidden_size is given without it: two thirds
    of 4 x hidden_size, rounded up to a multiple of 64."""
    num_heads: Annotated[Count, MUST_EQUAL] = 32
    """Query heads."""
    num_kv_heads: Annotated[Count | None, MUST_EQUAL] = 8
    """Key/value heads; divides num_heads; null, and where num_heads is given without it:
    num_heads."""
    head_dim: Annotated[Size | None, MUST_EQUAL] = None
    """Width of a head, even; null: hidden_size / num_heads."""
    vocab_size: Annotated[Size | None, MUST_EQUAL] = 128256
    """Rows of the embedding and of the head; null: the tokenizer's own."""
    rope_theta: Annotated[AboveOne, MUST_EQUAL] = 500000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = RopeScaling()
    """Llama 3.1's scaling; null: none."""
    rms_norm_eps: Annotated[Positive, MUST_EQUAL] = 1e-5
    """Added to the mean square in RMSNorm."""
    tie_word_embeddings: Annotated[bool, MUST_EQUAL] = False
    """The head uses the embedding's weight."""
    init_std: Annotated[Positive, SILENT] = 0.02
    """Standard deviation of every initial matrix."""
    attention: Annotated[AttentionName, MUST_EQUAL, _SEES] = "full"
    """What a token sees."""
    infini: InfiniSettings = InfiniSettings()
    attention_backend: Annotated[AttentionBackend, TELL] = "auto"
    """auto: the fastest that package, device and dtype allow (cuDNN, FlashAttention 2, sdpa, eager)
    and that passes a trial at the start: finite, right, and with system.deterministic=true the same
    bits in three calls. flash_attn: FlashAttention 2, from the package flash-attn; sdpa, with a
    line, where it cannot be had. Any other name: that kernel or an error."""


class TrainingSettings(_Section, frozen=True):
    """The optimizer step, and how many of them."""

    stage: Annotated[Stage, MUST_EQUAL] = "next_token"
    """next_token: every token of the text is predicted. prompt_target: the data are rows of
    {"prompt", "completion"} or {"messages"}, and only completions, the assistant's turns, and the
    end are (model.init_from names the model to begin with)."""
    max_steps: Annotated[Count, TELL] = 100
    """Optimizer steps."""
    batch_size: Annotated[Items, MUST_EQUAL] = 1
    """Sequences in a micro-batch of one worker, or rank."""
    grad_accum_nums: Annotated[Count, MUST_EQUAL] = 1
    """Micro-batches in an optimizer step, of one worker, or rank."""
    global_batch_size: Annotated[Items | None, MUST_EQUAL] = None
    """Sequences in an optimizer step, of all ranks of a job; null: batch_size x grad_accum_nums x
    ranks. Given, it replaces grad_accum_nums."""
    global_grad_accum_nums: Annotated[Count | None, MUST_EQUAL] = None
    """Micro-batches in an optimizer step, of all ranks of a job together: the ranks must divide it;
    null: grad_accum_nums of each. Given, it replaces grad_accum_nums."""
    context_length: Annotated[Items, MUST_EQUAL] = 8192
    """Tokens in a sequence."""
    learning_rate: Annotated[Positive, TELL] = 1e-5
    """Peak learning rate of AdamW."""
    min_lr: Annotated[NonNegative, TELL] = 0.0
    """The schedule never goes below this."""
    warmup_steps: Annotated[Natural, TELL] = 0
    """Steps of linear warm-up, the first of them at learning_rate / warmup_steps."""
    lr_schedule: Annotated[Literal["constant", "cosine", "linear", "wsd"], TELL] = "constant"
    """Shape after the warm-up. cosine and linear reach min_lr at max_steps; wsd (warm-up, stable,
    decay) stays at learning_rate and falls linearly over the last wsd_decay_share of the run."""
    wsd_decay_share: Annotated[Share, TELL] = 0.2
    """With lr_schedule wsd: share of max_steps in which the rate falls to min_lr."""
    max_grad_norm: Annotated[Positive | None, TELL] = 1.0
    """Gradients are scaled down to this global L2 norm; null: never."""
    weight_decay: Annotated[NonNegative, TELL] = 0.1
    """AdamW's decay of matrices; norms are never decayed."""
    adam_beta1: Annotated[Fraction, TELL] = 0.9
    """Decay of the first moment."""
    adam_beta2: Annotated[Fraction, TELL] = 0.95
    """Decay of the second moment."""
    adam_eps: Annotated[Positive, TELL] = 1e-8
    """Added to the root of the second moment."""
    use_amp: Annotated[bool, TELL] = True
    """Matrix products in 16 bits under autocast (training.precision says which; bf16 unless given);
    weights stay float32."""
    precision: Annotated[PrecisionName | None, TELL] = None
    """Type of matrix products: bf16, fp16 (with dynamic loss scaling) or fp32; torch's names mean
    the same. null: bf16 where use_amp, else fp32. Given, it replaces use_amp."""
    compile: Annotated[bool, TELL] = False
    """Compile blocks, last norm and loss with torch.compile before the first step, and take the
    compiled code where a trial shows that it computes what eager code does; false: eager."""
    gradient_checkpointing: Annotated[bool, TELL] = False
    """Recompute each block in the backward pass: less memory, a third more work."""
    loss_chunk_rows: Annotated[Count | None, TELL] = None
    """Tokens whose logits exist at once; null: on a GPU 2048, 8192 with compile and 16 bits; on a
    CPU as many as fit 8 MiB. Where compiled code is asked for and not taken, 2048 at most."""
    num_workers: Annotated[Helpers, SILENT] = 1
    """Background threads that prepare batches ahead; 0: none."""
    save_interval: Annotated[Count | None, SILENT] = None
    """Write step_N.pt every so many steps (launch.mode=fsdp: a directory step_N); null: never."""
    keep_last: Annotated[Count | None, SILENT] = None
    """Keep only so many step_N.pt of this run, the newest; null: all."""
    save_last: Annotated[bool, SILENT] = False
    """Write last.pt at the end of the run."""
    save_best: Annotated[bool, SILENT] = False
    """Write best.pt when best_split reaches its lowest loss; needs eval_interval."""
    async_save: Annotated[bool | None, SILENT] = None
    """Copy the state into host memory, then write it while training goes on; false: training waits
    for the disk. null: true on a GPU, false on a CPU."""
    save_on_signal: Annotated[bool, SILENT] = False
    """On SIGUSR1 (and on SIGTERM, for a run by hand) finish the step, write last.pt and end with
    exit code 0; false: SIGUSR1 is ignored, SIGTERM ends the run unsaved."""
    resume: Annotated[str | None, SILENT] = None
    """Go on from a checkpoint: auto (the newest sound last.pt or step_N.pt of this run in
    system.checkpoint_dir; without one: start at step 0), a file, or a checkpoint directory."""
    resume_anyway: Annotated[bool, SILENT] = False
    """Resume although architecture, batch, seed or data differ from the checkpoint's; the run is
    then no longer the one that was interrupted."""
    eval_interval: Annotated[Count | None, SILENT] = None
    """Evaluate every validation split every so many steps and at the end; null: never."""
    eval_batches: Annotated[Count | None, SILENT] = None
    """Batches of each split that are evaluated; null: all."""
    best_split: Annotated[str | None, SILENT] = None
    """The validation split that decides what is best; null: the first."""
    sample_interval: Annotated[Count | None, SILENT] = None
    """Show what the model says to a few prompts every so many steps and at the end; null: never."""
    sample_prompts: Annotated[str | None, SILENT] = None
    """A text file, a prompt a line; null: how two sequences begin, of the first validation split,
    else of the training data."""
    sample_length: Annotated[Count, SILENT] = 50
    """The longest answer to a prompt, tokens."""


class DataSettings(_Section, frozen=True):
    """What the model reads."""

    dataset: Annotated[str, SILENT] = "auto"
    """auto (wikitext where the hub answers, else embedded), wikitext, c4, embedded, a hub id, a
    local file or directory of .txt, .md, .markdown, .rst, .tex, .html, .htm, .py, .jsonl (all also
    .gz, .zst), .parquet, or of MIDI files (.mid, .midi, and no .txt, .jsonl, .parquet), or a
    prepared directory (data.output_dir). A name never falls back to another."""
    dataset_config: Annotated[str | None, SILENT] = None
    """Configuration of a hub dataset; null: its usual one."""
    split: Annotated[str, SILENT] = "train"
    """Split of a hub dataset."""
    text_column: Annotated[str, SILENT] = "text"
    """Column of JSONL, parquet and hub datasets that holds the text."""
    tokenizer: Annotated[str, SILENT] = "auto"
    """auto (model.model_path's for hub and local text; a byte-level BPE trained on the spot for
    embedded, or where model_path cannot be had), model (model.model_path's or an error), bpe or
    wordpiece (trained on the data; both byte-level), tiktoken or tiktoken:ENCODING (cl100k_base),
    midi (a word of a text is the name of a token of music; auto takes it for MIDI files), or a
    tokenizer.json."""
    document_end: Annotated[str | None, SILENT] = None
    """The token that ends each document; null: the eos_token that tokenizer_config.json or
    special_tokens_map.json beside the tokenizer.json declares, else the first known name that is a
    special token of it. Example: <|eot_id|>"""
    bpe_vocab_size: Annotated[ByteVocabulary, SILENT] = 8192
    """Vocabulary of a tokenizer trained on the data."""
    num_samples: Annotated[Count | None, SILENT] = None
    """Sequences of context_length tokens to prepare; null: all of the text, or what the run needs
    of a stream."""
    stride: Annotated[Count | None, SILENT] = None
    """Tokens between the starts of neighbouring sequences; null: context_length. Less makes them
    overlap: labels are then trained on more than once, and evaluated once."""
    tail: Annotated[Literal["drop", "pad"], SILENT] = "drop"
    """The last tokens, too few for a sequence: drop them, or pad them to a last sequence, whose
    padding is not a label. Validation splits always pad: each of their tokens is evaluated."""
    validation: Annotated[str | None, SILENT] = None
    """Validation splits, NAME=WHAT, separated by commas; null: none. auto: one split, held, a
    hundredth of the documents; of a text of fewer than 100 documents its end; nothing of one that
    is too short for both. WHAT: a fraction of the documents (0.01), a file or directory of text,
    COLUMN:VALUE (the rows of JSONL and parquet that have it, or the MIDI files whose row of
    metadata.csv, or of the only .csv, has it), or split:NAME of a hub dataset. A comma of a value
    is written `\\,`. What validates is never trained on, nor is a document that is equal to it.
    Example: held_out=0.01,bach=composer:Bach"""
    document_tokens: Annotated[DocumentTokens, MUST_EQUAL] = "end"
    """What marks the documents: the tokenizer's end token after each (end), or also its begin token
    before each (begin_end), where it has one."""
    document_masking: Annotated[bool, MUST_EQUAL] = False
    """Attention stays within a document, positions start again with each, and no label leads from
    one document into the next. With training.stage=prompt_target a sequence then holds as many
    examples as fit; false: one, and padding."""
    truncation: Annotated[Truncation, MUST_EQUAL] = "keep_start"
    """Of an example longer than a sequence: keep_start cuts its end, keep_end its beginning, drop
    leaves it out. One that has no target left is left out, too; all are counted."""
    chat_template: Annotated[str | None, SILENT] = None
    """How {"messages"} become text: chatml, or a file with a Jinja template. null: the tokenizer's
    own (chat_template.jinja or tokenizer_config.json beside it); chatml where it has none."""
    output_dir: Annotated[str | None, SILENT] = None
    """Leave a prepared directory here: tokenizer.json, dataset/, metadata.json. null: prepare into
    cache_dir."""
    force_preprocess: Annotated[bool, SILENT] = False
    """Prepare again, although the prepared data exist."""
    cache_dir: Annotated[str, SILENT] = ".cache/datasets"
    """Where token caches live; also the variable DATASET_CACHE_DIR."""
    verify: Annotated[Literal["full", "size", "off"], SILENT] = "size"
    """What opening a cache checks: full: every checksum; size: sizes; off: the manifest alone."""
    offline: Annotated[bool, SILENT] = False
    """Never ask the hub; also the variable HF_HUB_OFFLINE."""
    hub_timeout_s: Annotated[Positive, SILENT] = 3.0
    """Seconds that the one probe of the hub may take."""
    num_proc: Annotated[Count | None, SILENT] = None
    """Processes that tokenize a long text (a short text: this one); null: one a core."""
    tokenizer_backend: Annotated[TokenizerBackend, SILENT] = "auto"
    """What turns text into ids. auto: the fastest that is installed and gives the ids that
    tokenizers gives. It is not part of the cache's key."""


class SystemSettings(_Section, frozen=True):
    """The device and what is reproducible on it."""

    device: Annotated[Literal["auto", "cuda", "cpu"], SILENT] = "auto"
    """auto: cuda where a GPU is usable, else cpu."""
    device_id: Annotated[Natural, SILENT] = 0
    """Which of the VISIBLE devices; a supervised worker sees one, so 0."""
    seed: Annotated[Natural, MUST_EQUAL] = 42
    """Seeds initial weights and the order of the data."""
    deterministic: Annotated[bool, TELL] = True
    """Only deterministic kernels, so that identical runs give identical bits."""
    num_threads: Annotated[Threads | None, TELL] = None
    """CPU threads of a worker; null: the cores divided among the workers. A resumed run takes as
    many as before."""
    checkpoint_dir: Annotated[str, SILENT] = ".checkpoints"
    """Checkpoints and dumps; under the launcher a directory for each worker inside."""


class LoggingSettings(_Section, frozen=True):
    """What is printed and kept."""

    log_interval: Annotated[Count, SILENT] = 1
    """Print a step line every so many steps (events carry every step)."""
    details: Annotated[bool, SILENT] = False
    """After each step line another one: tokens/s, memory, the gradient's norm by layer."""
    speed_interval: Annotated[Count | None, SILENT] = None
    """Print a line of tokens/s, MFU and memory every so many steps; null: never."""
    all_ranks: Annotated[bool, SILENT] = False
    """Every rank of a job prints what is true of all; false: one does."""
    log_dir: Annotated[str | None, SILENT] = None
    """Parent of run directories; null: /tmp/model_check_logs_<PID>_<timestamp>/."""
    tensorboard: Annotated[bool, SILENT] = False
    """Write scalars for `tensorboard --logdir` below tensorboard_dir."""
    tensorboard_dir: Annotated[str | None, SILENT] = None
    """Parent of TensorBoard logs, switches them on; null: tensorboard_logs."""
    wandb: Annotated[Literal["off", "online", "offline"], SILENT] = "off"
    """Log to Weights & Biases (pip install wandb); the key is the variable WANDB_API_KEY, also from
    .env. offline: into ./wandb, to be sent with `wandb sync`."""
    wandb_project: Annotated[str, SILENT] = "model-check"
    """The W&B project."""
    tail_lines: Annotated[TailLines, SILENT] = 20
    """Last lines of the culprit that end a failed run."""


class DebugSettings(_Section, frozen=True):
    """Closer looks at a run, and alarms that are set off on purpose."""

    dump_tensors: Annotated[bool, SILENT] = False
    """On NaN or Inf, also write debug/nan_debug_step_N.pkl: every parameter and gradient."""
    drill: Annotated[str | None, SILENT] = None
    """A fault to inject, to see the alarm work: KIND@STEP[:WORKER[:NAME[:NUMBER]]][:always]. KIND
    one of nan, inf, flip_gradient (into a gradient), nan_weight, inf_weight, flip, burst (into a
    parameter or buffer), nan_moment, inf_moment, flip_moment (into AdamW's first; with exp_avg_sq.
    before NAME its second), nan_forward, inf_forward, flip_activation, nan_backward, inf_backward
    (into what a module makes), loss_nan, raise, exit7, kill, hang, slow. A flip turns over one bit
    of the first value: NUMBER, else 16, of a 16-bit value 0; burst does so in NUMBER neighbours, 2
    to 64, else 32. slow@STEP:WORKER:1.3x makes each step from STEP on take so much longer. No
    WORKER, or all: every worker. NAME: that parameter, buffer or module. It acts once; with always
    also when the step is computed again, as the first of a run is. Example:
    nan_forward@3:GPU1:layers.0.attention.wq"""
    fingerprints: Annotated[Literal["auto", "full", "rotate", "off"], SILENT] = "auto"
    """Sums over the bits of weights, gradients, moments and what flows between blocks, compared
    with the other workers' each step. full: all of them; rotate: a part, another one each step, for
    about 1 % of its time, and all at the last; auto: full on a CPU and in a run of at most 200
    steps, else rotate; off: none, and only loss and gradient norm are compared."""
    profile_steps: Annotated[str | None, SILENT] = None
    """Steps, FIRST-LAST or one, that torch's profiler records into profile/steps_FIRST-LAST.json.gz
    beside the checkpoints; null: none. Example: 3-5"""


class FsdpSettings(_Section, frozen=True):
    """How the ranks of launch.mode=fsdp share a model (torch's FSDP2)."""

    shard_size: Annotated[Shards | None, SILENT] = None
    """Ranks that hold one copy of the model together; null: all ranks. A smaller number, which
    divides that of the ranks: so many hold a copy, and copies sum their gradients (HSDP). Example:
    the GPUs of a machine."""
    reshard_after_forward: Annotated[bool, SILENT] = True
    """Free a block's gathered weights after its forward pass and gather them again for the backward
    pass; false: keep them, which takes their memory and saves a third of the communication."""
    sync_micro_batches: Annotated[bool, SILENT] = True
    """Sum gradients over the ranks after each micro-batch, so that a rank keeps its shard of them
    alone; false: once a step, and each rank keeps whole gradients meanwhile."""
    cpu_offload: Annotated[bool, SILENT] = False
    """Weights, gradients and moments lie in the host's memory, and the optimizer runs there; a GPU
    holds what it computes with."""


class LaunchSettings(_Section, frozen=True):
    """How the supervisor runs its workers."""

    gpus: Annotated[str, SILENT] = "all"
    """all, auto, auto:N, indices (0,2,5) or UUID prefixes (GPU-8f3a)."""
    require_idle: Annotated[bool, SILENT] = False
    """Refuse a GPU that runs or holds somebody else's work, seen from here or not, and one that
    does not tell; false: say so and share."""
    workers: Annotated[Workers, SILENT] = 2
    """CPU workers, where no GPU is used."""
    first_worker: Annotated[Natural, SILENT] = 0
    """Number of the first CPU worker, so that runs side by side have workers of different names."""
    mode: Annotated[Literal["replicate", "ddp", "fsdp", "compare"], SILENT] = "replicate"
    """replicate: one isolated, identical run a worker; ddp: one job, whose ranks are the workers:
    they share the batches of each step; fsdp: such a job whose ranks share the model, too, for one
    that no GPU holds alone; compare: arms (--arm NAME key=value ...), each with other settings,
    side by side."""
    fsdp: FsdpSettings = FsdpSettings()
    seeds: Annotated[Seeds, SILENT] = 1
    """How often each arm of a comparison is trained: with system.seed, with the next one, ..."""
    replicas: Annotated[Count, SILENT] = 1
    """Workers of each training of a comparison; the bits of several are compared."""
    rank_timeout_s: Annotated[Positive | None, SILENT] = None
    """Seconds that a rank of a job waits for the others, once steps run, also where all are stopped
    (Ctrl-Z); null: 60, or 10 usual steps where that is longer. Under the launcher at most half of
    what that waits for a silent worker: else nothing would tell which one is not there."""
    audit_interval: Annotated[Count | None, SILENT] = None
    """Every so many steps of a job all ranks also compute one micro-batch, the same one, and its
    gradients are compared: a rank that computes wrong shows nowhere else, since gradients are
    summed. null: never."""
    max_restarts: Annotated[Natural, SILENT] = 0
    """How often a job of ranks that failed goes on from its newest checkpoint; never after a
    configuration error."""
    grace_s: Annotated[NonNegative, SILENT] = 10.0
    """From SIGTERM to SIGKILL in every teardown, seconds."""
    telemetry_interval_s: Annotated[Interval, SILENT] = 1.0
    """Seconds between two samples of the run's GPUs by NVML; 0: none."""
    max_lead: Annotated[Lead, SILENT] = 2
    """How many steps a worker may be ahead of the slowest of its equals, so that what differs is
    still there when it is found."""
    on_suspect: Annotated[Literal["stop", "continue"], SILENT] = "stop"
    """Where one worker is odd, or its state changed by itself. stop: the run ends; continue: the
    others go on without it, so that a burn-in finds every bad GPU in one run."""
    golden: Annotated[str | None, SILENT] = None
    """A golden file (run.sh report RUN_DIR --write-golden FILE): every worker is held against it
    when the run is over, as if it were one more, so that one GPU has a peer. null: none."""
    replay_s: Annotated[NonNegative, SILENT] = 120.0
    """Seconds that replays may take: where workers differ, or one's state changed by itself, the
    steps to there are computed again on that device and on all healthy ones. It tells whether the
    fault comes again, and hardware from software. 0: none."""
    expect_gpus: Annotated[Count | None, SILENT] = None
    """How many GPUs (or MIG instances) CUDA_VISIBLE_DEVICES must leave this run: fewer end it with
    exit code 69; any other missing GPU is only reported. null: every GPU that the machine or
    CUDA_VISIBLE_DEVICES names must be there."""
    fail_on: Annotated[tuple[Failing, ...], SILENT] = FAIL_ON
    """Which symptoms of a GPU end a run with exit code 22, where it did not fail for another
    reason; []: none, they are only reported. isolate: uncorrected memory errors, a failed remap, a
    GPU that is lost; reset: a remap that waits for one; monitor: heat, power brake, a slow PCIe
    link, other Xids, and health that could not be read; speed: ten steps in a row slower than its
    equals by more than 15 %."""
    fail_on_health: Annotated[bool, SILENT] = False
    """true: launch.fail_on with all four; false: launch.fail_on decides."""
    dossier_gib: Annotated[Gib, SILENT] = 2.0
    """Of a faulty worker's tensors, how many GiB it keeps in the run directory's dossier: those
    around the fault, then the others that fit; 0: none. Statistics of all are always kept."""
    deadline_s: Annotated[NonNegative, SILENT] = 0.0
    """Seconds after its start when a run is over at the latest, start-up included; 0: none. It is
    judged by the steps until then: with 10 compared steps a worker passes."""
    repeat: Annotated[Count | None, SILENT] = None
    """How many rounds: the same run again and again, each complete and in a directory of its own,
    with one report of all. null: one, or as many as launch.soak_s allows."""
    soak_s: Annotated[NonNegative, SILENT] = 0.0
    """Seconds after the start within which further rounds end, as far as the earlier ones tell; 0:
    launch.repeat alone decides."""
    hang_timeout_s: Annotated[NonNegative, SILENT] = 300.0
    """Seconds of silence after which a worker counts as hanging; 0: never. Start-up and compilation
    get 10 times as long, and one that makes steps 2.5 s at least."""
    history_file: Annotated[str | None, SILENT, MAY_BE_EMPTY] = None
    """Where each run adds a line a worker, and learns whether a GPU has had a transient fault
    before; null: /var/lib/model-check/history.jsonl for root, for others
    model-check/history.jsonl in $XDG_STATE_HOME (~/.local/state); empty: no history is kept."""


class Settings(_Section, frozen=True):
    """The whole tree, checked and frozen. Derived values are in `model_check.config.derived`."""

    model: ModelSettings = ModelSettings()
    training: TrainingSettings = TrainingSettings()
    data: DataSettings = DataSettings()
    system: SystemSettings = SystemSettings()
    logging: LoggingSettings = LoggingSettings()
    debug: DebugSettings = DebugSettings()
    launch: LaunchSettings = LaunchSettings()
