"""SIGINT and SIGTERM as a request that a loop reads; a parent that speaks for an ended process."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .terminal import console

TOO_FEW = 4  # the exit code of a run that waited too long for workers, or whose Ray is gone
SIGNALS = (signal.SIGINT, signal.SIGTERM)
LOOK = 0.05  # seconds between a parent's looks at its child
SAME = 1.0  # seconds: schedulers send one signal to a process and to its parent, which passes it on


class Ended(Exception):
    """A run that ended before its last round, in good order."""

    def __init__(self, sentence: str, code: int):
        super().__init__(sentence, code)  # all of them: it travels between processes
        self.sentence, self.code = sentence, code  # the code of the process

    def __str__(self) -> str:
        return self.sentence


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
        if stop.signal:
            if time.monotonic() - stop.since > SAME:
                raise KeyboardInterrupt
            return
        stop.signal, stop.since = number, time.monotonic()
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


def end_with_parent(number: int) -> None:
    """Where Linux runs, a signal for this process when its parent is gone, however that ended."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG


def end_with_launcher() -> None:
    """Under torchrun: no rank outlives it, to train on and hold ports and the run's folder."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(signal.SIGTERM)  # in good order, with a checkpoint


def children(parent: int) -> list[int]:
    """Where Linux runs, the processes that a process has started or adopted."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            if int(path.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(path.parent.name))
    return found


@contextmanager
def apart(sentence: str) -> Iterator[None]:
    """Go on in a child process, for libraries that end theirs without a word (`_exit`, `abort`).

    The parent passes signals on, ends as the child does, and leaves nothing behind that the child
    has started; where the child was ended by such a library, it ends with `sentence` and TOO_FEW.
    """
    if not hasattr(os, "fork"):
        yield
        return
    sys.stdout.flush()
    sys.stderr.flush()
    ends, parent = os.pipe(), os.getpid()
    with suppress(OSError, AttributeError):  # Linux: adopt what one's children leave behind
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # who ignores it cannot wait for a child
    # a signal that comes before the parent can pass it on waits
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    if child := os.fork():
        os.close(ends[1])
        raise _stand_by(child, ends[0], sentence, mask)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    end_with_parent(signal.SIGTERM)  # in good order, with a checkpoint
    if os.getppid() != parent:  # it was gone before that
        os._exit(1)
    try:
        yield
    finally:
        os.write(ends[1], b".")  # what follows is Python's own end


def _stand_by(
    child: int, end: int, sentence: str, mask: set[int | signal.Signals]
) -> BaseException:
    """Wait for a child, with the signals of `mask` held back; how this process is to end."""

    def pass_on(number: int, frame: Any) -> None:
        with suppress(ProcessLookupError):
            os.kill(child, number)

    for number in SIGNALS:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    # not a wait without end: Python would pass on at its end what comes just before it begins
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        time.sleep(LOOK)
    code = os.waitstatus_to_exitcode(ended[1])
    while left := children(os.getpid()):  # with each of them its own children become ours
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    if os.read(end, 1) or code == 0:
        return SystemExit(code if code >= 0 else 128 - code)
    if code in (1, -signal.SIGABRT):
        return Ended(sentence, TOO_FEW)
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return Ended(f"the run was ended by {name}", 128 - code if code < 0 else code)
