"""Results judged in threads: is it what was announced, and may it be believed?

Judging reads a result three times, which takes a core as long as gloo takes to bring it on a fast link.
Results tend to come together, so several cores judge, and the hub's loop hears the other workers meanwhile.
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
from .session import Message

THREADS = 4  # more of them would wait for memory; one that waits for a liar holds up no other


@dataclass(frozen=True)
class Verdict:
    """What was found out about a result that has arrived."""

    result: Tensor | None  # [rows, n]; None if its bytes are not those that were announced
    loss_sum: float = math.nan
    why: str | None = None  # it is not believed


def judge(
    cfg: Config, announced: Message, sent: Tensor, answer: Tensor, transfer: Any, seconds: float
) -> Verdict:
    """Wait for a transfer into `answer` that is nearly over, and look at every byte of it."""
    session.wait(transfer, seconds)
    if session.checksum(answer) != announced.checksum:
        return Verdict(None)
    result = wire.read_up(cfg.run.wire, answer, (sent.shape[0], sent.shape[1]), sent[0])
    try:
        loss_sum = float(announced.body["loss_sum"])
    except (KeyError, TypeError, ValueError):
        loss_sum = math.nan
    return Verdict(result, loss_sum, suspicion(cfg.train, result, sent, loss_sum))


class Judges:
    """The threads, as long as there is a hub; `bell` can be read from when one of them has finished."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS)
        self.bell, self._rope = socket.socketpair()

    def ask(self, *case: Any) -> Future[Verdict]:
        """Start `judge`; what it raises comes with the verdict."""
        verdict = self._threads.submit(judge, *case)
        verdict.add_done_callback(lambda _: self._rope.send(b"."))
        return verdict

    def silence(self) -> None:
        """Take note of the bell."""
        self.bell.recv(1 << 10)

    def close(self) -> None:
        self._threads.shutdown()
        self.bell.close()
        self._rope.close()
