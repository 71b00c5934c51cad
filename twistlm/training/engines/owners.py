"""The owners of the central model, seen from the driver: a round is in all ranges or in none."""

import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
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


class Pulse:
    """Pings a run's actors, which end when nobody does, and knows how long each is silent."""

    def __init__(self, patience: float):
        self.patience, self.every = patience, min(BEAT, patience / 10)
        self.asked: dict[Any, Any] = {}  # actor -> its ping that is not answered yet
        self.answered: dict[Any, float] = {}
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._beat, daemon=True)
        self.thread.start()

    def close(self, *, leave: bool = True) -> None:
        """Before Ray is left: a ping after that would end this process. Actors may live on."""
        self.ended.set()
        self.thread.join(LEAVE)
        for actor in () if leave else list(self.answered):
            self.drop(actor)

    def start(self, kind: Any, name: str, machine: str = "", **options: Any) -> Any:
        """An actor that may take as long as `patience` until its first answer."""
        actor = ray_cluster.detached(kind, name, machine, **options).remote(self.patience)
        self.answered[actor] = time.monotonic() + self.patience
        return actor

    def drop(self, actor: Any) -> None:
        """End an actor."""
        with suppress(Exception):
            ray.kill(actor)
        self.answered.pop(actor, None)
        self.asked.pop(actor, None)

    def silent(self, actor: Any) -> float:
        return time.monotonic() - self.answered.get(actor, 0.0)

    def _beat(self) -> None:
        while not self.ended.wait(self.every):
            for actor in list(self.answered):
                with suppress(Exception):
                    if (ref := self.asked.get(actor)) is not None:
                        if not is_there(ref):
                            continue
                        _, wrong = answer(ref)
                        if actor in self.answered:  # one that is dead is silent for ever
                            self.answered[actor] = -math.inf if wrong else time.monotonic()
                    self.asked[actor] = actor.ping.remote()


class Owners:
    """H actors, each with a range; lives as long as the engine."""

    def __init__(self, cfg: Config, ranges: Ranges, run: Any, name: str, pulse: Pulse, log: Events):
        self.cfg, self.ranges, self.n, self.events = cfg, ranges, ranges.n, log
        self.name, self.pulse, self._run, self.attempt = name, pulse, run, ""
        self._whole = ray.put((ranges.segments.full, ranges.segments.block_map))
        groups = {"pulse": 1, "disk": 1, "pieces": cfg.train.n_workers}
        self._kind = ray.remote(concurrency_groups=groups)(owner.OWNER)
        self.at = [""] * self.n  # the machine of each
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
        return self.pulse.start(self._kind, f"{self.name}-owner-{i}", self.at[i], **more)

    def _replace(self, i: int) -> Standing:
        is_dead = self.pulse.silent(self.actors[i]) == math.inf  # else its machine may be at fault
        self.pulse.drop(self.actors[i])
        self.actors[i] = self._start(i, "" if is_dead else self.at[i])
        return self.wait({self._enter(i): i})[i]

    def _enter(self, i: int) -> Any:
        return self.actors[i].enter.remote(self._run, self._whole, i, self.n)

    def begin(self, central: Central, progress: Progress, resumes: bool) -> Progress:
        """Give everybody its range, unless owners of this run have a newer round: where it is."""
        have = [each.progress.round for each in self.standings().values() if each.progress]
        if resumes and max(have, default=-1) >= progress.round:
            with suppress(Ended):  # too much of it is lost: the checkpoint
                return self.mend()
        while True:
            with suppress(Lost, Ended):  # whoever is lost by now had nothing that is not here
                for i in set(range(self.n)) - set(self.standings()):
                    self._replace(i)
                for i, actor in enumerate(self.actors):
                    # in parts: pages of the store that this process writes count as its memory
                    state = self.ranges.whole.get(central.state, i).view(-1)
                    for n, part in enumerate(state.split(PART)):
                        piece = packed(part.cpu())
                        self.wait({actor.keep.remote(progress.round, i, piece, n * PART): i})
                self._settle(progress)
                return self.mend()
            time.sleep(self.pulse.every)

    def cut(self, blueprints: list[Blueprint]) -> list[tuple[Any, ...]]:
        """[worker][owner]: references to the parts of everybody's subnet."""
        # no number: workers of a driver that was killed may still bring what it asked for
        self.attempt = secrets.token_hex(8)
        calls = [
            actor.cut.options(num_returns=1 + len(blueprints)).remote(self.attempt, blueprints)
            for actor in self.actors
        ]
        self.wait({done: i for i, (done, *_) in enumerate(calls)})
        return list(zip(*(parts for _, *parts in calls), strict=True))

    def prepare(self, there: list[int], round: int) -> None:
        """These workers' results beside all committed ranges, and copies to all successors."""
        calls = [a.prepare.options(num_returns=2).remote(there, round) for a in self.actors]
        self.wait({done: i for i, (done, _) in enumerate(calls)})
        asked = {}
        for i, (_, state) in enumerate(calls if self.n > 1 else []):
            after = (i + 1) % self.n
            asked[self.actors[after].keep.remote(round, i, state)] = after
        self.wait(asked)

    def commit(self, progress: Progress) -> None:
        """What all have prepared and kept is the committed state; whoever is left has it."""
        with suppress(Lost):
            return self._settle(progress)
        self.mend()

    def _settle(self, progress: Progress) -> None:
        self.wait({actor.settle.remote(progress): i for i, actor in enumerate(self.actors)})

    def wait(self, asked: Mapping[Any, int]) -> dict[int, Any]:
        """Owner -> its answer, once all have answered."""
        answers, lost = self._answers(asked)
        if lost:
            raise Lost(lost)
        return answers

    def _answers(self, asked: Mapping[Any, int]) -> tuple[dict[int, Any], dict[int, str]]:
        """Owner -> its answer, and owner -> why there is none, if it is dead or silent."""
        open_, answers, lost = dict(asked), dict[int, Any](), dict[int, str]()
        while open_:
            for ref in ray.wait(list(open_), timeout=0.2)[0]:
                i, (said, wrong) = open_.pop(ref), answer(ref)
                if wrong == "bug":
                    raise said
                if wrong:
                    lost[i] = type(said).__name__
                else:
                    answers[i], self.pulse.answered[self.actors[i]] = said, time.monotonic()
            for ref, i in list(open_.items()):
                if self.is_silent(i):
                    lost[open_.pop(ref)] = f"silent for {self.cfg.ray.floor:g} s"
        for i, why in lost.items():
            self.events.write("lost", f"owner {i}", why=why)
        return answers, lost

    def is_silent(self, i: int) -> bool:
        return self.pulse.silent(self.actors[i]) > max(self.cfg.ray.floor, 3 * BEAT)

    def check_alive(self) -> None:
        """Raise `Lost` if one is dead or silent: the sooner, the less likely is a second one."""
        if silent := {i: "silent" for i in range(self.n) if self.is_silent(i)}:
            raise Lost(silent)

    def standings(self) -> dict[int, Standing]:
        """What owners have; those that do not say are left out."""
        told = self._answers({self._enter(i): i for i in range(self.n)})[0]
        for i, each in told.items():  # those of an earlier driver are where it started them
            self.at[i] = each.machine
        return told

    def mend(self) -> Progress:
        """Bring all owners to one committed round: each range is kept twice, by who has it."""
        while True:
            told = self.standings()
            have = [each.progress for each in told.values() if each.progress]
            if not have:
                raise self._gone(sorted(set(range(self.n)) - set(told)), "are lost")
            # a round that one has committed was prepared and kept by all
            now = max(have, key=lambda progress: progress.round)
            pairs = [(i, (i + 1) % self.n) for i in range(self.n)]  # who keeps range i
            has = {j: {i for r, i in each.kept if r == now.round} for j, each in told.items()}
            where = [[j for j in pair if i in has.get(j, ())] for i, pair in enumerate(pairs)]
            for pair in (pairs[i] for i, found in enumerate(where) if not found):
                raise self._gone(sorted(pair), "are lost together")
            try:
                self.wait({self.actors[i].settle.remote(now): i for i in told})
                for i in set(range(self.n)) - set(told):
                    told[i] = self._replace(i)
                for i, pair in enumerate(pairs):
                    for j in set(pair) - set(where[i]):
                        state = self.actors[where[i][0]].give.remote(i)
                        self.wait({self.actors[j].keep.remote(now.round, i, state): j})
                self._settle(now)
                for i in (i for i, found in enumerate(where) if i not in found):
                    self.events.write("restored", f"owner {i}", round=now.round, pid=told[i].pid)
                return now
            except Lost:
                time.sleep(self.pulse.every)

    def _gone(self, who: list[int], what: str) -> Ended:
        names = " and ".join(map(str, who))
        self.events.write("giving up", why=f"owners {names} {what}")
        return Ended(
            f"owners {names} of the central model {what}: start the run again with --resume, it "
            f"goes on from the last checkpoint",
            TOO_FEW,
        )

    def snapshot(self) -> Callable[[Path], None]:
        """What writes the committed ranges of now into a folder."""
        actors = list(self.actors)  # those of now: who replaces them later knows nothing of it
        lent = [[actor.lend.remote(i) for actor in actors] for i in range(self.n)]

        def write(draft: Path) -> None:
            asked = {a.write.remote(draft, *lent[i]): i for i, a in enumerate(actors)}
            try:
                for files in self.wait(asked).values():
                    for name, content in files.items():
                        content.tofile(draft / name)
            except Lost as error:
                raise OSError(f"owners are lost: {error}") from None
            except exceptions.RayTaskError as error:
                raise error.cause from None

        return write
