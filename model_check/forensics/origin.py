"""Where a NaN or Inf was born: the first module, in the order of computation, that made one out of
finite inputs. Found by hooks while a step is computed again."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from model_check.events import Origin
from model_check.forensics.manifest import unraveled
from model_check.forensics.scan import BadTensor, counted, is_finite
from model_check.forensics.shard import own_values

HEAD, LOSS = "output", "loss"
"""The head is no module that is called: the loss reads its weight."""
OUTPUT, INPUT_GRADIENT = "output", "gradient of input"


@dataclass(frozen=True)
class Found:
    origin: Origin
    evidence: Mapping[str, Tensor] = field(default_factory=dict)
    """The tensor itself, and what its module computed it from."""


def origin_of(
    direction: Literal["forward", "backward", "state"], module: str, bad: BadTensor
) -> Origin:
    low, high = (value.hex() for value in bad.finite_range) if bad.finite_range else (None, None)
    return Origin(
        direction=direction,
        module=module,
        tensor=bad.name,
        shape=list(bad.shape),
        num_nan=bad.num_nan,
        num_inf=bad.num_inf,
        first=list(bad.first_index),
        low=low,
        high=high,
    )


def of_state(named: Iterable[tuple[str, Tensor]]) -> Found | None:
    """Returns the first of these (`layers.0.attention.wq.weight`, `exp_avg of norm.weight`; any
    shape) that is not finite, with the values that lie here. Waits for the device."""
    for name, tensor in named:
        if not is_finite(tensor):
            what, _, path = name.rpartition(" ")
            module, _, leaf = path.rpartition(".")
            bad = counted(f"{what} {leaf}".strip(), tensor)
            return Found(origin_of("state", module or "the model", bad), _lying_here(bad, tensor))
    return None


def of_gradient(name: str, gradient: Tensor) -> Found:
    """Returns the origin for the gradient of the parameter `name`, in its shape, which is not
    finite. Waits for the device."""
    module, _, leaf = name.rpartition(".")
    bad = counted(f"gradient of {leaf}", gradient)
    return Found(origin_of("backward", module, bad), _lying_here(bad, gradient))


def _lying_here(bad: BadTensor, tensor: Tensor) -> dict[str, Tensor]:
    """Of a tensor that ranks share, this rank's part: only all together can read the whole."""
    return {bad.name: own_values(tensor)}


@dataclass
class Search:
    """What the hooks have found in the micro-batch that is computed."""

    found: Found | None = None
    """The first; what comes after it follows from it."""
    _bad_gradients: dict[str, Found] = field(default_factory=dict)
    """Module -> one of its own weights' gradients."""
    _passed: list[tuple[str, Found | None]] = field(default_factory=list)
    """In the order of the backward pass, the modules with finite gradients of their outputs, and
    what they made of them."""

    def begin(self, step: int) -> None:
        """The passes of a step begin."""

    def see(self, x_BTE: Tensor) -> None:
        """What flows between blocks: hooks of modules see it, too."""

    def end_micro_batch(self) -> None:
        made = (found or self._bad_gradients.get(name) for name, found in self._passed)
        self.found = self.found or next(filter(None, made), None)
        self._passed.clear()
        self._bad_gradients.clear()

    def after_forward(
        self, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any
    ) -> None:
        if self.found is not None or is_finite(output):
            return
        given = _tensors(inputs)
        if all(map(is_finite, given)):
            inputs_by_name = {f"input {number}": tensor for number, tensor in enumerate(given)}
            origin = origin_of("forward", name, counted(OUTPUT, output))
            self.found = Found(origin, {OUTPUT: output, **inputs_by_name})

    def after_loss(self, _: nn.Module, inputs: tuple[Any, ...], loss: Tensor) -> None:
        """Looks at the summed loss, a scalar, of hidden [B, T, E] and weight [V, E]. The head's
        logits exist only inside the loss: they are computed again."""
        if self.found is None and not is_finite(loss):
            hidden, weight, _targets = inputs
            if is_finite(hidden) and is_finite(weight):
                bad = origin_of("forward", LOSS, counted(OUTPUT, loss))
                self.found = _head(hidden, weight) or Found(bad, {"input 0": hidden})

    def after_backward(
        self, name: str, _: object, of_inputs: tuple[Any, ...], of_outputs: tuple[Any, ...]
    ) -> None:
        if self.found is None and all(map(is_finite, _tensors(of_outputs))):
            bad = next((g for g in _tensors(of_inputs) if not is_finite(g)), None)
            self._passed.append((name, None if bad is None else _made(name, bad, of_outputs)))
            # No call of the head itself is seen.
            self._passed += [(HEAD, None)] if name == LOSS else []

    def after_weight(self, name: str, gradient: Tensor) -> None:
        """Looks at a micro-batch's gradient of the parameter `name`, in the shape of the whole."""
        module = name.rpartition(".")[0]
        if not self._follows(module) and not is_finite(gradient):
            self._bad_gradients[module] = of_gradient(name, gradient)

    def _follows(self, module: str) -> bool:
        """Whether a gradient of its weight cannot be the first: mostly they are all bad, and held
        together they would take as much memory as the model."""
        is_made = any(found for _, found in self._passed)
        return self.found is not None or (is_made and module not in dict(self._passed))

    def after_embedding(self, name: str, _: object, _inputs: object, output: Tensor) -> None:
        """Looks at the gradient of `output`, [B, T, E], when it is computed: the inputs, token ids,
        have none."""
        hook = partial(self._after_embedding, name)
        output.register_hook(hook)  # type: ignore[no-untyped-call]

    def _after_embedding(self, name: str, gradient: Tensor) -> None:
        self.after_backward(name, None, (), (gradient,))


Hook = Callable[[Tensor], Tensor | None]
Hooked = Callable[[nn.Module, Mapping[str, Hook]], ExitStack]
"""Has hooks called with the gradients of the parameters of these names, until it is closed."""


def hooked(model: nn.Module, hooks: Mapping[str, Hook]) -> ExitStack:
    """As `Hooked`, of a model that is whole."""
    stack = ExitStack()
    for name, hook in hooks.items():
        handle = model.get_parameter(name).register_hook(hook)  # type: ignore[no-untyped-call]
        stack.callback(handle.remove)
    return stack


@contextmanager
def searched(model: nn.Module, hooked: Hooked = hooked) -> Iterator[Search]:
    """Hooks on every module and parameter of `model`; `end_micro_batch` follows each
    micro-batch. A compiled module must be called eagerly meanwhile."""
    search = Search()
    with ExitStack() as stack:
        # Of a module whose inputs have no gradients, as the first one's.
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)
        for name, module in model.named_modules():
            for handle in _hooks(search, name, module):
                stack.callback(handle.remove)
        names = [name for name, _ in model.named_parameters()]
        hooks = {name: partial(search.after_weight, name) for name in names}
        stack.enter_context(hooked(model, hooks))
        yield search


def _hooks(search: Search, name: str, module: nn.Module) -> Iterator[RemovableHandle]:
    if not name or isinstance(module, nn.ModuleList):
        return
    look = search.after_loss if name == LOSS else partial(search.after_forward, name)
    yield module.register_forward_hook(look)
    if isinstance(module, nn.Embedding):
        yield module.register_forward_hook(partial(search.after_embedding, name))
    else:
        yield module.register_full_backward_hook(partial(search.after_backward, name))


def _made(name: str, bad: Tensor, of_outputs: tuple[Any, ...]) -> Found:
    given = {f"gradient of output {n}": g for n, g in enumerate(_tensors(of_outputs))}
    origin = origin_of("backward", name, counted(INPUT_GRADIENT, bad))
    return Found(origin, {INPUT_GRADIENT: bad, **given})


def _head(hidden: Tensor, weight: Tensor, chunk_rows: int = 1024) -> Found | None:
    """The head, where its logits are not finite: counted in the first such chunk, whose shape is
    told; the first of them by its place in the batch."""
    chunks = torch.split(hidden.detach().flatten(0, -2), chunk_rows)
    for number, rows in enumerate(chunks):
        logits = nn.functional.linear(rows.to(weight.dtype), weight.detach())
        if not is_finite(logits):
            bad = counted(OUTPUT, logits)
            row, column = bad.first_index
            first = *unraveled(number * chunk_rows + row, hidden.shape[:-1]), column
            bad = replace(bad, first_index=first)
            return Found(origin_of("forward", HEAD, bad), {"input 0": hidden})
    return None


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Those that can be NaN."""
    return [v for v in values if isinstance(v, Tensor) and v.is_floating_point()]
