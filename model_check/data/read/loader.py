"""Batches. For training: which sequences, in which order, prepared ahead. For evaluation: every
sequence once.

A training batch depends on the seed and the number of its first sequence alone, so a run resumes by
that number, with any batch size, and every worker of a replicated run gets the same bits. The ranks
of a job take turns: together they read what one would read.
"""

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, islice

import numpy as np
import torch
from numpy.typing import NDArray

from model_check.data.read.token_split import PADDING, Split
from model_check.errors import DataError

# B sequences in a batch, T tokens in a sequence
_AHEAD = 2
_SEED_WORD = 0xFFFF_FFFF


@dataclass(frozen=True)
class Batch:
    """int64 [B, T] each, no two in the same memory. `targets[b, t]` is the token after
    `inputs[b, t]`, or -100 where no label counts: in padding, and in the prompt of an example."""

    inputs: torch.Tensor
    targets: torch.Tensor
    documents: torch.Tensor | None = None
    """int64 [B, T]: number of the document in its row, from 0; None: not asked for. Where it is
    given, the first token of a document is no label: nothing that could predict it is seen."""


@dataclass
class BatchLoader:
    """Every epoch is a permutation of all sequences. Epochs follow each other without a gap. Raises
    DataError for a split without a sequence."""

    split: Split
    batch_size: int
    seed: int
    num_workers: int
    """Threads that prepare batches ahead; 0: none."""
    pin: bool = False
    """Batches are in page-locked memory."""
    documents: bool = False
    """Batches say which token belongs to which document, and no label crosses a border."""
    rank: int = 0
    num_ranks: int = 1
    """It gives each `num_ranks`-th batch, from number `rank` on."""

    def __post_init__(self) -> None:
        if self.split.num_sequences < 1:
            raise DataError(f"{self.split}: holds no sequence")
        # Neighbouring batches share an epoch, and threads work on neighbours.
        self._order = lru_cache(maxsize=2)(self._permutation)

    def batch(self, first: int) -> Batch:
        """The batch from sequence `first` on, counted over all epochs; there is no last one."""
        return _read(self.split, self._sequences(first), self.documents, self.pin)

    def batches(self, start: int = 0) -> Generator[Batch, None, None]:
        """Batches from sequence `start` on, counted over all epochs, without an end; where there
        are ranks, this one's. An error of a thread is raised in place of its batch. Closing the
        iterator stops the threads."""
        firsts = count(start + self.rank * self.batch_size, self.num_ranks * self.batch_size)
        if self.num_workers == 0:
            yield from map(self.batch, firsts)
            return
        pool = ThreadPoolExecutor(self.num_workers, thread_name_prefix="batch")
        try:
            ahead: deque[Future[Batch]] = deque()
            while True:
                while len(ahead) < _AHEAD * self.num_workers:
                    ahead.append(pool.submit(self.batch, next(firsts)))
                yield ahead.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _sequences(self, first: int) -> NDArray[np.int64]:
        """The sequences of a batch, which may come from two epochs."""
        positions = range(first, first + self.batch_size)
        places = (divmod(position, self.split.num_sequences) for position in positions)
        return np.array([self._order(epoch)[offset] for epoch, offset in places], np.int64)

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if epoch > _SEED_WORD:
            raise DataError(f"{self.split}: epoch {epoch:,} has no order of its own")
        # RandomState: numpy promises that its numbers stay the same in all versions.
        words = [self.seed & _SEED_WORD, self.seed >> 32 & _SEED_WORD, epoch]
        return np.random.RandomState(words).permutation(self.split.num_sequences)


def evaluation_batches(
    split: Split,
    batch_size: int,
    limit: int | None = None,
    *,
    pin: bool = False,
    documents: bool = False,
    rank: int = 0,
    num_ranks: int = 1,
) -> Iterator[Batch]:
    """Every sequence of `split` once, in order, in at most `limit` batches. The last batch may be
    smaller. Of these, each `num_ranks`-th from number `rank` on.

    Each label counts once: where windows overlap (data.stride), labels that the previous window had
    are -100. Weigh a batch by the number of its targets that are not -100.
    """
    starts = range(0, split.num_sequences, batch_size)
    for first in islice(starts, rank, limit, num_ranks):
        last = min(first + batch_size, split.num_sequences)
        batch = _read(split, np.arange(first, last), documents, pin=False)
        if (overlap := split.context_length - split.stride) > 0:
            batch.targets[1 if first == 0 else 0 :, :overlap] = PADDING
        yield _pinned(batch) if pin else batch


def _read(split: Split, indices: NDArray[np.int64], documents: bool, pin: bool) -> Batch:
    windows_BW = torch.from_numpy(split.gather(indices))
    largest = int(windows_BW.max())
    # On a GPU such a token would end as an assert in a kernel.
    if largest >= split.vocab_size:
        raise DataError(
            f"{split}: sequences {indices.tolist()} hold token {largest}, the vocabulary is "
            f"{split.vocab_size}: the cache is damaged (data.verify=full rebuilds it)"
        )
    inputs_BT, targets_BT = _copied(windows_BW[:, :-1]), _copied(windows_BW[:, 1:])
    if bool((windows_BW[:, -1] == PADDING).any()):
        # Its targets are PADDING too, so the token that stands here counts for nothing.
        inputs_BT[inputs_BT == PADDING] = split.end_id
    if (learned_BW := split.targets(indices)) is not None:
        _check_targets(split, indices, learned_BW)
        targets_BT[torch.from_numpy(~learned_BW[:, 1:])] = PADDING
    numbers_BT = None
    if documents:
        numbers_BW = torch.from_numpy(split.documents(indices))
        numbers_BT = _copied(numbers_BW[:, :-1])
        targets_BT[numbers_BT != numbers_BW[:, 1:]] = PADDING
    batch = Batch(inputs_BT, targets_BT, numbers_BT)
    return _pinned(batch) if pin else batch


def _check_targets(split: Split, indices: NDArray[np.int64], learned_BW: NDArray[np.bool_]) -> None:
    """Each sequence of examples has a target. Raises DataError."""
    if not (has_one := learned_BW[:, 1:].any(axis=1)).all():
        raise DataError(
            f"{split}: sequences {indices[~has_one].tolist()} have nothing to learn: the cache is "
            "damaged (data.verify=full rebuilds it)"
        )


def _copied(view: torch.Tensor) -> torch.Tensor:
    """In memory of its own. `.contiguous()` does not copy a slice of one row, so a write to the
    inputs would change the targets."""
    return view.clone(memory_format=torch.contiguous_format)


def _pinned(batch: Batch) -> Batch:
    numbers = batch.documents
    return Batch(
        batch.inputs.pin_memory(),
        batch.targets.pin_memory(),
        None if numbers is None else numbers.pin_memory(),
    )
