"""What happens to workers that come and go: a live table for a person, JSON lines for a program."""

import json
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from ..system.terminal import console

LOUD = {"lost", "late", "refused", "quarantined", "waiting", "giving up", "set aside"}
MOST_ROWS = 40  # workers in the table; `events.jsonl` has all of them


@dataclass
class WorkerStatus:
    """One worker as the table shows it."""

    state: str = "in"
    rounds: int = 0  # results that were accepted
    seconds: float = 0.0  # its last result came so long after the weights had left
    waited: float = 0.0  # seconds in all for which everybody else had finished
    refused: int = 0
    why: str = ""


@dataclass
class Events:
    """`events.jsonl` of a run folder, and the state of every worker; written by several threads."""

    out: Path
    quiet: bool = False
    statuses: dict[str, WorkerStatus] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def write(self, event: str, worker: str = "", **more: Any) -> None:
        row: dict[str, Any] = {"time": round(time.time(), 3), "event": event}
        row |= {"worker": worker, **more} if worker else more
        with self._lock:
            with suppress(OSError), (self.out / "events.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")  # a full disk is no reason to stop
            self._keep(event, worker, more)
        if event in LOUD and not self.quiet:
            rest = ", ".join(
                f"{key} {value:.1f}" if isinstance(value, float) else f"{key} {value}"
                for key, value in more.items()
            )
            console.print(f"{event}: {worker}{' ' if worker else ''}{rest}", style="yellow")

    def _keep(self, event: str, worker: str, more: dict[str, Any]) -> None:
        for name, seconds in more["seconds"].items() if event == "round" else ():
            status = self.statuses.setdefault(name, WorkerStatus())
            status.rounds, status.seconds, status.state = status.rounds + 1, seconds, "in"
        if event == "round" and more["seconds"]:
            last = max(more["seconds"], key=more["seconds"].get)
            before, latest = [0.0, *sorted(more["seconds"].values())][-2:]
            self.statuses[last].waited += latest - before
        elif worker:
            status = self.statuses.setdefault(worker, WorkerStatus())
            known = {"joined": "in", "restored": "in", "refused": status.state}
            status.state = known.get(event, event)
            status.why = more.get("why", "")
            status.refused += event == "refused"

    def __rich__(self) -> Table:
        table = Table("worker", "state", box=None, padding=(0, 2, 0, 0))
        for name in ("rounds", "last, s", "waited for, s", "refused"):
            table.add_column(name, justify="right")
        with self._lock:
            newest = sorted(self.statuses.items(), key=lambda item: item[1].state != "in")
        for name, s in newest[:MOST_ROWS]:
            seconds, waited = f"{s.seconds:.2f}", f"{s.waited:.1f}"
            table.add_row(name, s.state, str(s.rounds), seconds, waited, str(s.refused), s.why)
        return table
