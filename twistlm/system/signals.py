"""SIGINT and SIGTERM as a request that a loop reads; a parent that speaks for an ended process."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from .terminal import console

TOO_FEW = 4  # the exit code of a run that waited too long for workers, or whose Ray is gone
SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME = 1.0  # seconds: schedulers send one signal to a process and to its parent, which passes it on


class Ended(Exception):
    """A run that ended before its last round, in good order."""

    def __init__(self, sentence: str, code: int):
        super().__init__(sentence, code)  # all of them: it travels between processes
        self.sentence, self.code = sentence, code  # the code of the process

    def __str__(self) -> str:
        return self.sentence


class Told(SystemExit):
    """The end of a process that has said why."""


@dataclass
class Stop:
    """Which signal has come, 0 for none."""

    signal: int = 0
    since: float = 0.0

    @property
    def requested(self) -> bool:
        return self.signal != 0


def stopped(stop: Stop, round: int) -> Ended:
    name = signal.Signals(stop.signal).name
    return Ended(f"stopped by {name} after round {round}", 128 + stop.signal)


@contextmanager
def on_signals(stop: Stop, quiet: bool = False) -> Iterator[Stop]:
    """While this is open, the first signal is noted in `stop`; threads cannot catch signals."""

    def note(number: int, frame: Any) -> None:
        if stop.signal and time.monotonic() - stop.since > SAME:
            raise KeyboardInterrupt
        if stop.signal:
            return
        stop.signal, stop.since = number, time.monotonic()
        if not quiet:
            name = signal.Signals(number).name
            console.print(f"{name}: ending in good order; once more stops at once")

    in_thread = threading.current_thread() is not threading.main_thread()
    before = {} if in_thread else {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with_parent() -> None:
    """Where Linux runs, SIGTERM for this process when its parent is gone, however that ended."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def end_with_launcher() -> None:
    """Under torchrun: no rank outlives it, to train on and hold ports and the run's folder."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()  # in good order, with a checkpoint


@contextmanager
def apart(sentence: str) -> Iterator[None]:
    """Go on in a child: Ray ends its process without a word, and then the parent says `sentence`.

    The parent passes signals on and ends as the child does.
    """
    sys.stdout.flush()
    ends = os.pipe()
    # a signal that comes before the parent can pass it on waits
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    if child := os.fork():
        for number in SIGNALS:
            signal.signal(number, lambda number, frame: os.kill(child, number))
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        # not a wait without end: Python would pass on at its end what comes just before it begins
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            time.sleep(0.05)
        code = os.waitstatus_to_exitcode(ended[1])
        os.close(ends[1])
        with suppress(OSError):
            os.killpg(child, signal.SIGKILL)  # what Ray started, if the child had no time to end it
        if code < 0 and code != -signal.SIGABRT:
            raise Ended(f"the run was ended by {signal.Signals(-code).name}", 128 - code)
        raise Told(code) if os.read(ends[0], 1) or not code else Ended(sentence, TOO_FEW)
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    end_with_parent()  # in good order, with a checkpoint
    try:
        yield
    finally:
        os.write(ends[1], b".")  # what follows is Python's own end
