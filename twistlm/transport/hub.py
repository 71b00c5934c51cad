"""The hub's side of a round: who is in, what goes out, what comes back in time and is believed.

Every worker has a session of its own, so a dead, hung, cut-off or lying one costs its own result and
nothing else. A round ends when every worker has answered or at its deadline, whichever comes first.
"""

from __future__ import annotations

import selectors
import statistics
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..config import Config, Wire
from ..system.signals import TOO_FEW, Ended
from . import session, wire
from .checks import Judges, Verdict
from .events import Events
from .listener import Door
from .members import Member, Order, Roster
from .session import Kind as Say
from .session import Message

RECENT = 9  # rounds behind the median
FIRST = 10  # times the floor: the deadline of a round with nothing to compare it with


@dataclass(frozen=True)
class Answer:
    """A result that was accepted."""

    place: int
    buffer: Tensor  # [rows, n]
    loss_sum: float


def tag(round: int, what: int, attempt: int) -> int:
    """gloo's tag of one transfer: what belongs to another round or attempt never meets its receiver."""
    return (round * 8 + what * 2 + attempt) % (1 << 31)


DOWN, IDS, UP = 0, 1, 2


class Hub:
    """Listens, lets workers in and out, and exchanges one round at a time with those who are in."""

    def __init__(
        self,
        door: Door,
        cfg: Config,
        events: Events,
        first_place: int,
        stopping: Callable[[], bool] = lambda: False,
    ):
        self.cfg, self.events, self.stopping = cfg, events, stopping
        self.roster = Roster(door, events, range(first_place, cfg.train.n_workers))
        self._judges = Judges()
        self._durations: deque[float] = deque(maxlen=RECENT)
        self._seconds: dict[str, float] = {}  # of the last round
        self._began = False  # whether a round has been committed since this hub started

    def gather(self, round: int, n_local: int, since: float) -> list[Member]:
        """The workers of a round in order of their places, at least `hub.min_workers` with local ones.

        `since` is when this round was first tried. A hub that has just started waits a while for all S:
        then a restarted run deals as before.
        """
        said, delay = 0.0, 0.0
        while True:
            self.roster.admit()
            n, waited = n_local + len(self.roster.members), time.monotonic() - since
            need = max(1, self.cfg.hub.min_workers)
            if not self._began and waited < self.cfg.hub.wait:
                need = self.cfg.train.n_workers
            if n >= need:
                return [self.roster.members[place] for place in sorted(self.roster.members)]
            if self.stopping():
                return []
            if waited > max(self.cfg.hub.patience, 0.0 if self._began else self.cfg.hub.wait):
                raise self._too_few(round, n, need, waited)
            if waited >= said + delay:
                said, delay = waited, max(1.0, 2 * delay)
                self.events.write("waiting", round=round, n_workers=n, need=need, seconds=waited)
            time.sleep(0.05)

    def post(
        self, member: Member, round: int, sent: Tensor, ids: Tensor, words: dict[str, Any]
    ) -> None:
        """Send a worker its weights [rows, n], its tokens and its orders; nothing is waited for."""
        kind: Wire = self.cfg.run.wire
        sent = session.staged(sent)
        down, shape = wire.down(kind, sent), (sent.shape[0], sent.shape[1])
        if kind != "fp32":  # the change is against what the worker has
            sent = wire.read_down(kind, down, shape, sent.dtype)
        n_up = wire.up_bytes(kind, shape, sent.dtype)
        flat = ids.to(torch.int32).contiguous().view(-1).view(torch.uint8)
        words = words | {"ids": list(ids.shape), "ids_checksum": session.checksum(flat).hex()}
        member.order = Order(round, sent, down, flat, words, member.rooms.get("up", n_up))
        self._send(member, member.order)

    def _send(self, member: Member, order: Order) -> None:
        attempt = order.tries_down - 1
        try:
            member.session.tell(
                Say.ROUND, order.round, order.down, attempt=attempt, seconds=self.deadline(),
                **order.words,
            )  # fmt: skip
            order.works += [
                member.session.send(order.down, tag(order.round, DOWN, attempt)),
                member.session.send(order.ids, tag(order.round, IDS, attempt)),
            ]
        except OSError as error:
            self.roster.drop(
                member, "lost", round=order.round, why=f"it could not be reached: {error}"
            )

    def deadline(self) -> float:
        """Seconds that a round may take: three times the median of the last ones, or the floor."""
        if not self._durations:
            return FIRST * self.cfg.hub.floor
        return max(self.cfg.hub.floor, 3 * statistics.median(self._durations))

    def collect(self, round: int, began: float) -> dict[int, Answer]:
        """Wait for every result of the round until its deadline; accepted ones by place."""
        answers: dict[int, Answer] = {}
        seconds: dict[str, float] = {}
        until = began + self.deadline()
        with selectors.DefaultSelector() as selector:
            selector.register(self._judges.bell, selectors.EVENT_READ)
            for member in self.roster.members.values():
                selector.register(member.session.sock, selectors.EVENT_READ, member)
            while orders := [m.order for m in self.roster.members.values() if m.order]:
                left = until - time.monotonic()
                if left <= 0:  # what has come in time is judged to the end
                    left = 0.2 if any(order.verdict for order in orders) else 0.0
                if not left or self.stopping():
                    break
                for key, _ in selector.select(min(left, 0.2)):
                    if key.data is None:
                        self._judges.silence()
                        continue
                    self._listen(key.data, round, until)
                    order = key.data.order
                    if key.data.session.closed or (order is not None and order.verdict is not None):
                        selector.unregister(key.fileobj)  # unheard until it is judged
                for member in list(self.roster.members.values()):
                    if member.order and member.order.verdict and member.order.verdict.done():
                        answer = self._settle(member, member.order, member.order.verdict)
                        if answer is not None:
                            answers[member.place] = answer
                            seconds[member.name] = time.monotonic() - began
                        if not member.session.closed:
                            selector.register(member.session.sock, selectors.EVENT_READ, member)
        if not self.stopping():
            for member in [m for m in self.roster.members.values() if m.order]:
                limit = until - began
                self.roster.drop(
                    member,
                    "late",
                    round=round,
                    seconds=limit,
                    why=f"no result within {limit:.1f} s",
                )
        self._seconds = seconds
        return answers

    def _listen(self, member: Member, round: int, until: float) -> None:
        try:
            for message in member.session.heard():
                self._take(member, message, round, until)
        except OSError as error:
            self.roster.drop(member, "lost", round=round, why=str(error))

    def _take(self, member: Member, message: Message, round: int, until: float) -> None:
        order, kind = member.order, message.kind
        if kind == Say.BYE or order is None or order.verdict or message.round != round:
            self.roster.out_of_turn(member, message, round)
        elif kind == Say.AGAIN:
            if order.tries_down > 1:
                raise ConnectionError("the weights did not reach it twice")
            order.tries_down += 1
            self._send(member, order)
        elif kind == Say.RESULT and order.announced is None:
            if message.n_bytes != order.answer.numel():
                self.roster.strike(
                    member, round,
                    f"it announced {message.n_bytes} bytes instead of {order.answer.numel()}",
                )  # fmt: skip
                raise ConnectionError("a result of another size")
            order.announced = message
            place = tag(round, UP, order.tries_up)
            order.works.append(member.session.receive(order.answer, place))
        elif kind == Say.SENT and order.announced is not None:
            order.verdict = self._judges.ask(
                self.cfg, order.announced, order.sent, order.answer, order.works[-1],
                until - time.monotonic(),
            )  # fmt: skip

    def _settle(self, member: Member, order: Order, verdict: Future[Verdict]) -> Answer | None:
        """Take a result that was judged, ask for it once more, or refuse it."""
        round = order.round
        try:
            found = verdict.result()
            if found.result is None:
                order.tries_up, order.announced, order.verdict = order.tries_up + 1, None, None
                if order.tries_up > 1:
                    self.roster.strike(member, round, "a wrong checksum, twice")
                else:
                    self.events.write("again", member.name, round=round, why="a wrong checksum")
                    member.session.tell(Say.AGAIN, round)
                return None
        except OSError as error:
            self.roster.drop(member, "lost", round=round, why=str(error))
            return None
        if found.why:
            self.roster.strike(member, round, found.why)
            return None
        member.order = None
        return Answer(member.place, found.result, found.loss_sum)

    def committed(self, round: int, seconds: float, **more: Any) -> None:
        """The round is in the central model; `more` says who was in it and who was lost."""
        self._began = True
        self._durations.append(seconds)
        self.events.write(
            "round", round=round, seconds=self._seconds, took=seconds, **more
        )  # fmt: skip

    def abandoned(self, round: int, n_results: int, since: float) -> None:
        """Too few results: the round will be tried again, unless that has been so for long."""
        need, waited = self.cfg.hub.min_workers, time.monotonic() - since
        self.events.write("not committed", round=round, n_results=n_results, need=need)
        if waited > self.cfg.hub.patience:
            raise self._too_few(round, n_results, need, waited)

    def _too_few(self, round: int, n: int, need: int, waited: float) -> Ended:
        self.events.write("giving up", round=round, n_workers=n, need=need)
        return Ended(
            f"round {round} needs {need} workers (hub.min_workers), {n} are in after {waited:.0f} s "
            f"(hub.patience = {self.cfg.hub.patience:g}); the last checkpoint is unharmed, start the "
            f"hub again with --resume",
            TOO_FEW,
        )

    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received so far."""
        return self.roster.traffic()

    def close(self) -> None:
        """Tell everybody to go home."""
        self.roster.close()
        self._judges.close()
