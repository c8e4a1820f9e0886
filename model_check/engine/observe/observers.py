"""Which observers a run has, by its settings; nothing that was not asked for is imported."""

import os
import time
from pathlib import Path

import msgspec
import torch

from model_check.config.profile import parse_steps
from model_check.config.schema import LoggingSettings, Settings
from model_check.config.shape import Geometry
from model_check.engine.device import device_name
from model_check.engine.observe.mfu import Utilisation, flops_per_token, peak_flops
from model_check.engine.observe.profiler import Profiler
from model_check.engine.observe.scalars import ScalarLog, ScalarWriter
from model_check.engine.observe.tensorboard import TensorBoardWriter
from model_check.engine.observe.wandb import API_KEY, WandbPlace, WandbRun, read_key
from model_check.engine.observer import Observer
from model_check.engine.run_context import Surroundings


def run_observers(
    settings: Settings, shape: Geometry, dtype: torch.dtype, here: Surroundings
) -> list[Observer]:
    """Raises ConfigError for a log that cannot be had."""
    observers: list[Observer] = []
    writers: list[ScalarWriter] = []
    if writes_tensorboard(settings.logging):
        directory = tensorboard_directory(settings.logging, here)
        here.say(f"TensorBoard: tensorboard --logdir {directory.parent}")
        writers.append(TensorBoardWriter(directory))
    if settings.logging.wandb != "off":
        run = _wandb_run(settings, here)
        writers.append(run)
        observers.append(run)
    utilisation = Utilisation(
        flops_per_token(shape, settings.training.context_length),
        peak_flops(device_name(here.device), dtype),
    )
    training, interval = settings.training, settings.logging.log_interval
    log = ScalarLog(training.max_steps, interval, utilisation, here.say, here.sink, writers)
    observers.append(log)
    if settings.debug.profile_steps is not None:
        steps = parse_steps(settings.debug.profile_steps, training.max_steps)
        observers.append(Profiler(steps, here.directory, here.device, here.say, here.sink))
    return observers


def writes_tensorboard(logging: LoggingSettings) -> bool:
    return logging.tensorboard or logging.tensorboard_dir is not None


def tensorboard_directory(logging: LoggingSettings, here: Surroundings) -> Path:
    """`tensorboard_logs/<run>/gpu3`, so that one --logdir shows a run's workers beside each other,
    and its parent all runs."""
    run_name = here.run_name or time.strftime("run_%Y%m%d_%H%M%S")
    return Path(logging.tensorboard_dir or "tensorboard_logs") / run_name / here.worker.lower()


def _wandb_run(settings: Settings, here: Surroundings) -> WandbRun:
    key = read_key(os.environ, Path(".env"))
    if key is not None:
        os.environ[API_KEY] = key  # where wandb, and nobody else, looks for it
    place = WandbPlace(
        project=settings.logging.wandb_project,
        group=here.run_name,
        name=here.worker,
        mode=settings.logging.wandb,
        directory=Path(),
    )
    return WandbRun(place, msgspec.to_builtins(settings), here.say)
