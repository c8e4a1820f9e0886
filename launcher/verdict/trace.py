"""What a worker told of all its steps, in bounded size, so that runs of many machines can be
compared by their reports alone: a chain of hashes over the bits of its steps, with some of its
links, and how long blocks of steps kept its device busy. Pure over events.

Two chains that are equal after n steps were equal in each of them. Where they differ, the events
of the runs tell the step, else two links tell between which steps it is.
"""

from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from statistics import median_high
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct, field

from launcher.verdict.slow import IN_A_ROW, WARM_UP
from model_check.events import Evaluation, Event, Step
from model_check.utils.fingerprint import BEFORE, is_compared

_MAX_LINKS = 32
_MAX_BLOCKS = 32
_BYTES = 8
Count = Annotated[int, Meta(ge=0, le=2**53)]
Link = Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
Milliseconds = Annotated[float, Meta(ge=0, le=1e12)]


class Block(NamedTuple):
    """Steps one after the other: how long they kept the device busy, milliseconds."""

    least: float
    """The quickest of them: a block is slow when all its steps are."""
    middle: float
    """Their median; of a block that was made of two, the mean of theirs."""


class Trace(Struct, frozen=True, kw_only=True):
    """All steps of one worker as a few numbers."""

    steps: Count
    """That it told."""
    began: Link | None = None
    """Of the state before its first update: weights, moments. null: it told none."""
    bits: Link
    """The chain after the last of them."""
    every: Annotated[int, Meta(ge=1, le=2**53)]
    links: Annotated[list[Link], Meta(max_length=_MAX_LINKS)]
    """The chain after each `every` steps: number i after (i + 1) * every."""
    evaluations: Link | None = None
    """Of the validation losses that it told behind its last step; null: there were none."""
    block: Annotated[int, Meta(ge=1, le=2**53)] = IN_A_ROW
    """Steps of a block."""
    least_ms: Annotated[list[Milliseconds], Meta(max_length=_MAX_BLOCKS)] = []
    """Of each block of steps behind the warm-up, but for a rest that fills none: how long its
    quickest step kept the device busy. Empty: not measured."""
    middle_ms: Annotated[list[Milliseconds], Meta(max_length=_MAX_BLOCKS)] = []
    """The median of its steps; of a block that was made of two, the mean of theirs."""

    def after(self, steps: int) -> str | None:
        """The chain after so many steps; None: this link was not kept."""
        if steps == self.steps:
            return self.bits
        at, rest = divmod(steps, self.every)
        return self.links[at - 1] if not rest and 0 < at <= len(self.links) else None

    def kept(self) -> Iterator[int]:
        """The numbers of steps after which the chain is known, in their order."""
        yield from ((at + 1) * self.every for at in range(len(self.links)))
        if self.steps > len(self.links) * self.every:
            yield self.steps

    def busy_by(self, block: int) -> list[Block]:
        """Its blocks, made as long as those of a longer run."""
        pairs = zip(self.least_ms, self.middle_ms, strict=False)
        blocks, length = [Block(*pair) for pair in pairs], self.block
        while length < block:
            blocks, length = _halved(blocks), length * 2
        return blocks


class Tracer(Struct):
    """Makes the trace of one worker, event by event."""

    num_steps: int = 0
    began: str | None = None
    bits: str = "0" * 2 * _BYTES
    _every: int = 1
    _links: list[str] = field(default_factory=list)
    _evaluations: str | None = None
    _block: int = IN_A_ROW
    _blocks: list[Block] = field(default_factory=list)
    _open: list[float] = field(default_factory=list)
    """Milliseconds of the steps of the next block: no more than IN_A_ROW of them."""
    _parts: list[Block] = field(default_factory=list)
    """Of a longer block, what is known of it so far."""

    def record(self, event: Event) -> None:
        match event:
            case Step():
                self._step(event)
            case Evaluation():
                self._evaluations = chained(self._evaluations or "", event)

    @property
    def trace(self) -> Trace | None:
        """None: it told no step."""
        if not self.num_steps:
            return None
        return Trace(
            steps=self.num_steps,
            began=self.began,
            bits=self.bits,
            every=self._every,
            links=self._links,
            evaluations=self._evaluations,
            block=self._block,
            least_ms=[block.least for block in self._blocks],
            middle_ms=[block.middle for block in self._blocks],
        )

    def _step(self, step: Step) -> None:
        before, self._evaluations = self.bits + (self._evaluations or ""), None
        if not self.num_steps:
            self.began = _began(step)
        self.bits = chained(before, step)
        self.num_steps += 1
        if self.num_steps % self._every == 0:
            self._links.append(self.bits)
        if len(self._links) > _MAX_LINKS:
            self._links, self._every = self._links[1::2], self._every * 2
        if step.busy_ms is not None and self.num_steps > WARM_UP:
            self._take(step.busy_ms)

    def _take(self, busy_ms: float) -> None:
        self._open.append(busy_ms)
        if len(self._open) == IN_A_ROW:
            least, middle = min(self._open), median_high(self._open)
            self._parts.append(Block(round(least, 3), round(middle, 3)))
            self._open = []
        if len(self._parts) * IN_A_ROW == self._block:
            self._blocks.append(_one(self._parts))
            self._parts = []
        if len(self._blocks) > _MAX_BLOCKS:
            # An odd one is left over: it begins the next block.
            self._parts = [self._blocks[-1]] * (self._block // IN_A_ROW)
            self._blocks, self._block = _halved(self._blocks), self._block * 2


def chained(before: str, event: Step | Evaluation) -> str:
    """The next link of a chain: of what is compared of an event, and of all before it."""
    if isinstance(event, Step):
        prints = _joined({q: fp for q, fp in event.fp.items() if is_compared(q)})
        told = f"{before} {event.step} {event.loss} {event.grad_norm} {event.taken} {prints}"
    else:
        told = f"{before} {event.step} {event.split} {event.loss}"
    return _hash(told)


def trace_of(events: Iterable[Event]) -> Trace | None:
    """Of a run whose report has none: an older version made it."""
    tracer = Tracer()
    for event in events:
        tracer.record(event)
    return tracer.trace


def _began(first: Step) -> str | None:
    before = {name: print_ for name, print_ in first.fp.items() if name.startswith(BEFORE)}
    return _hash(_joined(before)) if before else None


def _joined(prints: Mapping[str, object]) -> str:
    return ",".join(f"{name}={prints[name]}" for name in sorted(prints))


def _hash(told: str) -> str:
    return blake2b(told.encode(errors="backslashreplace"), digest_size=_BYTES).hexdigest()


def _one(parts: list[Block]) -> Block:
    middle = sum(part.middle for part in parts) / len(parts)
    return Block(min(part.least for part in parts), round(middle, 3))


def _halved(blocks: list[Block]) -> list[Block]:
    """Each two neighbours as one; a last one without neighbour is left out."""
    return [_one(list(pair)) for pair in zip(blocks[::2], blocks[1::2], strict=False)]
