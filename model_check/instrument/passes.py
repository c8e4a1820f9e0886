"""What both passes of a step show: the inputs of a model, what flows between its blocks, and the
sums of its leaves. The hooks on a person's modules act here."""

import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from model_check.forensics.fingerprint import Kernel, has_fingerprint
from model_check.hooks.fingerprints import FlowSums
from model_check.instrument import again, generators
from model_check.instrument.finite import LeafSums
from model_check.instrument.guard import Guard, guarded
from model_check.instrument.model_hooks import ModuleHook, tensors_in
from model_check.instrument.names import UNHOOKED, Root, leaves_of, root_of, sites_of
from model_check.instrument.place import has_peers

MOST_CALLS = 4096
"""Of a model, without a step behind them: what flows is not noted any further."""


@dataclass
class Noted:
    """Of the step that is under way."""

    has_backward: bool = False
    losses: list[Tensor] = field(default_factory=list)
    num_tokens: int = 0
    num_calls: int = 0
    rng: dict[str, str] | None = None
    """As it began; None: nobody has asked."""
    leaves: LeafSums = field(default_factory=LeafSums)


class Passes:
    def __init__(self, guard: Guard, kernel: Callable[[torch.device], Kernel]) -> None:
        """`kernel`: what takes fingerprints on a device."""
        self.guard, self._kernel = guard, kernel
        self.noted = Noted()
        self.flow: FlowSums | None = None
        self.calls: dict[int, again.Call] | None = None
        """Outermost module -> its first call in this step; None: they are not kept."""
        self._flow_device = torch.device("cpu")
        self._first_rng = generators.digests()
        """A generator that has not moved since has made nothing."""
        self._hooked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._leaves: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._are_all_leaves = True
        self._open: nn.Module | None = None
        """The outermost module that is being called."""

    def begin(self, *, keeps_calls: bool) -> None:
        """Another step follows."""
        self.calls = {} if keeps_calls else None
        self.noted, self._open = Noted(leaves=LeafSums(self._are_all_leaves)), None
        if self.flow is not None:
            self.flow.begin()

    def note_generators(self) -> None:
        """As the step begins with them: the first call in it counts."""
        if self.noted.rng is None:
            self.noted.rng = generators.digests()

    def told_generators(self) -> dict[str, str]:
        """`rng.torch` -> 8 hex digits of the state that the step began with, and 8 of the one that
        it ends with, of those that something was drawn from since the watching began."""
        end, first = generators.digests(), self._first_rng
        begin = end if self.noted.rng is None else {**end, **self.noted.rng}
        moved = (n for n, at in end.items() if {at, begin[n]} != {first.setdefault(n, begin[n])})
        return {name: begin[name] + end[name] for name in moved}

    def hook(self, roots: Sequence[Root]) -> None:
        for name, block in sites_of(roots):
            if block not in self._hooked:
                self._hooked.add(block)
                block.register_forward_hook(ModuleHook(functools.partial(self._after_block, name)))
        for name, leaf, has_own in leaves_of(roots):
            if leaf not in self._leaves:
                self._leaves.add(leaf)
                after = functools.partial(self._after_leaf, name, has_own)
                leaf.register_forward_hook(ModuleHook(after))
        for root in roots:
            self._hooked.add(root.inner)
            if any(isinstance(module, UNHOOKED) for module in root.inner.modules()):
                self.noted.leaves.are_all = self._are_all_leaves = False
            if isinstance(root.inner, UNHOOKED):
                continue
            if root.outer not in self._hooked or root.outer is root.inner:
                self._hook_outer(root.outer)
            for name, child in root.inner.named_children():
                if not isinstance(child, UNHOOKED):
                    self._hook_outer(child, name)

    def _hook_outer(self, outer: nn.Module, name: str = "") -> None:
        """`name`: of a part of the model, which a script may call by itself."""
        hooks = vars(outer)["_forward_pre_hooks"].values()
        if any(isinstance(hook, ModuleHook) for hook in hooks):
            return
        self._hooked.add(outer)
        before = ModuleHook(functools.partial(self._before_model, name))
        outer.register_forward_pre_hook(before, with_kwargs=True)
        outer.register_forward_hook(ModuleHook(functools.partial(self._after_model, name)))

    def hook_compiled(self, model: nn.Module) -> None:
        """It calls a model that may be watched already."""
        root = root_of(model)
        if root.inner in self._hooked and root.outer not in self._hooked:
            self._hook_outer(root.outer)

    @guarded
    def _before_model(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # a checkpoint computes it again
        refuse_capture()
        if self._open is not None and self._open is not module:
            return  # within; a module that is open still has raised an error
        self._open, noted = module, self.noted
        noted.num_calls += 1
        flow = self._flow_at(module)
        if flow is None:
            return
        tensors = list(tensors_in({**dict(enumerate(args)), **kwargs}))
        for place, tensor in tensors:
            x = tensor.to(torch.int16) if tensor.element_size() == 1 else tensor
            if self._can_take(x):
                flow.take("inputs", f"{name}.{place}" if name else place, x.detach())
        noted.num_tokens += _num_tokens([tensor for _, tensor in tensors])
        self.note_generators()
        calls = self.calls
        if calls is not None and id(module) not in calls and len(calls) < again.MOST_CALLS:
            with suppress(Exception):  # it is not needed
                calls[id(module)] = again.Call(module, args, kwargs)

    def told_again(self) -> dict[str, Any]:
        """Makes the calls of this step again, where they were kept, and returns what is told of
        that. One of several ranks would wait for the others."""
        if not self.calls or has_peers():
            return {}
        self.guard.is_paused = True
        try:
            return again.told(self.calls.values(), self._kernel(self._flow_device))
        finally:
            self.guard.is_paused = False

    @guarded
    def _after_model(self, name: str, module: nn.Module, _args: Any, output: Any) -> None:
        if self._open is not module:
            return
        self._open = None
        self._see(name or "the model", output)

    @guarded
    def _after_block(self, name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        self._see(name, output)

    @guarded
    def _after_leaf(
        self, name: str, has_own: bool, _module: nn.Module, _args: Any, output: Any
    ) -> None:
        x = next((x for _, x in tensors_in(output) if x.is_floating_point()), None)
        if x is not None:
            self.noted.leaves.take(name, x)
            if x.requires_grad and not has_own:
                x.register_hook(functools.partial(self._see_of_leaf, name))  # type: ignore[no-untyped-call]

    @guarded
    def _see_of_leaf(self, name: str, gradient: Tensor | None) -> None:
        if gradient is not None:
            self.noted.leaves.take_gradient(name, gradient)

    def _flow_at(self, module: nn.Module) -> FlowSums | None:
        if self.flow is None:
            device = next((p.device for p in module.parameters()), torch.device("cpu"))
            self._flow_device, self.flow = device, FlowSums(self._kernel(device), device)
        return self.flow if self.noted.num_calls <= MOST_CALLS else None

    def _see(self, name: str, output: Any) -> None:
        tensors = (x for _, x in tensors_in(output) if x.is_floating_point() and x.ndim)
        x = next((x for x in tensors if self._can_take(x)), None)
        if self.flow is not None and x is not None and self.noted.num_calls <= MOST_CALLS:
            self.flow.take("forward", name, x.detach())
            if x.requires_grad:
                see = functools.partial(self._see_gradient, self.flow, name)
                x.register_hook(see)  # type: ignore[no-untyped-call]

    @guarded
    def _see_gradient(self, flow: FlowSums, name: str, gradient: Tensor | None) -> None:
        if gradient is not None and self._can_take(gradient):  # None: of a compiled function
            flow.take("backward", name, gradient)

    def _can_take(self, x: Tensor) -> bool:
        return has_fingerprint(x) and x.device == self._flow_device


def refuse_capture() -> None:
    """Raises RuntimeError where a CUDA graph is captured: its replays call no hook."""
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if on_gpu and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a CUDA graph captures the steps, and no hook sees its replays")


def _num_tokens(tensors: Sequence[Tensor]) -> int:
    """Values of the first tensor of integers, or rows of the first one."""
    whole = [x for x in tensors if not x.is_floating_point()]
    if whole:
        return whole[0].numel()
    return len(tensors[0]) if tensors and tensors[0].ndim else 0
