"""The forward pass of the first step, computed before it: equal calls must give equal bits, or no
difference between workers would prove anything."""

import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from model_check.forensics.fingerprint import has_fingerprint
from model_check.instrument import generators
from model_check.instrument.model_hooks import tensors_in
from model_check.instrument.names import unwrapped

_NUM_TIMES = 4
Sums = Callable[[Sequence[Tensor]], Tensor]


class Rehearsal:
    """What the module, its inputs and the generators were is put back each time."""

    def __init__(self, sums: Sums) -> None:
        self._sums = sums
        self._first: list[list[int]] = []
        self.is_under_way = False

    def run(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """What fails is left to the script's own call."""
        forward = unwrapped(module, ("module",)).forward
        self.is_under_way = True
        try:
            for number in range(_NUM_TIMES):
                with _kept(module, args, kwargs), _quiet(logs=number == 0):
                    self._first.append(self._of(forward(*args, **kwargs)))
        except Exception:
            self._first = []
        finally:
            self.is_under_way = False

    def is_repeated_by(self, output: Any) -> bool | None:
        """Whether each call gave the bits of this output; None: not known."""
        sums = self._of(output) if self._first else []
        return all(sums == first for first in self._first) if sums else None

    def _of(self, output: Any) -> list[int]:
        found = [x.detach() for _, x in tensors_in(output) if x.is_floating_point()]
        return [int(self._sums([x])) for x in found if has_fingerprint(x)]


@contextmanager
def _kept(module: nn.Module, args: Any, kwargs: Any) -> Iterator[None]:
    before = generators.states()
    modules = list(module.modules())
    tensors = [*module.buffers(), *(x for _, x in tensors_in((args, kwargs)))]
    copies = [(x, x.detach().clone(), x._version) for x in tensors]
    states = [(vars(each), _copied(vars(each))) for each in modules]
    try:
        yield
    finally:
        for own, was in states:
            _put_back(own, was)
        with torch.no_grad():
            for x, copy, version in copies:
                if x._version != version:
                    x.copy_(copy)
        generators.put_back(before)


def _copied(value: Any) -> dict[str, tuple[Any, Any]]:
    """Attribute -> it, and what it holds: of a container a copy, of a generator its state."""
    return {name: (held, _content(held)) for name, held in value.items()}


def _content(held: Any) -> Any:
    if isinstance(held, torch.Generator):
        return held.get_state()
    return held.copy() if isinstance(held, dict | list | set) else None


def _put_back(own: dict[str, Any], was: dict[str, tuple[Any, Any]]) -> None:
    for name in own.keys() - was.keys():
        del own[name]
    for name, (held, content) in was.items():
        own[name] = held
        if isinstance(held, torch.Generator):
            held.set_state(content)
        elif isinstance(held, list):
            held[:] = content
        elif isinstance(held, dict | set):
            held.clear()
            held.update(content)


@contextmanager
def _quiet(*, logs: bool) -> Iterator[None]:
    """What the script prints it prints in its own call. What is told once in a process (a warning,
    a line of a log) is told here, or never."""
    streams, show, disabled = (sys.stdout, sys.stderr), warnings.showwarning, logging.root.manager

    def show_once(*args: Any, **kwargs: Any) -> None:
        muted, sys.stderr = sys.stderr, streams[1]
        try:
            show(*args, **kwargs)
        finally:
            sys.stderr = muted

    level = disabled.disable
    sys.stdout = sys.stderr = io.StringIO()
    warnings.showwarning = show_once
    if not logs:
        logging.disable()
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        warnings.showwarning = show
        logging.disable(level)
