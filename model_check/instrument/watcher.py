"""Watches the training of this process: what a step took becomes its events. No callback changes
what the script prints, returns, draws or trains."""

import functools
import math
import os
import resource
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from model_check.forensics.checksums import joined
from model_check.forensics.fingerprint import Kernel, fingerprint_for
from model_check.instrument import sources
from model_check.instrument.build import described
from model_check.instrument.guard import Guard, guarded
from model_check.instrument.names import Root, Roots, named, root_of
from model_check.instrument.passes import MOST_CALLS, Passes, refuse_capture
from model_check.instrument.place import Place
from model_check.instrument.sink import PlainSink
from model_check.instrument.step_log import Pending, StepLog, on_host
from model_check.instrument.supervised import Command, Supervised
from model_check.instrument.update import Updated, WatchedUpdate, device_of, parameters_of
from model_check.utils.wire import NOT_WATCHED, SCHEMA


class Watcher:
    def __init__(self, place: Place) -> None:
        self._place = place
        self._pid: int | None = None
        """Of the process that is the worker; None: nobody has stepped yet."""
        self.guard = Guard(self._may_watch, self._tell_end)
        self.passes = Passes(self.guard, self._kernel)
        self.passes.begin(keeps_calls=place.computes_again(0))
        self.is_script_failed = self._is_done = False
        self._sink: PlainSink | None = None
        self._client: Supervised | None = None
        self._is_refused = False
        self._step = 0
        self._kernels: dict[torch.device, Kernel] = {}
        self._updates: dict[int, WatchedUpdate] = {}
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._roots = Roots()
        self._models: dict[int, weakref.ref[nn.Module]] = {}
        """Optimizer -> its model, where that was named."""
        self._in_closure: WatchedUpdate | None = None
        self._log: StepLog | None = None
        self._losses: list[Tensor] = []
        """float64 [calls]: of the latest backward pass; several optimizers may step behind one.
        Empty: it began at no single value."""
        self._began, self._cpu = time.monotonic(), time.process_time()

    # -- who is the worker

    def _may_watch(self) -> bool:
        """Whether this process is the worker, or may become it."""
        return not self._is_refused and self._pid in (None, os.getpid())

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
        self._log = StepLog(sink)
        self._client = Supervised(
            sink, is_held=place.is_held, tell_vectors=self._tell_vectors, keep=self._keep
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
            self._models[id(optimizer)] = weakref.ref(model)
            weakref.finalize(optimizer, self._models.pop, id(optimizer), None).atexit = False
        self._register(optimizer)
        self._hook(optimizer)

    def _register(self, optimizer: Optimizer) -> None:
        if all(ref() is not optimizer for ref in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))

    def _hook(self, optimizer: Optimizer) -> list[Root]:
        """Returns its models as they are called now."""
        roots = self._roots_of(optimizer)
        self.passes.hook(roots)
        return roots

    def _roots_of(self, optimizer: Optimizer) -> list[Root]:
        ref = self._models.get(id(optimizer))
        model = None if ref is None else ref()
        return self._roots.of(parameters_of(optimizer)) if model is None else [root_of(model)]

    def _update_of(self, optimizer: Optimizer) -> WatchedUpdate:
        known = self._updates.get(id(optimizer))
        if known is not None and known.is_of(optimizer):
            return known
        if known is None:
            self._register(optimizer)
            weakref.finalize(optimizer, self._updates.pop, id(optimizer), None).atexit = False
        names = named(parameters_of(optimizer), self._hook(optimizer))
        made = WatchedUpdate(
            optimizer,
            names,
            self._kernel(device_of(optimizer)),
            num_tokens=self.passes.noted.num_tokens,
            last_step=self._place.stop_after,
        )
        self._updates[id(optimizer)] = made
        return made

    def _kernel(self, device: torch.device) -> Kernel:
        if device not in self._kernels:
            self._kernels[device] = fingerprint_for(device)
        return self._kernels[device]

    @guarded
    def see_backward(self, roots: Sequence[Tensor]) -> None:
        """The gradients that they bring are added to those that are there."""
        for update in self._updates.values():
            if update is not self._in_closure:
                update.drop()
        noted = self.passes.noted
        noted.has_backward = True
        if len(noted.losses) < MOST_CALLS:
            noted.losses += [x.detach() for x in roots if x.numel() == 1]

    @guarded
    def see_clip(self, parameters: Sequence[Tensor]) -> None:
        """As they were computed: who clips changes them all, and no fault could be named."""
        refuse_capture()
        clipped = set(map(id, parameters))
        for optimizer in self._present_optimizers():
            if clipped.intersection(map(id, parameters_of(optimizer))):
                self._update_of(optimizer).take()

    # -- a step

    @guarded
    def before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """What it returns takes the place of the arguments."""
        refuse_capture()
        if not self._claim(optimizer):
            return None
        self.passes.note_generators()
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
        log.take(self._told(optimizer, update, updated))
        if self.passes.calls:
            log.emit(keep=0)  # it is told before anything else can fail
            self._send("phase", name="train", detail=self.passes.told_again())
        self._step += 1
        self.passes.begin(keeps_calls=self._place.computes_again(self._step))
        client.tell_done(self._step)
        self._stay_in_step(log, client)
        self._began, self._cpu = time.monotonic(), time.process_time()

    def _told(self, optimizer: Optimizer, update: WatchedUpdate, updated: Updated) -> Pending:
        noted, vector = self.passes.noted, updated.vector
        if (flow := self.passes.flow) is not None:
            of_flow = flow.vector()
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
            "rng": self.passes.told_generators(),
        }
        if not on_gpu:
            event["busy_ms"] = (time.process_time() - self._cpu) * 1000
        if noted.has_backward:
            losses = [x.reshape(()).double() for x in noted.losses]
            self._losses = [torch.stack(losses)] if losses else []
        numbers = [vector.values, updated.grad_norms, *self._losses]
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

    def _tell_vectors(self, step: int) -> None:
        """Behind a step first which state changed by itself: of several optimizers the one that
        keeps it may not have looked at it since."""
        if (log := self._log) is None:
            return
        log.emit(keep=0)
        for update in () if self._is_done else [*self._updates.values()]:
            if (change := update.changed_now()) is not None:
                log.judge(change, update.written_now())
        log.tell_vectors(step)

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

    def _tell_end(self, error: Exception) -> None:
        """Of the watching."""
        try:
            sink = self._sink or PlainSink(self._place.events_fd)
            text = f"{NOT_WATCHED} from step {self._step} on: {type(error).__name__}: {error}"
            sink.emit("note", text=text)
            if self._sink is None:
                sink.forget()
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
        is_over = self._is_done or (self._log is not None and self._log.has_ended)
        if not self.is_claimed or self.is_script_failed or is_over:
            return
        self._is_done = True
        if self.guard.is_broken:
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
