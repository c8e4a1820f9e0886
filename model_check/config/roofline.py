"""What a training step takes on a GPU of a known kind, from the settings alone: computed, never
measured. Pure, without torch.

Matrix products and attention take their FLOPs at a share of the GPU's peak (products the bytes of
their weights, where those take longer), everything else its bytes at a share of the memory's speed.
The shares are those of an H100 SXM, from published figures; of other GPUs they are assumed to be
the same, where nothing else is said. Nothing overlaps. A step takes at least as long as the host
needs to launch its kernels.
"""

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from model_check.config.attention import KINDS
from model_check.config.derived import (
    attention_span,
    is_check,
    loss_chunk_rows,
    num_micro_batches,
    precision,
)
from model_check.config.flops import FlopsPerToken, flops_per_token
from model_check.config.gpu_models import GpuModel
from model_check.config.schema import Settings
from model_check.config.shape import Geometry

PRODUCTS = 680 / 989.4
"""Of the peak: what cuBLAS sustains in bfloat16 at these sizes; 640 to 720 TFLOP/s are likely."""
TRAFFIC = 2.8 / 3.35
"""Of the memory's sheet."""
UPDATE = 2.2 / 3.35
"""The same of a fused AdamW (pytorch #117872: 49.9 ms for a Llama 2 in bfloat16 on an H100)."""
FLOAT32_PRODUCTS = 67 / 989.4
"""Of the peak of bfloat16, without tensor cores."""
FINGERPRINTS = 3.15 / 3.35
"""The same of our kernel (measured on an H100, docs/log.md)."""
REST = 0.015
"""Of a step: copies, small operators, fingerprints of a part."""
LAUNCH_US = 15
"""What the host needs for one launch, the Python around it included: 775 launches of the preset
`train` took 11.5 to 15.5 ms under torch 2.11 over a CUDA that executes nothing (2 cores, quiet).
No run on a GPU was ever bound by it: the H100's 208 ms of `production` hold about 650."""
EAGER_LAUNCHES, COMPILED_LAUNCHES = (94, 44), (57, 17)
RECOMPUTED_LAUNCHES, OTHER_LAUNCHES = 32, 80
"""Launches of a micro-batch in bfloat16, counted there: (of a block, of a chunk of logits); more of
a block that is computed again; of all else, with the update."""
COMPILED = 0.35
"""Of the bytes between products, where blocks are compiled: 6 of 17 ms at the default sizes."""
ATTENTION = {
    # 529 TFLOP/s forward (flash-attention's chart); 1.7 to 2.3 x FlashAttention 2 in all
    "cudnn": (0.535, 0.565),
    # 333 TFLOP/s forward (the same chart); its deterministic backward pass is 5.9 ms
    "sdpa": (0.337, 0.237),
}
"""Backend -> the share of the peak of its forward and backward pass on Hopper."""
ATTENTION_BEFORE = (0.6, 0.4)
"""FlashAttention 2 on Ampere and Ada: up to 0.73 and 0.63 by arXiv 2307.08691, less with a causal
mask and determinism."""


class Operator(Struct, frozen=True):
    """A row: what a step spends on one kind of work."""

    name: str
    flops: float
    bytes: float
    ms: float


def _ms(operator: Operator) -> float:
    return operator.ms


class Plan(Struct, frozen=True):
    """A step on one GPU."""

    attention: str
    """The backend that it is computed for."""
    flops: FlopsPerToken
    tokens: int
    """Of a step."""
    operators: tuple[Operator, ...]
    peak_tflops: float
    num_launches: int
    """Of a step, about."""

    @property
    def gpu_ms(self) -> float:
        return sum(operator.ms for operator in self.operators)

    @property
    def host_ms(self) -> float:
        """What the host needs for the launches of a step."""
        return self.num_launches * LAUNCH_US / 1000

    @property
    def step_ms(self) -> float:
        return max(self.gpu_ms, self.host_ms)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_ms * 1000

    def mfu(self, flops: float) -> float:
        """The share of the peak; `flops` a token: of one convention."""
        return flops * self.tokens_per_s / (self.peak_tflops * 1e12)


def plan_step(settings: Settings, shape: Geometry, gpu: GpuModel) -> Plan | None:
    """None: products are in float32, for which no peaks are known here."""
    if precision(settings.training) == "fp32":
        return None
    sizes = _Sizes(settings, shape, gpu)
    operators = [*sizes.operators()]
    ms = sum(operator.ms for operator in operators)
    operators.append(Operator("the rest", 0, 0, ms * REST / (1 - REST)))
    flops, launches = flops_per_token(settings, shape), sizes.launches()
    return Plan(sizes.attention, flops, sizes.tokens, tuple(operators), gpu.tflops, launches)


def attention_of(settings: Settings, gpu: GpuModel) -> str:
    """The backend that model.attention_backend most likely means there: of packages nothing is
    known."""
    name = settings.model.attention_backend
    if name not in ("auto", "flash_attn"):
        return name
    is_free = not (settings.system.deterministic or settings.data.document_masking)
    return "cudnn" if name == "auto" and is_free and gpu.is_hopper_or_newer else "sdpa"


class _Sizes:
    """Bytes were counted on this project's own operators, in bfloat16; a test holds those of a
    block against them. By hand where a kernel reads more often, or less, than its operator."""

    def __init__(self, settings: Settings, shape: Geometry, gpu: GpuModel) -> None:
        self.settings, self.shape, self.gpu = settings, shape, gpu
        training = settings.training
        self.attention = attention_of(settings, gpu)
        self.num_micro = num_micro_batches(settings)
        self.rows = training.batch_size * training.context_length
        self.tokens = self.rows * self.num_micro
        self.twice = training.gradient_checkpointing
        """Blocks are computed again."""

    def operators(self) -> Iterator[Operator]:
        yield self._products()
        yield self._attention()
        if flops := self.tokens * KINDS[self.shape.attention].flops(self.settings, self.shape):
            yield self._at("compressive memory", flops, FLOAT32_PRODUCTS)
        yield self._moved("norms, rope, SwiGLU, residual", self._between())
        yield self._moved("casts of weights and gradients", self._casts())
        yield self._moved("head beside its products", self._head())
        # Weights, gradients and moments are read, and all but gradients written; clipped ones too.
        yield self._moved("AdamW", 32 * self.shape.num_parameters, UPDATE)
        yield self._moved("gradient norm", 4 * self.shape.num_parameters)
        how = self.settings.debug.fingerprints
        if how == "full" or (how == "auto" and is_check(self.settings)):
            yield self._moved("fingerprints", self._fingerprints(), FINGERPRINTS)

    def launches(self) -> int:
        """Of a step."""
        is_compiled = self.settings.training.compile
        of_block, of_chunk = COMPILED_LAUNCHES if is_compiled else EAGER_LAUNCHES
        of_block += RECOMPUTED_LAUNCHES if self.twice else 0
        of_head = of_chunk * self._num_chunks()
        return self.num_micro * (self.shape.num_layers * of_block + of_head + OTHER_LAUNCHES)

    def _num_chunks(self) -> int:
        """Of a micro-batch's logits."""
        return -(-self.rows // loss_chunk_rows(self.settings, self.shape.vocab_size, "cuda"))

    def _products(self) -> Operator:
        head = self.shape.vocab_size * self.shape.hidden_size
        blocks = self.shape.num_multiplied - head
        times = 8 if self.twice else 6
        found = self._at("products", self.tokens * (times * blocks + 6 * head), PRODUCTS)
        # With few rows they wait for the weights: read twice or three times, in 16 bits, and their
        # gradient is written.
        weights = self._moved("", self.num_micro * (times * blocks + 6 * head))
        return max(found, replace(found, bytes=weights.bytes, ms=weights.ms), key=_ms)

    def _attention(self) -> Operator:
        """Causal: a forward pass has 2 products, a backward pass 5."""
        span = attention_span(self.settings)
        one = self.tokens * self.shape.num_layers * self.shape.query_width * span
        if self.attention == "eager":
            return self._scores(one, span)
        shares = ATTENTION.get(self.attention, ATTENTION["sdpa"])
        forward, backward = shares if self.gpu.is_hopper_or_newer else ATTENTION_BEFORE
        num_forward = 2 if self.twice else 1
        name, peak = f"attention ({self.attention})", self.gpu.tflops * 1e9
        ms = (2 * num_forward * one / forward + 5 * one / backward) / peak
        return Operator(name, (2 * num_forward + 5) * one, 0, ms)

    def _scores(self, one: float, span: int) -> Operator:
        """Of eager attention: whole products, and T x T scores in memory."""
        # A score is read and written about 10 times forward and backward, in 2 to 4 bytes.
        num_scores = self.tokens * self.shape.num_layers * self.shape.num_heads * span
        flops, moved = 12 * one, 40 * num_scores
        ms = self._at("", flops, PRODUCTS).ms + self._moved("", moved).ms
        return Operator("attention (eager)", flops, moved, ms)

    def _between(self) -> float:
        shape = self.shape
        # 16 forward and 24 backward for two fused norms; the rest counted.
        of_hidden = 40 + 106
        of_query = of_key = 80
        of_token = of_hidden * shape.hidden_size + of_query * shape.query_width
        of_token += of_key * shape.key_width + 28 * shape.intermediate_size
        share = COMPILED if self.settings.training.compile else 1.0
        again = 4 / 3 if self.twice else 1.0
        return again * share * self.tokens * shape.num_layers * of_token

    def _casts(self) -> float:
        """Weights are cast to 16 bits, a micro-batch casts their gradients to 32 and adds them up
        from the second on."""
        head = self.shape.vocab_size * self.shape.hidden_size
        blocks = self.shape.num_multiplied - head
        num_casts = self._num_weight_casts() + self.num_micro
        return 6 * blocks * num_casts + 12 * self.shape.num_parameters * (self.num_micro - 1)

    def _num_weight_casts(self) -> int:
        """Of a block's, in a step: eager code keeps what autocast has cast; compiled code holds the
        casts themselves, and recomputed blocks once more."""
        training = self.settings.training
        if not training.compile:
            return 1
        return self.num_micro * (2 if self.twice else 1)

    def _head(self) -> float:
        """Logits: to float32, log-softmax (rows too long for one read), exponential, to 16 bits;
        compiled, two passes over their 16 bits. Weights: cast; products add their gradient up in
        float32, chunk by chunk (torch 2.12)."""
        of_logit = 8 if self.settings.training.compile else 36
        # The embedding's gradient is filled with zeros first.
        of_weight = 4 + 4 + 8 * (self._num_chunks() - 1)
        size = self.shape.vocab_size * self.shape.hidden_size
        weights = size * self.num_micro * (of_weight + 6)
        return of_logit * self.tokens * self.shape.vocab_size + weights

    def _fingerprints(self) -> float:
        """Gradients, and weights and moments before the update and after it; what flows between
        blocks, forward and backward."""
        flow = (self.shape.num_layers + 2) * self.tokens * self.shape.hidden_size
        return 28 * self.shape.num_parameters + 2 * 4 * flow

    def _at(self, name: str, flops: float, share: float) -> Operator:
        return Operator(name, flops, 0, flops / (share * self.gpu.tflops * 1e9))

    def _moved(self, name: str, moved: float, share: float = TRAFFIC) -> Operator:
        return Operator(name, 0, moved, moved / (share * self.gpu.gbytes_per_s * 1e6))
