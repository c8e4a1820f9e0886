"""What can be known to fail before anything starts: memory."""

import psutil

from model_check.config.derived import geometry
from model_check.config.schema import Settings
from model_check.errors import ConfigError


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
