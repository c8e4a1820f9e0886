"""torch.compile of everything between the products: the blocks, which share one graph, the last
norm, and the loss of a chunk of logits. Parameters keep their names.

Compiled code is taken after a trial: it must compute what eager code computes. Where it fails, the
run is eager, and a line says so.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from model_check.engine.batches import StepData
from model_check.engine.compile_trial import Pass, obstacle_of, random_steps
from model_check.engine.evaluation import untouched
from model_check.engine.rng import kept_rng
from model_check.engine.state import TrainingState
from model_check.engine.step import StepPlan, accumulate
from model_check.engine.uncompiled import uncompiled
from model_check.errors import ConfigError, PeerLost
from model_check.events import Phase
from model_check.model import ChunkedCrossEntropy, Llama
from model_check.utils.held import hold_own, make_unlinked
from model_check.utils.words import first_line

_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_COMPILERS = ("g++", "c++", "clang++", "gcc", "cc", "clang")


def compile_model(state: TrainingState, plan: StepPlan) -> None:
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
        obstacles = state.context.world.gathered(_obstacle(state, plan))
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
    for module in (*model.layers, model.norm):
        vars(module).pop("forward", None)
    vars(model.loss).pop("of_chunk", None)


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


def _obstacle(state: TrainingState, plan: StepPlan) -> str | None:
    """Why compiled code is not taken; None: it is. Compiles it first. Raises ConfigError where the
    compiler fails and ranks share the model: the others wait for this one's weights."""
    model, settings, device = state.model, state.settings, plan.device

    def run(data: StepData) -> Pass:
        loss = accumulate(model, data, state.optimizer, plan)
        return Pass(loss, state.optimizer.gradients())

    def run_eagerly(data: StepData) -> Pass:
        with uncompiled(model):
            return run(data)

    steps = random_steps(settings, state.shape.vocab_size, device)
    try:
        if state.context.splits:
            with untouched(model), plan.forward_context():
                model.summed_loss(*steps[0].micro_batches[0])
        return obstacle_of(
            run,
            run_eagerly,
            steps,
            list(state.optimizer.named),
            plan.dtype,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
    except (torch.OutOfMemoryError, torch.AcceleratorError, PeerLost):
        raise
    except Exception as error:  # compilers raise what they like
        why = f"{type(error).__name__}: {first_line(error)}"
        if not plan.world.is_sharded:
            return why
        text = f"training.compile = true: {why}; set training.compile=false"
        raise ConfigError(text) from error


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
