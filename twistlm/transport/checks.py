"""Results checked in threads: are these the bytes that were announced, and may they be believed?

A check reads a result three times, which takes a core as long as gloo takes to bring it on a fast link.
Results tend to come together, so several cores check them, and the hub hears the other workers meanwhile.
"""

from __future__ import annotations

import math
import socket
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..config import Config
from . import session, wire
from .guard import suspicion
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
