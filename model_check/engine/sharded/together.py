"""What ranks do together beside training: in a thread, over gloo on the CPU, in a group of its own,
so that it meets none of training's messages."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from model_check.dist.peers import heeding_peers
from model_check.errors import PeerLost
from model_check.utils.words import first_line

T = TypeVar("T")


@dataclass(frozen=True)
class Together:
    """One of these ranks."""

    rank: int
    size: int
    group: dist.ProcessGroup
    waiting: threading.Event = field(default_factory=threading.Event)
    """Set while this rank waits for another one, and has nothing to do itself."""

    @classmethod
    def new(cls, rank: int, size: int, timeout_s: float) -> "Together":
        """All ranks call it. `timeout_s`: how long one waits for another."""
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        return cls(rank, size, group)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gathered(self, value: Any) -> list[Any]:
        """What each rank gives, in their order. Raises PeerLost."""
        found: list[Any] = [None] * self.size
        with heeding_peers(), self.waits():
            dist.all_gather_object(found, value, group=self.group)
        return found

    @contextmanager
    def waits(self) -> Iterator[None]:
        """What is done here is to wait for other ranks."""
        self.waiting.set()
        try:
            yield
        finally:
            self.waiting.clear()

    def works(self, work: Callable[..., T]) -> Callable[..., T]:
        """The same, which this rank does itself amid such a wait."""

        def own(*given: Any, **named: Any) -> T:
            self.waiting.clear()
            found = work(*given, **named)
            self.waiting.set()
            return found

        return own

    def each(self, what: str, work: Callable[[], T]) -> list[T]:
        """Do it on all ranks; what each found. Where it fails on one, it fails on all: there with
        its own error, on the others with PeerLost."""
        try:
            found, failure = work(), None
        except Exception as error:
            found, failure = None, error
        told = self.gathered((found, None if failure is None else first_line(failure)))
        if failure is not None:
            raise failure
        for rank, (_, text) in enumerate(told):
            if text is not None:
                raise PeerLost(f"rank {rank} failed to {what}: {text}")
        return [each for each, _ in told]

    def first_does(self, what: str, work: Callable[[], T]) -> T:
        """The same where only the first rank has to do something, and tells the others."""
        return self.each(what, work if self.is_first else lambda: None)[0]  # type: ignore[return-value]
