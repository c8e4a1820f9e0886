"""Which fingerprints a step takes, and when: of weights, gradients and moments, and of what flows
between blocks. The formula is that of utils.fingerprint."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from model_check.engine.optim import AdamW
from model_check.forensics.fingerprint import Fingerprint, num_rows
from model_check.models.basic_llama import BasicLlama
from model_check.utils.fingerprint import BEFORE, NUM_COLUMNS

PART_VALUES = 1 << 26
"""A larger tensor is taken in parts, so that a slot can hold one of them."""
_READS = 7
"""Of each parameter: its gradient, and its weight and moments before and after the update."""


@dataclass(frozen=True)
class Entry:
    """One fingerprint."""

    quantity: str
    tensor: str
    """A parameter, a buffer, or the module whose output flows; `NAME[FIRST:END]` is a part."""
    num_values: int
    num_bits: int
    """Of each value; 0: no sum, and nothing tells which value differs."""


@dataclass(frozen=True)
class Prints:
    """Fingerprints of a step."""

    entries: tuple[Entry, ...]
    values: Tensor
    """int64 [entries]"""
    taken: str = ""
    """Which state: before the update, and after it; `all`, or the number of a slot."""

    def __add__(self, other: "Prints") -> "Prints":
        values = torch.cat([self.values, other.values])
        return Prints(self.entries + other.entries, values, self.taken or other.taken)


@dataclass(frozen=True)
class _Part:
    """Of a tensor."""

    quantity: str
    name: str
    owner: int
    """The number of the parameter, in the order of the optimizer."""
    values: slice


@dataclass
class _Selection:
    """What a step takes."""

    gradients: list[_Part] = field(default_factory=list)
    state: list[tuple[Entry, Tensor]] = field(default_factory=list)
    """Tensors that stay where they are: of the model and of the optimizer."""
    sites: set[int] = field(default_factory=set)
    num_bytes: int = 0
    name: str = "all"
    """Or the number of its slot."""

    @cached_property
    def tensors(self) -> list[Tensor]:
        """Of the state."""
        return [tensor for _, tensor in self.state]

    @cached_property
    def left(self) -> tuple[Entry, ...]:
        """By an update."""
        return tuple(entry for entry, _ in self.state)

    @cached_property
    def before(self) -> tuple[Entry, ...]:
        """The next one."""
        return tuple(replace(entry, quantity=BEFORE + entry.quantity) for entry in self.left)


@dataclass
class _Flow:
    """What was taken at the sites of a step so far."""

    next_site: int = 0
    micro_batch: int = 0
    sums: defaultdict[tuple[str, int], list[Tensor]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """(quantity, site) -> int64 [1] of each micro-batch, in the order of computation."""
    sizes: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Site -> values of a micro-batch, and the bits of each."""


class Fingerprints:
    """Nothing here waits for the device."""

    def __init__(
        self,
        model: BasicLlama,
        optimizer: AdamW,
        fingerprint: Fingerprint,
        *,
        last_step: int,
        budget_bytes: float | None = None,
        site_bytes: int = 0,
    ) -> None:
        """`budget_bytes`: what one step may read; None: all, 0: nothing. The first step and
        `last_step` take all whatever they read. `site_bytes`: what flows at one site in a step."""
        self._parameters = optimizer.parameters
        self._names = [name for name, _ in model.named_parameters()]
        self._fingerprint = fingerprint
        self._device = self._parameters[0].device
        self._sites = ["tok_embed", *(f"layers.{n}" for n in range(len(model.layers))), "norm"]
        units = [*_units_of_state(model, optimizer)]
        units += [_Selection(sites={n}, num_bytes=2 * site_bytes) for n in range(len(self._sites))]
        self._all = _merged(units) if budget_bytes != 0 else _Selection()
        self._slots = _slots(units, budget_bytes) if budget_bytes else [self._all]
        self._last_step = last_step
        self._step: int | None = None
        self._held: _Selection | None = None
        """What the step before left a fingerprint of."""
        self._left: _Selection | None = None
        """What this one did; a step that overflows in float16 is trained again."""
        self._selection, self._flow = self._all, _Flow()

    @property
    def are_taken(self) -> bool:
        return bool(self._all.state)

    @property
    def num_slots(self) -> int:
        """In so many steps everything is taken once."""
        return len(self._slots)

    def begin(self, step: int) -> None:
        """The forward pass of this step begins."""
        if step != self._step:
            self._step, self._held = step, self._left
        takes_all = self._held is None or step == self._last_step
        self._selection = self._all if takes_all else self._slots[step % len(self._slots)]
        self._flow = _Flow()

    def see(self, x_BTE: Tensor) -> None:
        """What a module hands to the next one; of all sites in turn."""
        site, self._flow.next_site = self._flow.next_site, self._flow.next_site + 1
        if site not in self._selection.sites:
            return
        self._flow.sizes[site] = x_BTE.numel(), 8 * x_BTE.element_size()
        first_row = self._flow.micro_batch * num_rows(x_BTE)
        self._take("forward", site, first_row, x_BTE)
        if x_BTE.requires_grad:
            take = partial(self._take, "backward", site, first_row)
            x_BTE.register_hook(take)  # type: ignore[no-untyped-call]

    def end_micro_batch(self) -> None:
        self._flow.micro_batch += 1
        self._flow.next_site = 0

    def before_update(self) -> Prints:
        """The gradients are whole: those of both passes, and of the state before the update."""
        return self._of_flow() + self._of_gradients() + self._of_state_before(self._held)

    def of_norms(self, grad_norms: Tensor) -> Prints:
        """Of each gradient; they are there in any case, so each step tells all of them."""
        if not self.are_taken:
            return Prints((), self._sums([]))
        entries = tuple(Entry("grad_norms", name, 1, 0) for name in self._names)
        return Prints(entries, grad_norms.detach().view(torch.int32).long())

    def after_update(self) -> Prints:
        self._left = self._selection
        before = self._held or self._all
        taken = f"{before.name}, {self._left.name} of {self.num_slots}"
        return Prints(self._left.left, self._sums(self._left.tensors), taken)

    def of_state_now(self) -> Prints:
        """What the last update left a fingerprint of is taken again; at first, all."""
        return self._of_state_before(self._left)

    def _of_state_before(self, held: _Selection | None) -> Prints:
        held = held or self._all
        return Prints(held.before, self._sums(held.tensors))

    @torch.no_grad()
    def _take(self, quantity: str, site: int, first_row: int, x_BTE: Tensor) -> None:
        self._flow.sums[quantity, site].append(self._fingerprint([x_BTE], [first_row]))

    def _of_flow(self) -> Prints:
        entries = tuple(self._entry_of_site(*place) for place in self._flow.sums)
        sums = [torch.cat(of_site).sum(0, keepdim=True) for of_site in self._flow.sums.values()]
        return Prints(entries, torch.cat([self._sums([]), *sums]))

    def _entry_of_site(self, quantity: str, site: int) -> Entry:
        """Each micro-batch begins a row. A large one is not searched for a bit: that takes long."""
        num_values, num_bits = self._flow.sizes[site]
        rows = -(-num_values // NUM_COLUMNS) * self._flow.micro_batch
        num_bits = num_bits if rows * NUM_COLUMNS <= PART_VALUES else 0
        return Entry(quantity, self._sites[site], rows * NUM_COLUMNS, num_bits)

    @torch.no_grad()
    def _of_gradients(self) -> Prints:
        entries, tensors = [], []
        for part in reversed(self._selection.gradients):  # as they are computed
            gradient = self._parameters[part.owner].grad
            assert gradient is not None
            tensors.append(gradient.view(-1)[part.values])
            entries.append(_entry(part.quantity, part.name, tensors[-1]))
        return Prints(tuple(entries), self._sums(tensors))

    @torch.no_grad()
    def _sums(self, tensors: Sequence[Tensor]) -> Tensor:
        if not tensors:
            return torch.empty(0, dtype=torch.int64, device=self._device)
        return self._fingerprint(tensors)


def _units_of_state(model: BasicLlama, optimizer: AdamW) -> Iterator[_Selection]:
    """What may not be divided among slots: a part of a parameter, and all that belongs to it."""
    others = [("weights", name, buffer) for name, buffer in model.named_buffers()]
    others += [("exp_avg", name, scalar) for name, scalar in optimizer.scalars.items()]
    state = [(_entry(quantity, name, tensor), tensor) for quantity, name, tensor in others]
    yield _Selection(state=state, num_bytes=2 * sum(tensor.nbytes for _, tensor in state))
    for number, (name, parameter) in enumerate(model.named_parameters()):
        moments = {kind: of_all[number] for kind, of_all in optimizer.moments.items()}
        tensors = {"weights": parameter.detach()} | moments
        for part, values in _parts(name, parameter):
            views = {kind: tensor.view(-1)[values] for kind, tensor in tensors.items()}
            yield _Selection(
                gradients=[_Part("gradients", part, number, values)],
                state=[(_entry(kind, part, view), view) for kind, view in views.items()],
                num_bytes=_READS * views["weights"].nbytes,
            )


def _parts(name: str, tensor: Tensor) -> Iterator[tuple[str, slice]]:
    num_values = tensor.numel()
    if num_values <= PART_VALUES:
        yield name, slice(None)
        return
    for first in range(0, num_values, PART_VALUES):
        end = min(first + PART_VALUES, num_values)
        yield f"{name}[{first}:{end}]", slice(first, end)


def _entry(quantity: str, name: str, tensor: Tensor) -> Entry:
    return Entry(quantity, name, tensor.numel(), 8 * tensor.element_size())


def _merged(units: Iterable[_Selection]) -> _Selection:
    """In the order of the model, one quantity after the other."""
    merged = _Selection()
    for unit in units:
        merged.gradients += unit.gradients
        merged.state += unit.state
        merged.sites |= unit.sites
        merged.num_bytes += unit.num_bytes
    return merged


def _slots(units: Sequence[_Selection], budget_bytes: float) -> list[_Selection]:
    """Neighbours share a slot, within the budget where one unit does not exceed it."""
    slots: list[list[_Selection]] = [[]]
    for unit in units:
        if slots[-1] and sum(u.num_bytes for u in slots[-1]) + unit.num_bytes > budget_bytes:
            slots.append([])
        slots[-1].append(unit)
    merged = [_merged(slot) for slot in slots]
    for number, selection in enumerate(merged):
        selection.name = str(number)
    return merged
