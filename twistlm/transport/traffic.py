"""What a round's subnets cost in bytes, down and up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ..config import Wire
from . import wire

FLOAT32 = 4  # bytes


@dataclass(frozen=True)
class Bytes:
    """One direction of a round, over all workers."""

    shared: int = 0  # weights that every worker holds
    blocks: int = 0  # weights of blocks
    moments: int = 0  # Adam's m and v of both

    @property
    def total(self) -> int:
        return self.shared + self.blocks + self.moments

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(
            self.shared + other.shared, self.blocks + other.blocks, self.moments + other.moments
        )


@dataclass(frozen=True)
class Traffic:
    """Bytes that left the central model for workers and came back, in one round."""

    down: Bytes
    up: Bytes
    wire: int  # what crossed a process boundary, seen from the central rank
    others: dict[str, int] = field(default_factory=dict)  # the same round by other counts

    def to_dict(self) -> dict[str, Any]:
        return {
            "bytes_down": self.down.total,
            "bytes_up": self.up.total,
            "bytes_wire": self.wire,
            "bytes": {"down": asdict(self.down), "up": asdict(self.up), **self.others},
        }


def subnet_bytes(
    n_shared: int, n_params: int, rows: int, kind: Wire, dtype: torch.dtype = torch.float32
) -> tuple[Bytes, Bytes]:
    """What one subnet costs down and up."""
    shape = (rows, n_params)

    def split(weights: int, total: int) -> Bytes:
        shared = weights * n_shared // n_params
        return Bytes(shared, weights - shared, total - weights)

    alone = (1, n_params)
    down = split(wire.down_bytes(kind, alone, dtype), wire.down_bytes(kind, shape, dtype))
    return down, split(wire.up_bytes(kind, alone, dtype), wire.up_bytes(kind, shape, dtype))


def other_counts(n_params: int, subnets: Sequence[int], interval: int) -> dict[str, int]:
    """The same round by other counts, in float32 and without moments, over all links.

    paper: every subnet once down and once up. ddp: a ring over the full model's gradient in every
    step, 2 (S - 1) M. least: each block is added up at one of its holders and goes back to the
    others, 2 (sum of subnets - M), when all blocks are dealt.
    """
    return {
        "paper": 2 * FLOAT32 * sum(subnets),
        "ddp": 2 * FLOAT32 * (len(subnets) - 1) * n_params * interval,
        "least": 2 * FLOAT32 * max(0, sum(subnets) - n_params),
    }
