"""Prompts from a file, a prompt a line. Read before data are prepared, and again by the worker."""

from pathlib import Path

from model_check.config.schema import TrainingSettings
from model_check.errors import ConfigError
from model_check.utils.files import lines_of, read_text

_LONGEST = 1 << 26
"""Bytes of a file."""


def read_prompts(path: Path, asked_by: str) -> list[str]:
    """The lines that are not blank. Raises ConfigError where there is none, or none can be read.
    `asked_by`: the option or setting that names the file, for the message."""
    try:
        text = read_text(path, _LONGEST)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{asked_by} {path}: cannot be read: {why}") from error
    lines = [line for line in lines_of(text) if line.strip()]
    if not lines:
        raise ConfigError(f"{asked_by} {path}: has no line with a prompt")
    return lines


def given_prompts(training: TrainingSettings) -> list[str] | None:
    """Those of training.sample_prompts; None: it names no file, or nothing is sampled. Raises
    ConfigError."""
    if training.sample_interval is None or training.sample_prompts is None:
        return None
    path = Path(training.sample_prompts)
    return read_prompts(path, "training.sample_prompts =")
