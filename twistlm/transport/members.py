"""The workers of a hub: who has a place, who waits for one, who is kept out after wrong results."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..config import Kind
from ..system.device import BufferPool
from .checks import Finding
from .events import Events
from .listener import Listener
from .protocol import Goodbye, Message, Refusal, RoundOrder, RoundResult
from .session import Session

STRIKES = 3
GOODBYE = 1.0  # seconds for workers to close their end


@dataclass
class PendingOrder:
    """What one worker was asked for in a round, and how far its answer has come."""

    order: RoundOrder  # as it was last sent
    sent: Tensor  # [rows, n]: what went down, in host memory
    weights: Tensor  # the same as bytes
    tokens: Tensor  # bytes
    answer: Tensor  # uint8: where its result will lie
    works: list[Any] = field(default_factory=list)  # transfers under way
    announced: RoundResult | None = None
    tries_up: int = 0
    finding: Future[Finding] | None = None  # on a result that has arrived


@dataclass
class Member:
    """A worker that is in, or waits for a place."""

    name: str
    session: Session
    widths: dict[Kind, int]  # its own K, where it brought one
    place: int = -1
    pending: PendingOrder | None = None
    buffers: BufferPool = field(default_factory=BufferPool)


class Members:
    """The workers of a run by place, and those who wait for one."""

    def __init__(self, listener: Listener, events: Events, places: range):
        self.listener, self._events, self._places = listener, events, places
        self.by_place: dict[int, Member] = {}
        self._waiting: list[Member] = []
        self._strikes: Counter[str] = Counter()
        self._n_sent = self._n_received = 0  # of sessions that are closed

    def admit(self) -> None:
        """Drop who has left, and give free places to those who wait, in the order of arrival."""
        self._waiting += [Member(*arrival) for arrival in self.listener.arrivals()]
        for member in [*self.by_place.values(), *self._waiting]:
            try:
                for message in member.session.heard():
                    self.out_of_turn(member, message, None)
            except OSError as error:
                self.drop(member, "left", why=str(error))
        free = [place for place in self._places if place not in self.by_place]
        for place, member in zip(free, list(self._waiting), strict=False):
            self._waiting.remove(member)
            while member.name in {other.name for other in self.by_place.values()}:
                member.name += "'"  # two processes under one name are told apart
            member.place = place
            self.by_place[place] = member
            self._events.write("joined", member.name, place=place, **member.widths)

    def out_of_turn(self, member: Member, message: Message, round: int | None) -> None:
        """A message that answers nothing: the worker leaves, or its result is late or a second one."""
        if isinstance(message, Goodbye):
            raise ConnectionError("it said goodbye")
        if isinstance(message, RoundResult):
            now = f"round {round} is on" if round is not None else "no round is on"
            self._events.write(
                "refused", member.name, round=message.round, why=f"late or twice: {now}"
            )

    def drop(self, member: Member, event: str, **more: Any) -> None:
        """End a session, and write down why."""
        if member.session.closed:
            return
        self._events.write(event, member.name, **more)
        if self.by_place.get(member.place) is member:
            del self.by_place[member.place]
        if member in self._waiting:
            self._waiting.remove(member)
        self._n_sent += member.session.n_sent
        self._n_received += member.session.n_received
        member.session.close()
        member.pending = None

    def strike(self, member: Member, round: int, why: str) -> None:
        """Refuse a result; after three of them the worker's name stays out of the run."""
        self._strikes[member.name] += 1
        self._events.write("refused", member.name, round=round, why=why)
        member.pending = None
        if self._strikes[member.name] >= STRIKES:
            with suppress(OSError):
                member.session.tell(Refusal(f"{member.name} is in quarantine: {why}"))
            self.listener.bar(member.name, f"{member.name} is in quarantine: {why}")
            self.drop(member, "quarantined", round=round, why=why)

    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received so far."""
        now = [member.session for member in self.by_place.values()]
        return (
            self._n_sent + sum(s.n_sent for s in now),
            self._n_received + sum(s.n_received for s in now),
        )

    def close(self) -> None:
        """Take nobody in any more, and end every session in good order."""
        self.listener.close()
        self._waiting += [Member(*arrival) for arrival in self.listener.arrivals()]
        for member in [*self.by_place.values(), *self._waiting]:
            member.session.leave()
        end = time.monotonic() + GOODBYE
        for member in [*self.by_place.values(), *self._waiting]:
            member.session.drain(end - time.monotonic())
            member.session.close()
        self.by_place.clear()
        self._waiting.clear()
