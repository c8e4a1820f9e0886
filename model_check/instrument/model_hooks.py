"""Hooks of a person's modules. A copy of a module, and a file that it is saved in, has none of
ours in it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

_FORWARD_HOOKS = "_forward_hooks", "_forward_pre_hooks"
_DEEPEST = 4


class ModuleHook:
    """Calls `act` where a module trains, and where nobody traces what it computes."""

    def __init__(self, act: Callable[..., None]) -> None:
        self._act = act

    def __call__(self, module: nn.Module, *call: Any) -> None:
        # First of all: what compiles the module reads no further.
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
            return
        if not (getattr(module, "_is_replica", False) or _is_traced()):
            self._act(module, *call)

    def __deepcopy__(self, _memo: object) -> Callable[..., None]:
        return nullcontext().__exit__

    def __reduce__(self) -> tuple[Any, ...]:
        # It takes whatever it is called with, returns None, and needs no package of ours.
        return getattr, (nullcontext(), "__exit__")


def _is_traced() -> bool:
    """Whether each operation is recorded, counted or transformed: ours would be, too."""
    return (
        torch._C._get_tracing_state() is not None
        or torch._C._functorch.maybe_current_level() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or getattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag", False)
    )


@contextmanager
def hooks_off(module: nn.Module) -> Iterator[None]:
    """For what refuses a module that has hooks."""
    dicts = [vars(m)[hooks] for m in module.modules() for hooks in _FORWARD_HOOKS]
    were = [(hooks, {**hooks}) for hooks in dicts]
    for hooks, all_hooks in were:
        for number, hook in all_hooks.items():
            if isinstance(hook, ModuleHook):
                del hooks[number]
    try:
        yield
    finally:
        for hooks, all_hooks in were:
            hooks.update(all_hooks)


def tensors_in(value: Any, name: str = "", depth: int = _DEEPEST) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of arguments or of an output, by their names or numbers."""
    if isinstance(value, Tensor):
        yield name, value
        return
    items: Mapping[Any, Any] = {}
    if isinstance(value, Mapping):
        items = value
    elif isinstance(value, list | tuple):
        items = dict(enumerate(value))
    elif is_dataclass(value):
        items = {field.name: getattr(value, field.name, None) for field in fields(value)}
    if depth:
        for key, item in items.items():
            yield from tensors_in(item, f"{name}.{key}" if name else str(key), depth - 1)
