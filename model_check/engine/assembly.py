"""Settings -> a trainer: every part of a run is made here, once."""

import torch

from model_check.config.schema import Settings
from model_check.config.shape import Geometry, geometry
from model_check.engine.alarm import Alarm
from model_check.engine.batches import BatchSource
from model_check.engine.compile import compile_blocks
from model_check.engine.device import compute_dtype, describe_device
from model_check.engine.evaluation import Evaluator
from model_check.engine.inject import Injector
from model_check.engine.loss_scale import loss_scale
from model_check.engine.memory import explained
from model_check.engine.observe.observers import run_observers
from model_check.engine.optim import AdamW
from model_check.engine.overflow import Overflow
from model_check.engine.reading import Reader
from model_check.engine.run_context import RunContext
from model_check.engine.saving.initial_weights import take_initial_weights
from model_check.engine.saving.resume import resume
from model_check.engine.saving.saver import Saver
from model_check.engine.state import TrainingState
from model_check.engine.step import StepPlan
from model_check.engine.trainer import Trainer
from model_check.engine.watch import Watch
from model_check.errors import ConfigError
from model_check.events import Phase
from model_check.models.attention import BACKENDS, AttentionFn
from model_check.models.backends import resolve_backend
from model_check.models.build_model import build_model


def build_trainer(
    settings: Settings,
    source: BatchSource,
    tokenizer_vocab_size: int,
    context: RunContext,
    lag: int | None = None,
) -> Trainer:
    """Build the model and everything around it; resume a checkpoint, if settings say so. Raises
    ConfigError for settings that cannot act here, CheckpointError.

    `lag`: see Reader; None: 1 on a GPU, 0 on a CPU. With a loss scale it is 0.
    """
    training, device = settings.training, context.device
    shape = geometry(settings.model, tokenizer_vocab_size)
    _check_vocabulary(shape, tokenizer_vocab_size)
    dtype = compute_dtype(training, device)
    attend = _choose_attention(settings, shape, dtype, context)
    with explained(settings, context):
        model = build_model(settings, shape, attend, device)
        take_initial_weights(model, settings, context)
        optimizer = AdamW(model.named_parameters(), training, loss_scale(dtype, device))
    plan = StepPlan(device, dtype, training.max_grad_norm, Watch(model))
    if optimizer.loss_scale is not None:
        lag = 0  # a step that overflows is repeated before the next begins
    reader = Reader((1 if device.type == "cuda" else 0) if lag is None else lag)
    observers = run_observers(settings, shape, dtype, context)
    state = TrainingState(settings, shape, context, model, optimizer, observers)
    injector = Injector(context.drill, context.identity.worker, model, optimizer)
    evaluator = Evaluator(state, plan)
    saver = Saver(training, context)
    alarm = Alarm(state, plan, injector, recomputes=reader.lag > 0)
    if training.resume is not None:
        resume(state, training.resume, saver)
        injector.check_reached(from_step=state.progress.step)
    if training.compile:  # last: it takes long, and every other mistake is known before
        with explained(settings, context):
            compile_blocks(state, plan)
    overflow = Overflow(state, plan, reader, alarm)
    return Trainer(state, source, plan, reader, injector, evaluator, saver, alarm, overflow)


def _check_vocabulary(shape: Geometry, tokenizer_vocab_size: int) -> None:
    if tokenizer_vocab_size > shape.vocab_size:
        raise ConfigError(
            f"model.vocab_size = {shape.vocab_size} is smaller than the tokenizer's vocabulary "
            f"({tokenizer_vocab_size}); set model.vocab_size=null to take the tokenizer's"
        )


def _choose_attention(
    settings: Settings, shape: Geometry, dtype: torch.dtype, context: RunContext
) -> AttentionFn:
    """The attention to build with. The `build` phase and a line say which it is, and why."""
    masked = settings.data.document_masking
    backend, reason = resolve_backend(
        settings.model.attention_backend, context.device, dtype, documents=masked
    )
    detail = describe_device(context.device) | {
        "attention_backend": backend,
        "attention_reason": reason,
        "num_parameters": shape.num_parameters,
        "dtype": str(dtype).removeprefix("torch."),
    }
    context.channels.sink.emit(Phase(name="build", detail=detail))
    context.channels.say(
        f"{detail['device_name']}, torch {detail['torch']}: {detail['num_parameters']:,} "
        f"parameters, {detail['dtype']}, attention {backend} ({reason})"
    )
    return BACKENDS[backend]
