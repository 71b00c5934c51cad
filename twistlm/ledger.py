"""Parameters, bytes and rounds: what a plan costs, beside the paper's own formula."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .blocks import BlockMap, Shapes, Widths

FLOAT32 = 4  # bytes


def count(block_map: BlockMap, shapes: Shapes, widths: Widths) -> int:
    """Parameters of a subnet with these widths."""
    return sum(math.prod(shape) for shape in block_map.narrowed(shapes, widths).values())


def paper_rounds(n_sequences: int, epochs: float, batch: int, interval: int) -> int:
    """The paper's count: global batches divided by the interval, whoever computes them."""
    return int(n_sequences * epochs / batch / interval)


def true_rounds(n_sequences: int, epochs: float, batch: int, interval: int, n_workers: int) -> int:
    """Rounds when each of S workers makes `interval` local steps."""
    return int(n_sequences * epochs // (batch * interval * n_workers))


def traffic(n_params: int, n_workers: int, n_rounds: int, rows: int = 1) -> int:
    """Bytes down and up: every worker gets and returns `rows` float32 per parameter each round.

    rows = 1 is weights only (the paper); carried moments make it 3.
    """
    return n_params * FLOAT32 * 2 * n_workers * n_rounds * rows


@dataclass(frozen=True)
class Traffic:
    """Bytes that left the central model for workers and came back, in one round."""

    down: int
    up: int
    wire: int  # the part of both that crossed a process boundary
