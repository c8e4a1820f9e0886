"""torch.compile of everything between the products: the blocks, which share one graph, the last
norm, and the loss of a chunk of logits. Parameters keep their names.

Compiled code is taken after a check: both passes of a few steps must be what eager code computes.
Where they are not, the run is eager, and a line says so.
"""

import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from model_check.config.schema import Settings
from model_check.engine.results import StepData
from model_check.engine.rng import kept_rng
from model_check.engine.state import TrainingState
from model_check.engine.uncompiled import COMPILED, uncompiled, untouched
from model_check.errors import ConfigError, PeerLost
from model_check.events import Phase
from model_check.kernels import NUM_CALLS, Output, Outputs, check_kernel, whole
from model_check.model import ChunkedCrossEntropy, Llama
from model_check.train import StepContext, accumulate
from model_check.utils.held import hold_own, make_unlinked
from model_check.utils.words import first_line

_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_COMPILERS = ("g++", "c++", "clang++", "gcc", "cc", "clang")
NUM_STEPS = 3
LOSS_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""The loss's error, as a share of it."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}
"""A gradient's error, as a share of its size. Measured on a CPU, two blocks: below 1e-6 and
0.007; a GPU adds in other orders."""
_EPS = torch.finfo(torch.float32).eps
"""Of all gradients together: an error below it is rounding, in products of 16 bits, too, whose sums
are in float32. (In a gradient that is 0 but for its rounding, 1e-9 were measured.)"""
_PART = 1 << 20
_SAMPLE = 4096
"""Numbers of a gradient that are compared; of its whole, its norm."""
_LOSS, _GRADIENT = "the loss", "the gradient of {}"


def compile_model(state: TrainingState, context: StepContext) -> None:
    """Compile training and evaluation now, and try them: the wait has a phase of its own, and no
    step pays for it.

    Leaves weights, gradients and random states as they were. Raises ConfigError where nothing can
    be compiled.
    """
    channels = state.context.channels
    _refuse_without_compiler()
    take_cache()
    channels.sink.emit(Phase(name="compile"))
    channels.say(
        f"Compiling {len(state.model.layers)} blocks (training.compile=false trains without) ..."
    )
    started = time.monotonic()
    _make_compiler_deterministic()
    _wrap(state.model)
    with kept_rng():
        obstacles = state.context.world.gathered(_obstacle(state, context))
    state.optimizer.zero_grad()
    if found := next(filter(None, obstacles), None):
        _unwrap(state.model)
        channels.note(f"training.compile = true: not taken, this run is eager: {found}")
        return
    channels.say(f"Compiled in {time.monotonic() - started:.0f} s")


def _wrap(model: Llama) -> None:
    """Nothing is compiled before it is called. Hooks of a module stay outside: those of a shared
    block gather its weights, and no graph holds them."""
    for module in (*model.layers, model.norm):
        vars(module)["forward"] = torch.compile(module.forward, fullgraph=True)
    vars(model.loss)["of_chunk"] = _compiled_chunk_loss()


def _unwrap(model: Llama) -> None:
    for module in model.modules():
        for name in COMPILED:
            vars(module).pop(name, None)


def _compiled_chunk_loss() -> Callable[..., tuple[Tensor, Tensor | None]]:
    """One graph for any number of rows: the last chunk has fewer."""
    compiled = torch.compile(ChunkedCrossEntropy.of_chunk, fullgraph=True)

    def call(
        logits_NV: Tensor, targets_N: Tensor, grad_scale: Tensor | None, with_gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        for tensor in (logits_NV, targets_N):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(logits_NV, targets_N, grad_scale, with_gradient)

    return call


def _obstacle(state: TrainingState, context: StepContext) -> str | None:
    """Why compiled code is not taken; None: it is. Compiles it first. Raises ConfigError where the
    compiler fails and ranks share the model: the others wait for this one's weights."""
    steps = _random_steps(state.settings, state.shape.vocab_size, context.device)

    def run_eagerly(data: StepData) -> Outputs:
        with uncompiled(state.model):
            return _digest_of_step(context, data)

    try:
        if state.context.splits:
            with untouched(state.model), context.forward_context():
                state.model.summed_loss(*steps[0].micro_batches[0])
        return check_steps(partial(_digest_of_step, context), run_eagerly, steps, context.dtype)
    except (torch.OutOfMemoryError, torch.AcceleratorError, PeerLost):
        raise
    except Exception as error:  # compilers raise what they like
        why = f"{type(error).__name__}: {first_line(error)}"
        if not context.world.is_sharded:
            return why
        text = f"training.compile = true: {why}; set training.compile=false"
        raise ConfigError(text) from error


def _random_steps(settings: Settings, vocab_size: int, device: torch.device) -> list[StepData]:
    """Steps with the shapes and kinds of tensors that every step will have."""
    steps = []
    for seed in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(seed)
        drawn = _random_batch(settings, vocab_size, generator)
        batch, num_tokens = tuple(tensor.to(device) for tensor in drawn), drawn[0].numel()
        steps.append(StepData(-1, [batch], num_tokens, num_tokens))
    return steps


def _random_batch(
    settings: Settings, vocab_size: int, generator: torch.Generator
) -> tuple[Tensor, ...]:
    shape = (settings.training.batch_size, settings.training.context_length)
    batch = [torch.randint(vocab_size, shape, generator=generator) for _ in range(2)]
    if settings.data.document_masking:
        batch.append((torch.arange(shape[1]) // max(1, shape[1] // 3)).repeat(shape[0], 1))
    return tuple(batch)


def check_steps(
    fast: Callable[[StepData], Outputs],
    plain: Callable[[StepData], Outputs],
    steps: Sequence[StepData],
    dtype: torch.dtype,
) -> str | None:
    """What is wrong with `fast`; None: on each of `steps` it computes what `plain` computes, within
    the rounding of products in `dtype`. See `check_kernel`."""
    return check_kernel(
        fast,
        plain,
        steps,
        partial(_off, dtype),
        NUM_CALLS if torch.are_deterministic_algorithms_enabled() else 1,
        lambda varying: f"{NUM_CALLS} equal steps give other bits of {varying[0]}",
    )


def _digest_of_step(context: StepContext, data: StepData) -> Outputs:
    """What both passes of a step leave."""
    loss, optimizer = accumulate(context, data), context.optimizer
    return digest(loss, dict(zip(optimizer.named, optimizer.gradients(), strict=True)))


def digest(loss: Tensor, gradients: Mapping[str, Tensor]) -> Outputs:
    """Returns what is compared of a step, on the host, for a device holds the gradients of a whole
    model once: the loss, a float64 scalar; of each gradient (float32, contiguous) its norm and a
    sample, float32 [1 + sample], and the sum of its bits, an int64 scalar."""
    norms = torch.stack(torch._foreach_norm([*gradients.values()])).to("cpu", torch.float32)
    outputs = {_LOSS: whole(loss.detach().to("cpu", torch.float64))}
    for (name, gradient), norm in zip(gradients.items(), norms, strict=True):
        values = torch.cat([norm[None], _sample(gradient)])
        outputs[_GRADIENT.format(name)] = Output(values, _sum_of_bits(gradient).cpu())
    return outputs


def _sum_of_bits(gradient: Tensor) -> Tensor:
    """Part by part: a CPU writes out what it adds up, in 64 bits."""
    parts = torch.split(gradient.view(torch.int32).view(-1), _PART)
    return torch.stack([part.sum(dtype=torch.int64) for part in parts]).sum()


def _sample(gradient: Tensor) -> Tensor:
    flat = gradient.reshape(-1)
    # A copy on a CPU, too: a view would hold the whole gradient.
    return flat[:: max(1, len(flat) // _SAMPLE)].to("cpu", torch.float32, copy=True)


def _off(dtype: torch.dtype, _: StepData, got: Outputs, wanted: Outputs) -> str | None:
    loss, plain = float(got[_LOSS].values), float(wanted[_LOSS].values)
    if not math.isclose(loss, plain, rel_tol=LOSS_TOLERANCE[dtype]):
        return f"its loss is {loss:.6g}, and {plain:.6g} by eager code"
    gradients = [name for name in got if name != _LOSS]
    rounding = _EPS * math.hypot(*(float(wanted[name].values[0]) for name in gradients))
    for name in gradients:
        values, expected = got[name].values, wanted[name].values
        of_norm = _share(values[:1], expected[:1], rounding)
        of_sample = _share(values[1:], expected[1:], rounding)
        error = max(of_norm, of_sample)
        if not error <= TOLERANCE[dtype]:  # a NaN is no number within it
            return f"{name} is off by {error:.2g} of its size ({TOLERANCE[dtype]:g} is allowed)"
    return None


def _share(got: Tensor, wanted: Tensor, rounding: float) -> float:
    """The error as a share of the size. Nothing is left of some gradients but `rounding` (of a
    query's weights, where each position sees itself alone), or nothing at all (of a row that no
    token has)."""
    error, size = float((got - wanted).norm()), float(wanted.norm())
    if error <= rounding:
        return 0.0
    return error / size if size else math.inf


def _refuse_without_compiler() -> None:
    named = os.environ.get("CXX") or os.environ.get("CC")
    if not any(shutil.which(name) for name in ((named,) if named else _COMPILERS)):
        raise ConfigError(
            "training.compile = true: no C++ compiler found (apt install g++, or name one in CXX); "
            "training.compile=false trains eagerly"
        )


def take_cache() -> None:
    """Make the directory from which torch runs code that it compiled earlier: the one that the
    environment names, else torch's own. Its name in /tmp can be foreseen: who makes it first has
    code of theirs run. Raises ConfigError where another user did, or where there can be none: torch
    makes it while it is imported."""
    named = os.environ.get(_CACHE)
    own = Path(tempfile.gettempdir(), f"torchinductor_uid{os.geteuid()}")
    directory = Path(named) if named else own
    try:
        make_unlinked(directory, 0o700)
        if not named:
            hold_own(directory).close()
    except OSError as error:
        raise ConfigError(
            f"training.compile = true: {directory}: {error.strerror}; torch runs compiled code out "
            f"of it: set {_CACHE} to a directory of your own"
        ) from error
    os.environ[_CACHE] = str(directory)


def _make_compiler_deterministic() -> None:
    """What torch.use_deterministic_algorithms would do (engine.device: why it is not used)."""
    import torch._inductor.config  # 2 s, needed for compiling alone

    torch._inductor.config.deterministic = torch.are_deterministic_algorithms_enabled()
