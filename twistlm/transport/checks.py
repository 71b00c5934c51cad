"""Results checked in threads: are these the bytes that were announced, and may they be believed?

A check reads a result three times, which takes a core as long as gloo takes to bring it on a fast link.
Results tend to come together, so several cores check them, and the hub hears the other workers meanwhile.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..config import Config, TrainConfig
from . import session, wire
from .protocol import RoundResult

THREADS = 4  # more of them would wait for memory; one that waits for a liar holds up no other


@dataclass(frozen=True)
class CheckRequest:
    """A result on its way, and what it must be compared with."""

    cfg: Config
    announced: RoundResult
    sent: Tensor  # [rows, n]: what the worker started from
    answer: Tensor  # uint8: where the result arrives
    transfer: Any  # gloo's work
    seconds: float  # until the transfer is given up


@dataclass(frozen=True)
class Finding:
    """What was found out about a result that has arrived."""

    result: Tensor | None  # [rows, n]; None if its bytes are not those that were announced
    loss_sum: float = math.nan
    why: str | None = None  # it is not believed


def check(request: CheckRequest) -> Finding:
    """Wait for a transfer that is nearly over, and look at every byte of it."""
    cfg, sent, answer = request.cfg, request.sent, request.answer
    session.wait(request.transfer, request.seconds)
    if not request.announced.update.matches(answer):
        return Finding(None)
    result = wire.read_up(cfg.run.wire, answer, (sent.shape[0], sent.shape[1]), sent[0])
    loss_sum = float(request.announced.loss_sum)
    return Finding(result, loss_sum, suspicion(cfg.train, result, sent, loss_sum))


class Checkers:
    """The threads, as long as there is a hub; `finished` can be read from when one has an answer."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS)
        self.finished, self._signal = socket.socketpair()

    def start(self, request: CheckRequest) -> Future[Finding]:
        """Start a check; what it raises comes with the finding."""
        finding = self._threads.submit(check, request)
        finding.add_done_callback(lambda _: self._signal.send(b"."))
        return finding

    def clear(self) -> None:
        """Make `finished` unreadable until another check ends."""
        self.finished.recv(1 << 10)

    def close(self) -> None:
        self._threads.shutdown()
        self.finished.close()
        self._signal.close()


CHUNK = 1 << 18  # elements: a difference stays in a core's cache until it is squared


def longest_step(cfg: TrainConfig, n: int, norm: float) -> float:
    """No AdamW can move n weights of this L2 norm farther than this in a round (L2).

    A bias-corrected step is at most sqrt((1 - beta1) / (1 - beta2)) per weight, or 1; twice that
    leaves room for moments that were averaged or lay idle. Decay adds its share of the weights.
    """
    beta1, beta2 = cfg.betas
    step = 2 * max(1.0, math.sqrt((1 - beta1) / (1 - beta2)))
    return cfg.interval * cfg.lr * (step * math.sqrt(n) + 2 * cfg.weight_decay * norm)


def length(pieces: Iterable[Tensor]) -> float:
    """L2 norm of a vector that comes in pieces; NaN or Inf if a value is, or overflows when squared."""
    return math.sqrt(sum(float(torch.dot(piece, piece)) for piece in pieces))


def distance(a: Tensor, b: Tensor) -> float:
    """|a - b| (L2) in one pass over memory, without a third tensor of their size."""
    return length(x - y for x, y in zip(a.split(CHUNK), b.split(CHUNK), strict=True))


def suspicion(cfg: TrainConfig, result: Tensor, sent: Tensor, loss_sum: float) -> str | None:
    """Why a result [rows, n] must not be believed; None if there is no reason."""
    if not math.isfinite(loss_sum):
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
