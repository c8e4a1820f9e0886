"""Calls of a model, made again behind the last step of a replay: what varies by itself gives other
bits. The process ends there, so that nothing of the script's is changed by it."""

import hashlib
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from model_check.forensics.fingerprint import has_fingerprint, is_plain
from model_check.instrument import generators
from model_check.instrument.model_hooks import tensors_in
from model_check.utils.wire import CALLS_BITS, CALLS_REPEATED

MOST_CALLS = 16
"""Of a step."""
_NUM_TIMES = 2, 4, 8, 16
"""As many as there is time for: two workers of other speed compare what both made."""
_LONG_ENOUGH_S = 5.0
_LONGEST = 200
"""Characters of an error that is told."""
_WRAPPERS = ("DistributedDataParallel", "DataParallel")
Sums = Callable[[Sequence[Tensor]], Tensor]


class Call:
    def __init__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Before it is made."""
        self._module = module
        # A graph that is the script's ends here.
        self._args, self._kwargs = tree_map_only(Tensor, _cut_off, (args, kwargs))
        self._generators = generators.states()
        kinds = (kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind))
        self._casts = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds]

    def made_again(self, sums: Sums, until: float) -> list[list[int]]:
        """Returns the sums of its outputs and gradients, of each time. `until`: monotonic seconds,
        but twice in each case. Raises what the module raises."""
        if not all(map(is_plain, _tensors_of(self._module, self._args, self._kwargs))):
            raise ValueError("a tensor of the model is sparse, sharded, or of a class of its own")
        found: list[list[int]] = []
        for times in _NUM_TIMES:
            if found and time.monotonic() >= until:
                break
            found += [self._make(sums) for _ in range(times - len(found))]
        return found

    def _make(self, sums: Sums) -> list[int]:
        with ExitStack() as stack:
            stack.enter_context(_kept(self._module, self._args, self._kwargs))
            stack.enter_context(torch.enable_grad())
            for kind, dtype in self._casts:
                stack.enter_context(torch.autocast(kind, dtype))
            generators.put_back(self._generators)
            # Not by the module itself: its hooks are ours.
            outputs = _floats(_unwrapped(self._module).forward(*self._args, **self._kwargs))
            tensors = [*outputs]
            with suppress(RuntimeError):  # some passes cannot be computed from outputs alone
                tensors += _gradients(self._module, outputs)
            return [int(sums([x.detach()])) for x in tensors if has_fingerprint(x)]


def told(calls: Iterable[Call], sums: Sums) -> dict[str, Any]:
    """Makes them again, and returns what is told of that: whether each gave the same bits each
    time, and a digest of all bits of the first 2, 4, 8 and 16 times."""
    until = time.monotonic() + _LONG_ENOUGH_S
    try:
        found = [call.made_again(sums, until) for call in calls]
    except BaseException as error:  # the process ends behind this
        return {"calls failed": f"{type(error).__name__}: {error}"[:_LONGEST]}
    is_repeated = all(sums == of_one[0] for of_one in found for sums in of_one)
    prefixes = {times: [of_one[:times] for of_one in found] for times in _NUM_TIMES}
    digests = {
        f"{CALLS_BITS} {times}": hashlib.blake2b(repr(bits).encode(), digest_size=8).hexdigest()
        for times, bits in prefixes.items()
        if all(len(of_one) == times for of_one in bits)
    }
    return {CALLS_REPEATED: is_repeated, **digests}


def _unwrapped(module: nn.Module) -> nn.Module:
    """What torch's wrappers call, which count their own calls."""
    inner = vars(module)["_modules"].get("module")
    return inner if inner is not None and type(module).__name__ in _WRAPPERS else module


def _cut_off(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.requires_grad)


def _floats(output: Any) -> list[Tensor]:
    return [x for _, x in tensors_in(output) if x.is_floating_point()]


def _gradients(module: nn.Module, outputs: Sequence[Tensor]) -> list[Tensor]:
    """Those of the parameters, where the gradients of the outputs are given: any will do, but of
    equal ones a norm or a softmax hands on little."""
    outputs = [x for x in outputs if x.requires_grad]
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not (outputs and parameters):
        return []
    given = [
        torch.linspace(-1, 1, x.numel(), dtype=x.dtype, device=x.device).view(x.shape)
        for x in outputs
    ]
    found = torch.autograd.grad(outputs, parameters, given, allow_unused=True)
    return [gradient for gradient in found if gradient is not None]


def _tensors_of(module: nn.Module, args: Any, kwargs: Any) -> list[Tensor]:
    """Returns what a forward pass can write: parameters, buffers, attributes, and its inputs."""
    held = (x for m in module.modules() for x in vars(m).values() if isinstance(x, Tensor))
    of_call = (x for _, x in tensors_in((args, kwargs)))
    return [*module.parameters(), *module.buffers(), *held, *of_call]


@contextmanager
def _kept(module: nn.Module, args: Any, kwargs: Any) -> Iterator[None]:
    # Not by their versions: batch norm writes its statistics past them.
    copies = [(x, x.data, x.detach().clone()) for x in _tensors_of(module, args, kwargs)]
    states = [(vars(each), _copied(vars(each))) for each in module.modules()]
    try:
        yield
    finally:
        for own, was in states:
            _put_back(own, was)
        for x, values, copy in copies:
            if not torch.equal(values, copy):
                values.copy_(copy)
            if x.data_ptr() != values.data_ptr():
                x.data = values


def _copied(value: Any) -> dict[str, tuple[Any, Any]]:
    """Attribute -> it, and what it holds: of a container a copy, of a generator its state."""
    return {name: (held, _content(held)) for name, held in value.items()}


def _content(held: Any) -> Any:
    if isinstance(held, torch.Generator):
        return held.get_state()
    if isinstance(held, random.Random):
        return held.getstate()
    if hasattr(held, "bit_generator"):
        return held.bit_generator.state
    is_copied = isinstance(held, dict | list | set | deque) or _is_array(held)
    return held.copy() if is_copied else None


def _is_array(held: Any) -> bool:
    """Of numpy; its scalars and others cannot be written."""
    can_write = getattr(getattr(held, "flags", None), "writeable", False)
    return bool(can_write) and hasattr(held, "__array_interface__")


def _put_back(own: dict[str, Any], was: dict[str, tuple[Any, Any]]) -> None:
    for name in own.keys() - was.keys():
        del own[name]
    for name, (held, content) in was.items():
        own[name] = held
        if isinstance(held, torch.Generator):
            held.set_state(content)
        elif isinstance(held, random.Random):
            held.setstate(content)
        elif hasattr(held, "bit_generator"):
            held.bit_generator.state = content
        elif isinstance(held, list):
            held[:] = content
        elif isinstance(held, deque):
            held.clear()
            held.extend(content)
        elif isinstance(held, dict | set):
            held.clear()
            held.update(content)
        elif _is_array(held):
            held[...] = content
