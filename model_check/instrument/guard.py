"""Callbacks that never reach the script: an error of ours ends the watching, and nothing else."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


class Guard:
    """Whether the hooks of this process act, and what comes of an error in one of them."""

    def __init__(self, is_ours: Callable[[], bool], give_up: Callable[[Exception], None]) -> None:
        """`is_ours`: whether this process is the worker, or may become it."""
        self._is_ours, self._give_up = is_ours, give_up
        self.is_paused = False
        """The script's modules are called by us."""
        self.is_broken = False

    @property
    def is_open(self) -> bool:
        return not (self.is_broken or self.is_paused) and self._is_ours()

    def fail(self, error: Exception) -> None:
        self.is_broken = True
        self._give_up(error)


def _unseen() -> AbstractContextManager[object]:
    """A mode that the script has entered, to count operations or to log them, sees none of ours."""
    if not torch._C._len_torch_dispatch_stack():
        return nullcontext()
    from torch.utils._python_dispatch import _disable_current_modes

    modes: AbstractContextManager[object] = _disable_current_modes()
    return modes


class Guarded(Protocol):
    @property
    def guard(self) -> Guard: ...


S = TypeVar("S", bound=Guarded)


def guarded(callback: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R | None]:
    """What goes wrong in ours is no matter of the script: it goes on, unwatched."""

    @functools.wraps(callback)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        if not self.guard.is_open:
            return None
        try:
            with _unseen():
                return callback(self, *args, **kwargs)
        except Exception as error:
            self.guard.fail(error)
            return None

    return call
