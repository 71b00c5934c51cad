"""Batches as a pure function of seed and place, and the ledger that trains each sequence once.

The data is an endless stream of shuffled sequences, counted from 0. A slot is one batch: the places
of `batch` sequences in that stream. A round of n live workers and I steps takes I * n slots; step j
of the w-th live worker gets slots[j * n + w]. What a lost worker held goes out again first. The
ledger (`Leases`) counts sequences, so that S and the batch may change at any round boundary:
nothing is lost, nothing is seen twice. A sequence that holds an illegal id never goes out, and one
that fails with two workers is set aside.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor

from .teacher_cache import TeacherCache
from .token_file import TokenFile

Slot = tuple[int, ...]  # places of one batch in the stream


@dataclass(frozen=True)
class Batches:
    """The stream by its places: one random permutation of all sequences after another, no state."""

    file: TokenFile
    seq_len: int
    batch: int
    seed: int
    teacher_cache: TeacherCache | None = None  # of a teacher, where they come with the tokens

    def rows_at(self, places: Sequence[int]) -> np.ndarray:
        """Numbers of the sequences at these places of the stream."""
        n = self.n_sequences
        spots = [divmod(place, n) for place in places]
        return np.array([_permutation(self.seed, epoch, n)[spot] for epoch, spot in spots])

    def read(self, slots: Sequence[Slot]) -> tuple[np.ndarray, tuple[int, ...]]:
        """Ids [n_slots, batch, seq_len], and the places whose sequences hold an illegal one."""
        places = [place for slot in slots for place in slot]
        ids, is_bad = self.file.read(self.rows_at(places), self.seq_len)
        bad = tuple(place for place, bad in zip(places, is_bad, strict=True) if bad)
        return ids.reshape(len(slots), -1, self.seq_len), bad

    def name(self, place: int) -> str:
        """The name of the sequence at a place of the stream."""
        return f"{self.file.stem}.bin, sequence {int(self.rows_at([place])[0])}"

    def describe(self, place: int) -> str:
        """The name of the sequence at a place of the stream, and its largest id."""
        return self.file.describe(int(self.rows_at([place])[0]), self.seq_len)

    def teacher_topk(self, slot: Slot) -> Tensor | None:
        """A teacher's packed predictions for that batch: uint8 [batch, seq_len - 1, bytes]."""
        cache = self.teacher_cache
        return None if cache is None else cache.sequences(self.rows_at(slot))

    @property
    def n_sequences(self) -> int:
        """Of one epoch."""
        return self.file.n_sequences(self.seq_len)


@lru_cache(maxsize=4)  # a batch may straddle two epochs
def _permutation(seed: int, epoch: int, n: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(n)


@dataclass(frozen=True)
class Leases:
    """All sequences before `next` have been taken; of these, `returned` (ascending) came back."""

    next: int = 0
    returned: tuple[int, ...] = ()
    failed: tuple[tuple[int, int], ...] = ()  # (sequence, worker that could not train it)
    skipped: tuple[int, ...] = ()  # illegal, or failed with two workers: they never go out again


def take(leases: Leases, n: int, batch: int) -> tuple[tuple[Slot, ...], Leases]:
    """n slots of `batch` sequences, returned ones first, and the ledger after it."""
    n_old = min(n * batch, len(leases.returned))
    end = leases.next + n * batch - n_old
    places = leases.returned[:n_old] + tuple(range(leases.next, end))
    slots = tuple(places[i : i + batch] for i in range(0, n * batch, batch))
    return slots, replace(leases, next=end, returned=leases.returned[n_old:])


def take_legal(
    batches: Batches, leases: Leases, n: int
) -> tuple[tuple[Slot, ...], np.ndarray, Leases]:
    """n slots as from `take`, of legal sequences alone, with their ids [n, batch, seq_len]."""
    n_skipped = len(leases.skipped)
    while True:
        slots, after = take(leases, n, batches.batch)
        ids, bad = batches.read(slots)
        if not bad:
            return slots, ids, after
        good = tuple(place for slot in slots for place in slot if place not in bad)
        leases = replace(give_back(after, (good,)), skipped=(*leases.skipped, *bad))
        if len(leases.skipped) - n_skipped > batches.n_sequences:
            raise ValueError(f"no sequence is legal: {batches.describe(bad[0])}")


def give_back(leases: Leases, slots: tuple[Slot, ...]) -> Leases:
    """The ledger after these slots, taken and not trained, go back to the front."""
    places = [place for slot in slots for place in slot]
    returned = {*leases.returned, *places}
    assert len(returned) == len(leases.returned) + len(places), "given back twice"
    assert all(0 <= place < leases.next for place in places), "never taken"
    return replace(leases, returned=tuple(sorted(returned)))


def fail(leases: Leases, slots: tuple[Slot, ...], worker: int) -> Leases:
    """The ledger after an error of a worker with these slots; another's error skips a sequence."""
    places = {place for slot in slots for place in slot}
    twice = {place for place, other in leases.failed if place in places and other != worker}
    rest = give_back(leases, (tuple(sorted(places - twice)),))
    failed = {*leases.failed, *((place, worker) for place in places)}
    kept = tuple(sorted((place, other) for place, other in failed if place not in twice))
    return replace(rest, failed=kept, skipped=(*leases.skipped, *sorted(twice)))


def to_dict(leases: Leases) -> dict[str, Any]:
    """Plain data for JSON; `from_dict` reads it back."""
    table: dict[str, Any] = {"next": leases.next, "returned": list(leases.returned)}
    troubled = {"failed": [list(pair) for pair in leases.failed], "aside": list(leases.skipped)}
    return table | {name: places for name, places in troubled.items() if places}


def from_dict(table: dict[str, Any]) -> Leases:
    failed = tuple((place, worker) for place, worker in table.get("failed", ()))
    found = Leases(table["next"], tuple(table["returned"]), failed, tuple(table.get("aside", ())))
    taken, back = range(found.next), found.returned
    places = {*back, *found.skipped, *(place for place, _ in failed)}
    if not all(place in taken for place in places) or list(back) != sorted(set(back)):
        raise ValueError(f"a ledger of {found.next} sequences does not hold these")
    return found
