"""Which sequences are trained, which are still to come: the ledger behind exactly-once data.

The data is an endless stream of sequences (`data.Batches`), counted from 0. A slot is one batch: the
places of `batch` sequences in that stream. A round of n live workers and I steps takes I * n slots;
step j of the w-th live worker gets slots[j * n + w]. What a lost worker held is given back and is the
first to go out again. The ledger counts sequences, not batches, so that S and the batch may change at
any round boundary: nothing is lost, nothing is seen twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Slot = tuple[int, ...]  # places of one batch in the stream


@dataclass(frozen=True)
class Leases:
    """All sequences before `next` have been taken; of these, `returned` (ascending) came back."""

    next: int = 0
    returned: tuple[int, ...] = ()


def take(leases: Leases, n: int, batch: int) -> tuple[tuple[Slot, ...], Leases]:
    """n slots of `batch` sequences, returned ones first, and the ledger after it."""
    n_old = min(n * batch, len(leases.returned))
    end = leases.next + n * batch - n_old
    places = leases.returned[:n_old] + tuple(range(leases.next, end))
    slots = tuple(places[i : i + batch] for i in range(0, n * batch, batch))
    return slots, Leases(end, leases.returned[n_old:])


def give_back(leases: Leases, slots: tuple[Slot, ...]) -> Leases:
    """The ledger after these slots, taken and not trained, go back to the front."""
    places = [place for slot in slots for place in slot]
    returned = {*leases.returned, *places}
    assert len(returned) == len(leases.returned) + len(places), "given back twice"
    assert all(0 <= place < leases.next for place in places), "never taken"
    return Leases(leases.next, tuple(sorted(returned)))


def of_worker(slots: tuple[Slot, ...], place: int, n: int) -> tuple[Slot, ...]:
    """The slots of the `place`-th of n live workers, one per step."""
    return slots[place::n]


def to_dict(leases: Leases) -> dict[str, Any]:
    """Plain data for JSON; `from_dict` reads it back."""
    return {"next": leases.next, "returned": list(leases.returned)}


def from_dict(table: dict[str, Any]) -> Leases:
    return Leases(table["next"], tuple(table["returned"]))
