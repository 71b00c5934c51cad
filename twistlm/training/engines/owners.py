"""The owners of the central model, seen from the driver: a round is in all ranges or in none."""

import math
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...config import Config
from ...model.blocks import Blueprint
from ...model.central import Central
from ...model.ranges import Ranges
from ...system.signals import TOO_FEW, Ended
from ...transport import ray_cluster
from ...transport.events import Events
from ...transport.protocol import packed
from ...transport.ray_cluster import answer, exceptions, is_there, ray
from ..run import Progress
from . import owner
from .owner import Standing

BEAT = 1.0  # seconds between two pings
LEAVE = 60.0  # seconds for the last ones, on a machine that stalls
PART = 1 << 20  # values that the driver sends at a time


class Lost(Exception):
    """An owner is gone or silent, or what it sent is: the round is abandoned."""


@dataclass
class Contact:
    """What a pulse knows of an actor; one that is dropped meanwhile takes it along."""

    answered: float  # when, in the future while it starts, -inf once it is dead
    ping: Any = None  # that it has not answered yet


class Pulse:
    """Pings a run's actors, which end when nobody does, and knows how long each is silent.

    Silence is counted in seconds that this process has lived: one that was itself stopped accuses
    nobody when it goes on.
    """

    def __init__(self, patience: float):
        self.patience, self.every, self.lived = patience, min(BEAT, patience / 10), 0.0
        self.contacts: dict[Any, Contact] = {}  # by actor
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._beat, daemon=True)
        self.thread.start()

    def close(self, *, leave: bool = True) -> bool:
        """Whether Ray may be left: a ping after that would end this process. Actors may stay."""
        self.ended.set()
        self.thread.join(LEAVE)
        for actor in () if leave else list(self.contacts):
            self.drop(actor)
        return not self.thread.is_alive()

    def start(self, kind: Any, name: str, machine: str = "", **options: Any) -> Any:
        """An actor that may take as long as `patience` until its first answer."""
        actor = ray_cluster.detached(kind, name, machine, **options).remote(self.patience)
        self.contacts[actor] = Contact(self.lived + self.patience)
        return actor

    def drop(self, actor: Any) -> None:
        """End an actor."""
        self.contacts.pop(actor, None)  # first: no ping keeps it alive
        with suppress(Exception):
            ray.kill(actor)

    def hear(self, actor: Any) -> None:
        if contact := self.contacts.get(actor):
            contact.answered = self.lived

    def silent(self, actor: Any) -> float:
        contact = self.contacts.get(actor)
        return self.lived - contact.answered if contact else math.inf

    def _beat(self) -> None:
        woke = time.monotonic()
        while not self.ended.wait(self.every):
            slept, woke = time.monotonic() - woke, time.monotonic()
            self.lived += min(slept, 2 * self.every)
            for actor, contact in list(self.contacts.items()):
                with suppress(Exception):
                    if contact.ping is not None:
                        if not is_there(contact.ping):
                            continue
                        contact.answered = -math.inf if answer(contact.ping)[1] else self.lived
                    contact.ping = actor.ping.remote()


class Owners:
    """H actors, each with a range; lives as long as the engine."""

    def __init__(self, cfg: Config, ranges: Ranges, run: Any, name: str, pulse: Pulse, log: Events):
        self.cfg, self.ranges, self.n, self.events = cfg, ranges, ranges.n, log
        self.name, self.pulse, self._run, self.attempt = name, pulse, run, ""
        self._whole = ray.put((ranges.segments.full, ranges.segments.block_map))
        groups = {"pulse": 1, "disk": 1, "pieces": cfg.train.n_workers}
        self._kind = ray.remote(concurrency_groups=groups)(owner.OWNER)
        self.at = [""] * self.n  # the machine of each
        self.numbers: dict[Any, int] = {}  # actor -> its range, also of those that were replaced
        self.actors = [self._start(i) for i in range(self.n)]

    def _start(self, i: int, silent: str = "") -> Any:
        """On a machine with few owners, if possible not its neighbours' nor a silent one."""
        near = {self.at[j % self.n] for j in (i - 1, i + 1)}
        others = [*self.at[:i], *self.at[i + 1 :]]
        machines = [node["NodeID"] for node in ray_cluster.machines()]
        self.at[i] = min(
            machines, key=lambda m: (m == silent, others.count(m), m in near, machines.index(m))
        )
        more = {"num_cpus": 0, "allow_out_of_order_execution": True}
        actor = self.pulse.start(self._kind, f"{self.name}-owner-{i}", self.at[i], **more)
        self.numbers[actor] = i
        return actor

    def _enter(self, who: Iterable[int]) -> tuple[dict[int, Standing], dict[int, str]]:
        """What these owners have, and why others do not say."""
        asked = {self.actors[i]: (self._run, self._whole, i, self.n) for i in who}
        try:
            told, lost = self._answers({a.enter.remote(*args): a for a, args in asked.items()})
        except exceptions.RayTaskError as error:
            if isinstance(error.cause, ValueError):  # its machine has another twistlm
                raise ValueError(f"an owner of the central model: {error.cause}") from None
            raise
        for i, each in told.items():  # those of an earlier driver are where it started them
            self.at[i] = each.machine
        return told, lost

    def everyone(self) -> dict[int, Standing]:
        """What all owners have, new ones in the places of those that do not say."""
        told, lost = self._enter(range(self.n))
        for i in lost:
            old = self.actors[i]
            is_dead = self.pulse.silent(old) == math.inf  # else its machine may be at fault
            self.pulse.drop(old)
            self.actors[i] = self._start(i, "" if is_dead else self.at[i])
        fresh, lost = self._enter(lost)
        if lost:
            raise Lost(lost)
        return told | fresh

    def begin(self, central: Central, progress: Progress, resumes: bool) -> Progress:
        """Give everybody its range, unless owners of this run have a newer round: where it is."""
        while True:
            with suppress(Lost):  # whoever is lost by now had nothing that is not here
                have = [r for each in self.everyone().values() for r, _ in each.kept]
                if resumes and max(have, default=-1) >= progress.round:
                    with suppress(Ended):  # too much of it is lost: the checkpoint
                        return self.mend()
                for i, actor in enumerate(self.actors):
                    # in parts: pages of the store that this process writes count as its memory
                    state = self.ranges.whole.get(central.state, i).view(-1)
                    for n, part in enumerate(state.split(PART)):
                        piece = packed(part.cpu())
                        self.wait({actor.load.remote(progress, piece, n * PART): actor})
                return self.mend()
            time.sleep(self.pulse.every)

    def cut(self, after: int, blueprints: list[Blueprint]) -> list[tuple[Any, ...]]:
        """[worker][owner]: references to the parts of everybody's subnet."""
        # no number: workers of a driver that was killed may still bring what it asked for
        self.attempt, n = secrets.token_hex(8), 1 + len(blueprints)
        asked = self.attempt, after, blueprints
        calls = {a: a.cut.options(num_returns=n).remote(*asked) for a in self.actors}
        return list(zip(*self._made(calls), strict=True))

    def prepare(self, there: list[int], progress: Progress) -> None:
        """The round with these workers' results: in every range, and copied to its successor."""
        made = self._made({a: a.prepare.remote(there, progress) for a in self.actors})
        copies = {}
        for i, (state,) in enumerate(made if self.n > 1 else ()):
            after = self.actors[(i + 1) % self.n]
            copies[after.keep.remote(progress, i, state)] = after
        self.wait(copies)

    def _made(self, calls: Mapping[Any, list[Any]]) -> list[list[Any]]:
        """What each actor was asked for, as references behind a word that it is there, once it is:
        who takes it then waits for no owner, which may be silent."""
        self.wait({done: actor for actor, (done, *_) in calls.items()})
        return [pieces for _, *pieces in calls.values()]

    def wait(self, asked: Mapping[Any, Any]) -> dict[int, Any]:
        """Number -> answer, of references and the actors that were asked, once all have."""
        answers, lost = self._answers(asked)
        if lost:
            raise Lost(lost)
        return answers

    def _answers(self, asked: Mapping[Any, Any]) -> tuple[dict[int, Any], dict[int, str]]:
        """Number -> answer, and number -> why there is none, if it is dead or silent."""
        open_, answers, lost = dict(asked), dict[int, Any](), dict[int, str]()
        while open_:
            for ref in ray.wait(list(open_), num_returns=len(open_), timeout=0.2)[0]:
                actor, (said, wrong) = open_.pop(ref), answer(ref)
                if wrong == "bug":
                    raise said
                if wrong:
                    lost[self.numbers[actor]] = type(said).__name__
                else:
                    answers[self.numbers[actor]] = said
                    self.pulse.hear(actor)
            for ref, actor in list(open_.items()):
                if self.is_silent(actor):
                    lost[self.numbers[open_.pop(ref)]] = f"silent for {self.cfg.ray.floor:g} s"
        for i, why in lost.items():
            self.events.write("lost", f"owner {i}", why=why)
        return answers, lost

    def is_silent(self, actor: Any) -> bool:
        return self.pulse.silent(actor) > max(self.cfg.ray.floor, 3 * BEAT)

    def check_alive(self) -> None:
        """Raise `Lost` if one is dead or silent: the sooner, the less likely is a second one."""
        if silent := {i: "silent" for i, actor in enumerate(self.actors) if self.is_silent(actor)}:
            raise Lost(silent)

    def mend(self) -> Progress:
        """Bring the newest round of which every range is left to all: each is kept twice."""
        while True:
            with suppress(Lost):
                told = self.everyone()
                keepers: dict[tuple[int, int], list[int]] = {}  # (round, range) -> owners
                for j, each in told.items():
                    for at in each.kept:
                        keepers.setdefault(at, []).append(j)
                if not keepers:
                    raise self._gone(range(self.n), "are lost")
                n_left = {r: sum((r, i) in keepers for i in range(self.n)) for r, _ in keepers}
                now = max(n_left, key=lambda r: (n_left[r], r))
                for i in range(self.n):
                    pair = sorted({i, (i + 1) % self.n})  # who keeps range i
                    has = keepers.get((now, i))
                    if not has:
                        raise self._gone(pair, "are lost together")
                    progress = told[has[0]].progress[now]
                    for j in set(pair) - set(has):
                        keeper, lacks = self.actors[has[0]], self.actors[j]
                        ((state,),) = self._made({keeper: keeper.give.remote(now, i)})
                        self.wait({lacks.keep.remote(progress, i, state): lacks})
                    if i not in has:
                        self.events.write("restored", f"owner {i}", round=now, pid=told[i].pid)
                return progress
            time.sleep(self.pulse.every)

    def _gone(self, who: range | list[int], what: str) -> Ended:
        names = " and ".join(map(str, who))
        self.events.write("giving up", why=f"owners {names} {what}")
        return Ended(
            f"owners {names} of the central model {what}: start the run again with --resume, it "
            f"goes on from the last checkpoint",
            TOO_FEW,
        )

    def snapshot(self, round: int) -> Callable[[Path], None]:
        """What writes the ranges after a round into a folder."""
        actors = list(self.actors)  # those of now: who replaces them later knows nothing of it
        lent = {a: a.lend.options(num_returns=1 + self.n).remote(round) for a in actors}

        def write(draft: Path) -> None:
            try:
                parts = zip(actors, zip(*self._made(lent), strict=True), strict=True)
                asked = {actor.write.remote(draft, *each): actor for actor, each in parts}
                for files in self.wait(asked).values():
                    for name, content in files.items():
                        content.tofile(draft / name)
            except Lost as error:
                raise OSError(f"owners are lost: {error}") from None
            except exceptions.RayTaskError as error:
                raise error.cause from None

        return write
