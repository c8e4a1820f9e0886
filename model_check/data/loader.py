"""Batches for training: which sequences, in which order, prepared ahead.

A batch is a function of (seed, index) alone, so a run resumes by its index and every worker of a
replicated run gets the same bits.
"""

from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray

from model_check.data.token_cache import TokenCache
from model_check.errors import DataError

# B sequences in a batch, T tokens in a sequence
_AHEAD = 2
_SEED_WORD = 0xFFFF_FFFF


@dataclass(frozen=True)
class Batch:
    """int64 [B, T] each; `targets[b, t]` is the token after `inputs[b, t]`."""

    inputs: torch.Tensor
    targets: torch.Tensor


class BatchLoader:
    """Every epoch is a permutation of all sequences; epochs follow each other without a gap."""

    def __init__(
        self, cache: TokenCache, batch_size: int, seed: int, num_workers: int, pin: bool = False
    ) -> None:
        """`num_workers` threads prepare batches ahead (0: none); `pin`: in page-locked memory."""
        if cache.num_sequences < 1:
            raise DataError(f"{cache.path}: holds no sequence")
        self._cache = cache
        self._batch_size = batch_size
        self._seed = seed
        self._num_workers = num_workers
        self._pin = pin
        # Neighbouring batches share an epoch, and threads work on neighbours.
        self._order = lru_cache(maxsize=2)(self._permutation)

    def batch(self, index: int) -> Batch:
        """The batch at `index`, from 0, without an end."""
        windows_BW = torch.from_numpy(self._cache.gather(self._sequences(index)))
        largest = int(windows_BW.max())
        if largest >= self._cache.vocab_size:  # on a GPU it would end as an assert in a kernel
            raise DataError(
                f"{self._cache.path}: batch {index} holds token {largest}, the vocabulary is "
                f"{self._cache.vocab_size}: the cache is damaged (data.verify=full rebuilds it)"
            )
        inputs_BT = windows_BW[:, :-1].contiguous()
        targets_BT = windows_BW[:, 1:].contiguous()
        if self._pin:
            return Batch(inputs_BT.pin_memory(), targets_BT.pin_memory())
        return Batch(inputs_BT, targets_BT)

    def batches(self, start: int = 0) -> Generator[Batch, None, None]:
        """Batches from `start` on, for ever. What a thread raises is raised here, in its place;
        closing the iterator stops the threads."""
        if self._num_workers == 0:
            yield from map(self.batch, count(start))
            return
        pool = ThreadPoolExecutor(self._num_workers, thread_name_prefix="batch")
        try:
            indices = count(start)
            ahead: deque[Future[Batch]] = deque()
            while True:
                while len(ahead) < _AHEAD * self._num_workers:
                    ahead.append(pool.submit(self.batch, next(indices)))
                yield ahead.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _sequences(self, index: int) -> NDArray[np.int64]:
        """Which sequences make up a batch; one may take from two epochs."""
        first = index * self._batch_size
        positions = range(first, first + self._batch_size)
        places = (divmod(position, self._cache.num_sequences) for position in positions)
        return np.array([self._order(epoch)[offset] for epoch, offset in places], np.int64)

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        # RandomState, since numpy promises that its numbers never change between versions.
        words = [self._seed & _SEED_WORD, self._seed >> 32 & _SEED_WORD, epoch]
        return np.random.RandomState(words).permutation(self._cache.num_sequences)
