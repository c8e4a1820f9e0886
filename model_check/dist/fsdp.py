"""Each rank holds a shard of every parameter, of its gradient and its moments. torch's FSDP2
gathers a block's weights when they are needed, and scatters the sums of its gradients.

Where products have 16 bits, blocks are gathered in that type, and their gradients are summed in
float32. Embedding, last norm and head stay in float32: so does what flows between blocks, as it
does in a model that is whole.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from model_check.config.schema import FsdpSettings
from model_check.dist.peers import heeding_peers
from model_check.dist.ranks import Limit, Ranks
from model_check.dist.world import refuse_bad_peer
from model_check.forensics.origin import Hook
from model_check.forensics.shard import first_of, is_shared, own_values
from model_check.model import Llama
from model_check.utils.worker_env import RankEnv

T = TypeVar("T")
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""torch 2.13 has another name for it."""


class Shards(Ranks):
    """A shard of the model on each rank; with fewer shards than ranks, some hold equal ones."""

    is_sharded = True

    def __init__(
        self, env: RankEnv, device: torch.device, limit: Limit, settings: FsdpSettings
    ) -> None:
        super().__init__(env, device, limit)
        self._settings = settings
        self.is_offloaded = settings.cpu_offload
        self._groups: list[dist.ProcessGroup] = []
        """Those of part of the ranks, which this one is in."""
        self.num_shards = settings.shard_size or self.size
        self._model: FSDPModule | None = None
        with heeding_peers():
            self._mesh = self._make_mesh()

    @property
    def shard_name(self) -> str:  # type: ignore[override]
        return f"{self.rank % self.num_shards} of {self.num_shards}"

    @property
    def _num_replicas(self) -> int:
        return self.size // self.num_shards

    def shard(self, model: nn.Module, blocks: Sequence[nn.Module], dtype: torch.dtype) -> None:
        settings = self._settings
        offload = OffloadPolicy()
        if settings.cpu_offload:
            offload = CPUOffloadPolicy(pin_memory=self._device.type == "cuda")
        common: dict[str, Any] = {"mesh": self._mesh, "offload_policy": offload}
        half = MixedPrecisionPolicy()
        if dtype.itemsize == 2:
            half = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
        for block in blocks:
            reshard = settings.reshard_after_forward
            fully_shard(block, mp_policy=half, reshard_after_forward=reshard, **common)
        fully_shard(model, **common)
        assert isinstance(model, FSDPModule)
        self._model = model
        for module in _sharded(model):
            # Summed, not averaged: each rank divides its loss by the targets of all.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_custom_reduce_scatter(_Summing(self.note_own))
        for method in ("summed_loss", "loss_and_matches"):
            register_fsdp_forward_method(model, method)
        model.to_empty(device="cpu" if settings.cpu_offload else self._device)

    def leave(self) -> None:
        self._model = None
        super().leave()

    def summed_loss(self, model: Llama) -> Callable[..., Tensor]:
        self._local = []
        return super().summed_loss(model)

    def computing(self) -> AbstractContextManager[object]:
        return heeding_peers()

    @contextmanager
    def reducing(self, is_last: bool) -> Iterator[None]:
        model = self._model
        assert model is not None
        if self._settings.sync_micro_batches:
            model.set_requires_all_reduce(is_last)
        else:
            model.set_requires_gradient_sync(is_last)
        with heeding_peers():
            yield
        if is_last:
            if self._waited is not None:
                self._waited.end()
            self._tell_summed(model)

    def _tell_summed(self, model: FSDPModule) -> None:
        if self._see_sum is None:
            return
        assert isinstance(model, nn.Module)
        for parameter in model.parameters():
            if parameter.grad is not None:
                self._see_sum(parameter, own_values(parameter.grad))

    def norms(self, norms: Tensor) -> Tensor:
        # By all ranks, replicas too: a sum in another order could have other bits, and so would
        # their weights.
        squares = norms.to(self._device, torch.float64).square() / self._num_replicas
        return self.summed(squares).sqrt().to(norms.dtype)

    def whole(self, tensors: Sequence[Tensor]) -> Tensor:
        shape = (len(tensors), *tensors[0].shape)
        stacked = torch.zeros(shape, dtype=tensors[0].dtype, device=self._device)
        if self.rank < self.num_shards:  # of replicas the first
            for row, tensor in zip(stacked, tensors, strict=True):
                values, first = own_values(tensor), first_of(tensor)
                row.view(-1)[first : first + values.numel()] = values.view(-1).to(self._device)
        return self.summed(stacked)

    def hooked(self, model: nn.Module, hooks: Mapping[str, Hook]) -> ExitStack:
        """The weights that a pass computes with are there when their block is called."""
        stack, left = ExitStack(), dict(hooks)
        # Hooks of modules make views of what they give. Nothing here is changed in place.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)

        def hook_those_that_are_there(*_: object) -> None:
            for name in list(left):
                if not is_shared(parameter := model.get_parameter(name)):
                    handle = parameter.register_hook(left.pop(name))  # type: ignore[no-untyped-call]
                    stack.callback(handle.remove)

        for module in _sharded(model):
            handle = module.register_forward_pre_hook(hook_those_that_are_there)
            stack.callback(handle.remove)
        return stack

    def in_step(self, batches: Iterable[T]) -> Iterator[T | None]:
        stream = iter(batches)
        while True:
            batch = next(stream, None)
            told = self.offer(int(batch is not None), 0, 0).take(lambda: None)
            refuse_bad_peer(told)
            if not any(has_more for has_more, *_ in told):
                return
            yield batch

    def settle(self, model: nn.Module) -> None:
        """The root's weights are whole until a backward pass: they would be used once more."""
        for module in _sharded(model):
            module.reshard()

    def _set_timeout(self, timeout: timedelta) -> None:
        super()._set_timeout(timeout)
        for group in self._groups:
            dist.distributed_c10d._set_pg_timeout(timeout, group)

    def _make_mesh(self) -> DeviceMesh:
        kind = self._device.type
        if self.num_shards == self.size:
            everyone = dist.distributed_c10d._get_default_group()
            return DeviceMesh.from_group(everyone, kind, mesh_dim_names=("shard",))
        ranks = torch.arange(self.size).view(-1, self.num_shards)
        groups = [self._group_of(ranks.T.tolist()), self._group_of(ranks.tolist())]
        names = ("replicate", "shard")
        return DeviceMesh.from_group(groups, kind, mesh=ranks, mesh_dim_names=names)

    def _group_of(self, rows: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """The group of the row that this rank is in; all ranks make all groups."""
        timeout = timedelta(seconds=self._timeout_s)
        own_group: dist.ProcessGroup
        made = [(row, dist.new_group(list(row), timeout=timeout)) for row in rows]
        (own_group,) = (group for row, group in made if self.rank in row)
        self._groups.append(own_group)
        return own_group


class _Summing:
    """torch's way to sum gradients, which shows what this rank brings in."""

    def __init__(self, note_own: Callable[[Tensor], None]) -> None:
        self._note_own = note_own

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._note_own(input_tensor)
        work: dist.Work | None = _reduce_scatter(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )
        return work


def _sharded(model: nn.Module) -> Iterator[Any]:
    """The model and its blocks."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))
