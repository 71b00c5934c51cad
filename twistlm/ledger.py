"""Parameters, bytes and rounds: what a plan costs, beside the paper's own formula."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .blocks import BlockMap, Shapes, Widths

FLOAT32 = 4  # bytes


def count(block_map: BlockMap, shapes: Shapes, widths: Widths) -> int:
    """Parameters of a subnet with these widths."""
    return sum(math.prod(shape) for shape in block_map.narrowed(shapes, widths).values())


def flops_per_token(n_products: int, attn_widths: Iterable[int], seq_len: int) -> int:
    """Training FLOPs of a token: 6 per weight in a matrix product, 12 T per channel of attention.

    (Forward 2, backward 4; scores and values over all T positions, causal or not, as is usual.)
    """
    return 6 * n_products + 12 * seq_len * sum(attn_widths)


def layer_params(d: int, d_attn: int, d_ffn: int) -> int:
    """One GPT-2 layer by the paper's appendix: N_attn + N_ffn + two layer norms."""
    n_attn = 4 * d_attn * d + 3 * d_attn + d
    n_ffn = 2 * d_ffn * d + d_ffn + d
    return n_attn + n_ffn + 2 * (2 * d)


def gpt2_params(
    n_layers: int, d: int, vocab: int, positions: int, *, n_cut: int = 0, share: float = 1.0
) -> int:
    """GPT-2 by the appendix's formulas, with `n_cut` layers that keep `share` of their blocks."""
    whole, cut = layer_params(d, d, 4 * d), layer_params(d, int(share * d), int(share * 4 * d))
    return (vocab + positions) * d + (n_layers - n_cut) * whole + n_cut * cut + 2 * d


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


class Metrics:
    """`metrics.jsonl`: one line per round; on resume, lines of rounds that will run again are dropped."""

    def __init__(self, out: Path, start: int):
        self.path = out / "metrics.jsonl"
        kept = []
        if self.path.is_file():
            for line in self.path.read_text().splitlines():
                try:
                    kept += [line] if json.loads(line)["round"] <= start else []
                except ValueError:
                    continue  # a line cut short by a crash
        text = "".join(f"{line}\n" for line in kept)
        self.path.write_text(text)
        self.size = len(text.encode())  # bytes of whole lines
        self.waiting = ""  # lines that a full disk did not take yet

    def write(self, row: dict[str, Any]) -> None:
        """Append a line; one that a full disk refuses waits for the next."""
        self.waiting += json.dumps(row) + "\n"
        data = self.waiting.encode()
        with suppress(OSError), self.path.open("ab", buffering=0) as file:
            file.truncate(self.size)  # what the disk took of a refused line
            if file.write(data) == len(data):
                self.size += len(data)
                self.waiting = ""
