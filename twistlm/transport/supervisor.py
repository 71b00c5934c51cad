"""Restarts a hub that crashed, from its last checkpoint, on a listening socket that stays open.

The supervisor holds the socket and hands it to one hub after another: the port is never lost, and
workers that connect while a hub starts simply wait. It imports no torch.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ..system.signals import SIGNALS, TOO_FEW
from ..system.terminal import console

FINAL = {0, 2, TOO_FEW, 130, 143}  # done, a user's mistake, too few workers, asked to stop
FRUITLESS = 3  # restarts in a row without a new checkpoint before it gives up


def supervise(listener: socket.socket, args: Sequence[str], out: Path) -> int:
    """Run `twistlm args` until it ends in good order; its exit code, 128 + signal for a signal."""
    wish, hub = 0, None

    def forward(number: int, frame: object) -> None:
        nonlocal wish
        wish = number
        if hub is not None and hub.poll() is None:
            hub.send_signal(number)

    before = {number: signal.signal(number, forward) for number in SIGNALS}
    more: list[str] = []
    fruitless, newest = 0, _newest(out)
    try:
        while True:
            hub = subprocess.Popen(
                [sys.executable, "-m", "twistlm", *args, *more],
                pass_fds=[listener.fileno()],
                env=os.environ | {"TWISTLM_LISTENER": str(listener.fileno())},
                process_group=0,  # Ctrl-C reaches it through us alone, once
            )
            code = hub.wait()
            if code in FINAL or wish:
                return code if code >= 0 else 128 - code
            fruitless = 0 if _newest(out) != newest else fruitless + 1
            newest, more = _newest(out), [] if "--resume" in args else ["--resume"]
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            if fruitless > FRUITLESS:
                console.print(f"the hub ended by {how} {fruitless} times without a new checkpoint")
                return code if code >= 0 else 128 - code
            console.print(f"the hub ended by {how}: starting it again", style="yellow")
            time.sleep(min(10, 0.5 * fruitless**2))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _newest(out: Path) -> str:
    return max((path.name for path in (out / "checkpoints").glob("round-*")), default="")
