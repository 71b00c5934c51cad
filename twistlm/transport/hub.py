"""The hub's side of a round: who takes part, what goes out, what comes back in time and is believed.

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
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..config import Config, Wire
from ..system.signals import TOO_FEW, Ended
from . import session, wire
from .checks import Checkers, CheckRequest, Finding
from .events import Events
from .listener import Listener
from .members import Member, Members, PendingOrder
from .protocol import (
    TOKENS,
    UPDATE,
    WEIGHTS,
    Message,
    Payload,
    Resend,
    ResultSent,
    RoundOrder,
    RoundResult,
    Task,
    transfer_tag,
)

RECENT = 9  # rounds behind the median
FIRST = 10  # times the floor: the deadline of a round with nothing to compare it with


@dataclass(frozen=True)
class Answer:
    """A result that was accepted."""

    place: int
    buffer: Tensor  # [rows, n]
    loss_sum: float


class Hub:
    """Listens, lets workers in and out, and exchanges one round at a time with those who are in."""

    def __init__(
        self,
        listener: Listener,
        cfg: Config,
        events: Events,
        first_place: int,
        stopping: Callable[[], bool] = lambda: False,
    ):
        self.cfg, self.events, self.stopping = cfg, events, stopping
        self.members = Members(listener, events, range(first_place, cfg.train.n_workers))
        self._checkers = Checkers()
        self._durations: deque[float] = deque(maxlen=RECENT)
        self._seconds: dict[str, float] = {}  # of the last round
        self._began = False  # whether a round has been committed since this hub started

    def gather(self, round: int, n_local: int, since: float) -> list[Member]:
        """The workers of a round in order of their places, at least `hub.min_workers` with local ones.

        `since` is when this round was first tried. A hub that has just started waits a while for all S:
        then a restarted run deals as before.
        """
        reported, delay = 0.0, 0.0
        while True:
            self.members.admit()
            n, waited = n_local + len(self.members.by_place), time.monotonic() - since
            need = max(1, self.cfg.hub.min_workers)
            if not self._began and waited < self.cfg.hub.wait:
                need = self.cfg.train.n_workers
            if n >= need:
                return [self.members.by_place[place] for place in sorted(self.members.by_place)]
            if self.stopping():
                return []
            if waited > max(self.cfg.hub.patience, 0.0 if self._began else self.cfg.hub.wait):
                raise self._too_few(round, n, need, waited)
            if waited >= reported + delay:
                reported, delay = waited, max(1.0, 2 * delay)
                self.events.write("waiting", round=round, n_workers=n, need=need, seconds=waited)
            time.sleep(0.05)

    def post(self, member: Member, round: int, sent: Tensor, ids: Tensor, task: Task) -> None:
        """Send a worker its weights [rows, n], its tokens and its task; nothing is waited for."""
        kind: Wire = self.cfg.run.wire
        sent = session.staged(sent)
        weights, shape = wire.down(kind, sent), (sent.shape[0], sent.shape[1])
        if kind != "fp32":  # the change is against what the worker has
            sent = wire.read_down(kind, weights, shape, sent.dtype)
        n_up = wire.up_bytes(kind, shape, sent.dtype)
        tokens = ids.to(torch.int32).contiguous().view(-1).view(torch.uint8)
        order = RoundOrder(
            round=round,
            task=task,
            weights=Payload.of(weights),
            tokens=Payload.of(tokens),
            tokens_shape=tuple(ids.shape),
            seconds=self.deadline(),
        )
        answer = member.buffers.get("up", n_up)
        member.pending = PendingOrder(order, sent, weights, tokens, answer)
        self._send(member, member.pending)

    def _send(self, member: Member, pending: PendingOrder) -> None:
        order, line = pending.order, member.session
        try:
            line.tell(order)
            pending.works += [
                line.send(pending.weights, transfer_tag(order.round, WEIGHTS, order.attempt)),
                line.send(pending.tokens, transfer_tag(order.round, TOKENS, order.attempt)),
            ]
        except OSError as error:
            self.members.drop(
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
            selector.register(self._checkers.finished, selectors.EVENT_READ)
            for member in self.members.by_place.values():
                selector.register(member.session.sock, selectors.EVENT_READ, member)
            while asked := [m.pending for m in self.members.by_place.values() if m.pending]:
                left = until - time.monotonic()
                if left <= 0:  # what has come in time is checked to the end
                    left = 0.2 if any(each.finding for each in asked) else 0.0
                if not left or self.stopping():
                    break
                for key, _ in selector.select(min(left, 0.2)):
                    if key.data is None:
                        self._checkers.clear()
                        continue
                    self._listen(key.data, round, until)
                    now = key.data.pending
                    if key.data.session.closed or (now is not None and now.finding is not None):
                        selector.unregister(key.fileobj)  # unheard until the check is over
                for member in list(self.members.by_place.values()):
                    now = member.pending
                    if now and now.finding and now.finding.done():
                        answer = self._settle(member, now, now.finding)
                        if answer is not None:
                            answers[member.place] = answer
                            seconds[member.name] = time.monotonic() - began
                        if not member.session.closed:
                            selector.register(member.session.sock, selectors.EVENT_READ, member)
        if not self.stopping():
            for member in [m for m in self.members.by_place.values() if m.pending]:
                limit = until - began
                self.members.drop(
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
            self.members.drop(member, "lost", round=round, why=str(error))

    def _take(self, member: Member, message: Message, round: int, until: float) -> None:
        now = member.pending
        answers = isinstance(message, Resend | RoundResult | ResultSent) and message.round == round
        if now is None or now.finding or not answers:
            self.members.out_of_turn(member, message, round)
        elif isinstance(message, Resend):
            if now.order.attempt:
                raise ConnectionError("the weights did not reach it twice")
            now.order = replace(now.order, attempt=1, seconds=self.deadline())
            self._send(member, now)
        elif isinstance(message, RoundResult) and now.announced is None:
            n_bytes, wanted = message.update.n_bytes, now.answer.numel()
            if n_bytes != wanted:
                why = f"it announced {n_bytes} bytes instead of {wanted}"
                self.members.strike(member, round, why)
                raise ConnectionError("a result of another size")
            now.announced = message
            place = transfer_tag(round, UPDATE, now.tries_up)
            now.works.append(member.session.receive(now.answer, place))
        elif isinstance(message, ResultSent) and now.announced is not None:
            left = until - time.monotonic()
            now.finding = self._checkers.start(
                CheckRequest(self.cfg, now.announced, now.sent, now.answer, now.works[-1], left)
            )

    def _settle(
        self, member: Member, pending: PendingOrder, finding: Future[Finding]
    ) -> Answer | None:
        """Take a result that was checked, ask for it once more, or refuse it."""
        round = pending.order.round
        try:
            found = finding.result()
            if found.result is None:
                pending.tries_up += 1
                pending.announced = pending.finding = None
                if pending.tries_up > 1:
                    self.members.strike(member, round, "a wrong checksum, twice")
                else:
                    self.events.write("again", member.name, round=round, why="a wrong checksum")
                    member.session.tell(Resend(round))
                return None
        except OSError as error:
            self.members.drop(member, "lost", round=round, why=str(error))
            return None
        if found.why:
            self.members.strike(member, round, found.why)
            return None
        member.pending = None
        return Answer(member.place, found.result, found.loss_sum)

    def committed(self, round: int, seconds: float, **more: Any) -> None:
        """The round is in the central model; `more` says who was in it and who was lost."""
        self._began = True
        self._durations.append(seconds)
        self.events.write("round", round=round, seconds=self._seconds, took=seconds, **more)

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
        return self.members.traffic()

    def close(self) -> None:
        """End every session in good order."""
        self.members.close()
        self._checkers.close()
