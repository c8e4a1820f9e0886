"""What a check asks of an optimizer, and any optimizer of torch.optim seen so."""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from model_check.forensics.fingerprint import has_fingerprint
from model_check.forensics.shard import flat, is_dense, is_shared, named_part, own_values
from model_check.utils.fingerprint import label


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
        parameter's own shape where the part is all of it that lies here; empty for a parameter that
        has none."""


class Optimizer(Protocol):
    """An optimizer as checks see it. Its tensors are the live ones."""

    @property
    def named(self) -> dict[str, nn.Parameter]:
        """Its parameters by their names, in the order of the model."""

    @property
    def blocks(self) -> Sequence[Block]:
        """Together they hold each parameter once."""

    def others(self) -> Iterable[tuple[str, str, Tensor]]:
        """Yields quantity, name and live values of what updates alone change, and which has not the
        shape of a parameter."""

    def kept(self, number: int) -> dict[str, Tensor]:
        """Returns what an update changes of the parameter of that number, as far as it lies on this
        rank, by quantity: `weights` first, and `exp_avg` and `exp_avg_sq` or whatever else the
        optimizer keeps. All have the parameter's shape."""

    def grad_norms(self) -> Tensor:
        """float32 [parameters]: the norm of each gradient, in the order of the model; 0 without."""


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
    """All parameters."""

    parts: tuple[Part, ...]
    owners: Sequence[nn.Parameter]

    def gradients(self) -> list[Tensor]:
        return [_gradient(owner) for owner in self.owners]


class TorchOptimizer:
    """One of torch.optim. Most keep nothing until their first step."""

    def __init__(
        self,
        model: nn.Module | Iterable[tuple[str, nn.Parameter]],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """`model`: or its parameters and their names. Does not keep the optimizer alive. What has
        no fingerprint, or lies on another device than the first parameter, is left out."""
        own = {p for group in optimizer.param_groups for p in group["params"]}
        named = model.named_parameters() if isinstance(model, nn.Module) else model
        known = {name: p for name, p in named if p in own}
        self._device = next((own_values(p).device for p in known.values()), torch.device("cpu"))
        self.named = {name: p for name, p in known.items() if self._is_read(p)}
        self._unread = [label("weights", name) for name in known if name not in self.named]
        self._optimizer: torch.optim.Optimizer = weakref.proxy(optimizer)
        self._owners = list(self.named.values())

    @property
    def blocks(self) -> list[_WholeBlock]:
        numbers = enumerate(self._owners)
        parts = tuple(Part(number, 0, own_values(p).numel()) for number, p in numbers)
        return [_WholeBlock(parts, self._owners)]

    def others(self) -> Iterator[tuple[str, str, Tensor]]:
        for name, parameter in self.named.items():
            for kind, values in self._tensors(parameter):
                if values.shape != parameter.shape:
                    yield kind, name, own_values(values)

    def kept(self, number: int) -> dict[str, Tensor]:
        parameter = self._owners[number]
        state = self._tensors(parameter)
        moments = {k: own_values(values) for k, values in state if values.shape == parameter.shape}
        return {"weights": own_values(parameter), **moments}

    @property
    def unread(self) -> list[str]:
        """What has no fingerprint, for people: weights, gradients and state, as far as they exist
        by now. Not a number of steps, which optimizers keep on the CPU: each update shows it."""
        found = [*self._unread]
        for name, parameter in self.named.items():
            if parameter.grad is not None and not has_fingerprint(parameter.grad):
                found.append(label("gradients", name))
            state = self._optimizer.state.get(parameter, {})
            read = {kind for kind, _ in self._tensors(parameter)}
            unread = {kind: x for kind, x in state.items() if kind not in read}
            found += [
                label(kind, name)
                for kind, x in unread.items()
                if _holds_tensor(x) and not _is_number(x)
            ]
        return found

    @property
    def layout(self) -> list[int]:
        """Another one where any of what an update changes is another tensor."""
        state = self._optimizer.state
        of_owners = (state.get(owner, {}).values() for owner in self._owners)
        kept = (values for of_one in of_owners for values in of_one if isinstance(values, Tensor))
        strided = (tensor for tensor in kept if tensor.layout is torch.strided)
        return [_place(tensor) for tensor in (*self._owners, *strided)]

    @torch.no_grad()
    def grad_norms(self) -> Tensor:
        gradients = [_gradient(owner) for owner in self._owners]
        is_wide = any(gradient.dtype == torch.float64 for gradient in gradients)
        dtype = torch.float64 if is_wide else torch.float32
        return torch.stack(torch._foreach_norm(gradients, dtype=dtype)).float()

    def _tensors(self, parameter: nn.Parameter) -> Iterator[tuple[str, Tensor]]:
        """Yields what the optimizer keeps for a parameter, beside its weights."""
        for kind, values in self._optimizer.state.get(parameter, {}).items():
            if isinstance(values, Tensor) and self._is_read(values := _in_pairs(values)):
                yield kind, values

    def _is_read(self, tensor: Tensor) -> bool:
        values = own_values(tensor)
        return has_fingerprint(values) and values.device == self._device and is_dense(values)


def _place(tensor: Tensor) -> int:
    """Where its values lie, read without a view: each step asks."""
    return own_values(tensor).data_ptr() if is_shared(tensor) else tensor.data_ptr()


def _in_pairs(tensor: Tensor) -> Tensor:
    """The same memory: of values of one byte, any shape, each two as int16 [values / 2], where that
    can be."""
    is_strided = tensor.layout is torch.strided and not is_shared(tensor)
    if tensor.element_size() > 1 or not is_strided or not is_dense(tensor):
        return tensor
    is_even = tensor.numel() % 2 == tensor.storage_offset() % 2 == 0
    return flat(tensor).view(torch.int16) if is_even else tensor


def _holds_tensor(value: object) -> bool:
    if isinstance(value, dict):
        value = [*value.values()]
    return isinstance(value, Tensor) or (
        isinstance(value, list | tuple) and any(map(_holds_tensor, value))
    )


def _is_number(value: object) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu"


def _gradient(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    if gradient is None or not has_fingerprint(gradient):
        return own_values(parameter).new_empty(0)
    return own_values(gradient)
