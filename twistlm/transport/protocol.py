"""What a run and its workers in other processes exchange, and whether a result may be believed."""

import hashlib
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..config import Kind, TrainConfig, Wire
from . import wire

ROW = 64  # words of 8 bytes that a checksum adds up
MOST_LOSS = 1e6  # nats per token: no model is more wrong, and 1e308 would poison the mean
CHUNK = 1 << 18  # elements: a difference stays in a core's cache until it is squared


def checksum(payload: Tensor) -> str:
    """32 hex digits that change with any bit of `payload`: sha256 over sums of 512 bytes."""
    payload = payload.reshape(-1).view(torch.uint8)
    whole = payload.numel() // (8 * ROW) * 8 * ROW
    digest = hashlib.sha256()  # processors have instructions for it
    if whole:
        sums = payload[:whole].view(torch.int64).view(-1, ROW).sum(1)
        digest.update(sums.numpy().data)
    digest.update(payload[whole:].numpy().data)
    return digest.hexdigest()[:32]


@dataclass(frozen=True)
class RunDescription:
    """All that a worker must know to build its model: it has neither the config nor the data."""

    version: str  # of twistlm
    config: dict[str, Any]  # of the run, as a table
    model: dict[str, Any]  # Hugging Face's config of the full model
    total_steps: int  # of the learning rate's schedule


@dataclass(frozen=True)
class WorkerInfo:
    """A worker whose model is built: where it is, and K where its machine has its own."""

    name: str
    node: str  # Ray's id of the machine
    widths: dict[Kind, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Piece:
    """Bytes on their way between processes, with a checksum."""

    payload: Any  # a numpy array: it is read where it lies in the object store
    checksum: str


def packed(payload: Tensor) -> Piece:
    return Piece(payload.numpy(), checksum(payload))


def unpacked(piece: Piece) -> Tensor:
    """The tensor of a piece, not copied; nobody writes into it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is read-only
        payload = torch.from_numpy(piece.payload)
    if checksum(payload) != piece.checksum:
        raise RejectedResult("a wrong checksum")
    return payload


@dataclass(frozen=True)
class RoundOrder:
    """What one worker trains in a round; weights come beside it, a piece from every owner."""

    round: int
    attempt: str  # a name of this try
    at: int  # the round of the learning rate's schedule
    worker: int  # among those of the round
    blueprint: dict[str, tuple[int, ...]]  # block group -> the blocks of the subnet
    gates: Piece  # [steps, rows, held blocks]: masks times activation scales
    tokens: Piece  # int32 [interval, batch, T]
    teacher_topk: Piece | None  # of a teacher's cache: uint8 [interval, batch, T - 1, bytes]


class RejectedResult(ValueError):
    """A result that must not enter the central model, and why."""


def read_result(kind: Wire, piece: Piece, shape: tuple[int, int], sent: Tensor) -> Tensor:
    """A piece [rows, n] of a result, read where it lies; the weights `sent` [n] went down."""
    wanted, has = wire.up_bytes(kind, shape, sent.dtype), piece.payload.size
    if has != wanted:
        raise RejectedResult(f"{has} bytes instead of {wanted}")
    return wire.read_up(kind, unpacked(piece), shape, sent)


Moved = tuple[float, float]  # sums of squares: of the change since it left, of what had left


def measured(result: Tensor, sent: Tensor) -> Moved:
    """How far a piece [rows, n] has moved from the weights `sent` [n]; NaN and Inf are refused."""
    # the norm sees every NaN and Inf, and is 15 times cheaper than isfinite
    pairs = zip(result[0].split(CHUNK), sent.split(CHUNK), strict=True)
    moved = _squares(new - old for new, old in pairs)  # without a third tensor of their size
    if not all(map(math.isfinite, (moved, *(_squares(row.split(CHUNK)) for row in result[1:])))):
        raise RejectedResult("NaN or Inf in the update")
    if len(result) > 2 and result.shape[1] and float(result[2].amin()) < 0:
        raise RejectedResult("a negative second moment")
    return moved, _squares(sent.split(CHUNK))


def longest_step(cfg: TrainConfig, n: int, norm: float) -> float:
    """No AdamW can move n weights of this norm farther than this in a round (both L2).

    A bias-corrected step is at most sqrt((1 - beta1) / (1 - beta2)) per weight, or 1; twice that
    leaves room for moments that were averaged or lay idle. Decay adds its share of the weights.
    """
    beta1, beta2 = cfg.betas
    step = 2 * max(1.0, math.sqrt((1 - beta1) / (1 - beta2)))
    return cfg.interval * cfg.lr * (step * math.sqrt(n) + 2 * cfg.weight_decay * norm)


def _squares(pieces: Iterable[Tensor]) -> float:
    return sum(float(torch.dot(piece, piece)) for piece in pieces)


def reason_to_reject(
    cfg: TrainConfig, pieces: Sequence[Moved], n: int, loss_sum: float
) -> str | None:
    """Why a result of n weights must not be believed, by its pieces; None if there is no reason.

    The norm is that of all pieces, whoever owns them: it depends on their number by rounding alone.
    """
    if not 0 <= loss_sum <= MOST_LOSS * cfg.interval:
        return f"its loss is {loss_sum}"
    moved, sent = (math.sqrt(sum(squares)) for squares in zip(*pieces, strict=True))
    if moved > (bound := longest_step(cfg, n, sent)):
        return f"the update's norm is {moved:.3g}, and {bound:.3g} is the most that AdamW can move"
    return None
