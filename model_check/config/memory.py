"""How much memory the training of a worker takes, from the settings alone. Without torch, and pure,
but that it reads the vocabulary of a prepared directory.

It counts what exists at the fullest moment of a step: weights, moments, what autograd keeps of the
forward pass, and a chunk of logits. tests/models/test_memory_estimate.py compares the activations
with what torch really keeps.
"""

import msgspec
from msgspec import Struct

from model_check.config.attention import KINDS
from model_check.config.derived import (
    attention_span,
    loss_chunk_rows,
    num_micro_batches,
    precision,
)
from model_check.config.prepared_dir import prepared_directory
from model_check.config.schema import Settings
from model_check.config.shape import Geometry, geometry
from model_check.errors import ConfigError

_FLOAT32, _HALF = 4, 2
_RUNTIME_BYTES = {"cuda": 768 * 2**20, "cpu": 320 * 2**20}
"""Context, libraries and kernel workspaces. cpu: the resident set of a worker with a tiny model
after its trials (measured, torch 2.13); cuda: what contexts of recent GPUs usually take, not
measured by us. The check of the kernels comes before the weights and takes less than they do."""


class MemoryEstimate(Struct, frozen=True):
    """Bytes of one worker at the fullest moment of a step."""

    weights: int
    """float32, with the 16-bit copies of the matrices that autocast keeps; of a rank that shares
    the model, its shard."""
    gathered: int
    """Of such a rank: what of others' weights it holds at a time, and whole gradients."""
    gradients: int
    """Those that exist at that moment: all of them from the second micro-batch on."""
    moments: int
    activations: int
    temporaries: int
    """The larger of two: a chunk of logits with its softmax, as eager code needs it if that is more
    (a compiled run turns eager where its trial fails), or what the backward pass of one block works
    on."""
    buckets: int
    """Of a rank: DDP's own copy of all gradients; with accumulation two (measured, torch 2.13, 33.7
    M parameters, CPU: 0.8 and 1.6 times the weights)."""
    unused: int
    """Freed, but of no use to later tensors, on a CPU: see `_unused`."""
    runtime: int

    @property
    def total(self) -> int:
        return sum(msgspec.structs.astuple(self))

    def describe(self) -> str:
        """`49.2 GiB: weights 10.1, gradients 14.3, ...`: for people."""
        unit, size = ("GiB", 2**30) if self.total >= 2**31 else ("MiB", 2**20)
        shown = ".1f" if unit == "GiB" else ",.0f"
        parts = msgspec.structs.asdict(self).items()
        texts = ", ".join(f"{name} {part / size:{shown}}" for name, part in parts if part)
        return f"{self.total / size:{shown}} {unit}: {texts}"


def expected_geometry(settings: Settings) -> Geometry:
    """The geometry before the data are open. For a model.vocab_size that is null stands the
    vocabulary of a prepared directory, which the worker will find, else data.bpe_vocab_size."""
    known = _prepared_vocab_size(settings)
    return geometry(settings.model, known or settings.data.bpe_vocab_size)


def num_shards(settings: Settings, num_ranks: int) -> int:
    """In how many parts a job of so many ranks divides its model; 1: each holds all of it."""
    if settings.launch.mode != "fsdp":
        return 1
    return settings.launch.fsdp.shard_size or num_ranks


def state_bytes(settings: Settings, num_ranks: int) -> int:
    """float32 weights, gradients and moments of one worker, of so many ranks."""
    return -(-expected_geometry(settings).state_bytes // num_shards(settings, num_ranks))


def estimate_memory(settings: Settings, device: str, num_ranks: int = 1) -> MemoryEstimate:
    """What one worker, of so many ranks, needs on `cuda` or `cpu`: see `expected_geometry`."""
    shape = expected_geometry(settings)
    whole = _estimate_whole(settings, shape, device)
    if (shards := num_shards(settings, num_ranks)) == 1:
        return whole
    is_elsewhere = settings.launch.fsdp.cpu_offload and device == "cuda"
    of_shard = 0 if is_elsewhere else shape.num_parameters * _FLOAT32 // shards
    return msgspec.structs.replace(
        whole,
        weights=of_shard,
        gathered=_gathered(settings, shape),
        gradients=of_shard,
        moments=2 * of_shard,
    )


def _gathered(settings: Settings, shape: Geometry) -> int:
    """Embedding, last norm and head with their gradients, in float32. Of two blocks the weights,
    and of one the gradients with their copy for the sum, in float32. With resharding off the
    weights of all blocks; all gradients, where ranks sum them once a step."""
    fsdp, tables = settings.launch.fsdp, 1 if shape.tie_word_embeddings else 2
    root = tables * shape.vocab_size * shape.hidden_size + shape.hidden_size
    block = (shape.num_parameters - root) // shape.num_layers
    num_blocks = min(2, shape.num_layers) if fsdp.reshard_after_forward else shape.num_layers
    width = _product_bytes(settings)
    weights = root * _FLOAT32 + num_blocks * block * width
    gradients = 2 * root * _FLOAT32 + block * (width + _FLOAT32)
    if not fsdp.sync_micro_batches:
        gradients += shape.num_parameters * _FLOAT32
    return weights + gradients


def _estimate_whole(settings: Settings, shape: Geometry, device: str) -> MemoryEstimate:
    weights = shape.num_parameters * _FLOAT32
    activations = _activations(settings, shape, device)
    temporaries = max(_logits(settings, shape, device), _backward(settings, shape))
    # Of the head: computed in the forward pass.
    gradients = shape.vocab_size * shape.hidden_size * _FLOAT32
    if num_micro_batches(settings) > 1:
        gradients += weights
    elif activations + temporaries + gradients < weights:
        # Fullest when the backward pass ends: all gradients exist, the activations are gone.
        gradients, activations, temporaries = weights, 0, 0
    copies = shape.num_multiplied * _HALF if _product_bytes(settings) == _HALF else 0
    return MemoryEstimate(
        weights=weights + copies,
        gathered=0,
        gradients=gradients,
        moments=2 * weights,
        activations=activations,
        temporaries=temporaries,
        buckets=_buckets(settings, weights),
        unused=_unused(settings, shape, device),
        runtime=_RUNTIME_BYTES[device],
    )


def _buckets(settings: Settings, weights: int) -> int:
    if settings.launch.mode != "ddp":
        return 0
    return weights if num_micro_batches(settings) == 1 else 2 * weights


def describe_size(settings: Settings, device: str, num_ranks: int = 1) -> str:
    """`1,923,125,248 parameters; a worker takes about 35.3 GiB: ...`, for people."""
    shape = expected_geometry(settings)
    assumed = ""
    if settings.model.vocab_size is None:
        is_known = _prepared_vocab_size(settings) is not None
        whose = "of the prepared directory" if is_known else "the tokenizer decides"
        assumed = f" with a vocabulary of {shape.vocab_size:,} ({whose})"
    estimate = estimate_memory(settings, device, num_ranks).describe()
    return f"{shape.num_parameters:,} parameters{assumed}; a worker takes about {estimate}"


def check_host_memory(
    settings: Settings, num_workers: int, host_bytes: int, num_ranks: int = 1
) -> None:
    """Refuse CPU workers that a machine with `host_bytes` cannot hold. The runtime is not counted:
    the workers share it. `num_ranks`: of their job, on all machines. Raises ConfigError."""
    estimate = estimate_memory(settings, "cpu", num_ranks)
    needed = (estimate.total - estimate.runtime) * num_workers
    if needed > host_bytes:
        each = f"{num_workers} CPU workers" if num_workers > 1 else "training"
        raise ConfigError(
            f"{each} cannot fit: about {needed / 2**30:,.1f} GiB are needed, and this machine has "
            f"{host_bytes / 2**30:,.1f} GiB; {advice(settings)}"
        )


def advice(settings: Settings) -> str:
    """What makes a run smaller: the settings that can still be changed, with their values."""
    training = settings.training
    ways = []
    if training.batch_size > 1:
        ways.append(
            f"lower training.batch_size ({training.batch_size}) and raise training.grad_accum_nums"
        )
    ways.append(f"lower training.context_length ({training.context_length})")
    if not training.gradient_checkpointing:
        ways.append("set training.gradient_checkpointing=true")
    if settings.model.attention_backend == "eager":
        ways.append("set model.attention_backend=auto")
    if settings.model.num_layers > 1:
        ways.append(f"train fewer model.num_layers ({settings.model.num_layers})")
    return ", or ".join(ways)


def _prepared_vocab_size(settings: Settings) -> int | None:
    if settings.model.vocab_size is not None:
        return None
    prepared = prepared_directory(settings.data.dataset)
    return None if prepared is None else prepared[1].vocab_size


def block_activations(settings: Settings, shape: Geometry, device: str) -> int:
    """Bytes that autograd keeps of one block's forward pass."""
    asked = settings, shape, device
    width = _product_bytes(settings)
    # The input of each norm; a CPU has no fused norm and also keeps what it scales.
    residual = (4 if device == "cpu" else 2) * shape.hidden_size * _FLOAT32
    normed = 2 * shape.hidden_size * width
    # q, k, v, the output; and the sums of the rows.
    attention = (2 * shape.query_width + 2 * shape.key_width) * width + shape.num_heads * _FLOAT32
    feed_forward = 4 * shape.intermediate_size * width
    more = KINDS[shape.attention].kept_bytes(settings, shape, width)
    of_a_row = residual + normed + attention + feed_forward + more
    return _rows(settings) * of_a_row + _scores(settings, shape, device) + _written_out(*asked)


def _product_bytes(settings: Settings) -> int:
    """Of one element of a matrix product."""
    return _FLOAT32 if precision(settings.training) == "fp32" else _HALF


def _rows(settings: Settings) -> int:
    """Tokens of a micro-batch."""
    return settings.training.batch_size * settings.training.context_length


def _activations(settings: Settings, shape: Geometry, device: str) -> int:
    """Of all blocks, at the end of the forward pass, with the head's input and its gradient."""
    inputs = _rows(settings) * shape.hidden_size * _FLOAT32
    one = block_activations(settings, shape, device)
    if settings.training.gradient_checkpointing:
        return shape.num_layers * inputs + one + 3 * inputs  # one block is recomputed at a time
    return shape.num_layers * one + 3 * inputs


def _unused(settings: Settings, shape: Geometry, device: str) -> int:
    """Half of what a forward pass computes, three quarters where it is recomputed. Temporaries
    that are freed leave holes in malloc's heap, among the activations: with each tensor in a
    mapping of its own (a threshold of 1 MiB) the peak lacks this part, and steps pay in page
    faults. Fits workers of 2 to 12 layers within 12 % (glibc 2.36). torch's allocator of a GPU has
    no such heap."""
    if device != "cpu":
        return 0
    quarters = 3 if settings.training.gradient_checkpointing else 2
    return quarters * shape.num_layers * block_activations(settings, shape, device) // 4


def _scores(settings: Settings, shape: Geometry, device: str) -> int:
    """What eager attention keeps beyond any other: the probabilities of each head, the mask, and
    keys and values once for each query head. On a GPU autocast's softmax is in float32."""
    if settings.model.attention_backend != "eager":
        return 0
    span = attention_span(settings)
    width = _product_bytes(settings)
    probability = width + _FLOAT32 if width == _HALF and device == "cuda" else width
    of_a_row = shape.num_heads * span * probability + _repeated(settings, shape)
    return span * span + _rows(settings) * of_a_row


def _written_out(settings: Settings, shape: Geometry, device: str) -> int:
    """What a fused kernel of torch wants that takes no groups: keys and values once for each query
    head. It is so with a mask, which is kept as numbers to add, and in float32 on a GPU."""
    masked = settings.data.document_masking
    in_float32 = device == "cuda" and _product_bytes(settings) == _FLOAT32
    if settings.model.attention_backend == "eager" or not (masked or in_float32):
        return 0
    span = attention_span(settings)
    mask = span * _product_bytes(settings) if masked else 0
    return _rows(settings) * (_repeated(settings, shape) + mask)


def _repeated(settings: Settings, shape: Geometry) -> int:
    """Of a token, keys and values for every query head, beyond those of their own heads."""
    return 2 * (shape.query_width - shape.key_width) * _product_bytes(settings)


def _logits(settings: Settings, shape: Geometry, device: str) -> int:
    """A chunk of them in float32 with its gradient, and a 16-bit copy where products have it.
    Compiled code turns them into their gradient in place, in larger chunks. Where its trial fails
    the run is eager: of a compiled run the larger of both counts."""
    width = _product_bytes(settings)
    copy = _HALF if width == _HALF else 0
    plain = msgspec.structs.replace(settings.training, compile=False)
    eager = msgspec.structs.replace(settings, training=plain)
    needed = _chunk(eager, shape, device) * (copy + 2 * _FLOAT32)
    if settings.training.compile:
        needed = max(needed, _chunk(settings, shape, device) * width)
    return needed


def _chunk(settings: Settings, shape: Geometry, device: str) -> int:
    """Logits that exist at once."""
    rows = min(loss_chunk_rows(settings, shape.vocab_size, device), _rows(settings))
    return rows * shape.vocab_size


def _backward(settings: Settings, shape: Geometry) -> int:
    """Gradients by the inner widths of one block's feed-forward and by its inputs; of eager
    attention by probabilities and scores, with a copy (measured on a CPU)."""
    inner = 4 * shape.intermediate_size * _product_bytes(settings)
    if settings.model.attention_backend == "eager":
        span = attention_span(settings)
        inner = max(inner, 3 * shape.num_heads * span * _FLOAT32)
    return _rows(settings) * (inner + 3 * shape.hidden_size * _FLOAT32)
