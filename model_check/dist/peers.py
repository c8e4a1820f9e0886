"""A rank waits for others: how long, and what it says of one that does not come."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from model_check.errors import PeerLost
from model_check.utils.wire import BEAT_S
from model_check.utils.words import first_line

LOOK_S = 0.01
_OF_PEERS = ("Connection closed by peer", "Connection reset by peer", "gloo", "NCCL", "Timed out")
"""One of them is in the text of a collective's failure."""
_TIMED_OUT = re.compile(r"Timed out waiting (\d+)ms")
_MAX_WHY = 200


def wait_for(work: dist.Work, timeout_s: float, meanwhile: Callable[[], None]) -> None:
    """Signals are heard, too, which gloo's own wait with a limit does not (nor has it a limit).
    Raises PeerLost."""
    wait_until(work.is_completed, timeout_s, meanwhile)
    with heeding_peers():
        work.wait()


def wait_until(
    is_over: Callable[[], bool], timeout_s: float, meanwhile: Callable[[], None]
) -> None:
    """`meanwhile` is called each BEAT_S. Raises PeerLost."""
    began = beaten = time.monotonic()
    while not is_over():
        waited_s = (now := time.monotonic()) - began
        if waited_s >= timeout_s:
            raise _late(timeout_s)
        if now - beaten >= BEAT_S:
            meanwhile()
            beaten = now
        time.sleep(min(LOOK_S, waited_s / 20))  # a short wait is looked at often


@contextmanager
def heeding_peers() -> Iterator[None]:
    """A collective that breaks tells of a peer, not of this rank. Raises PeerLost."""
    try:
        yield
    except RuntimeError as error:
        is_of_peers = any(text in str(error) for text in _OF_PEERS)
        if not (is_of_peers or isinstance(error, dist.DistError)):
            raise
        raise _lost(error) from error


def _late(waited_s: float) -> PeerLost:
    text = f"another rank did not come in {waited_s:.3g} s"
    return PeerLost(text, has_waited=True, waited_s=waited_s)


def _lost(error: RuntimeError) -> PeerLost:
    """In few words: gloo's own tell of its source, and of sockets."""
    text = str(error)
    if (waited := _TIMED_OUT.search(text)) is not None:
        return _late(int(waited[1]) / 1000)
    why = next((part for part in _OF_PEERS[:2] if part in text), first_line(error))
    return PeerLost(f"another rank is gone ({why[:_MAX_WHY]})")
