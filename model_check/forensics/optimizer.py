"""What a check asks of an optimizer, and any optimizer of torch.optim seen so."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from model_check.forensics.shard import named_part, own_values


@dataclass(frozen=True)
class Part:
    """Of a parameter, or of this rank's shard of it: values `first` to `end` - 1."""

    owner: int
    """Its number, in the order of the model."""
    first: int
    end: int

    def of(self, tensor: Tensor) -> Tensor:
        """The same values of a tensor of the same shape: of the parameter, a gradient, a moment."""
        whole = own_values(tensor)
        if self.end - self.first == whole.numel():
            return whole
        return whole.view(-1)[self.first : self.end]


class Block(Protocol):
    """What is updated at once, part by part."""

    @property
    def parts(self) -> tuple[Part, ...]: ...

    def gradients(self) -> list[Tensor]:
        """Returns this step's live gradients, one for each part: flat, [values], or in the
        parameter's own shape where the part is all of it that lies here."""


class Optimizer(Protocol):
    """An optimizer as checks see it. Its tensors are the live ones."""

    @property
    def named(self) -> dict[str, nn.Parameter]:
        """Its parameters by their names, in the order of the model."""

    @property
    def blocks(self) -> Sequence[Block]:
        """Together they hold each parameter once."""

    @property
    def scalars(self) -> Mapping[str, Tensor]:
        """Returns what updates alone change and belongs to no parameter: live scalars, by name."""

    def kept(self, number: int) -> dict[str, Tensor]:
        """Returns what an update changes of the parameter of that number, as far as it lies on this
        rank, by quantity: `weights` first, and `exp_avg` and `exp_avg_sq` or whatever else the
        optimizer keeps. All have the parameter's shape."""

    def zero_grad(self) -> None: ...

    def grad_norms(self) -> Tensor:
        """float32 [parameters with a gradient]: the norm of each, in the order of the model."""


def moments_of(optimizer: Optimizer) -> Iterator[tuple[str, str, Tensor]]:
    """Yields quantity, parameter and live values of what it keeps beside weights, quantity by
    quantity; the values have the shape of those that lie here of the parameter."""
    kept = {name: optimizer.kept(number) for number, name in enumerate(optimizer.named)}
    for kind in dict.fromkeys(kind for of_one in kept.values() for kind in of_one):
        if kind != "weights":
            yield from ((kind, name, of[kind]) for name, of in kept.items() if kind in of)


def tensors_of(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yields all that a step reads and writes, by its name in a dossier: `weights/norm.weight`, a
    buffer too, `gradients/`, `exp_avg/`, `exp_avg_sq/`. The live ones. Of a sharded model those
    values that lie here: `weights/norm.weight[256:512]`."""
    parts = {name: named_part(name, parameter) for name, parameter in optimizer.named.items()}
    for name, tensor in (*optimizer.named.items(), *model.named_buffers()):
        yield f"weights/{parts.get(name, name)}", own_values(tensor)
    for name, parameter in optimizer.named.items():
        if parameter.grad is not None:
            yield f"gradients/{parts[name]}", own_values(parameter.grad)
    for kind, name, values in moments_of(optimizer):
        yield f"{kind}/{parts[name]}", values


@dataclass(frozen=True)
class _WholeBlock:
    """All parameters that have a gradient."""

    parts: tuple[Part, ...]
    owners: Sequence[nn.Parameter]

    def gradients(self) -> list[Tensor]:
        return [own_values(owner.grad) for owner in self.owners if owner.grad is not None]


class TorchOptimizer:
    """One of torch.optim, after its first step: until then most keep nothing."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        own = {p for group in optimizer.param_groups for p in group["params"]}
        self.named = {name: p for name, p in model.named_parameters() if p in own}
        self._optimizer = optimizer
        self._owners = list(self.named.values())

    @property
    def blocks(self) -> list[_WholeBlock]:
        with_gradient = [(n, p) for n, p in enumerate(self._owners) if p.grad is not None]
        parts = tuple(Part(n, 0, own_values(p).numel()) for n, p in with_gradient)
        return [_WholeBlock(parts, [p for _, p in with_gradient])]

    @property
    def scalars(self) -> dict[str, Tensor]:
        return {}

    def kept(self, number: int) -> dict[str, Tensor]:
        parameter = self._owners[number]
        state = self._optimizer.state[parameter].items()
        moments = {
            kind: own_values(values)
            for kind, values in state
            if isinstance(values, Tensor) and values.shape == parameter.shape
        }
        return {"weights": own_values(parameter), **moments}

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    @torch.no_grad()
    def grad_norms(self) -> Tensor:
        gradients = [own_values(p.grad) for p in self._owners if p.grad is not None]
        return torch.stack(torch._foreach_norm(gradients, dtype=torch.float32))
