"""Puts the watcher in place: torch's own hooks of all optimizers, and the few functions of torch
that a training calls and that have none."""

import atexit
import functools
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers

from model_check.instrument import generators
from model_check.instrument.model_hooks import hooks_off
from model_check.instrument.place import Place
from model_check.instrument.watcher import Watcher
from model_check.utils.wire import DETERMINISTIC, SEED

_CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")
_watchers: list[Watcher] = []
"""One, once it is installed."""


def install() -> Watcher | None:
    """None: nobody supervises this process. Once a process."""
    if _watchers:
        return _watchers[0]
    place = Place.from_environ()
    if place is None:
        return None
    if (seed := os.environ.get(SEED, "")).isdigit():
        generators.seed(int(seed))
    if os.environ.get(DETERMINISTIC):
        torch.use_deterministic_algorithms(True, warn_only=True)
    watcher = Watcher(place)
    _watchers.append(watcher)
    _Hooks(watcher)
    atexit.register(watcher.end)
    return watcher


def claimed() -> bool:
    return any(watcher.is_claimed for watcher in _watchers)


class _Hooks:
    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._handles: list[Any] = []
        self._register(watcher.before_step, watcher.after_step)
        _wrap(Optimizer, "__init__", self._made)
        # Tensor.backward calls it by this name.
        _wrap(torch.autograd, "backward", self._backward)
        _wrap(torch, "compile", self._compile)
        _wrap(torch.jit, "script", self._script)
        _wrap(torch.cuda, "make_graphed_callables", self._without_hooks)
        _wrap(sys, "excepthook", self._failed)
        for name in _CLIPS:
            if hasattr(torch.nn.utils, name):
                _wrap(torch.nn.utils, name, self._clip)
                setattr(torch.nn.utils.clip_grad, name, getattr(torch.nn.utils, name))

    def _register(self, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = [
            optimizers.register_optimizer_step_pre_hook(before),
            optimizers.register_optimizer_step_post_hook(after),
        ]

    def _made(self, init: Callable[..., None], optimizer: Optimizer, *args: Any, **kw: Any) -> None:
        init(optimizer, *args, **kw)
        self._watcher.meet(optimizer)

    def _backward(self, backward: Callable[..., Any], tensors: Any, *args: Any, **kw: Any) -> Any:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        self._watcher.see_backward([root for root in tensors if isinstance(root, Tensor)])
        return backward(tensors, *args, **kw)

    def _clip(self, clip: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(parameters, Tensor):
            parameters = list(parameters)
        self._watcher.see_clip([parameters] if isinstance(parameters, Tensor) else parameters)
        return clip(parameters, *args, **kwargs)

    def _compile(self, compile_: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Who compiles an optimizer must not compile us. Not sooner: to hide takes Dynamo, which
        takes a second to import."""
        hide: Callable[..., Any] = torch.compiler.disable
        watcher = self._watcher
        before, after = (hide(hook) for hook in (watcher.before_step, watcher.after_step))
        self._register(before, after)
        made = compile_(*args, **kwargs)
        if isinstance(made, nn.Module):
            watcher.passes.hook_compiled(made)
        return made

    def _script(self, script: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        """It looks up names in the frame of its caller: three of ours lie between."""
        return self._without_hooks(script, *args, **kw, _frames_up=kw.pop("_frames_up", 0) + 3)

    def _without_hooks(self, make: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        """Who scripts or captures a module refuses one that has hooks."""
        given = [x if isinstance(x, tuple) else (x,) for x in (*args, *kw.values())]
        modules = [x for several in given for x in several if isinstance(x, nn.Module)]
        with ExitStack() as stack:
            for module in modules:
                stack.enter_context(hooks_off(module))
            return make(*args, **kw)

    def _failed(self, hook: Callable[..., None], *args: Any) -> None:
        self._watcher.is_script_failed = True
        hook(*args)


def _wrap(owner: Any, name: str, call: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return call(original, *args, **kwargs)

    setattr(owner, name, wrapped)
