"""What a run and its workers in other processes exchange, and whether a result may be believed."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..config import Config, Kind, TrainConfig
from . import wire
from .ranks import TrainerKind

ROW = 64  # words of 8 bytes that a checksum adds up
MOST_LOSS = 1e6  # nats per token: no model is more wrong, and 1e308 would poison the mean
CHUNK = 1 << 18  # elements: a difference stays in a core's cache until it is squared


def checksum(payload: Tensor) -> str:
    """32 hex digits that change with any bit of `payload`: sha256 over sums of 512 bytes."""
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
    rows: int  # of the buffer that travels: weights, or weights, m and v


@dataclass(frozen=True)
class WorkerInfo:
    """A worker whose model is built: where it is, and K where its machine has its own."""

    name: str
    node: str  # Ray's id of the machine
    widths: dict[Kind, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundOrder:
    """What one worker trains in a round; weights, tokens and predictions come beside it."""

    round: int
    worker: int  # among those of the round
    blueprint: dict[str, tuple[int, ...]]  # block group -> the blocks of the subnet
    trainer: TrainerKind
    gates: Any  # [steps, rows, held blocks], a numpy array: masks times activation scales
    weights_checksum: str
    tokens_checksum: str
    teacher_checksum: str = ""  # of what a teacher's cache holds for the tokens


@dataclass(frozen=True)
class RoundResult:
    """A trained subnet."""

    round: int
    update: Any  # uint8 [n_bytes], a numpy array: it is read where it lies in the object store
    checksum: str
    loss_sum: float  # over the round's steps; NaN is legal here, and refused by the checks


class RejectedResult(ValueError):
    """A result that must not enter the central model, and why."""


def check_result(cfg: Config, result: RoundResult, payload: Tensor, sent: Tensor) -> Tensor:
    """The buffer [rows, n] of a result that came as `payload` (uint8); `sent` [rows, n] went down.

    It is read where it lies; every byte of it is looked at three times, which takes a core as long
    as a fast link takes to bring it: several threads do it.
    """
    shape = (sent.shape[0], sent.shape[1])
    wanted = wire.up_bytes(cfg.run.wire, shape, sent.dtype)
    if payload.numel() != wanted:
        raise RejectedResult(f"{payload.numel()} bytes instead of {wanted}")
    if checksum(payload) != result.checksum:
        raise RejectedResult("a wrong checksum")
    buffer = wire.read_up(cfg.run.wire, payload, shape, sent[0])
    if why := reason_to_reject(cfg.train, buffer, sent, result.loss_sum):
        raise RejectedResult(why)
    return buffer


def longest_step(cfg: TrainConfig, n: int, norm: float) -> float:
    """No AdamW can move n weights of this L2 norm farther than this in a round (L2).

    A bias-corrected step is at most sqrt((1 - beta1) / (1 - beta2)) per weight, or 1; twice that
    leaves room for moments that were averaged or lay idle. Decay adds its share of the weights.
    """
    beta1, beta2 = cfg.betas
    step = 2 * max(1.0, math.sqrt((1 - beta1) / (1 - beta2)))
    return cfg.interval * cfg.lr * (step * math.sqrt(n) + 2 * cfg.weight_decay * norm)


def length(pieces: Iterable[Tensor]) -> float:
    """L2 norm of a vector in pieces; NaN or Inf if a value is, or overflows squared."""
    return math.sqrt(sum(float(torch.dot(piece, piece)) for piece in pieces))


def distance(a: Tensor, b: Tensor) -> float:
    """|a - b| (L2) in one pass over memory, without a third tensor of their size."""
    return length(x - y for x, y in zip(a.split(CHUNK), b.split(CHUNK), strict=True))


def reason_to_reject(cfg: TrainConfig, result: Tensor, sent: Tensor, loss_sum: float) -> str | None:
    """Why a result [rows, n] must not be believed; None if there is no reason."""
    if not 0 <= loss_sum <= MOST_LOSS * cfg.interval:
        return f"its loss is {loss_sum}"
    # the norm sees every NaN and Inf, and is 15 times cheaper than isfinite
    moved = distance(result[0], sent[0])
    rest = [length(row.split(CHUNK)) for row in result[1:]]
    if not all(map(math.isfinite, (moved, *rest))):
        return "NaN or Inf in the update"
    bound = longest_step(cfg, sent.shape[1], 0.0)
    if moved > bound:  # seldom: only then the weights' own norm is asked for
        bound = longest_step(cfg, sent.shape[1], length(sent[0].split(CHUNK)))
    if moved > bound:
        return f"the update's norm is {moved:.3g}, and {bound:.3g} is the most that AdamW can move"
    if len(result) > 2 and float(result[2].amin()) < 0:
        return "a negative second moment"
    return None
