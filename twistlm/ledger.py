"""Parameters, bytes and rounds: what a plan costs, beside the paper's own formula."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import wire
from .blocks import BlockMap, Shapes, Widths
from .config import Wire

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

    down = split(wire.n_bytes("fp32", n_params, dtype), wire.down_bytes(kind, shape, dtype))
    return down, split(wire.n_bytes(kind, n_params, dtype), wire.up_bytes(kind, shape, dtype))


def other_counts(n_params: int, subnets: Sequence[int], interval: int) -> dict[str, int]:
    """The same round by other counts, in float32 and without moments, over all links.

    paper: every subnet once down and once up. ddp: a ring over the full model's gradient in every
    step, 2 (S - 1) M. least: each block is added up at one of its holders and goes back to the others,
    2 (sum of subnets - M), when all blocks are dealt.
    """
    return {
        "paper": 2 * FLOAT32 * sum(subnets),
        "ddp": 2 * FLOAT32 * (len(subnets) - 1) * n_params * interval,
        "least": 2 * FLOAT32 * max(0, sum(subnets) - n_params),
    }


class Metrics:
    """`metrics.jsonl`: one line per round; on resume, lines of rounds that will run again are dropped.

    Where TensorBoard is installed, the same numbers go to `tensorboard/` in the run folder.
    """

    def __init__(self, out: Path, start: int):
        self.board = _board(out / "tensorboard", start)
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
        if self.board is not None:
            for name, value in scalars(row).items():
                self.board.add_scalar(name, value, row["round"])
            self.board.flush()

    def close(self) -> None:
        if self.board is not None:
            self.board.close()


def scalars(row: dict[str, Any]) -> dict[str, float]:
    """A round's numbers by name: `train/loss`, `perplexity/6/12`."""
    found = {f"train/{key}": row[key] for key in row if key not in ("round", "bytes", "eval")}
    found["train/tokens_per_s"] = row["n_tokens"] / row["seconds"]
    for size, value in row.get("eval", {}).items():
        found[f"perplexity/{size}"] = value if size == "full" else value["mean"]
    return found


def _board(folder: Path, start: int) -> Any:
    """A writer of TensorBoard's own format, or None where it is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:  # a broken installation must not stop a training
        return None
    return SummaryWriter(str(folder), purge_step=start + 1 if start else None)
