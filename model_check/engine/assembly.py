"""Settings -> a trainer: every part of a run is made here, once."""

import torch
from torch import Tensor

from model_check.attention import AttentionFn
from model_check.config.derived import is_check, num_micro_batches
from model_check.config.flops import flops_per_token
from model_check.config.resume import settings_digest
from model_check.config.schema import Settings
from model_check.config.shape import Geometry, geometry
from model_check.engine.compile import compile_model
from model_check.engine.device import compute_dtype, describe_device
from model_check.engine.hook_list import Checks, Hooks, make_hooks
from model_check.engine.kernels import (
    DeviceLost,
    Kernels,
    NoKernel,
    choose_kernels,
    device_of_state,
    refuse_different,
)
from model_check.engine.memory import explained
from model_check.engine.run_context import RunContext
from model_check.engine.saving.initial_weights import take_initial_weights
from model_check.engine.saving.resume import resume
from model_check.engine.schedule import learning_rate
from model_check.engine.start import refuse_other_starts
from model_check.engine.state import TrainingState
from model_check.engine.training_run import TrainingRun
from model_check.errors import ConfigError
from model_check.events import Phase, Scalar
from model_check.forensics.fingerprint import Kernel, fingerprint_for
from model_check.forensics.shard import first_of, own_values
from model_check.hooks.checksum_log import ChecksumLog
from model_check.hooks.fingerprints import Fingerprints, bytes_paid_by
from model_check.hooks.observe.gates import tell_limits
from model_check.hooks.observe.observers import run_observers
from model_check.hooks.overflow import OverflowRepeat
from model_check.hooks.site_monitor import SiteMonitor
from model_check.init import build_model, build_sharded
from model_check.loss_scale import loss_scale
from model_check.model import Llama
from model_check.optim import AdamW
from model_check.products import adds_in_float32
from model_check.train import BatchSource, StepContext, Trainer
from model_check.utils.fingerprint import SCHEMA as FINGERPRINTS


def build_trainer(
    settings: Settings,
    source: BatchSource,
    tokenizer_vocab_size: int,
    context: RunContext,
    lag: int | None = None,
) -> TrainingRun:
    """Build the model and everything around it; resume a checkpoint, if settings say so. Raises
    ConfigError for settings that cannot act here, CheckpointError.

    `lag`: see AsyncMetrics; None: 1 on a GPU, 0 on a CPU. With a loss scale it is 0.
    """
    shape, log = geometry(settings.model, tokenizer_vocab_size), ChecksumLog()
    _check_vocabulary(shape, tokenizer_vocab_size)
    dtype = compute_dtype(settings.training, context.device)
    kernel, how = _choose_fingerprints(settings, context)
    kernels = _choose_kernels(settings, shape, dtype, how, context)
    state = _make_state(settings, shape, dtype, kernels, log, context)
    tell_limits(settings, context.channels.say)
    checks = Checks(SiteMonitor(state.model.sites), _make_fingerprints(state, kernel, how), log)
    step_context = _make_step_context(state, dtype, checks)
    hooks = make_hooks(state, step_context, checks, kernel, _lag(state, lag))
    if settings.training.resume is not None:
        resume(state, settings.training.resume, hooks.saver)
        if context.replay_to is None:
            hooks.injector.check_reached(from_step=state.progress.step)
    refuse_other_starts(state, kernel)
    if settings.training.compile:  # last: it takes long, and every other mistake is known before
        with explained(settings, context):
            compile_model(state, step_context)
    context.world.join(state.model, context.device)
    return TrainingRun(state, _make_trainer(state, source, step_context, hooks, _lag(state, lag)))


def _make_trainer(
    state: TrainingState,
    source: BatchSource,
    step_context: StepContext,
    hooks: Hooks,
    lag: int,
) -> Trainer:
    training, context = state.settings.training, state.context
    return Trainer(
        step_context,
        source,
        hooks.in_order,
        num_micro_batches=num_micro_batches(state.settings, context.world.size),
        first_sequence=state.progress.sequences,
        first_step=state.progress.step,
        num_steps=state.num_steps,
        lag=lag,
        learning_rate=lambda step: learning_rate(step, training),
        repeat_overflow=OverflowRepeat(
            step_context,
            hooks.nonfinite,
            context.channels.note,
            is_deterministic=state.settings.system.deterministic,
        ),
        is_asked_to_end=lambda: context.stop.asked(training.save_on_signal),
        meanwhile=hooks.client.beat,
    )


def _make_state(
    settings: Settings,
    shape: Geometry,
    dtype: torch.dtype,
    kernels: Kernels,
    log: ChecksumLog,
    context: RunContext,
) -> TrainingState:
    """The model with its first weights, its optimizer, and who is told of its steps."""
    with explained(settings, context):
        model = _make_model(settings, shape, dtype, kernels.attention.attend, context)
        take_initial_weights(model, settings, context)
        _tell_rounding(dtype, context)
        scale, gate_lr = loss_scale(dtype, context.device), settings.model.infini.gate_lr
        parameters, world = model.named_parameters(), context.world
        optimizer = AdamW(parameters, settings.training, scale, gate_lr, world, kernels.update)
    observers = run_observers(settings, shape, dtype, context, log, optimizer)
    return TrainingState(settings, shape, context, model, optimizer, observers)


def _make_model(
    settings: Settings,
    shape: Geometry,
    dtype: torch.dtype,
    attend: AttentionFn,
    context: RunContext,
) -> Llama:
    """With its first weights, of which this rank may hold a part."""
    world = context.world
    if not world.is_sharded:
        return build_model(settings, shape, attend, context.device)

    def shard(model: Llama) -> None:
        world.shard(model, list(model.layers), dtype)

    def local_shard(parameter: Tensor) -> tuple[Tensor, int]:
        return own_values(parameter), first_of(parameter)

    return build_sharded(settings, shape, attend, context.device, shard, local_shard)


def _tell_rounding(dtype: torch.dtype, context: RunContext) -> None:
    """A line where a GPU rounds the products of the head's gradient before it adds them."""
    is_rounded = dtype != torch.float32 and not adds_in_float32(context.device, dtype)
    if is_rounded and context.device.type == "cuda":
        context.channels.say(
            f"head: torch {torch.__version__} adds no 16-bit product to a float32 sum here: each "
            "is rounded, and then added"
        )


def _make_step_context(state: TrainingState, dtype: torch.dtype, checks: Checks) -> StepContext:
    return StepContext(
        state.model,
        state.optimizer,
        state.context.device,
        dtype,
        state.settings.training.max_grad_norm,
        state.context.world,
        watchers=(checks.monitor, checks.fingerprints),
        update_watcher=checks.fingerprints,
    )


def _make_fingerprints(state: TrainingState, kernel: Kernel, how: str) -> Fingerprints:
    settings, shape, world = state.settings, state.shape, state.context.world
    return Fingerprints(
        state.model,
        state.optimizer,
        kernel,
        last_step=settings.training.max_steps - 1,  # also of a replay: it takes what its run took
        budget_bytes=_fingerprint_budget(settings, shape, how, kernel, state.context),
        site_bytes=4 * _tokens_per_step(settings, world.size) * shape.hidden_size,
        sites=state.model.sites if world.is_alone else (),  # ranks read different batches
        shard=world.shard_name,
    )


def _lag(state: TrainingState, lag: int | None) -> int:
    if state.optimizer.loss_scale is not None:
        return 0  # a step that overflows is repeated before the next begins
    return int(state.context.device.type == "cuda") if lag is None else lag


def _choose_fingerprints(settings: Settings, context: RunContext) -> tuple[Kernel, str]:
    """Their kernel, and debug.fingerprints where `auto` is decided; a line says it where a slow
    kernel leaves less than is usual here."""
    kernel, how = fingerprint_for(device_of_state(context)), settings.debug.fingerprints
    if how != "auto":
        return kernel, how
    if kernel.name == "eager":
        text = "fingerprints: torch's own operators compute them, a part in each step"
        context.channels.say(f"{text} ({kernel.obstacle})")
    takes_all = kernel.name == "c" or (kernel.name == "triton" and is_check(settings))
    return kernel, "full" if takes_all else "rotate"


def _fingerprint_budget(
    settings: Settings, shape: Geometry, how: str, kernel: Kernel, context: RunContext
) -> float | None:
    """What they may read in a step, bytes; None: all."""
    if how != "rotate":
        return None if how == "full" else 0.0
    of_token = flops_per_token(settings, shape).full
    flops = _tokens_per_step(settings, context.world.size) * of_token
    return bytes_paid_by(flops, kernel, context.device)


def _tokens_per_step(settings: Settings, num_ranks: int) -> int:
    """Of one rank."""
    training = settings.training
    return training.batch_size * training.context_length * num_micro_batches(settings, num_ranks)


def _check_vocabulary(shape: Geometry, tokenizer_vocab_size: int) -> None:
    if tokenizer_vocab_size > shape.vocab_size:
        raise ConfigError(
            f"model.vocab_size = {shape.vocab_size} is smaller than the tokenizer's vocabulary "
            f"({tokenizer_vocab_size}); set model.vocab_size=null to take the tokenizer's"
        )


def _choose_kernels(
    settings: Settings, shape: Geometry, dtype: torch.dtype, fingerprints: str, context: RunContext
) -> Kernels:
    """Those that pass their trials. The `build` phase and lines say which they are, and what trials
    showed; where none passes, before the error is raised. `fingerprints`: debug.fingerprints,
    decided."""
    detail = describe_device(context.device) | {
        "num_parameters": shape.num_parameters,
        "flops_per_token": flops_per_token(settings, shape).causal,
        "dtype": str(dtype).removeprefix("torch."),
        "settings": settings_digest(settings),
        "data": context.identity.data.get("content"),
        "fingerprints": f"{fingerprints}, schema {FINGERPRINTS}",
        **({"shard": context.world.shard_name} if context.world.is_sharded else {}),
    }
    with explained(settings, context):
        try:
            kernels = choose_kernels(settings, shape, dtype, context)
        except (NoKernel, DeviceLost) as error:
            context.channels.sink.emit(Phase(name="build", detail=detail | dict(error.trials)))
            raise
    detail |= kernels.detail
    context.channels.sink.emit(Phase(name="build", detail=detail))
    _say_what_computes(kernels, detail, settings, context)
    refuse_different(kernels, context)
    return kernels


def _say_what_computes(
    kernels: Kernels, detail: dict[str, Scalar], settings: Settings, context: RunContext
) -> None:
    for failure in kernels.failures:
        context.channels.note(failure)
    attention, kind = kernels.attention, settings.model.attention
    named = attention.name if kind == "full" else f"{kind} by {attention.name}"
    context.channels.say(
        f"{detail['device_name']}, torch {detail['torch']}: {detail['num_parameters']:,} "
        f"parameters, {detail['dtype']}, attention {named} ({attention.reason})"
    )
