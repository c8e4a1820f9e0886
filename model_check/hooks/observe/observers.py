"""Which observers a run has, by its settings; nothing that was not asked for is imported."""

import re
import shutil
import sys
import time
from pathlib import Path

import msgspec
import torch

from model_check.config.flops import flops_per_token
from model_check.config.profile import parse_steps
from model_check.config.resume import acting_settings
from model_check.config.schema import Settings
from model_check.config.shape import Geometry
from model_check.engine.device import device_name
from model_check.engine.run_context import Identity, RunContext
from model_check.hooks.checksum_log import ChecksumLog
from model_check.hooks.hook import RunObserver
from model_check.hooks.observe.detail_log import DetailLog
from model_check.hooks.observe.mfu import Utilisation, peak_flops
from model_check.hooks.observe.profiler import Profiler
from model_check.hooks.observe.scalars import ScalarLog, Writer
from model_check.hooks.observe.step_log import StepLog
from model_check.hooks.observe.wandb import WandbRun
from model_check.optim import AdamW
from model_check.utils.worker_env import RUN_PREFIX, telemetry_path


def run_observers(
    settings: Settings,
    shape: Geometry,
    dtype: torch.dtype,
    context: RunContext,
    checksums: ChecksumLog,
    optimizer: AdamW,
) -> list[RunObserver]:
    """The run's own log, the logs that settings ask for, and the observers of `context`. Raises
    ConfigError and StorageError for a log that cannot begin."""
    channels, training = context.channels, settings.training
    observers: list[RunObserver] = [StepLog(settings, context.meter, channels, checksums)]
    if settings.logging.details:
        observers.append(DetailLog(settings, list(optimizer.named), context.meter, channels.say))
    writers: list[Writer] = []
    logging, writes = settings.logging, context.world.is_first
    if writes and (logging.tensorboard or logging.tensorboard_dir is not None):
        from model_check.hooks.observe.tensorboard import TensorBoardWriter  # 0.7 s

        directory = _tensorboard_directory(settings, context.identity)
        channels.say(f"TensorBoard: {_viewer()} --logdir {directory.parent}")
        acting = acting_settings(msgspec.to_builtins(settings))
        writers.append(TensorBoardWriter(directory, acting))
    if writes and logging.wandb != "off":
        run = WandbRun(settings, context.identity, channels.say)
        writers.append(run)
        observers.append(run)
    utilisation = Utilisation(
        flops_per_token(settings, shape),
        peak_flops(device_name(context.device), dtype),
        num_devices=context.world.size,
    )
    place = context.run_dir
    telemetry = place and telemetry_path(place, context.identity.worker)
    log = ScalarLog(
        training.max_steps,
        logging,
        utilisation,
        channels,
        context.meter,
        writers,
        telemetry,
        optimizer.gates,
    )
    observers.append(log)
    if settings.debug.profile_steps is not None:
        steps = parse_steps(settings.debug.profile_steps, training.max_steps)
        observers.append(Profiler(steps, context))
    return [*observers, *channels.observers]


def _viewer() -> str:
    """The program, as it can be typed here: an environment that run.sh made is on nobody's PATH."""
    name = "tensorboard"
    return name if shutil.which(name) else str(Path(sys.executable).with_name(name))


def _tensorboard_directory(settings: Settings, identity: Identity) -> Path:
    """`tensorboard_logs/infini_20261127_214039_4711/gpu3`: one --logdir shows the workers of a run
    side by side, its parent all runs. Model, time and launcher name a run that nobody named."""
    kind = {"full": "baseline"}.get(settings.model.attention, settings.model.attention)
    run_name = identity.run_name or time.strftime(f"{kind}_%Y%m%d_%H%M%S")
    shown = "runs" if "/" in run_name else kind
    run_name = re.sub(rf"^{RUN_PREFIX}(\d+)_(\d+_\d+)", rf"{shown}_\2_\1", run_name)
    parent = Path(settings.logging.tensorboard_dir or "tensorboard_logs")
    return parent / run_name / identity.worker.lower()
