"""Who is in at a hub: places, spares, strikes and quarantine."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..config import Kind
from ..system.buffers import Rooms
from .checks import Verdict
from .events import Events
from .listener import Door
from .session import Kind as Say
from .session import Message, Session

STRIKES = 3
GOODBYE = 1.0  # seconds for workers to hang up


@dataclass
class Order:
    """What one worker was asked for in a round."""

    round: int
    sent: Tensor  # [rows, n]: what went down, in host memory
    down: Tensor  # the same as bytes
    ids: Tensor
    words: dict[str, Any]
    answer: Tensor  # uint8: where its result will lie
    works: list[Any] = field(default_factory=list)  # transfers under way
    announced: Message | None = None
    tries_down: int = 1
    tries_up: int = 0
    verdict: Future[Verdict] | None = None  # on a result that has arrived


@dataclass
class Member:
    """A worker that is in, or waits for a place."""

    name: str
    session: Session
    widths: dict[Kind, int]  # its own K, where it brought one
    place: int = -1
    order: Order | None = None
    rooms: Rooms = field(default_factory=Rooms)


class Roster:
    """The members of a run by place, and those who wait for one."""

    def __init__(self, door: Door, events: Events, places: range):
        self.door, self._events, self._places = door, events, places
        self.members: dict[int, Member] = {}  # by place
        self._waiting: list[Member] = []
        self._strikes: Counter[str] = Counter()
        self._n_sent = self._n_received = 0  # of sessions that are closed

    def admit(self) -> None:
        """Drop who has hung up, and give free places to those who wait, in the order of arrival."""
        self._waiting += [Member(*arrival) for arrival in self.door.arrivals()]
        for member in [*self.members.values(), *self._waiting]:
            try:
                for message in member.session.heard():
                    self.out_of_turn(member, message, None)
            except OSError as error:
                self.drop(member, "left", why=str(error))
        free = [place for place in self._places if place not in self.members]
        for place, member in zip(free, list(self._waiting), strict=False):
            self._waiting.remove(member)
            while member.name in {other.name for other in self.members.values()}:
                member.name += "'"  # two processes under one name are told apart
            member.place = place
            self.members[place] = member
            self._events.write("joined", member.name, place=place, **member.widths)

    def out_of_turn(self, member: Member, message: Message, round: int | None) -> None:
        if message.kind == Say.BYE:
            raise ConnectionError("it said goodbye")
        if message.kind == Say.RESULT:
            now = f"round {round} is on" if round is not None else "no round is on"
            self._events.write(
                "refused", member.name, round=message.round, why=f"late or twice: {now}"
            )

    def drop(self, member: Member, event: str, **more: Any) -> None:
        if member.session.closed:
            return
        self._events.write(event, member.name, **more)
        if self.members.get(member.place) is member:
            del self.members[member.place]
        if member in self._waiting:
            self._waiting.remove(member)
        self._n_sent += member.session.n_sent
        self._n_received += member.session.n_received
        member.session.close()
        member.order = None

    def strike(self, member: Member, round: int, why: str) -> None:
        self._strikes[member.name] += 1
        self._events.write("refused", member.name, round=round, why=why)
        member.order = None
        if self._strikes[member.name] >= STRIKES:
            with suppress(OSError):
                member.session.tell(Say.REFUSED, why=f"{member.name} is in quarantine: {why}")
            self.door.bar(member.name, f"{member.name} is in quarantine: {why}")
            self.drop(member, "quarantined", round=round, why=why)

    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received so far."""
        now = [member.session for member in self.members.values()]
        return (
            self._n_sent + sum(s.n_sent for s in now),
            self._n_received + sum(s.n_received for s in now),
        )

    def close(self) -> None:
        """Tell everybody to go home."""
        self.door.close()
        self._waiting += [Member(*arrival) for arrival in self.door.arrivals()]
        for member in [*self.members.values(), *self._waiting]:
            member.session.leave()
        end = time.monotonic() + GOODBYE
        for member in [*self.members.values(), *self._waiting]:
            member.session.drain(end - time.monotonic())
            member.session.close()
        self.members.clear()
        self._waiting.clear()
