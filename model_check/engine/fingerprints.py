"""Which fingerprints a step takes, and when: of weights, gradients and moments, and of what flows
between blocks. The formula is that of utils.fingerprint."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from model_check.engine.optim import AdamW, Block
from model_check.forensics.fingerprint import Fingerprint, as_int64, num_rows, sent
from model_check.forensics.shard import first_of, is_shared, own_values
from model_check.model import Llama
from model_check.utils.fingerprint import BEFORE, NUM_COLUMNS, weight

PART_VALUES = 1 << 26
"""A larger tensor is taken in parts, so that a slot can hold one of them."""
_READS = 7
"""Of each parameter: its gradient, and its weight and moments before and after the update."""
_NUM_LAYOUTS = 1024
"""A run needs a few for each slot."""


@dataclass(frozen=True)
class Entry:
    """One fingerprint."""

    quantity: str
    tensor: str
    """A parameter, a buffer, or the module whose output flows; `NAME[FIRST:END]` is a part."""
    num_values: int
    num_bits: int
    """Of each value; 0: no sum, and nothing tells which value differs."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Of what the numbers of a vector are the fingerprints. Equal to itself alone: many steps have
    the same one, and what follows from it is computed once."""

    entries: tuple[Entry, ...]

    def roll_ups(self, values: Tensor) -> dict[str, str]:
        """One number for each quantity, 16 hex digits: the sum, modulo 2^64, of its fingerprints
        times weights 0, 1, ... of splitmix64. `values`: int64 [entries], on the host."""
        quantities, numbers, weights = self._rolling
        sums = torch.zeros(len(quantities), dtype=torch.int64)
        sums.index_add_(0, numbers, values * weights)
        rolled = (f"{value % (1 << 64):016x}" for value in sums.tolist())
        return dict(zip(quantities, rolled, strict=True))

    @cached_property
    def _rolling(self) -> tuple[list[str], Tensor, Tensor]:
        """The quantities, the number of each entry's, its weight among those of the same one."""
        members: dict[str, list[int]] = {}
        for number, entry in enumerate(self.entries):
            members.setdefault(entry.quantity, []).append(number)
        numbers = torch.empty(len(self.entries), dtype=torch.int64)
        weights = torch.empty_like(numbers)
        for number, own in enumerate(members.values()):
            numbers[own] = number
            weights[own] = as_int64([weight(n) for n in range(len(own))])
        return [*members], numbers, weights


@dataclass(frozen=True)
class Prints:
    """Fingerprints of a step."""

    layout: Layout
    values: Tensor
    """int64 [entries]"""
    taken: str = ""
    """Which state: before the update, and after it; `all`, or the number of a slot."""


@dataclass(frozen=True)
class _Part:
    """Of a tensor: what has one fingerprint."""

    entry: Entry
    owner: int | None = None
    """The number of the parameter that it is of, or is a moment or the gradient of."""
    first: int = 0
    """Value of that parameter."""
    tensor: Tensor = field(default_factory=lambda: torch.empty(0))
    """Of the state; empty for a gradient, which is another one in each step."""


@dataclass(eq=False)
class _Selection:
    """What a step takes."""

    gradients: list[_Part] = field(default_factory=list)
    state: list[_Part] = field(default_factory=list)
    """Of the model and of the optimizer: tensors that stay where they are."""
    sites: set[int] = field(default_factory=set)
    num_bytes: int = 0
    name: str = "all"
    """Or the number of its slot."""

    @cached_property
    def left(self) -> Layout:
        """By an update."""
        return Layout(tuple(part.entry for part in self.state))

    @cached_property
    def before(self) -> Layout:
        """The next one."""
        entries = self.left.entries
        return Layout(tuple(replace(e, quantity=BEFORE + e.quantity) for e in entries))


class _Piece(NamedTuple):
    """What of a cut lies in one block of an update."""

    gradients: list[tuple[int, slice]]
    """The number of a part of the block, and values of it."""
    tensors: list[Tensor]
    """Of the state."""
    rows: list[int]
    """The first row of each in its part: of the gradients, of the tensors."""


class _Cut:
    """The gradients of one selection and the state of another, block by block."""

    def __init__(
        self,
        layout: Layout,
        parts: Sequence[_Part],
        blocks: Sequence[Block],
        device: torch.device,
    ) -> None:
        """`layout`: of the parts, gradients first."""
        self.layout = layout
        numbers = [number for number, part in enumerate(parts) if part.owner is None]
        rest = [parts[number].tensor for number in numbers]
        self.pieces: dict[int | None, _Piece] = {}
        """By the numbers of their blocks; None: what belongs to no parameter."""
        if rest:
            self.pieces[None] = _Piece([], rest, [0] * len(rest))
        for block_number, block in enumerate(blocks):
            piece, own_numbers = _within(block, parts)
            if own_numbers:
                self.pieces[block_number] = piece
                numbers += own_numbers
        self.numbers = sent(torch.tensor(numbers, dtype=torch.int64), device)
        """Of the parts: whose sum each is a part of, the rest first, then block by block."""


def _within(block: Block, parts: Sequence[_Part]) -> tuple[_Piece, list[int]]:
    """What of the parts lies in the block, and their numbers."""
    piece, numbers = _Piece([], [], []), []
    own_parts = {own.owner: (which, own) for which, own in enumerate(block.parts)}
    for number, part in enumerate(parts):
        if part.owner not in own_parts:
            continue
        which, own = own_parts[part.owner]
        first, end = max(part.first, own.first), min(part.first + part.entry.num_values, own.end)
        if first >= end:
            continue
        numbers.append(number)
        piece.rows.append((first - part.first) // NUM_COLUMNS)
        if part.entry.quantity == "gradients":
            piece.gradients.append((which, slice(first - own.first, end - own.first)))
        else:
            piece.tensors.append(part.tensor[first - part.first : end - part.first])
    return piece, numbers


class _Look:
    """Takes the fingerprints of a cut while an update passes over it."""

    def __init__(self, cut: _Cut, fingerprint: Fingerprint) -> None:
        self._cut = cut
        self._fingerprint = fingerprint
        self._sums: list[Tensor] = []

    @torch.no_grad()
    def at(self, number: int | None, gradients: Sequence[Tensor] = ()) -> None:
        """Take those of the block of that number, whose gradients these are; None: of what belongs
        to no parameter, before all blocks or after them."""
        if (piece := self._cut.pieces.get(number)) is not None:
            own = [gradients[which].view(-1)[values] for which, values in piece.gradients]
            place = 0 if number is None else len(self._sums)
            self._sums.insert(place, self._fingerprint(own + piece.tensors, piece.rows))

    def found(self) -> Prints:
        """The rest, and all blocks, were looked at."""
        numbers = self._cut.numbers
        sums = torch.cat(self._sums) if self._sums else numbers[:0]
        values = sums.new_zeros(len(self._cut.layout.entries)).index_add_(0, numbers, sums)
        return Prints(self._cut.layout, values)


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
    """Looks at a step, and at its update block by block: on a CPU a block's values are in the cache
    meanwhile. Nothing here waits for the device."""

    def __init__(
        self,
        model: Llama,
        optimizer: AdamW,
        fingerprint: Fingerprint,
        *,
        last_step: int,
        budget_bytes: float | None = None,
        site_bytes: int = 0,
        sees_sites: bool = True,
        shard: str = "",
    ) -> None:
        """`budget_bytes`: what one step may read; None: all, 0: nothing. The first step and
        `last_step` take all whatever they read. `site_bytes`: what flows at one site in a step.
        `sees_sites`: whether that is taken: ranks read different batches. `shard`: which one of the
        model this rank holds; those of others are other tensors."""
        self._shard = shard
        self._blocks = optimizer.blocks
        self._fingerprint = fingerprint
        self._device = optimizer.weights[0].device
        sites = ["tok_embed", *(f"layers.{n}" for n in range(len(model.layers))), "norm"]
        self._sites = sites if sees_sites else []
        units = [*_units_of_state(model, optimizer)]
        units += [_Selection(sites={n}, num_bytes=2 * site_bytes) for n in range(len(self._sites))]
        self._all = _merged(units) if budget_bytes != 0 else _Selection()
        self._slots = _slots(units, budget_bytes) if budget_bytes else [self._all]
        names = list(optimizer.named) if self.are_taken else []
        self._norms = Layout(tuple(Entry("grad_norms", name, 1, 0) for name in names))
        self._named = optimizer.named
        self._last_step = last_step
        self._step: int | None = None
        self._held: _Selection | None = None
        """What the step before left a fingerprint of."""
        self._left: _Selection | None = None
        """What this one did; a step that overflows in float16 is trained again."""
        self._selection, self._flow = self._all, _Flow()
        self._cuts: dict[tuple[_Selection | None, _Selection], _Cut] = {}
        self._before, self._after = self._looks()

    @property
    def are_taken(self) -> bool:
        return bool(self._all.state)

    @property
    def see_all(self) -> bool:
        """Each step."""
        return self.are_taken and self.num_slots == 1

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

    def begin_update(self) -> None:
        """The gradients are whole. What belongs to no parameter is looked at now."""
        self._before, self._after = self._looks()
        self._before.at(None)

    def before(self, number: int, gradients: Sequence[Tensor]) -> None:
        """The update of a block begins."""
        self._before.at(number, gradients)

    def after(self, number: int) -> None:
        self._after.at(number)

    def end_update(self, grad_norms: Tensor) -> Prints:
        """All of the step: of both passes, of the state before the update, of each gradient's norm,
        which is there in any case, and of what the update left."""
        self._after.at(None)
        self._left = self._selection
        before, after = self._before.found(), self._after.found()
        norms = grad_norms.detach().view(torch.int32).long()[: len(self._norms.entries)]
        norms = norms.to(self._device)
        joined = _joined(self._of_flow(), before, Prints(self._norms, norms), after)
        held = self._held or self._all
        taken = f"{held.name}, {self._left.name} of {self.num_slots}" if self.are_taken else ""
        if taken and self._shard:
            taken = f"shard {self._shard}: {taken}"
        return replace(joined, taken=taken)

    def of_rehearsal(self) -> Prints:
        """Of both passes and of the state, where no update follows."""
        self.begin_update()
        for number, block in enumerate(self._blocks):
            self.before(number, block.gradients())
        return _joined(self._of_flow(), self._before.found())

    @torch.no_grad()
    def of_audit(self) -> Prints:
        """Of the gradients that are there, all of them, in the order of computation."""
        views = {
            part: owner.grad.view(-1)[values]
            for name, owner in reversed(self._named.items())
            if owner.grad is not None
            for part, values in _parts(name, owner)
        }
        entries = tuple(_entry("audit", part, view) for part, view in views.items())
        return Prints(_layout(entries), self._sums(list(views.values())))

    @torch.no_grad()
    def of_state_now(self) -> Prints:
        """What the last update left a fingerprint of is taken again; at first, all."""
        held = self._left or self._all
        return Prints(held.before, self._sums([part.tensor for part in held.state]))

    def _looks(self) -> tuple[_Look, _Look]:
        """Before the update, and after it."""
        before = self._cut(self._selection, self._held or self._all)
        after = self._cut(None, self._selection)
        return _Look(before, self._fingerprint), _Look(after, self._fingerprint)

    def _cut(self, gradients_of: _Selection | None, state_of: _Selection) -> _Cut:
        """Gradients in the order in which they are computed, and the state before the update; None:
        the state that it leaves."""
        key = gradients_of, state_of
        if key not in self._cuts:
            gradients = [] if gradients_of is None else [*reversed(gradients_of.gradients)]
            layout = state_of.left
            if gradients_of is not None:
                of_gradients = Layout(tuple(part.entry for part in gradients))
                layout = _joined_layout(of_gradients, state_of.before)
            parts = [*gradients, *state_of.state]
            self._cuts[key] = _Cut(layout, parts, self._blocks, self._device)
        return self._cuts[key]

    @torch.no_grad()
    def _take(self, quantity: str, site: int, first_row: int, x_BTE: Tensor) -> None:
        self._flow.sums[quantity, site].append(self._fingerprint([x_BTE], [first_row]))

    def _of_flow(self) -> Prints:
        entries = tuple(self._entry_of_site(*place) for place in self._flow.sums)
        sums = [torch.cat(of_site) for of_site in self._flow.sums.values()]
        return Prints(_layout(entries), torch.stack(sums).sum(1) if sums else self._sums([]))

    def _entry_of_site(self, quantity: str, site: int) -> Entry:
        """Each micro-batch begins a row. A large one is not searched for a bit: that takes long."""
        num_values, num_bits = self._flow.sizes[site]
        rows = -(-num_values // NUM_COLUMNS) * self._flow.micro_batch
        num_bits = num_bits if rows * NUM_COLUMNS <= PART_VALUES else 0
        return Entry(quantity, self._sites[site], rows * NUM_COLUMNS, num_bits)

    def _sums(self, tensors: Sequence[Tensor]) -> Tensor:
        if not tensors:
            return torch.empty(0, dtype=torch.int64, device=self._device)
        return self._fingerprint(tensors)


def with_audit(audit: Prints, prints: Prints) -> Prints:
    """What the step took, and what was computed before it."""
    return replace(_joined(audit, prints), taken=prints.taken)


def _joined(*prints: Prints) -> Prints:
    layout = _joined_layout(*(own.layout for own in prints))
    return Prints(layout, torch.cat([own.values for own in prints]))


@lru_cache(_NUM_LAYOUTS)
def _joined_layout(*layouts: Layout) -> Layout:
    return Layout(tuple(entry for layout in layouts for entry in layout.entries))


@lru_cache(_NUM_LAYOUTS)
def _layout(entries: tuple[Entry, ...]) -> Layout:
    return Layout(entries)


def _units_of_state(model: Llama, optimizer: AdamW) -> Iterator[_Selection]:
    """What may not be divided among slots: a part of a parameter, and all that belongs to it."""
    # Weights may be offloaded; a buffer never is.
    device = optimizer.weights[0].device
    buffers = [(n, buffer) for n, buffer in model.named_buffers() if buffer.device == device]
    others = [("weights", name, buffer) for name, buffer in buffers]
    others += [("exp_avg", name, scalar) for name, scalar in optimizer.scalars.items()]
    state = [_Part(_entry(kind, name, tensor), tensor=tensor) for kind, name, tensor in others]
    yield _Selection(state=state, num_bytes=2 * sum(part.tensor.nbytes for part in state))
    for number, (name, parameter) in enumerate(optimizer.named.items()):
        moments = {kind: of_all[number] for kind, of_all in optimizer.moments.items()}
        tensors = {"weights": optimizer.weights[number]} | moments
        for part, values in _parts(name, parameter):
            views = {kind: tensor.view(-1)[values] for kind, tensor in tensors.items()}
            gradient = _entry("gradients", part, views["weights"])
            yield _Selection(
                gradients=[_Part(gradient, number, values.start)],
                state=[
                    _Part(_entry(kind, part, view), number, values.start, view)
                    for kind, view in views.items()
                ],
                num_bytes=_READS * views["weights"].nbytes,
            )


def _parts(name: str, tensor: Tensor) -> Iterator[tuple[str, slice]]:
    """Of its values that lie here: a shard is a part, too."""
    num_values, place = own_values(tensor).numel(), first_of(tensor)
    is_whole = num_values <= PART_VALUES and not is_shared(tensor)
    for first in range(0, num_values, PART_VALUES):
        end = min(first + PART_VALUES, num_values)
        yield name if is_whole else f"{name}[{place + first}:{place + end}]", slice(first, end)


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
