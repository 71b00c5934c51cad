"""SIGINT and SIGTERM as a wish that a loop reads; a second signal stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .terminal import console

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(Exception):
    """The run was asked to stop, and has stopped in good order."""

    def __init__(self, wish: int, round: int):
        super().__init__(f"stopped by {signal.Signals(wish).name} after round {round}")
        self.code = 128 + wish


@dataclass
class Stop:
    """Which signal has come, 0 for none."""

    wish: int = 0

    @property
    def wished(self) -> bool:
        return self.wish != 0


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
