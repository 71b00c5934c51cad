"""Batches as a pure function of (seed, worker, step): an endless stream of shuffled sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from torch import Tensor

from .leases import Slot
from .token_file import TokenFile


@dataclass(frozen=True)
class Batches:
    """`batch(worker, step)`: every sequence once per epoch, disjoint between workers, no state.

    Place p = (step * S + worker) * batch + i of an endless stream that runs through one random
    permutation of all sequences after another. Rounds draw from the same stream by `slot`, because
    workers come and go (`leases`); with all of them alive it is the same batch.
    """

    file: TokenFile
    seq_len: int
    n_workers: int
    batch: int
    seed: int

    def rows(self, worker: int, step: int) -> np.ndarray:
        """Numbers of the sequences in this batch."""
        first = (step * self.n_workers + worker) * self.batch
        return self.rows_at(range(first, first + self.batch))

    def rows_at(self, places: Sequence[int]) -> np.ndarray:
        """Numbers of the sequences at these places of the stream."""
        n = self.file.n_sequences(self.seq_len)
        spots = [divmod(place, n) for place in places]
        return np.array([_permutation(self.seed, epoch, n)[spot] for epoch, spot in spots])

    def __call__(self, worker: int, step: int) -> Tensor:
        """Token ids, int64 [batch, seq_len]."""
        return self.file.sequences(self.rows(worker, step), self.seq_len)

    def slot(self, slot: Slot) -> Tensor:
        """The batch that was leased out as `slot`: int64 [batch, seq_len]."""
        return self.file.sequences(self.rows_at(slot), self.seq_len)

    def n_rounds(self, epochs: float, interval: int) -> int:
        """Whole rounds in that many epochs: rounds of S * batch * interval sequences."""
        return int(epochs * self.n_sequences // (self.n_workers * self.batch * interval))

    @property
    def n_sequences(self) -> int:
        """Of one epoch."""
        return self.file.n_sequences(self.seq_len)


@lru_cache(maxsize=4)  # a batch may straddle two epochs
def _permutation(seed: int, epoch: int, n: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(n)
