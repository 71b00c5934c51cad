"""What a run and its workers in other processes exchange: frozen records, raw bytes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..config import Kind
from .ranks import TrainerKind

ROW = 64  # words of 8 bytes that a checksum adds up


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
