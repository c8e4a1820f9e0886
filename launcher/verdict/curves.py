"""How a run went, in bounded memory: what a worker told of each step, and where its time went."""

import math
from collections.abc import Iterable, Iterator

from msgspec import Struct, field

from model_check.events import Done, Event, Metrics, NonFinite, Phase, Step

MAX_BUCKETS = 512
MAX_SPANS = 256

Extent = tuple[float, float]
"""The lowest and the highest value of a bucket: no spike is lost."""


class Series(Struct):
    """Values by a whole number (a step, or a time in milliseconds), thinned where they are too
    many: each bucket keeps the lowest and the highest of its values."""

    width: int = 1
    """Of a bucket: bucket b holds b * width to (b + 1) * width - 1. A power of 2, so the buckets of
    two series fit into each other."""
    buckets: dict[int, Extent] = field(default_factory=dict)

    def add(self, x: int, value: float) -> None:
        """A value that is not finite is left out."""
        if not math.isfinite(value):
            return
        bucket = x // self.width
        low, high = self.buckets.get(bucket, (value, value))
        self.buckets[bucket] = (min(low, value), max(high, value))
        if len(self.buckets) > MAX_BUCKETS:
            self._coarsen()

    def thinned(self, num: int) -> "Series":
        """With `num` buckets or fewer."""
        series = Series(self.width, dict(self.buckets))
        while len(series.buckets) > max(1, num):
            series._coarsen()
        return series

    def is_like(self, other: "Series") -> bool:
        """Whether both hold the same values where both have some."""
        width = max(self.width, other.width)
        mine, others = self._of_width(width), other._of_width(width)
        if not mine or not others:
            return mine == others
        first, last = max(min(mine), min(others)), min(max(mine), max(others))
        # One that went on has more values in the last bucket of the other.
        stop = last + (width == 1)
        return all(mine.get(at) == others.get(at) for at in range(first, stop))

    def points(self) -> Iterator[tuple[float, float, float]]:
        """(x of the middle of a bucket, lowest, highest)"""
        for bucket, (low, high) in self.buckets.items():
            yield (bucket + 0.5) * self.width - 0.5, low, high

    def _of_width(self, width: int) -> dict[int, Extent]:
        series = Series(self.width, dict(self.buckets))
        while series.width < width:
            series._coarsen()
        return series.buckets

    def _coarsen(self) -> None:
        self.width *= 2
        coarse: dict[int, Extent] = {}
        for bucket, (low, high) in self.buckets.items():
            before = coarse.get(bucket // 2, (low, high))
            coarse[bucket // 2] = (min(before[0], low), max(before[1], high))
        self.buckets = coarse


class Span(Struct, frozen=True):
    """What lasted for a while: a phase of a worker, a state of its GPU. CLOCK_MONOTONIC."""

    what: str
    since_ns: int
    until_ns: int

    @property
    def ns(self) -> int:
        return self.until_ns - self.since_ns


def bounded(spans: list[Span]) -> list[Span]:
    """Where there are too many, each two neighbours as one, called by the longer: the picture keeps
    its proportions."""
    return spans if len(spans) <= MAX_SPANS else list(_merged(spans))


class Curves(Struct):
    """One worker's run."""

    loss: Series = field(default_factory=Series)
    grad_norm: Series = field(default_factory=Series)
    busy_ms: Series = field(default_factory=Series)
    """What a step kept its device busy; its wall time where that is not measured. The first steps
    are warm-up."""
    nonfinite_step: int | None = None
    """The first whose loss, gradient or weight was not finite."""
    spans: list[Span] = field(default_factory=list)
    """In order, without gaps; neighbours are one where there are too many."""
    waited_ns: int = 0
    """Of its training: in which steps waited for their data."""
    first_ns: int = 0
    last_ns: int = 0
    """Of the first event and of the latest."""
    before_end_ns: int = 0
    """Of the latest before it said how it ended: a silent one says so when it is stopped."""
    _spent_ns: dict[str, int] = field(default_factory=dict)
    """Phase -> time in it, of those that are over."""
    _phase: tuple[str, int] | None = None
    _metrics_ns: int = 0

    def record(self, event: Event) -> None:
        self.first_ns = self.first_ns or event.t
        self.last_ns = max(self.last_ns, event.t)
        if not isinstance(event, Done):
            self.before_end_ns = self.last_ns
        match event:
            case Step():
                self._step(event)
            case NonFinite() if self.nonfinite_step is None:
                self.nonfinite_step = event.step
            case Phase():
                self._enter(event.name, event.t)
            case Metrics():
                self._wait(event)
            case Done():
                self._enter("end", event.t)

    @property
    def all_spans(self) -> list[Span]:
        """With the phase in which the worker was when it was heard last."""
        if self._phase is None or self._phase[0] == "end":
            return self.spans
        name, since = self._phase
        return [*self.spans, Span(name, since, self.last_ns)]

    @property
    def spent(self) -> dict[str, int]:
        """Phase -> nanoseconds in it."""
        spent = dict(self._spent_ns)
        for span in self.all_spans[len(self.spans) :]:
            spent[span.what] = spent.get(span.what, 0) + span.ns
        return spent

    def _step(self, step: Step) -> None:
        if step.loss is not None:
            self.loss.add(step.step, float.fromhex(step.loss))
        self.grad_norm.add(step.step, float.fromhex(step.grad_norm))
        self.busy_ms.add(step.step, step.ms if step.busy_ms is None else step.busy_ms)

    def _enter(self, phase: str, now: int) -> None:
        if self._phase is not None:
            name, since = self._phase
            if name == phase:
                return
            self._leave(Span(name, since, now))
        self._phase = (phase, now)
        self._metrics_ns = now

    def _leave(self, span: Span) -> None:
        if span.what == "end":
            return
        self._spent_ns[span.what] = self._spent_ns.get(span.what, 0) + span.ns
        self.spans = bounded([*self.spans, span])

    def _wait(self, metrics: Metrics) -> None:
        if metrics.data_wait is not None:
            self.waited_ns += int((metrics.t - self._metrics_ns) * metrics.data_wait)
        self._metrics_ns = metrics.t


def _merged(spans: Iterable[Span]) -> Iterator[Span]:
    pairs = iter(spans)
    for one in pairs:
        other = next(pairs, one)
        longer = max(one, other, key=lambda span: span.ns)
        yield Span(longer.what, one.since_ns, other.until_ns)
