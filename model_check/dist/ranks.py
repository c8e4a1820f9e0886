"""One rank of several: what it tells the others, and what it hears of them.

Host numbers travel over gloo on the CPU, in a group of their own, so that no rank waits for its
device to agree on them.
"""

import pickle
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from model_check.engine.busy import Waited
from model_check.dist.failures import Failures
from model_check.dist.meeting import open_store, use_way_to, wait_for_all
from model_check.dist.peers import heeding_peers, wait_for, wait_until
from model_check.dist.world import Offer, World
from model_check.errors import PeerLost
from model_check.utils.evidence import EVIDENCE_BYTES_PER_S, EVIDENCE_S
from model_check.utils.worker_env import RankEnv

Limit = Callable[[float | None], float]
"""How long steps take, seconds (None: nobody knows yet) -> how long a rank waits for the others."""
PATIENCE = 10
"""So much longer where a rank evaluates, or writes a checkpoint; and where NCCL has a limit of its
own, behind ours: it would abort the ranks that wait, and free the one that does not come."""
_FOREVER = timedelta(days=30)
"""Of the group of host numbers: each wait of ours there looks, and has a limit of its own."""


class Ranks(World):
    """This process is one rank of several. How they share a model is for the kinds of them."""

    def __init__(self, env: RankEnv, device: torch.device, limit: Limit) -> None:
        """Find the others. Raises PeerLost, and ConfigError where they cannot meet."""
        self.rank, self.size, self.node = env.rank, env.world_size, env.node_number
        self._device, self._limit, self._run_dir = device, limit, env.run_dir
        self._timeout_s = limit(None)
        self._has_steps = False
        self._local: list[Tensor] = []
        """The sum of each part of the gradients, before it was summed over the ranks."""
        self._waited: Waited | None = None
        with heeding_peers():
            self._meet_first(env, device)

    def _meet_first(self, env: RankEnv, device: torch.device) -> None:
        use_way_to(env)
        store = open_store(env, self._timeout_s)
        wait_for_all(store, env, self._timeout_s)
        self._failures = None if env.has_launcher else Failures(store, env)
        on_gpu = device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=store,
            rank=env.rank,
            world_size=env.world_size,
            timeout=self._limit_of_torch,
            device_id=device if on_gpu else None,
        )
        self._control = dist.new_group(backend="gloo", timeout=_FOREVER)

    def tell_failure(self, error: BaseException, steps: int) -> None:
        """This rank ends of that, after so many steps; where a launcher hears its ranks, it needs
        no telling."""
        if self._failures is not None:
            self._failures.tell(error, steps)

    def tell_saving(self, error: BaseException, steps: int, num_bytes: int) -> None:
        if self._failures is not None:
            self._failures.tell_saving(error, steps, EVIDENCE_S + num_bytes / EVIDENCE_BYTES_PER_S)

    def explained(self, lost: PeerLost) -> PeerLost:
        """The same, with what is known of the rank that was lost."""
        return lost if self._failures is None else self._failures.explained(lost)

    def let_leave(self) -> None:
        """Return when the rank that failed has its evidence; where a launcher hears its ranks, it
        sees to that."""
        if self._failures is not None:
            self._failures.let_leave()

    def leave(self) -> None:
        """Close the connections."""
        dist.destroy_process_group()

    @property
    def waited(self) -> Waited | None:
        return self._waited

    def own_bad(self) -> Tensor | None:
        if not self._local:
            return None
        return ~torch.isfinite(torch.stack(self._local)).all()

    def note_own(self, gradients: Tensor) -> None:
        """Notes the sum of this rank's gradients (any shape), a float32 scalar on the device,
        before they are summed over the ranks."""
        self._local.append(gradients.sum(dtype=torch.float32))
        self._waited = Waited(self._device)

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
        self.meet(self.beat)
        own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [size for (size,) in self.offer(own.numel()).take(self.beat)]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: own.numel()] = own
        told = [torch.empty_like(padded) for _ in sizes]
        # Not by all_gather_object, whose wait hears no signal and has no limit.
        with heeding_peers():
            work = dist.all_gather(told, padded, group=self._control, async_op=True)
        assert work is not None
        wait_for(work, self._timeout_s, self.beat)
        each = zip(told, sizes, strict=True)
        return [pickle.loads(bytes(data[:size].tolist())) for data, size in each]

    def meet(self, meanwhile: Callable[[], None]) -> None:
        with heeding_peers():
            work = dist.barrier(group=self._control, async_op=True)
        assert work is not None
        wait_for(work, PATIENCE * self._timeout_s, meanwhile)

    def expect(self, step_s: float) -> None:
        timeout_s = self._limit(step_s)
        # Not for each step: a change costs a call of torch's.
        if self._has_steps and 0.5 < timeout_s / self._timeout_s < 2:
            return
        self._has_steps, self._timeout_s = True, timeout_s
        self._set_timeout(self._limit_of_torch)

    @property
    def _limit_of_torch(self) -> timedelta:
        on_gpu = self._device.type == "cuda"
        return timedelta(seconds=self._timeout_s * (PATIENCE if on_gpu else 1))

    def wait_for_device(self) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self.wait_for_event(event)

    def wait_for_event(self, event: torch.cuda.Event) -> None:
        try:
            with heeding_peers():
                wait_until(event.query, self._timeout_s, self.beat)
        except PeerLost:
            self._keep_flight_record()
            raise

    def _keep_flight_record(self) -> None:
        """What NCCL was asked for last, as torch's `torchfrtrace` reads it: `nccl_trace_rank_0`, in
        the run directory."""
        if self._run_dir is None or self._device.type != "cuda":
            return
        with suppress(OSError, RuntimeError, AttributeError):  # it is no part of torch's API
            record = torch._C._distributed_c10d._dump_nccl_trace()  # type: ignore[attr-defined]
            (self._run_dir / f"nccl_trace_rank_{self.rank}").write_bytes(record)

    def _set_timeout(self, timeout: timedelta) -> None:
        dist.distributed_c10d._set_pg_timeout(timeout)


class _Sent(Offer):
    def __init__(self, told: list[Tensor], work: dist.Work, timeout_s: float) -> None:
        super().__init__([])
        self._sent, self._work, self._timeout_s = told, work, timeout_s

    def take(self, meanwhile: Callable[[], None]) -> list[list[int]]:
        wait_for(self._work, self._timeout_s, meanwhile)
        return [numbers.tolist() for numbers in self._sent]
