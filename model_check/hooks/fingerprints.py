"""Which fingerprints a step takes, and when: of weights, gradients and moments, and of what flows
between blocks. The formula is that of utils.fingerprint."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from model_check.forensics.checksums import (
    ChecksumIndex,
    ChecksumKey,
    ChecksumVector,
    index_of,
    index_of_all,
    joined,
)
from model_check.forensics.fingerprint import Fingerprint, Kernel, num_rows, sent
from model_check.forensics.optimizer import Block, Optimizer
from model_check.forensics.shard import first_of, flat, is_shared, own_values
from model_check.utils.fingerprint import BEFORE, NUM_COLUMNS

_FLOPS_PER_BYTE, _OF_CPU = 15_000, 1_500
"""So many of a step's floating point operations pay for one byte that fingerprints read: it takes
1 % of their time. By the data sheet an H100 does 300 in the time of a byte, at half its peak 150; a
core of a CPU about a tenth."""
_EAGER_SLOWDOWN = 10
"""So much longer torch's own operators take (benchmarks/fingerprint_cost.py)."""
PART_VALUES = 1 << 26
"""A larger tensor is taken in parts, so that a slot can hold one of them."""
READS = 7
"""Tensors read for each parameter: its gradient, and its weight and moments before and after the
update."""


def bytes_paid_by(flops: float, kernel: Kernel, device: torch.device) -> float:
    """Returns the bytes that fingerprints may read in a step of so many operations."""
    each = _FLOPS_PER_BYTE if device.type == "cuda" else _OF_CPU
    return flops / each / (_EAGER_SLOWDOWN if kernel.name == "eager" else 1)


@dataclass(frozen=True)
class _Part:
    """The part of a tensor that has one fingerprint."""

    key: ChecksumKey
    owner: int | None = None
    """The number of the parameter to which the weight, moment or gradient belongs; None: a buffer
    or a scalar."""
    first: int = 0
    """Its first value within that parameter."""
    tensor: Tensor = field(default_factory=lambda: torch.empty(0))
    """The values; empty for a gradient, which is another tensor in each step."""


@dataclass(eq=False)
class _Selection:
    """What is fingerprinted in one step."""

    gradients: list[_Part] = field(default_factory=list)
    state: list[_Part] = field(default_factory=list)
    """Tensors of the model and of the optimizer, which stay where they are."""
    sites: set[int] = field(default_factory=set)
    num_bytes: int = 0
    name: str = "all"
    """`all`, or the number of its slot."""

    @cached_property
    def left(self) -> ChecksumIndex:
        """The state that an update leaves."""
        return index_of(tuple(part.key for part in self.state))

    @cached_property
    def before(self) -> ChecksumIndex:
        """The same state before the next update."""
        keys = self.left.keys
        return index_of(tuple(replace(e, quantity=BEFORE + e.quantity) for e in keys))


class _Piece(NamedTuple):
    """What of a selection lies in one block of an update."""

    gradients: list[tuple[int, slice]]
    """Each as the number of a part of the block, and values of it."""
    tensors: list[Tensor]
    """Views of the state."""
    rows: list[int]
    """The first row of each gradient, then of each tensor, in its part."""


class _BlockSums:
    """The fingerprints of the gradients of one selection and of the state of another, block by
    block: of what an update reads, or of what it leaves."""

    def __init__(
        self,
        index: ChecksumIndex,
        parts: Sequence[_Part],
        blocks: Sequence[Block],
        device: torch.device,
        fingerprint: Fingerprint,
    ) -> None:
        """`index` names the parts, gradients first."""
        self._index, self._fingerprint = index, fingerprint
        numbers = [number for number, part in enumerate(parts) if part.owner is None]
        rest = [parts[number].tensor for number in numbers]
        self._pieces: dict[int | None, _Piece] = {}
        """By the number of the block; None: buffers and scalars."""
        if rest:
            self._pieces[None] = _Piece([], rest, [0] * len(rest))
        for block_number, block in enumerate(blocks):
            piece, own_numbers = _within(block, parts)
            if own_numbers:
                self._pieces[block_number] = piece
                numbers += own_numbers
        self._numbers = sent(torch.tensor(numbers, dtype=torch.int64), device)
        """int64: the part to which each sum belongs, the rest first, then block by block."""
        self._sums: list[Tensor] = []

    def begin(self) -> "_BlockSums":
        self._sums = []
        return self

    @torch.no_grad()
    def at(self, number: int | None, gradients: Sequence[Tensor] = ()) -> None:
        """Take those of the block of that number, whose gradients these are; None: of buffers and
        scalars, before all blocks or after them."""
        if (piece := self._pieces.get(number)) is not None:
            own = [flat(gradients[which])[values] for which, values in piece.gradients]
            place = 0 if number is None else len(self._sums)
            self._sums.insert(place, self._fingerprint(own + piece.tensors, piece.rows))

    def take(self) -> ChecksumVector:
        """Returns the vector, when the rest and all blocks were looked at."""
        sums = torch.cat(self._sums) if self._sums else self._numbers[:0]
        values = sums.new_zeros(len(self._index.keys)).index_add_(0, self._numbers, sums)
        return ChecksumVector(self._index, values)


def _within(block: Block, parts: Sequence[_Part]) -> tuple[_Piece, list[int]]:
    """Returns what of the parts lies in the block, and the numbers of these parts."""
    piece, numbers = _Piece([], [], []), []
    own_parts = {own.owner: (which, own) for which, own in enumerate(block.parts)}
    for number, part in enumerate(parts):
        if part.owner not in own_parts:
            continue
        which, own = own_parts[part.owner]
        first, end = max(part.first, own.first), min(part.first + part.key.num_values, own.end)
        if first >= end:
            continue
        numbers.append(number)
        piece.rows.append((first - part.first) // NUM_COLUMNS)
        if part.key.quantity == "gradients":
            piece.gradients.append((which, slice(first - own.first, end - own.first)))
        else:
            piece.tensors.append(part.tensor[first - part.first : end - part.first])
    return piece, numbers


class FlowSums:
    """The fingerprints of what flows in a step, tensor by tensor."""

    def __init__(self, fingerprint: Fingerprint, device: torch.device) -> None:
        self._fingerprint, self._device = fingerprint, device
        self._sums: defaultdict[tuple[str, str], list[Tensor]] = defaultdict(list)
        """(quantity, name) -> int64 [1] of each micro-batch, in the order of computation."""
        self._sizes: dict[str, tuple[int, int]] = {}
        """Name -> number of values in a micro-batch, and bits of a value."""

    def begin(self) -> None:
        self._sums, self._sizes = defaultdict(list), {}

    def see(self, name: str, x: Tensor) -> None:
        """Takes what a module hands on, and its gradient in turn."""
        first_row = len(self._sums["forward", name]) * num_rows(x)
        self.take("forward", name, x, first_row)
        if x.requires_grad:
            take = partial(self.take, "backward", name, first_row=first_row)
            x.register_hook(take)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def take(self, quantity: str, name: str, x: Tensor, first_row: int | None = None) -> None:
        """`first_row`: of a later micro-batch; None: behind those of that name."""
        of_name = self._sums[quantity, name]
        first_row = len(of_name) * num_rows(x) if first_row is None else first_row
        of_name.append(self._fingerprint([x], [first_row]))
        self._sizes[name] = x.numel(), 8 * x.element_size()

    def vector(self) -> ChecksumVector:
        keys = tuple(self._key(*place) for place in self._sums)
        if not keys:
            return ChecksumVector(
                index_of(keys), torch.empty(0, dtype=torch.int64, device=self._device)
            )
        sums = [torch.cat(of_name) for of_name in self._sums.values()]
        if len({len(of_name) for of_name in sums}) > 1:  # a module was not called each time
            sums = [of_name.sum().view(1) for of_name in sums]
        return ChecksumVector(index_of(keys), torch.stack(sums).sum(1))

    def _key(self, quantity: str, name: str) -> ChecksumKey:
        """Each micro-batch begins a row. A large one is not searched for a bit: that takes long."""
        num_values, num_bits = self._sizes[name]
        rows = -(-num_values // NUM_COLUMNS) * len(self._sums[quantity, name])
        num_bits = num_bits if rows * NUM_COLUMNS <= PART_VALUES else 0
        return ChecksumKey(quantity, name, rows * NUM_COLUMNS, num_bits)


class Fingerprints:
    """Looks at a step, and at its update block by block: on a CPU a block's values are in the cache
    meanwhile. Nothing here waits for the device."""

    def __init__(
        self,
        model: nn.Module | None,
        optimizer: Optimizer,
        fingerprint: Fingerprint,
        *,
        sites: Sequence[str],
        last_step: int = -1,
        budget_bytes: float | None = None,
        site_bytes: int = 0,
        shard: str = "",
    ) -> None:
        """`model`: whose buffers are taken, too; None: none are. `sites`: the modules whose outputs
        `see` is called with, in turn. `budget_bytes`: what one step may read; None: all, 0:
        nothing. The first step and `last_step` take all, whatever they read. `site_bytes`: what
        flows at one site in a step. `shard`: names the one of the model that this rank holds;
        others hold other tensors."""
        self._shard = shard
        self._fingerprint = fingerprint
        self._device = optimizer.kept(0)["weights"].device
        self._sites = sites
        self._flow = FlowSums(fingerprint, self._device)
        self._model, self._optimizer = model, optimizer
        self._budget_bytes, self._site_bytes = budget_bytes, site_bytes
        self._last_step = last_step
        self._step: int | None = None
        self._held: _Selection | None = None
        """The state of which the step before left fingerprints."""
        self._left: _Selection | None = None
        """The state of which this step left some; one that overflows in float16 does so twice."""
        self._lay_out()
        self._selection, self._next_site = self._all, 0
        self._before, self._after = self._sums_of_update()

    def _lay_out(self) -> None:
        units = [*_units_of_state(self._model, self._optimizer)]
        sites = range(len(self._sites))
        units += [_Selection(sites={n}, num_bytes=2 * self._site_bytes) for n in sites]
        self._blocks = self._optimizer.blocks
        budget_bytes = self._budget_bytes
        self._all = _merged(units) if budget_bytes != 0 else _Selection()
        self._slots = _slots(units, budget_bytes) if budget_bytes else [self._all]
        self._named = self._optimizer.named
        names = list(self._named) if self.are_taken else []
        self._norms = index_of(tuple(ChecksumKey("grad_norms", name, 1, 0) for name in names))
        self._made: dict[tuple[_Selection | None, _Selection], _BlockSums] = {}

    def renew(self) -> None:
        """The state is other tensors than before: with the first step it appears. What was taken of
        this step stays."""
        self._lay_out()
        self._selection = self._all
        self._held = self._left = None if self._held is None else self._all
        self._after = self._block_sums(None, self._selection)

    @property
    def are_taken(self) -> bool:
        return bool(self._all.state)

    @property
    def see_all(self) -> bool:
        """Whether each step takes all."""
        return self.are_taken and self.num_slots == 1

    @property
    def num_slots(self) -> int:
        """The number of steps in which everything is taken once."""
        return len(self._slots)

    def begin(self, step: int) -> None:
        """The forward pass of this step begins."""
        if step != self._step:
            self._step, self._held = step, self._left
        takes_all = self._held is None or step == self._last_step
        self._selection = self._all if takes_all else self._slots[step % len(self._slots)]
        self._next_site = 0
        self._flow.begin()

    def see(self, x_BTE: Tensor) -> None:
        """A module hands `x_BTE` to the next one: called for each site in turn."""
        site, self._next_site = self._next_site, self._next_site + 1
        if site in self._selection.sites:
            self._flow.see(self._sites[site], x_BTE)

    def end_micro_batch(self) -> None:
        self._next_site = 0

    def begin_update(self) -> None:
        """The gradients are whole. What belongs to no parameter is looked at now."""
        self._before, self._after = self._sums_of_update()
        self._before.at(None)

    def before(self, number: int, gradients: Sequence[Tensor]) -> None:
        """Takes the fingerprints of block `number` before its update. `gradients`: in the shapes of
        Block.gradients."""
        self._before.at(number, gradients)

    def after(self, number: int) -> None:
        self._after.at(number)

    def end_update(self, grad_norms: Tensor) -> ChecksumVector:
        """Returns the fingerprints of the step: of both passes, of the state before the update, of
        each gradient's norm, which is there in any case, and of the state that the update left.
        `grad_norms`: float32 [parameters]."""
        self._after.at(None)
        self._left = self._selection
        before, after = self._before.take(), self._after.take()
        norms = grad_norms.detach().view(torch.int32).long()[: len(self._norms.keys)]
        norms = norms.to(self._device)
        vector = joined(self._flow.vector(), before, ChecksumVector(self._norms, norms), after)
        held = self._held or self._all
        taken = f"{held.name}, {self._left.name} of {self.num_slots}" if self.are_taken else ""
        if taken and self._shard:
            taken = f"shard {self._shard}: {taken}"
        return replace(vector, taken=taken)

    def of_passes(self) -> ChecksumVector:
        """Returns the fingerprints of both passes and of the state, where no update follows."""
        self.begin_update()
        for number, block in enumerate(self._blocks):
            self.before(number, block.gradients())
        return joined(self._flow.vector(), self._before.take())

    @torch.no_grad()
    def of_audit(self) -> ChecksumVector:
        """Returns the fingerprints of all gradients, in the order of computation."""
        views = {
            part: owner.grad.view(-1)[values]
            for name, owner in reversed(self._named.items())
            if owner.grad is not None
            for part, values in _parts(name, owner)
        }
        keys = tuple(_key("audit", part, view) for part, view in views.items())
        return ChecksumVector(index_of(keys), self._sums(list(views.values())))

    @torch.no_grad()
    def of_state_now(self) -> ChecksumVector:
        """Returns the fingerprints of the state as it is now: of those tensors of which the last
        update left some, and before the first one of all."""
        held = self._left or self._all
        return ChecksumVector(held.before, self._sums([part.tensor for part in held.state]))

    def _sums_of_update(self) -> tuple[_BlockSums, _BlockSums]:
        """Returns those before the update, and those after it."""
        before = self._block_sums(self._selection, self._held or self._all)
        return before, self._block_sums(None, self._selection)

    def _block_sums(self, gradients_of: _Selection | None, state_of: _Selection) -> _BlockSums:
        """Gradients, in the order in which they are computed, and the state before the update;
        without gradients (None): the state that the update leaves."""
        key = gradients_of, state_of
        if key not in self._made:
            gradients = [] if gradients_of is None else [*reversed(gradients_of.gradients)]
            index = state_of.left
            if gradients_of is not None:
                of_gradients = index_of(tuple(part.key for part in gradients))
                index = index_of_all(of_gradients, state_of.before)
            parts = [*gradients, *state_of.state]
            made = _BlockSums(index, parts, self._blocks, self._device, self._fingerprint)
            self._made[key] = made
        return self._made[key].begin()

    def _sums(self, tensors: Sequence[Tensor]) -> Tensor:
        if not tensors:
            return torch.empty(0, dtype=torch.int64, device=self._device)
        return self._fingerprint(tensors)


def _units_of_state(model: nn.Module | None, optimizer: Optimizer) -> Iterator[_Selection]:
    """Yields what may not be divided among slots: a part of a parameter, and all that belongs to
    it."""
    # Weights may be offloaded; a buffer never is.
    device = optimizer.kept(0)["weights"].device
    of_model = () if model is None else model.named_buffers()
    others = [("weights", n, buffer) for n, buffer in of_model if buffer.device == device]
    others += optimizer.others()
    state = [_Part(_key_of_other(o, optimizer), tensor=o[2]) for o in others]
    yield _Selection(state=state, num_bytes=2 * sum(part.tensor.nbytes for part in state))
    for number, (name, parameter) in enumerate(optimizer.named.items()):
        tensors = optimizer.kept(number)
        for part, values in _parts(name, parameter):
            views = {kind: flat(tensor)[values] for kind, tensor in tensors.items()}
            gradient = _key("gradients", part, views["weights"])
            yield _Selection(
                gradients=[_Part(gradient, number, values.start)],
                state=[
                    _Part(_key(kind, part, view), number, values.start, view)
                    for kind, view in views.items()
                ],
                num_bytes=READS * views["weights"].nbytes,
            )


def _parts(name: str, tensor: Tensor) -> Iterator[tuple[str, slice]]:
    """Yields the name and the values of each part of what lies here; a shard is a part, too."""
    num_values, place = own_values(tensor).numel(), first_of(tensor)
    is_whole = num_values <= PART_VALUES and not is_shared(tensor)
    for first in range(0, num_values, PART_VALUES):
        end = min(first + PART_VALUES, num_values)
        yield name if is_whole else f"{name}[{place + first}:{place + end}]", slice(first, end)


def _key(quantity: str, name: str, tensor: Tensor) -> ChecksumKey:
    return ChecksumKey(quantity, name, tensor.numel(), 8 * tensor.element_size())


def _key_of_other(other: tuple[str, str, Tensor], optimizer: Optimizer) -> ChecksumKey:
    """What has the name of a parameter and not its shape is not searched for a bit."""
    key = _key(*other)
    return replace(key, num_bits=0) if key.tensor in optimizer.named else key


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
