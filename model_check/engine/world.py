"""The ranks of one training job: what our loop asks of torch.distributed. A process that trains
alone is a world of one, and asks nobody.

Host numbers travel over gloo on the CPU, in a group of their own, so that no rank waits for its
device to agree on them.
"""

import re
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import (  # type: ignore[attr-defined]
    GradBucket,
    PrefixStore,
    Store,
    TCPStore,
)

from model_check.engine.busy import Waited
from model_check.errors import ConfigError, PeerLost
from model_check.utils.words import first_line
from model_check.utils.worker_env import RankEnv

Limit = Callable[[float | None], float]
"""How long steps take, seconds (None: nobody knows yet) -> how long a rank waits for the others."""
PATIENCE = 10
"""So much longer where a rank evaluates, or writes a checkpoint."""
BEAT_S = 1.0
_LOOK_S = 0.01
_FOREVER = timedelta(days=30)
_OF_PEERS = ("Connection closed by peer", "Connection reset by peer", "gloo", "NCCL", "Timed out")
"""One of them is in the text of a collective's failure."""
_TIMED_OUT = re.compile(r"Timed out waiting (\d+)ms")
_MAX_WHY = 200


class World:
    """One process, alone."""

    rank = 0
    size = 1

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks and writes for all."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    on_summed: Callable[[Tensor, Tensor], None] | None = None
    """Called with each parameter and its gradient when that is summed."""

    def join(self, model: nn.Module, device: torch.device) -> None:
        """From now on the gradients of `model` are those of all ranks."""

    def called(self, model: nn.Module) -> nn.Module:
        """What to call for the forward pass of `model`."""
        return model

    def reducing(self, is_last: bool) -> AbstractContextManager[object]:
        """Around both passes of a micro-batch. In the last one of a step gradients are summed over
        the ranks."""
        return nullcontext()

    @property
    def waited(self) -> Waited | None:
        """In the latest step, from its own last gradient to the sum of all; None: alone."""
        return None

    def own_bad(self) -> Tensor | None:
        """A bool scalar: whether this rank's own gradients of the step were not finite, before they
        were summed. None: nothing was summed."""
        return None

    def summed(self, value: Tensor) -> Tensor:
        """Over the ranks, in place."""
        return value

    def of_first(self, value: Tensor) -> Tensor:
        """That of the first rank; all give tensors of one shape."""
        return value

    def offer(self, *numbers: int) -> "Offer":
        """Tell all ranks these numbers, now; what they tell is known later."""
        return Offer([list(numbers)])

    def gathered(self, value: Any) -> list[Any]:
        """What each rank gives, in their order."""
        return [value]

    def meet(self, meanwhile: Callable[[], None]) -> None:
        """Return when every rank is here: they may have written a checkpoint. Raises PeerLost."""

    def expect(self, step_s: float) -> None:
        """Steps take about so long: who waits longer for a peer gives it up."""


ALONE = World()


class Offer:
    """Numbers on their way to all ranks."""

    def __init__(self, told: list[list[int]]) -> None:
        self._told = told

    def take(self, meanwhile: Callable[[], None]) -> list[list[int]]:
        """What each rank has offered, in their order. `meanwhile` is called each BEAT_S of a long
        wait. Raises PeerLost."""
        return self._told


class Ranks(World):
    """This process is one rank of several."""

    def __init__(self, env: RankEnv, device: torch.device, limit: Limit) -> None:
        """Find the others. Raises PeerLost, and ConfigError where they cannot meet."""
        self.rank, self.size = env.rank, env.world_size
        self._device, self._limit = device, limit
        self._timeout_s = limit(None)
        self._has_steps = False
        self._module: nn.Module | None = None
        self._local: list[Tensor] = []
        """The sum of each bucket of gradients, before it was summed over the ranks."""
        self._waited: Waited | None = None
        with heeding_peers():
            self._meet_first(env, device)

    def _meet_first(self, env: RankEnv, device: torch.device) -> None:
        timeout = timedelta(seconds=self._timeout_s)
        store = _store(env, self._timeout_s)
        _wait_for_all(store, env, self._timeout_s)
        on_gpu = device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=store,
            rank=env.rank,
            world_size=env.world_size,
            timeout=timeout,
            device_id=device if on_gpu else None,
        )
        self._control = dist.new_group(backend="gloo", timeout=_FOREVER)

    def leave(self) -> None:
        """Close the connections."""
        self._module = None
        dist.destroy_process_group()

    def join(self, model: nn.Module, device: torch.device) -> None:
        # Weights and buffers are equal already: drawn with one seed, or read from one file.
        with warnings.catch_warnings():
            # torch 2.13 prefers another option for buffers, which 2.11 does not know.
            warnings.simplefilter("ignore", FutureWarning)
            ddp = nn.parallel.DistributedDataParallel(
                model,
                device_ids=[device.index] if device.type == "cuda" else None,
                broadcast_buffers=False,
                init_sync=False,
                gradient_as_bucket_view=True,
            )
        ddp.register_comm_hook(None, self._sum_bucket)
        self._module = ddp

    def called(self, model: nn.Module) -> nn.Module:
        return model if self._module is None else self._module

    @contextmanager
    def reducing(self, is_last: bool) -> Iterator[None]:
        module = self._module
        if not isinstance(module, nn.parallel.DistributedDataParallel):
            yield
            return
        if is_last:
            self._local = []
        with heeding_peers(), nullcontext() if is_last else module.no_sync():
            yield
        if is_last and self._waited is not None:
            self._waited.end()

    @property
    def waited(self) -> Waited | None:
        return self._waited

    def own_bad(self) -> Tensor | None:
        if not self._local:
            return None
        return ~torch.isfinite(torch.stack(self._local)).all()

    def summed(self, value: Tensor) -> Tensor:
        with heeding_peers():
            dist.all_reduce(value)
        return value

    def of_first(self, value: Tensor) -> Tensor:
        first = value.clone()
        with heeding_peers():
            dist.broadcast(first, src=0)
        return first

    def offer(self, *numbers: int) -> Offer:
        own = torch.tensor(numbers, dtype=torch.int64)
        told = [torch.empty_like(own) for _ in range(self.size)]
        with heeding_peers():
            work = dist.all_gather(told, own, group=self._control, async_op=True)
        assert work is not None
        return _Sent(told, work, self._timeout_s)

    def gathered(self, value: Any) -> list[Any]:
        self.meet(lambda: None)  # what follows hears no signal, and has no limit
        found: list[Any] = [None] * self.size
        with heeding_peers():
            dist.all_gather_object(found, value, group=self._control)
        return found

    def meet(self, meanwhile: Callable[[], None]) -> None:
        with heeding_peers():
            work = dist.barrier(group=self._control, async_op=True)
        assert work is not None
        _wait(work, PATIENCE * self._timeout_s, meanwhile)

    def expect(self, step_s: float) -> None:
        timeout_s = self._limit(step_s)
        # Not for each step: a change costs a call of torch's.
        if self._has_steps and 0.5 < timeout_s / self._timeout_s < 2:
            return
        self._has_steps, self._timeout_s = True, timeout_s
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))

    def _sum_bucket(self, _: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Gradients are summed, not averaged: each rank divides its loss by the targets of all."""
        gradients = bucket.buffer()
        self._local.append(gradients.sum(dtype=torch.float32))
        self._waited = Waited(self._device)
        pairs = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
        work = dist.all_reduce(gradients, async_op=True)
        assert work is not None

        def take(done: torch.futures.Future[list[Tensor]]) -> Tensor:
            if self.on_summed is not None:
                for parameter, gradient in pairs:
                    self.on_summed(parameter, gradient)
            return done.value()[0]

        summed: torch.futures.Future[Tensor] = work.get_future().then(take)
        return summed


@contextmanager
def joined(env: RankEnv | None, device: torch.device, limit: Limit) -> Iterator[World]:
    """The world of a rank; None: of a process that trains alone. Where it ends by an error, its
    connections stay open until the process is gone: to close them would wait for what no peer
    answers any more. Raises PeerLost, ConfigError."""
    if env is None:
        yield ALONE
        return
    ranks = Ranks(env, device, limit)
    yield ranks
    ranks.leave()


def is_connected() -> bool:
    return dist.is_initialized()


def _store(env: RankEnv, timeout_s: float) -> Store:
    """Where the ranks find each other: rank 0 listens, or torchrun does. Until then the port is
    refused. Signals are heard meanwhile, as torch's own wait hears none. Raises PeerLost, and
    ConfigError for a port that somebody else has."""
    is_master = env.rank == 0 and not env.is_by_torchrun
    until = time.monotonic() + timeout_s
    while not is_master and not _listens(env):
        if time.monotonic() > until:
            raise PeerLost(f"rank 0 did not come in {timeout_s:.0f} s", has_waited=True)
        time.sleep(_LOOK_S)
    try:
        store = TCPStore(
            env.address,
            env.port,
            env.world_size,
            is_master=is_master,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=env.store_fd,
        )
    except dist.DistNetworkError as error:
        if not is_master:
            raise
        raise ConfigError(
            f"MASTER_PORT = {env.port}: rank 0 cannot listen there, since another program does, or "
            "may not; set it to a free port"
        ) from error
    return PrefixStore(f"attempt {env.attempt}", store)


def _listens(env: RankEnv) -> bool:
    with suppress(OSError):
        socket.create_connection((env.address, env.port), timeout=BEAT_S).close()
        return True
    return False


def _wait_for_all(store: Store, env: RankEnv, timeout_s: float) -> None:
    """A rank may never come; signals are heard. Raises PeerLost, and ConfigError where another job
    meets."""
    places = [f"model-check/{rank}" for rank in range(env.world_size)]
    until = time.monotonic() + timeout_s
    here = f"here {env.job}"
    if (
        env.rank > 0
        and _all_came(places[:1], store, until)
        and store.get(places[0]) != here.encode()
    ):
        raise ConfigError(
            f"MASTER_PORT = {env.port}: the ranks of another job meet there; set it to a free port"
        )
    store.set(places[env.rank], here)
    if not _all_came(places, store, until):
        there = [rank for rank, place in enumerate(places) if store.check([place])]
        said = f"of {env.world_size} ranks only {there} came in {timeout_s:.0f} s"
        raise PeerLost(said, has_waited=True)


def _all_came(places: list[str], store: Store, until: float) -> bool:
    while not store.check(places):
        if time.monotonic() > until:
            return False
        time.sleep(_LOOK_S)
    return True


class _Sent(Offer):
    def __init__(self, told: list[Tensor], work: dist.Work, timeout_s: float) -> None:
        super().__init__([])
        self._sent, self._work, self._timeout_s = told, work, timeout_s

    def take(self, meanwhile: Callable[[], None]) -> list[list[int]]:
        _wait(self._work, self._timeout_s, meanwhile)
        return [numbers.tolist() for numbers in self._sent]


def _wait(work: dist.Work, timeout_s: float, meanwhile: Callable[[], None]) -> None:
    """Signals are heard, too, which gloo's own wait with a limit does not (nor has it a limit).
    Raises PeerLost."""
    began = beaten = time.monotonic()
    while not work.is_completed():
        waited_s = (now := time.monotonic()) - began
        if waited_s >= timeout_s:
            raise _late(timeout_s)
        if now - beaten >= BEAT_S:
            meanwhile()
            beaten = now
        time.sleep(min(_LOOK_S, waited_s / 10))  # a short wait is looked at often
    with heeding_peers():
        work.wait()


@contextmanager
def heeding_peers() -> Iterator[None]:
    """A collective that breaks tells of a peer, not of this rank. Raises PeerLost."""
    try:
        yield
    except RuntimeError as error:
        is_of_peers = any(text in str(error) for text in _OF_PEERS)
        if not (is_of_peers or isinstance(error, dist.DistError)):
            raise
        raise _lost(error) from error


def _late(waited_s: float) -> PeerLost:
    return PeerLost(f"another rank did not come in {waited_s:.3g} s", has_waited=True)


def _lost(error: RuntimeError) -> PeerLost:
    """In few words: gloo's own tell of its source, and of sockets."""
    text = str(error)
    if (waited := _TIMED_OUT.search(text)) is not None:
        return _late(int(waited[1]) / 1000)
    why = next((part for part in _OF_PEERS[:2] if part in text), first_line(error))
    return PeerLost(f"another rank is gone ({why[:_MAX_WHY]})")
