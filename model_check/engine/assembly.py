"""Settings -> a trainer: everything that a run is made of, put together once."""

import torch

from model_check.config.schema import Settings
from model_check.config.shape import Geometry, geometry
from model_check.engine.batches import BatchSource
from model_check.engine.compile import compile_blocks
from model_check.engine.device import describe_device
from model_check.engine.loss_scale import loss_scale
from model_check.engine.memory import explained
from model_check.engine.observe.observers import run_observers
from model_check.engine.observe.step_log import StepLog
from model_check.engine.optim import AdamW
from model_check.engine.precision import compute_dtype
from model_check.engine.reading import Reader
from model_check.engine.run_context import Surroundings
from model_check.engine.saving.initial_weights import take_initial_weights
from model_check.engine.state import TrainingState
from model_check.engine.step import StepPlan
from model_check.engine.trainer import Trainer
from model_check.errors import ConfigError
from model_check.events import Phase, Scalar
from model_check.models.attention import BACKENDS, AttentionFn
from model_check.models.backends import resolve_backend
from model_check.models.build_model import build_model


def build_trainer(
    settings: Settings,
    source: BatchSource,
    tokenizer_vocab_size: int,
    here: Surroundings,
    lag: int | None = None,
) -> Trainer:
    """Build the model and all around it, and put it where a checkpoint left off, if one is to be
    resumed. Raises ConfigError for settings that cannot act here, CheckpointError.

    `lag`: see Reader; None: 1 on a GPU, 0 on a CPU.
    """
    training = settings.training
    shape = geometry(settings.model, tokenizer_vocab_size)
    check_vocabulary(shape, tokenizer_vocab_size)
    dtype = compute_dtype(training, here.device)
    backend = _choose_backend(settings, shape, dtype, here)
    with explained(settings, here):
        model = build_model(settings, shape, backend, here.device)
        take_initial_weights(model, settings, here.say)
        optimizer = AdamW(model.named_parameters(), training, loss_scale(dtype, here.device))
    plan = StepPlan(here.device, dtype, training.max_grad_norm)
    reader = Reader((1 if here.device.type == "cuda" else 0) if lag is None else lag)
    log = StepLog(settings, here.meter, here.say, here.sink)
    observers = (log, *run_observers(settings, shape, dtype, here), *here.observers)
    data = dict(here.data)
    state = TrainingState(settings, shape, data, model, optimizer, here.meter, observers)
    trainer = Trainer(state, source, plan, reader, here)
    if training.compile:  # last: what else is wrong is told before the wait
        with explained(settings, here):
            compile_blocks(model, optimizer, plan, settings, here.say, here.sink)
    return trainer


def check_vocabulary(shape: Geometry, tokenizer_vocab_size: int) -> None:
    if tokenizer_vocab_size > shape.vocab_size:
        raise ConfigError(
            f"model.vocab_size = {shape.vocab_size} is smaller than the tokenizer's vocabulary "
            f"({tokenizer_vocab_size}); set model.vocab_size=null to take the tokenizer's"
        )


def _choose_backend(
    settings: Settings, shape: Geometry, dtype: torch.dtype, here: Surroundings
) -> AttentionFn:
    """The attention to build with; the `build` phase and a line say which, and on what."""
    masked = settings.data.document_masking
    backend, reason = resolve_backend(
        settings.model.attention_backend, here.device, dtype, documents=masked
    )
    detail = describe_device(here.device) | {
        "attention_backend": backend,
        "attention_reason": reason,
        "num_parameters": shape.num_parameters,
        "dtype": str(dtype).removeprefix("torch."),
    }
    here.sink.emit(Phase(name="build", detail=detail))
    here.say(_introduction(detail))
    return BACKENDS[backend]


def _introduction(detail: dict[str, Scalar]) -> str:
    return (
        f"{detail['device_name']}, torch {detail['torch']}: {detail['num_parameters']:,} "
        f"parameters, {detail['dtype']}, attention {detail['attention_backend']} "
        f"({detail['attention_reason']})"
    )
