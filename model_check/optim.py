"""AdamW in fused kernels, one a group or block, with the clip folded in and a gate on the device.

`torch.optim.AdamW(fused=True)` calls the same kernels: a test compares the two bit for bit, and
each reads the state of the other. We do not use it because its constructor imports torch._dynamo
(1.7 s of a worker's start), and because a refused step must refuse the next ones, too.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from model_check.config.parameter import Group
from model_check.config.schema import TrainingSettings
from model_check.config.shape import parameter
from model_check.dist.world import ALONE, World
from model_check.forensics.optimizer import Part
from model_check.forensics.shard import own_values
from model_check.kernels import Update
from model_check.loss_scale import LossScale

BLOCK_VALUES = 1 << 18
"""Of an update on a CPU: its cache keeps them, with their moments and gradients, for who looks at
them before and after."""


class GroupOptions(NamedTuple):
    """Of the parameters of one group of `config.shape`."""

    weight_decay: float = 0.0
    lr_share: float = 1.0
    """Of the schedule's rate."""


@dataclass(frozen=True)
class Block:
    """What is updated at once, part by part."""

    parts: tuple[Part, ...]
    group: "GroupOptions"
    owners: list[nn.Parameter]
    weights: list[Tensor]
    first_moments: list[Tensor]
    second_moments: list[Tensor]

    def gradients(self) -> list[Tensor]:
        """Returns this step's live gradients, one for each part: flat, [values], or in the
        parameter's own shape where the part is all of it that lies here."""
        pairs = zip(self.parts, self.owners, strict=True)
        return [part.of(owner.grad) for part, owner in pairs]  # type: ignore[arg-type]


class UpdateWatcher(Protocol):
    """Watches an update block by block, each by its number."""

    def before(self, number: int, gradients: Sequence[Tensor]) -> None:
        """Is called before block `number` is updated, with the live gradients of its parts, in the
        shapes of Block.gradients; they still carry the loss scale and are not clipped."""

    def after(self, number: int) -> None: ...


class AdamW:
    """Treats each parameter as its group of `config.shape` says: matrices are decayed, norms and
    gates never, and gates have a rate of their own.

    A step with a non-finite gradient leaves weights, moments and step count untouched, and so do
    all later steps: the host notices it late, and must still find the evidence.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        training: TrainingSettings,
        loss_scale: LossScale | None = None,
        gate_lr: float | None = None,
        world: World = ALONE,
        update: Update = torch._fused_adamw_,
    ) -> None:
        """`parameters`: with their names, in the order of the model. `gate_lr`: the gates' peak
        rate; None: training.learning_rate. `world`: of the ranks that share them. `update`: another
        kernel, where the fused one failed its check."""
        self.named = dict(parameters)
        """In the order of the model. What a sharded model shows itself may be whole meanwhile."""
        self._world = world
        self.parameters = list(self.named.values())
        self.weights = [own_values(parameter) for parameter in self.parameters]
        """Their values that lie here, and so moments."""
        self.loss_scale = loss_scale
        """The factor that gradients carry; None: they carry none."""
        self._kernel: Update = update
        self.betas = (training.adam_beta1, training.adam_beta2)
        self.eps = training.adam_eps
        self.first_moments = [torch.zeros_like(weights) for weights in self.weights]
        self.second_moments = [torch.zeros_like(weights) for weights in self.weights]
        device = self.weights[0].device
        # The kernels read these, and the divisor, as float32, whatever the weights are.
        self.num_steps = torch.zeros((), dtype=torch.float32, device=device)
        self.refusing = torch.zeros((), dtype=torch.float32, device=device)
        """1 from the first bad step on."""
        self.awaited: list[torch.cuda.Event] = []
        """What must have come on the device before weights and moments change."""
        gate_share = 1.0 if gate_lr is None else gate_lr / training.learning_rate
        self._training = training
        self._numbers = {group: _of_group(self.named, group) for group in Group}
        """The numbers of each group's parameters, in the order of the model."""
        self._gates: list[Tensor] = [self.parameters[i] for i in self._numbers[Group.GATE]]
        options = {
            Group.MATRIX: GroupOptions(weight_decay=training.weight_decay),
            Group.VECTOR: GroupOptions(),
            Group.GATE: GroupOptions(lr_share=gate_share),
        }
        size = BLOCK_VALUES if device.type == "cpu" else None
        self.blocks = [
            self._block(parts, options[group])
            for group, indices in self._numbers.items()
            for parts in _parts([(i, self.weights[i].numel()) for i in indices], size)
        ]

    @property
    def moments(self) -> dict[str, list[Tensor]]:
        """Returns the live moments by their names in a state dict, in the order of the model; each
        has the shape and dtype of its entry in `weights`."""
        return {"exp_avg": self.first_moments, "exp_avg_sq": self.second_moments}

    def kept(self, number: int) -> dict[str, Tensor]:
        """Returns what an update changes of the parameter of that number, by quantity: live
        tensors, all in the shape of the values that lie here."""
        moments = {kind: of_all[number] for kind, of_all in self.moments.items()}
        return {"weights": self.weights[number], **moments}

    def others(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yields what updates alone change, beside the moments: live float32 scalars."""
        yield "exp_avg", "num_steps", self.num_steps
        yield "exp_avg", "refusing", self.refusing

    def zero_grad(self) -> None:
        for owner in self.parameters:
            owner.grad = None

    def gradients(self) -> list[Tensor]:
        """Returns the live gradients that exist, in the order of the model: of each the values that
        lie here, in the shape and dtype of its entry in `weights`."""
        return [own_values(p.grad) for p in self.parameters if p.grad is not None]

    @torch.no_grad()
    def grad_norms(self) -> Tensor:
        """[parameters with a gradient] float32: the norm of each, in the order of the model; of a
        sharded one over all ranks, which all must ask for."""
        return self._world.norms(torch.stack(torch._foreach_norm(self.gradients())))

    @torch.no_grad()
    def gates(self) -> Tensor | None:
        """[layers, query heads]: a copy of them as they are now; None: the model has none. All
        ranks must ask for them."""
        return self._world.whole(self._gates) if self._gates else None

    @torch.no_grad()
    def step(
        self,
        lr: float,
        bad: Tensor,
        grad_divisor: Tensor | None,
        skip: Tensor | None = None,
        update_watcher: UpdateWatcher | None = None,
    ) -> None:
        """Update with gradients / `grad_divisor`, unless `bad` (a bool scalar) is or was true, or
        `skip` is; block by block, each seen by `update_watcher` before and after. The loss scale
        counts the step, where one is given.

        All of them stay on the device. `.grad` holds the divided gradients afterwards, or the
        gradients as they were where the step was refused.
        """
        while self.awaited:
            torch.cuda.current_stream().wait_event(self.awaited.pop())
        torch.maximum(self.refusing, bad.to(self.refusing), out=self.refusing)
        refused = self.refusing
        if skip is not None:
            refused = torch.maximum(refused, skip.to(refused))
        self.num_steps += 1 - refused
        for number, block in enumerate(self.blocks):
            gradients = block.gradients()
            if update_watcher is not None:
                update_watcher.before(number, gradients)
            self._update(block, gradients, lr, grad_divisor, refused)
            if update_watcher is not None:
                update_watcher.after(number)
        if self.loss_scale is not None and skip is not None:
            self.loss_scale.count(~skip & (self.refusing == 0))

    def state_dict(self) -> dict[str, Any]:
        """In the form of torch.optim.AdamW: moments and step by the parameter's number."""
        moments = zip(self.first_moments, self.second_moments, strict=True)
        return {
            "state": {
                i: {"step": self.num_steps, "exp_avg": first, "exp_avg_sq": second}
                for i, (first, second) in enumerate(moments)
            },
            "param_groups": self.param_groups(self._training),
            "loss_scale": self.loss_scale.state_dict() if self.loss_scale else None,
        }

    def param_groups(self, training: TrainingSettings) -> list[dict[str, Any]]:
        """What `state_dict` says of the parameters when they are trained with these settings."""
        return [
            {
                "params": indices,
                "weight_decay": training.weight_decay if group is Group.MATRIX else 0.0,
                "betas": (training.adam_beta1, training.adam_beta2),
                "eps": training.adam_eps,
            }
            for group, indices in self._numbers.items()
            if indices
        ]

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy moments and step count from what `state_dict` gives. The caller has checked that
        names, shapes and dtypes are the same."""
        for i, entry in state["state"].items():
            self.first_moments[i].copy_(entry["exp_avg"])
            self.second_moments[i].copy_(entry["exp_avg_sq"])
            self.num_steps.copy_(entry["step"])
        if self.loss_scale is not None and state.get("loss_scale") is not None:
            self.loss_scale.load_state_dict(state["loss_scale"])

    def _block(self, parts: tuple[Part, ...], options: GroupOptions) -> Block:
        owners = [self.parameters[part.owner] for part in parts]
        views = (
            [part.of(tensors[part.owner]) for part in parts]
            for tensors in (self.weights, self.first_moments, self.second_moments)
        )
        return Block(parts, options, owners, *views)

    def _update(
        self,
        block: Block,
        gradients: list[Tensor],
        lr: float,
        divisor: Tensor | None,
        refused: Tensor,
    ) -> None:
        self._kernel(
            block.weights,
            gradients,
            block.first_moments,
            block.second_moments,
            [],
            [self.num_steps] * len(gradients),
            lr=lr * block.group.lr_share,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=block.group.weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=None if divisor is None else divisor.to(refused),
            found_inf=refused,
        )


def _parts(sizes: Sequence[tuple[int, int]], size: int | None) -> Iterator[tuple[Part, ...]]:
    """Parts of parameters of these (number, values), each list up to twice `size` values long; a
    parameter is divided at multiples of it. None: all in one."""
    block: list[Part] = []
    for owner, num_values in sizes:
        for first in range(0, num_values, size or max(1, num_values)):
            block.append(Part(owner, first, min(first + (size or num_values), num_values)))
            if size and sum(part.end - part.first for part in block) >= size:
                yield tuple(block)
                block = []
    if block:
        yield tuple(block)


def _of_group(named: Iterable[str], group: Group) -> list[int]:
    return [number for number, name in enumerate(named) if parameter(name).group is group]


@dataclass(frozen=True)
class Judgement:
    """Whether a step may update weights: scalars on the device."""

    grad_norm: Tensor
    """float32: of the gradients without their loss scale, before clipping."""
    bad: Tensor
    """bool: loss or norm is not finite, and no smaller scale would help."""
    overflow: Tensor | None = None
    """bool: gradients are not finite in float16, which is not `bad`; None: they carry no scale."""
    loss_scale: Tensor | None = None
    """float32: what the gradients carry; None: nothing."""

    def divisor(self, max_grad_norm: float | None) -> Tensor | None:
        """Returns what the gradients are to be divided by, a float32 scalar: their loss scale, and
        what brings their norm down to `max_grad_norm`; None: nothing."""
        clip, scale = clip_divisor(self.grad_norm, max_grad_norm), self.loss_scale
        if scale is None or clip is None:
            return clip if scale is None else scale
        return scale * clip


def judge(loss: Tensor, norms: Tensor, scale: LossScale | None) -> Judgement:
    """Judges a step by its loss, a float32 scalar, and the norms of its gradients as they are,
    float32 [parameters]."""
    norm = total_norm(norms)
    if scale is None:
        return Judgement(norm, ~(torch.isfinite(loss) & torch.isfinite(norm)))
    used = scale.value.clone()
    grad_norm = norm / used
    overflow = ~torch.isfinite(grad_norm)
    bad = ~torch.isfinite(loss) | scale.exhausted(overflow)
    return Judgement(grad_norm, bad, overflow & ~bad, used)


def total_norm(norms: Tensor) -> Tensor:
    """Returns the L2 norm of all gradients together, a float32 scalar, from `norms`, that of each,
    float32 [parameters]; bit for bit that of torch.nn.utils.get_total_norm."""
    total: Tensor = torch.linalg.vector_norm(norms)
    return total


def clip_divisor(grad_norm: Tensor, max_grad_norm: float | None) -> Tensor | None:
    """Returns the divisor, at least 1, that brings the norm of the gradients down to
    `max_grad_norm`, a float32 scalar as `grad_norm` is; None: no limit. (Pascanu et al., On the
    difficulty of training recurrent neural networks, arXiv 1211.5063, algorithm 1; 1e-6 as in
    torch.nn.utils.clip_grad_norm_.)"""
    if max_grad_norm is None:
        return None
    return ((grad_norm + 1e-6) / max_grad_norm).clamp(min=1.0)
