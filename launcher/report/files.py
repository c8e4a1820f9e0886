"""What a run left in its directory, read again."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from model_check.errors import UsageError
from model_check.events import Saved
from model_check.utils.checkpoint_names import content_of as checkpoint_content
from model_check.utils.held import hold_unlinked

T = TypeVar("T")
_LONGEST = 1 << 30
"""Bytes of a file: the events of a million steps are a quarter of it."""


def content_of(path: Path) -> bytes:
    """A file that the run left. A link that another user put in its place would have us read
    something else. Raises OSError."""
    with hold_unlinked(path.parent) as directory:
        return directory.read(path.name, _LONGEST)


def intact(saved: Iterable[Saved]) -> list[Saved]:
    """The checkpoints that a run can go on from and that are there as they were saved, the newest
    last."""
    last = {event.path: event for event in saved}  # a later save under the same name counts
    found = [
        event
        for event in last.values()
        if (path := Path(event.path)).stem != "best" and checkpoint_content(path) == event.content
    ]
    return sorted(found, key=lambda event: event.step)


def lines_of(path: Path, decode: Callable[[bytes], T]) -> Iterator[T]:
    """Raises UsageError for a file that is there and cannot be read."""
    try:
        lines = content_of(path).splitlines()
    # Of a worker that never started, or cut since then.
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    for line in lines:
        # The last line of a run that was cut short is none.
        with suppress(msgspec.DecodeError):
            yield decode(line)
