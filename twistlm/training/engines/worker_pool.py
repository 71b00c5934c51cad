"""Who works for a run on Ray: S actors that are started, found again, or replaced."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ...config import Config, Kind
from ...transport import ray_cluster
from ...transport.events import Events
from ...transport.protocol import RoundOrder, RunDescription, WorkerInfo
from ...transport.ray_cluster import exceptions, ray
from ..teacher import Packed
from . import actor

STRIKES = 3
LONGEST_PAUSE = 30.0  # seconds between two tries to start a worker


@dataclass
class WorkerSlot:
    """One of the S workers of a run, and the actor that fills it."""

    number: int
    actor: Any = None
    entering: Any = None  # the reference of its hello, until it is there
    info: WorkerInfo | None = None
    asked: Any = None  # the reference of a result that has not come
    since: float = 0.0  # when it was asked
    fresh: bool = True  # it has not brought a result yet: its first steps compile
    again: float = 0.0  # not before: a slot that fails is filled more and more slowly
    pause: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.number}@{self.info.name}" if self.info else f"place {self.number}"

    @property
    def widths(self) -> dict[Kind, int]:
        return self.info.widths if self.info else {}

    def ask(self, order: RoundOrder, weights: Any, tokens: Any, teacher_topk: Any) -> None:
        self.since = time.monotonic()
        self.asked = self.actor.train.remote(order, weights, tokens, teacher_topk)


@dataclass
class WorkerPool:
    """All workers of a run; lives as long as its engine."""

    cfg: Config
    run_id: str
    run: RunDescription
    teacher: Packed | None
    events: Events
    check_widths: Callable[[dict[Kind, int]], None] = lambda own: None
    barred: set[str] = field(default_factory=set)  # machines whose results were wrong three times
    strikes: Counter[str] = field(default_factory=Counter)  # by machine

    def __post_init__(self) -> None:
        self.slots = [WorkerSlot(number) for number in range(self.cfg.train.n_workers)]
        self._gpus = ray_cluster.gpus(self.cfg)
        self._kind = ray.remote(concurrency_groups={"pulse": 1})(actor.WORKER)
        self._run, self._teacher = ray.put(self.run), ray.put(self.teacher)
        self._ended = threading.Event()
        threading.Thread(target=self._ping, daemon=True).start()

    def _ping(self) -> None:
        """Workers end by themselves when no run speaks to them; an evaluation may take long."""
        while not self._ended.wait(min(10.0, self.cfg.ray.patience / 10)):
            for slot in self.slots:
                with suppress(Exception):  # its death is noticed where it is waited for
                    slot.actor.ping.remote()

    def admit(self, r: int, longest: float, first: float) -> list[WorkerSlot]:
        """Start who is missing, take in who is ready, replace who has been late for long."""
        for slot in self.slots:
            if slot.actor is None and time.monotonic() >= slot.again:
                self._start(slot)
            if slot.entering is not None and _is_there(slot.entering):
                self._take_in(slot)
            if slot.asked is not None:
                self._look_after(slot, r, max(longest, first) if slot.fresh else longest)
        return [slot for slot in self.slots if slot.info is not None and slot.asked is None]

    def _start(self, slot: WorkerSlot) -> None:
        """An actor of that name that is there already belongs to an earlier process of this run."""
        good = f"!in({','.join(self.barred)})"
        made = self._kind.options(
            name=f"{self.run_id}-{slot.number}",
            namespace=ray_cluster.NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=0,
            num_cpus=ray_cluster.cpus(self.cfg),
            num_gpus=self._gpus,
            scheduling_strategy="SPREAD",
            label_selector={"ray.io/node-id": good} if self.barred else None,
        )
        slot.actor = made.remote(self.cfg.ray.patience)
        slot.entering, slot.fresh = slot.actor.enter.remote(self._run, self._teacher), True

    def _take_in(self, slot: WorkerSlot) -> None:
        try:
            info: WorkerInfo = ray.get(slot.entering)
            slot.info, slot.entering = info, None
            if info.node in self.barred:
                raise ValueError("its machine is in quarantine")
            self.check_widths(slot.widths)
        except exceptions.RayTaskError as error:
            self.lose(slot, "turned away", why=last_words(error))
        except ValueError as error:
            if slot.info is not None:
                self.barred.add(slot.info.node)
            self.lose(slot, "turned away", why=str(error))
        except exceptions.RayError as error:
            self.lose(slot, "lost", why=last_words(error))
        else:
            slot.pause = 0.0
            self.events.write("joined", slot.name, place=slot.number, **slot.widths)

    def _look_after(self, slot: WorkerSlot, r: int, longest: float) -> None:
        """A late worker is kept: it may only be slow. What it brings now is refused."""
        if _is_there(slot.asked):
            ref, slot.asked, slot.fresh = slot.asked, None, False
            try:
                result = ray.get(ref)
            except exceptions.RayTaskError:
                return
            except exceptions.RayError as error:
                self.lose(slot, "lost", round=r, why=last_words(error))
                return
            why = f"late: round {r} is on"
            self.events.write("refused", slot.name, round=result.round, why=why)
            self.events.write("joined", slot.name, place=slot.number, **slot.widths)
        elif time.monotonic() - slot.since > longest:
            self.lose(slot, "lost", round=r, why=f"silent for {longest:.0f} s: replaced")

    def lose(self, slot: WorkerSlot, event: str, **more: Any) -> None:
        """Empty a slot; it is filled again, at once for the first time."""
        self.events.write(event, slot.name, **more)
        with suppress(Exception):
            ray.kill(slot.actor)
        slot.actor = slot.entering = slot.asked = slot.info = None
        slot.again = time.monotonic() + slot.pause
        slot.pause = min(LONGEST_PAUSE, max(0.5, 2 * slot.pause))

    def strike(self, slot: WorkerSlot, r: int, why: str) -> None:
        """Refuse a result; a machine that brought three wrong ones gets no new workers."""
        node = slot.info.node if slot.info else ""
        self.strikes[node] += 1
        slot.fresh = False
        self.events.write("refused", slot.name, round=r, why=why)
        if self.strikes[node] >= STRIKES and node:
            self.barred.add(node)
            self.lose(slot, "quarantined", round=r, why=why)

    def close(self, end: bool) -> None:
        self._ended.set()
        if end:
            for slot in self.slots:
                with suppress(Exception):
                    ray.kill(slot.actor)


def _is_there(ref: Any) -> bool:
    return bool(ray.wait([ref], timeout=0)[0])


def last_words(error: exceptions.RayError) -> str:
    """What went wrong, in one line: the last one of a traceback, else Ray's first."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    words = lines[-1] if isinstance(error, exceptions.RayTaskError) else lines[0]
    return f"{type(error).__name__}: {words}"[:200]
