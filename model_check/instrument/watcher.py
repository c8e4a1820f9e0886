"""Watches the training of this process: what a step took becomes its events. No callback changes
what the script prints, returns, draws or trains."""

import functools
import math
import os
import resource
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from model_check.forensics.checksums import joined
from model_check.forensics.fingerprint import Kernel, fingerprint_for, has_fingerprint
from model_check.hooks.fingerprints import FlowSums
from model_check.instrument import generators, sources
from model_check.instrument.build import described
from model_check.instrument.finite import LeafSums
from model_check.instrument.model_hooks import ModuleHook, tensors_in
from model_check.instrument.names import Root, leaves_of, named, root_of, roots_of, sites_of
from model_check.instrument.place import Place
from model_check.instrument.rehearsal import Rehearsal
from model_check.instrument.sink import PlainSink
from model_check.instrument.step_log import Pending, StepLog, on_host
from model_check.instrument.supervised import Command, Supervised
from model_check.instrument.update import Updated, WatchedUpdate, device_of, parameters_of
from model_check.utils.wire import SCHEMA

_MOST_CALLS = 4096
"""Of a model, without a step behind them: what flows is not noted any further."""
P = ParamSpec("P")
R = TypeVar("R")


def guarded(
    callback: "Callable[Concatenate[Watcher, P], R]",
) -> "Callable[Concatenate[Watcher, P], R | None]":
    """What goes wrong in ours is no matter of the script: it goes on, unwatched."""

    @functools.wraps(callback)
    def call(self: "Watcher", /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        if self.is_broken or not self.is_ours:
            return None
        try:
            return callback(self, *args, **kwargs)
        except Exception as error:
            self.give_up(error)
            return None

    return call


@dataclass
class _Noted:
    """Of the step that is under way."""

    losses: list[Tensor] = field(default_factory=list)
    num_tokens: int = 0
    num_calls: int = 0
    rng: dict[str, str] = field(default_factory=dict)
    leaves: LeafSums = field(default_factory=LeafSums)


class Watcher:
    def __init__(self, place: Place) -> None:
        self._place = place
        self._pid: int | None = None
        """Of the process that is the worker: the first one that steps."""
        self.is_broken = self.is_script_failed = self._is_done = False
        self._sink: PlainSink | None = None
        self._client: Supervised | None = None
        self._is_refused = False
        self._step = 0
        self._first_rng = generators.digests()
        """A generator that has not moved since has made nothing."""
        self._kernels: dict[torch.device, Kernel] = {}
        self._updates: dict[int, WatchedUpdate] = {}
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._roots: dict[int, list[Root]] = {}
        """Optimizer -> its models, where they were named."""
        self._hooked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._leaves: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._flow: FlowSums | None = None
        self._flow_device = torch.device("cpu")
        self._noted = _Noted()
        self._in_closure: WatchedUpdate | None = None
        self._open: nn.Module | None = None
        """The outermost module that is being called."""
        self._is_rehearsing = False
        self._rehearsals: dict[int, Rehearsal | None] = {}
        """Outermost module -> what its first call is compared with; None: it was."""
        self._not_rehearsed: list[str] = []
        self._repeated: bool | None = None
        self._log: StepLog | None = None
        self._began, self._cpu = time.monotonic(), time.process_time()

    # -- who is the worker

    @property
    def is_ours(self) -> bool:
        """Whether this process is the worker, or may become it."""
        return not (self._is_rehearsing or self._is_refused) and self._pid in (None, os.getpid())

    @property
    def is_claimed(self) -> bool:
        return self._pid == os.getpid()

    def _claim(self, optimizer: Optimizer) -> bool:
        """Of all processes of this worker one is watched: the same one in each worker."""
        if self._pid is not None:
            return True
        place = self._place
        sink = PlainSink(place.events_fd)
        if not place.claim():
            self._is_refused = True
            text = "another process trains, too, and is not watched"
            sink.emit("note", text=text, unwatched=os.getpid())
            sink.forget()
            return False
        self._pid, self._sink = os.getpid(), sink
        sink.keep_from_children()
        self._log = log = StepLog(sink)
        self._client = Supervised(
            sink, is_held=place.is_held, tell_vectors=log.tell_vectors, keep=self._keep
        )
        sink.emit("phase", name="import", detail={"schema": SCHEMA})
        kernel = self._kernel(device_of(optimizer)).name
        built = described(optimizer, self._present_optimizers(), kernel)
        sink.emit("phase", name="build", detail=built | sources.digests(self._note))
        sink.emit("phase", name="train", detail={})
        self._began, self._cpu = time.monotonic(), time.process_time()
        return True

    def _present_optimizers(self) -> list[Optimizer]:
        return [each for each in (ref() for ref in self._optimizers) if each is not None]

    # -- models and optimizers

    @guarded
    def meet(self, optimizer: Optimizer, model: nn.Module | None = None) -> None:
        """It was made: on most occasions its model is there."""
        if model is not None:
            self._roots[id(optimizer)] = [root_of(model)]
        if all(ref() is not optimizer for ref in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))
        self._hook(self._roots_of(optimizer))

    def hook_compiled(self, model: nn.Module) -> None:
        """It calls a model that may be watched already."""
        root = root_of(model)
        if root.inner in self._hooked and root.outer not in self._hooked:
            self._hook_outer(root.outer)

    def _roots_of(self, optimizer: Optimizer) -> list[Root]:
        return self._roots.get(id(optimizer)) or roots_of(parameters_of(optimizer))

    def _hook(self, roots: Sequence[Root]) -> None:
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
            if root.outer not in self._hooked or root.outer is root.inner:
                self._hook_outer(root.outer)
            for name, child in root.inner.named_children():
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

    def _update_of(self, optimizer: Optimizer) -> WatchedUpdate:
        known = self._updates.get(id(optimizer))
        if known is not None and known.is_of(optimizer):
            return known
        if known is None:
            self.meet(optimizer)
            weakref.finalize(optimizer, self._updates.pop, id(optimizer), None).atexit = False
        names = named(parameters_of(optimizer), self._roots_of(optimizer))
        made = WatchedUpdate(
            optimizer,
            names,
            self._kernel(device_of(optimizer)),
            num_tokens=self._noted.num_tokens,
            last_step=self._place.stop_after,
        )
        self._updates[id(optimizer)] = made
        return made

    def _kernel(self, device: torch.device) -> Kernel:
        if device not in self._kernels:
            self._kernels[device] = fingerprint_for(device)
        return self._kernels[device]

    # -- both passes

    @guarded
    def _before_model(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._open is not None:
            return
        self._open, noted = module, self._noted
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
        if not noted.rng:
            now, first = generators.digests(), self._first_rng
            noted.rng = {
                n: state for n, state in now.items() if state != first.setdefault(n, state)
            }
        if self._step == 0 and id(module) not in self._rehearsals:
            self._rehearse(module, args, kwargs)

    def _rehearse(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        rehearsal = Rehearsal(self._kernel(self._flow_device))
        self._is_rehearsing = True
        try:
            rehearsal.run(module, args, kwargs)
        finally:
            self._is_rehearsing = False
        self._rehearsals[id(module)] = rehearsal
        if rehearsal.why_not:
            self._not_rehearsed.append(rehearsal.why_not)

    @guarded
    def _after_model(self, name: str, module: nn.Module, _args: Any, output: Any) -> None:
        if self._open is not module:
            return
        self._open = None
        rehearsal, self._rehearsals[id(module)] = self._rehearsals.get(id(module)), None
        if rehearsal is not None and (is_repeated := rehearsal.is_repeated_by(output)) is not None:
            self._repeated = is_repeated and self._repeated is not False
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
            self._noted.leaves.take(name, x)
            if x.requires_grad and not has_own:
                x.register_hook(functools.partial(self._see_of_leaf, name))  # type: ignore[no-untyped-call]

    @guarded
    def _see_of_leaf(self, name: str, gradient: Tensor | None) -> None:
        if gradient is not None:
            self._noted.leaves.take_gradient(name, gradient)

    def _flow_at(self, module: nn.Module) -> FlowSums | None:
        if self._flow is None:
            device = next((p.device for p in module.parameters()), torch.device("cpu"))
            self._flow_device, self._flow = device, FlowSums(self._kernel(device), device)
        return self._flow if self._noted.num_calls <= _MOST_CALLS else None

    def _see(self, name: str, output: Any) -> None:
        tensors = (x for _, x in tensors_in(output) if x.is_floating_point() and x.ndim)
        x = next((x for x in tensors if self._can_take(x)), None)
        if self._flow is not None and x is not None and self._noted.num_calls <= _MOST_CALLS:
            self._flow.take("forward", name, x.detach())
            if x.requires_grad:
                see = functools.partial(self._see_gradient, self._flow, name)
                x.register_hook(see)  # type: ignore[no-untyped-call]

    @guarded
    def _see_gradient(self, flow: FlowSums, name: str, gradient: Tensor | None) -> None:
        if gradient is not None and self._can_take(gradient):  # None: of a compiled function
            flow.take("backward", name, gradient)

    def _can_take(self, x: Tensor) -> bool:
        return has_fingerprint(x) and x.device == self._flow_device

    @guarded
    def see_backward(self, roots: Tensor | Iterable[Tensor]) -> None:
        """The gradients that they bring are added to those that are there."""
        for update in self._updates.values():
            if update is not self._in_closure:
                update.drop()
        tensors = [roots] if isinstance(roots, Tensor) else list(roots)
        if len(self._noted.losses) < _MOST_CALLS:
            self._noted.losses += [x.detach() for x in tensors if x.numel() == 1]

    @guarded
    def see_clip(self, parameters: Sequence[Tensor]) -> None:
        """As they were computed: who clips changes them all, and no fault could be named."""
        clipped = set(map(id, parameters))
        for optimizer in self._present_optimizers():
            if self._step == 0 and id(optimizer) not in self._updates:
                self._update_of(optimizer)
            update = self._updates.get(id(optimizer))
            if update and clipped.intersection(map(id, parameters_of(optimizer))):
                update.take()

    # -- a step

    @guarded
    def before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """What it returns takes the place of the arguments."""
        if not self._claim(optimizer):
            return None
        update = self._update_of(optimizer)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            update.take()
            return None
        self._in_closure = update
        if len(args) > 1:
            return (args[0], self._within(closure, update), *args[2:]), kwargs
        return args, {**kwargs, "closure": self._within(closure, update)}

    def _within(self, closure: Callable[[], Any], update: WatchedUpdate) -> Callable[[], Any]:
        """Both passes are in there: the gradients are whole when it has been called once."""

        @functools.wraps(closure)
        def call() -> Any:
            result = closure()
            self._take(update)
            return result

        return call

    @guarded
    def _take(self, update: WatchedUpdate) -> None:
        update.take()

    @guarded
    def after_step(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        self._in_closure = None
        update, log, client = self._updates.get(id(optimizer)), self._log, self._client
        if update is None or log is None or client is None or (updated := update.end()) is None:
            return
        pending = self._told(optimizer, update, updated)
        self._noted, self._open = _Noted(), None
        if self._flow is not None:
            self._flow.begin()
        self._step += 1
        try:
            log.take(pending)
        except SystemExit:
            self._is_done = True
            raise
        client.tell_done(self._step)
        self._stay_in_step(log, client)
        self._began, self._cpu = time.monotonic(), time.process_time()

    def _told(self, optimizer: Optimizer, update: WatchedUpdate, updated: Updated) -> Pending:
        noted, vector = self._noted, updated.vector
        if self._flow is not None:
            of_flow = self._flow.vector()
            if of_flow.values.device == vector.values.device:
                vector = replace(joined(of_flow, vector), taken=vector.taken)
        if (number := self._number_of(optimizer)) > 0:
            vector = replace(vector, taken=f"optimizer {number}: {vector.taken}")
        lr = optimizer.param_groups[0].get("lr", 0.0)
        on_gpu = vector.values.device.type == "cuda"
        event: dict[str, Any] = {
            "step": self._step,
            "lr": float(lr) if isinstance(lr, float | int) and math.isfinite(lr) else 0.0,
            "ms": (time.monotonic() - self._began) * 1000,
            "tokens": noted.num_tokens,
            "rng": noted.rng,
        }
        if not on_gpu:
            event["busy_ms"] = (time.process_time() - self._cpu) * 1000
        if self._step == 0 and self._repeated is not None:
            event["repeated"] = self._repeated
        if self._not_rehearsed:
            self._note(f"first step not computed again: {'; '.join(self._not_rehearsed)}")
            self._not_rehearsed = []
        losses = [x.reshape(()).double() for x in noted.losses]
        numbers = [vector.values, updated.grad_norms]
        numbers += [torch.stack(losses)] if losses else []
        numbers, arrived = on_host(numbers)
        leaves = None if getattr(optimizer, "found_inf", None) is not None else noted.leaves
        updated = replace(updated, vector=vector)
        return Pending(event, update, updated, numbers, arrived, leaves)

    def _number_of(self, optimizer: Optimizer) -> int:
        return next(n for n, ref in enumerate(self._optimizers) if ref() is optimizer)

    def _stay_in_step(self, log: StepLog, client: Supervised) -> None:
        if self._step - 1 == self._place.stop_after:
            self._leave()
        if not client.may_begin(self._step):
            log.emit(keep=0)  # the others may wait for it
            client.wait_for_permit(self._step)
        if client.is_released:
            self._leave(early="ended early: the run goes on without this worker")

    # -- the supervisor

    def _send(self, kind: str, **fields: Any) -> None:
        if self._sink is not None:
            self._sink.emit(kind, **fields)

    def _note(self, text: str) -> None:
        self._send("note", text=text)

    def _keep(self, dump: Command, num_done: int) -> None:
        kept: dict[str, Tensor] = {}
        for update in self._updates.values():
            kept |= update.kept()
        kept = {name: kept[name] for name in dump.get("tensors", ()) if name in kept} or kept
        directory = self._place.run_dir / "dossier" / self._place.worker.lower()
        path = directory / f"state_after_{num_done}_steps.pt"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            torch.save({name: x.cpu() for name, x in kept.items()}, path)
        except (OSError, RuntimeError) as error:
            self._note(f"evidence not saved: {error}")
            return
        readable = str(path.absolute()).encode(errors="backslashreplace").decode()
        self._send("evidence", path=readable, what=f"{len(kept)} tensors after {num_done} steps")

    def give_up(self, error: Exception) -> None:
        self.is_broken = True
        try:
            self._note(f"not watched from step {self._step} on: {type(error).__name__}: {error}")
            self._send("finished")
        except Exception:
            self._sink = None

    def _leave(self, early: str | None = None) -> None:
        """Ends the process behind a step."""
        self.end(early)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(0)

    def end(self, early: str | None = None) -> None:
        """The script has ended, or ends here."""
        if not self.is_claimed or self.is_script_failed or self._is_done:
            return
        self._is_done = True
        if self.is_broken:
            return  # a worker that has told no end was not watched to it
        if early is None:
            self._finish()
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        ending: dict[str, Any] = {"exit_code": 0, "peak_memory_bytes": memory}
        if early is not None:
            ending["early"] = early
        self._send("done", steps=self._step, **ending)

    @guarded
    def _finish(self) -> None:
        log, client = self._log, self._client
        if log is None or client is None:
            return
        log.emit(keep=0)
        for update in self._updates.values():
            if (change := update.changed_now()) is not None and change.found:
                log.judge(change, frozenset(update.seen.named))
        log.tell_vectors(self._step - 1)
        client.finish()


def _num_tokens(tensors: Sequence[Tensor]) -> int:
    """Values of the first tensor of integers, or rows of the first one."""
    whole = [x for x in tensors if not x.is_floating_point()]
    if whole:
        return whole[0].numel()
    return len(tensors[0]) if tensors and tensors[0].ndim else 0
