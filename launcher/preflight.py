"""What can be known to fail before anything starts: memory, a drill nobody would run."""

from collections.abc import Sequence

import psutil

from model_check.config.derived import geometry
from model_check.config.drill import parse_drill
from model_check.config.schema import Settings
from model_check.errors import ConfigError


def check_worker_settings(settings: Settings, workers: Sequence[str]) -> None:
    """Refuse what a supervised worker could not do. Raises ConfigError."""
    if settings.system.device_id != 0:
        raise ConfigError(
            f"system.device_id = {settings.system.device_id}: a supervised worker sees one device, "
            "number 0 (--gpus chooses GPUs)"
        )
    if settings.debug.drill is None:
        return
    drill = parse_drill(settings.debug.drill, settings.training.max_steps)
    if drill.worker is not None and drill.worker not in workers:
        raise ConfigError(
            f"debug.drill = {settings.debug.drill!r}: this run has no worker {drill.worker} "
            f"(it has {', '.join(workers)})"
        )


def check_memory(settings: Settings, num_workers: int) -> None:
    """Refuse CPU workers whose weights, gradients and moments alone exceed the free memory."""
    shape = geometry(settings.model, settings.data.bpe_vocab_size)
    needed, available = shape.state_bytes * num_workers, psutil.virtual_memory().available
    if needed > available:
        raise ConfigError(
            f"{num_workers} CPU workers with {shape.num_parameters:,} parameters need "
            f"{needed / 2**30:.1f} GiB for weights, gradients and moments alone; "
            f"{available / 2**30:.1f} GiB are available (a smaller model.*, fewer --workers, "
            "or --preset cpu)"
        )
