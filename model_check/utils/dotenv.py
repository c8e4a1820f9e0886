"""Secrets in the `.env` of the working directory: read as data, never executed, and only where no
other user wrote it. A stranger's key would send what is logged to the stranger."""

import errno
import logging
import os
from contextlib import suppress
from io import StringIO
from pathlib import Path

from model_check.utils import secrets
from model_check.utils.files import text_of
from model_check.utils.held import hold

DOTENV = ".env"
_LONGEST = 1 << 20


def take_from_dotenv(name: str) -> None:
    """Put a variable that the environment lacks there, for the package that reads it."""
    if not os.environ.get(name) and (value := dotenv_value(name)) is not None:
        os.environ[name] = value
        secrets.look_again()


def dotenv_value(name: str, directory: Path = Path()) -> str | None:
    """None: there is no such file, it has no such line, or another user wrote it."""
    with suppress(OSError, UnicodeDecodeError):
        if name in (text := _read(directory)):
            from dotenv import dotenv_values  # 30 ms, where a secret stands there

            logging.getLogger("dotenv").setLevel(logging.ERROR)  # it warns of others' lines
            return dotenv_values(stream=StringIO(text), interpolate=False).get(name) or None
    return None


def why_unread(directory: Path = Path()) -> str:
    """For the end of a message that misses a secret; empty where nothing stood in the way."""
    try:
        _read(directory)
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        return f" ({directory.absolute() / DOTENV} is not read: {_reason(error)})"
    return ""


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return str(getattr(error, "strerror", None) or "not text")


def _read(directory: Path) -> str:
    with hold(directory) as held:
        text = text_of(held.read_own(DOTENV, _LONGEST))
    if "\0" in text:  # no variable can hold one
        raise OSError(errno.EINVAL, "it holds a NUL character")
    return text
