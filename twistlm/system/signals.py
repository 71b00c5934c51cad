"""SIGINT and SIGTERM as a wish that a loop reads; a second signal stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .terminal import console

TOO_FEW = 4  # the exit code of a run that waited too long for workers
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Ended(Exception):
    """A run that ended before its last round, in good order."""

    def __init__(self, sentence: str, code: int):
        super().__init__(sentence)
        self.code = code  # of the process


@dataclass
class Stop:
    """Which signal has come, 0 for none."""

    wish: int = 0

    @property
    def wished(self) -> bool:
        return self.wish != 0


def stopped(stop: Stop, round: int) -> Ended:
    name = signal.Signals(stop.wish).name
    return Ended(f"stopped by {name} after round {round}", 128 + stop.wish)


@contextmanager
def on_signals(stop: Stop, quiet: bool = False) -> Iterator[Stop]:
    """While this is open, the first signal is noted in `stop`; threads cannot catch signals."""

    def note(number: int, frame: Any) -> None:
        if stop.wish:
            raise KeyboardInterrupt
        stop.wish = number
        if not quiet:
            name = signal.Signals(number).name
            console.print(f"{name}: ending in good order; once more stops at once")

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
