"""Which observers a run has, by its settings; nothing that was not asked for is imported."""

import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from model_check.config.flops import flops_per_token
from model_check.config.profile import parse_steps
from model_check.config.schema import LoggingSettings, Settings
from model_check.config.shape import Geometry
from model_check.engine.device import device_name
from model_check.engine.fingerprint_log import FingerprintLog
from model_check.engine.observe.detail_log import DetailLog
from model_check.engine.observe.mfu import Utilisation, peak_flops
from model_check.engine.observe.profiler import Profiler
from model_check.engine.observe.scalars import ScalarLog, Writer
from model_check.engine.observe.step_log import StepLog
from model_check.engine.observe.wandb import WandbRun
from model_check.engine.observer import RunObserver
from model_check.engine.run_context import Identity, RunContext


def run_observers(
    settings: Settings,
    shape: Geometry,
    dtype: torch.dtype,
    context: RunContext,
    fingerprints: FingerprintLog,
    parameters: Sequence[str],
) -> list[RunObserver]:
    """The run's own log, the logs that settings ask for, and the observers of `context`.
    `parameters`: their names, in the order of the model. Raises ConfigError and StorageError for a
    log that cannot begin."""
    channels, training = context.channels, settings.training
    observers: list[RunObserver] = [StepLog(settings, context.meter, channels, fingerprints)]
    if settings.logging.details:
        observers.append(DetailLog(settings, parameters, channels.say))
    writers: list[Writer] = []
    logging, writes = settings.logging, context.world.is_first
    if writes and (logging.tensorboard or logging.tensorboard_dir is not None):
        from model_check.engine.observe.tensorboard import TensorBoardWriter  # 0.7 s

        directory = _tensorboard_directory(settings.logging, context.identity)
        channels.say(f"TensorBoard: {_viewer()} --logdir {directory.parent}")
        writers.append(TensorBoardWriter(directory))
    if writes and logging.wandb != "off":
        run = WandbRun(settings, context.identity, channels.say)
        writers.append(run)
        observers.append(run)
    utilisation = Utilisation(
        flops_per_token(settings, shape),
        peak_flops(device_name(context.device), dtype),
        num_devices=context.world.size,
    )
    interval = settings.logging.log_interval
    observers.append(ScalarLog(training.max_steps, interval, utilisation, channels, writers))
    if settings.debug.profile_steps is not None:
        steps = parse_steps(settings.debug.profile_steps, training.max_steps)
        observers.append(Profiler(steps, context))
    return [*observers, *channels.observers]


def _viewer() -> str:
    """The program, as it can be typed here: an environment that run.sh made is on nobody's PATH."""
    name = "tensorboard"
    return name if shutil.which(name) else str(Path(sys.executable).with_name(name))


def _tensorboard_directory(logging: LoggingSettings, identity: Identity) -> Path:
    """`tensorboard_logs/<run>/gpu3`: one --logdir shows the workers of a run side by side, and its
    parent all runs."""
    run_name = identity.run_name or time.strftime("run_%Y%m%d_%H%M%S")
    return Path(logging.tensorboard_dir or "tensorboard_logs") / run_name / identity.worker.lower()
