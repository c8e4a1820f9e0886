"""Whether `logging.wandb` can act here. Asked before data are prepared, and again by the worker."""

import importlib.util
import os
import sys
from pathlib import Path

from model_check.config.schema import LoggingSettings
from model_check.errors import ConfigError
from model_check.utils.dotenv import dotenv_value, why_unread

API_KEY = "WANDB_API_KEY"


def check_wandb(logging: LoggingSettings) -> None:
    """Raises ConfigError where wandb is not installed, or has no key to be online."""
    if logging.wandb == "off":
        return
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f"logging.wandb = {logging.wandb}: wandb is not installed "
            f"({sys.executable} -m pip install wandb), or logging.wandb=off"
        )
    if logging.wandb == "online" and not _has_key():
        raise ConfigError(
            f"logging.wandb = online: no key; put {API_KEY}=... into the environment or into "
            f".env, run `wandb login`, or set logging.wandb=offline{why_unread()}"
        )


def _has_key() -> bool:
    """In the environment, in .env, or in the file that `wandb login` writes."""
    netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    own = os.environ.get(API_KEY) or dotenv_value(API_KEY)
    return bool(own) or (netrc.is_file() and "wandb" in netrc.read_text())
