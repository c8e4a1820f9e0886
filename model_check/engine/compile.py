"""torch.compile, a block at a time: all blocks share one compiled graph, and parameters keep their
names."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from model_check.config.schema import Settings
from model_check.engine.batches import StepData
from model_check.engine.rng import kept_rng
from model_check.engine.state import TrainingState
from model_check.engine.step import StepPlan, accumulate
from model_check.errors import ConfigError
from model_check.events import Phase
from model_check.utils.held import hold_own
from model_check.utils.words import first_line

_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_COMPILERS = ("g++", "c++", "clang++", "gcc", "cc", "clang")


def compile_blocks(state: TrainingState, plan: StepPlan) -> None:
    """Compile forward and backward pass now, on a micro-batch of zeros: the wait has a phase of its
    own, and no step pays for it.

    Leaves weights, gradients and random states as they were. Raises ConfigError where nothing can
    be compiled.
    """
    model, optimizer, channels = state.model, state.optimizer, state.context.channels
    _refuse_without_compiler()
    take_cache()
    channels.sink.emit(Phase(name="compile"))
    channels.say(
        f"Compiling {len(model.layers)} blocks (training.compile=false trains without) ..."
    )
    started = time.monotonic()
    _make_compiler_deterministic()
    for block in model.layers:
        block.compile()
    try:
        with kept_rng():
            accumulate(model, _step_of_zeros(state.settings, plan.device), optimizer, plan)
    except torch._dynamo.exc.TorchDynamoException as error:
        raise ConfigError(
            f"training.compile = true: {first_line(error)}; set training.compile=false"
        ) from error
    optimizer.zero_grad()
    channels.say(f"Compiled in {time.monotonic() - started:.0f} s")


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Compiled modules are called without their compiled code, which hooks cannot look into."""
    compiled = [module for module in model.modules() if module._compiled_call_impl is not None]
    calls = [module._compiled_call_impl for module in compiled]
    for module in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in zip(compiled, calls, strict=True):
            module._compiled_call_impl = call


def _step_of_zeros(settings: Settings, device: torch.device) -> StepData:
    """One micro-batch, of the shapes and kinds of tensors that every step will have."""
    shape = (settings.training.batch_size, settings.training.context_length)
    tokens_BT = torch.zeros(shape, dtype=torch.long, device=device)
    num_tensors = 3 if settings.data.document_masking else 2  # inputs, targets, documents
    return StepData(-1, [(tokens_BT,) * num_tensors], tokens_BT.numel(), tokens_BT.numel())


def _refuse_without_compiler() -> None:
    named = os.environ.get("CXX") or os.environ.get("CC")
    if not any(shutil.which(name) for name in ((named,) if named else _COMPILERS)):
        raise ConfigError(
            "training.compile = true: no C++ compiler found (apt install g++, or name one in CXX); "
            "training.compile=false trains eagerly"
        )


def take_cache() -> None:
    """Make the directory from which torch runs code that it compiled earlier, unless the
    environment names one. By torch's default its name in /tmp can be foreseen: who makes it first
    has code of theirs run. Raises ConfigError where another user did."""
    if _CACHE in os.environ:
        return
    directory = Path(tempfile.gettempdir(), f"torchinductor_uid{os.geteuid()}")
    try:
        directory.mkdir(0o700, exist_ok=True)
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
