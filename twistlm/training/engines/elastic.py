"""The elastic engine: workers are Ray actors on machines that come and go."""

import math
import secrets
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ... import config
from ...compute.perplexity import Text
from ...data import stream
from ...model import generator
from ...model.ranges import Ranges
from ...system.provenance import version
from ...system.signals import TOO_FEW, Ended, stopped
from ...transport import protocol, ray_cluster
from ...transport.events import Events
from ...transport.protocol import RoundOrder, WorkerInfo, packed, reason_to_reject
from ...transport.ray_cluster import answer, exceptions, is_there, ray, words
from ..aggregator import Stats
from ..assignments import Assignments, Outcome, assign, measured_rho, traffic
from ..run import Progress, Run
from ..teacher import pack
from . import actor
from .engine import Engine
from .owners import Lost, Owners, Pulse

RECENT = 9  # rounds behind the median
FIRST = 10  # times the floor: the deadline of a round with nothing to compare it with
STRIKES = 3
LONGEST_PAUSE = 30.0  # seconds between two tries to start a worker
NOBODY = WorkerInfo("", "")


@dataclass
class WorkerSlot:
    """One of the S workers of a run, and the actor that fills it."""

    number: int
    actor: Any = None
    info: WorkerInfo = NOBODY  # until its hello is there
    pending: Any = None  # the reference of its hello, or of a result, that has not come
    round: int = 0  # that it was asked for
    since: float = 0.0  # when it was asked
    fresh: bool = True  # it has not brought a result yet: its first steps compile
    not_before: float = 0.0  # a slot that fails is filled more and more slowly
    pause: float = 0.0
    stats: Stats | None = None  # of its result, if that came in time and was accepted
    seconds: float = 0.0  # until all owners had it
    failed: bool = False  # it answered with an error, or its result was rejected

    @property
    def name(self) -> str:
        return f"{self.number}@{self.info.name}" if self.info.name else f"place {self.number}"


class WorkerPool:
    """S actors that are started, found again, or replaced; lives as long as the engine."""

    def __init__(self, run: Run, described: Any, name: str, pulse: Pulse, events: Events):
        self.cfg, self.block_map, self.events = run.cfg, run.cut.block_map, events
        self.pulse, self._id, self._gpus = pulse, name, ray_cluster.gpus(run.cfg)
        self.slots = [WorkerSlot(number) for number in range(self.cfg.train.n_workers)]
        self.barred: set[str] = set()  # machines whose results were wrong three times
        self.strikes: Counter[str] = Counter()  # by machine
        self._kind = ray.remote(concurrency_groups={"pulse": 1})(actor.WORKER)
        self._hello = described, ray.put(pack(run.teacher))

    def admit(self, r: int, longest: float) -> list[WorkerSlot]:
        """Start who is missing, take in who is ready, replace who has been late for long."""
        for slot in self.slots:
            if slot.actor is None and time.monotonic() >= slot.not_before:
                self._start(slot)
            if slot.pending is not None and slot.info is not NOBODY:
                first = FIRST * self.cfg.ray.floor if slot.fresh else 0.0
                self._look_after(slot, r, max(longest, first))
            elif slot.pending is not None and is_there(slot.pending):
                self._take_in(slot)
        return [s for s in self.slots if s.info is not NOBODY and s.pending is None]

    def _start(self, slot: WorkerSlot) -> None:
        """Anywhere but on a machine whose results were wrong three times."""
        good = {"ray.io/node-id": f"!in({','.join(self.barred)})"} if self.barred else None
        name, cpus = f"{self._id}-{slot.number}", max(1, self.cfg.run.threads)
        more: dict[str, Any] = {"num_cpus": cpus, "num_gpus": self._gpus, "label_selector": good}
        slot.actor = self.pulse.start(self._kind, name, **more)
        slot.pending = slot.actor.enter.remote(*self._hello)

    def _take_in(self, slot: WorkerSlot) -> None:
        said, wrong = answer(slot.pending)
        if wrong:
            return self.lose(slot, "lost" if wrong == "gone" else "turned away", why=words(said))
        slot.info, slot.pending = said, None
        try:
            if slot.info.node in self.barred:
                raise ValueError("its machine is in quarantine")
            generator.check_own(self.block_map, self.cfg.blocks, slot.info.widths)
            slot.pause = 0.0
            self.events.write("joined", slot.name, place=slot.number, **slot.info.widths)
        except ValueError as error:
            self.barred.add(slot.info.node)
            self.lose(slot, "turned away", why=str(error))

    def _look_after(self, slot: WorkerSlot, r: int, longest: float) -> None:
        """A late worker is kept: it may only be slow. What it brings now is refused."""
        if is_there(slot.pending):
            said, wrong = answer(slot.pending)
            slot.pending, slot.fresh = None, False
            if wrong == "gone":
                self.lose(slot, "lost", round=r, why=words(said))
            elif not wrong:
                why = f"late: round {r} is on"
                self.events.write("refused", slot.name, round=slot.round, why=why)
                self.events.write("joined", slot.name, place=slot.number, **slot.info.widths)
        elif time.monotonic() - slot.since > longest:
            self.lose(slot, "lost", round=r, why=f"silent for {longest:.0f} s: replaced")

    def lose(self, slot: WorkerSlot, event: str, **more: Any) -> None:
        """Empty a slot; it is filled again, at once for the first time."""
        self.events.write(event, slot.name, **more)
        self.pulse.drop(slot.actor)
        pause, then = min(LONGEST_PAUSE, max(0.5, 2 * slot.pause)), time.monotonic() + slot.pause
        self.slots[slot.number] = WorkerSlot(slot.number, not_before=then, pause=pause)

    def strike(self, slot: WorkerSlot, r: int, why: str) -> None:
        """Refuse a result; a machine that brought three wrong ones gets no new workers."""
        node = slot.info.node
        self.strikes[node] += 1
        slot.fresh = False
        self.events.write("refused", slot.name, round=r, why=why)
        if self.strikes[node] >= STRIKES:
            self.barred.add(node)
            self.lose(slot, "quarantined", round=r, why=why)


def _actors_of(out: Path) -> tuple[str, int]:
    """By which name a restarted process finds a run's actors, and how many owners are left."""
    note = out / "ray-id.txt"
    name, *n = note.read_text().split() if note.is_file() else [secrets.token_hex(6)]
    return name, sum(map(int, n)) if f"{name}-owner-0" in ray.util.list_named_actors() else 0


class Elastic(Engine):
    """Rounds with whoever is in.

    Who has no result in time costs its own update: blocks that it alone held stay as they are, and
    its sequences are the first to go out again. Weights, counts and leases change together, or not
    at all.
    """

    events: Events

    def __init__(self, run: Run, start: Progress, quiet: bool, resumes: bool):
        assert run.central is not None
        assert run.evaluator is not None
        cfg, out = run.cfg, Path(run.cfg.run.out)
        dealt = generator.for_training(
            run.cut.block_map, cfg.train.n_workers, cfg.blocks, seed=0, round=0
        )
        stored, n_copies = traffic(run, dealt, dealt), 1 + (cfg.ray.owners != 1)
        in_store = stored.down + stored.up + stored.teacher
        there = ray_cluster.enter(cfg, in_store, run.state_bytes * n_copies)
        self.durations: deque[float] = deque(maxlen=RECENT)  # of rounds since this process started
        self.events, self.text = Events(out, quiet), run.evaluator.text
        self.head, self.pulse = ray_cluster.Head(there["address"]), Pulse(cfg.ray.patience)
        try:
            name, n_left = _actors_of(out)
            n_owners = cfg.ray.owners or (resumes and n_left) or len(ray_cluster.machines())
            (out / "ray-id.txt").write_text(f"{name} {n_owners}\n")
            model = run.cut.template.config
            about = (version("twistlm"), config.to_dict(cfg), model.to_dict(), run.total_steps)
            described = ray.put(protocol.RunDescription(*about))
            self.pool = WorkerPool(run, described, name, self.pulse, self.events)
            ranges = Ranges(run.cut.segments, n_owners)
            self.owners = Owners(cfg, ranges, described, name, self.pulse, self.events)
            # a process takes seconds to import torch: workers start while owners do
            self.pool.admit(start.round, math.inf)
            start = self.owners.begin(run.central, start, resumes)
            run.cut.template.to(torch.device("meta"))  # type: ignore[arg-type]
            super().__init__(replace(run, central=None, evaluator=None, teacher=None), start)
            self.n_done = start.round  # rounds that are in all ranges
            url = there.get("webui_url")
            more = {"address": there["address"]} | ({"dashboard": f"http://{url}"} if url else {})
            pids = [told.pid for _, told in sorted(self.owners.everyone().items())]
            self.events.write("started", round=start.round, **more, owners=pids)
        except BaseException:
            self.close(crashed=True)
            raise

    @contextmanager
    def _on_ray(self) -> Iterator[None]:
        """Within, errors that come from a Ray that is gone are one sentence."""
        try:
            yield
        except exceptions.RayTaskError as error:  # a bug of an actor, whose traceback it has
            self.events.write("giving up", why=words(error))
            raise RuntimeError(str(error)) from None
        except (Ended, exceptions.RayError) as error:
            # owners and workers are lost, too, when it is their head that died
            mine = isinstance(error, Ended) and error.code != TOO_FEW
            if mine or self.head.answers():
                raise
            self.events.write("giving up", why="its head does not answer")
            raise self.head.gone() from None

    def round(self, progress: Progress) -> Outcome:
        """One round with those who are in, unless Ray itself is gone."""
        with self._on_ray():
            return self._round(progress)

    def _round(self, progress: Progress) -> Outcome:
        """Tried again until `ray.min_workers` results are there, and all owners with them."""
        run, r, need = self.run, progress.round, self.run.cfg.ray.min_workers
        rho, first = None, time.monotonic()
        while True:
            team, there, why = list[WorkerSlot](), list[int](), ""
            try:
                team = self._gather(r, first)
                if rho is None:
                    rho = measured_rho(run, progress, partial(self._on_a_worker, "rho"))
                present = [(slot.number, slot.info.widths) for slot in team]
                work, began = assign(run, progress, present, rho), time.monotonic()
                self._post(work, team)
                self._collect(work, team, began)
                there = [i for i, slot in enumerate(team) if slot.stats is not None]
                if run.stop.requested and len(there) < len(team):
                    raise stopped(run.stop, r)
                if len(there) >= need:
                    return self._commit(work, team, there, began)
            except Lost as error:
                why = f"owners are lost: {error}"
            self.events.write("not committed", round=r, n_results=len(there), need=need, why=why)
            if why or not there:
                self._mend()  # first: who waits for a silent owner waits no more
            self._drain(team)
            if (waited := time.monotonic() - first) > run.cfg.ray.patience:
                raise self._too_few(r, len(there), waited, why)

    def _commit(
        self, work: Assignments, team: list[WorkerSlot], there: list[int], began: float
    ) -> Outcome:
        """These results into all ranges; others' sequences go out again."""
        leases, dealt, r = work.leases, work.blueprints, work.progress.round
        lost = [i for i in range(len(team)) if i not in there]
        for i in lost:
            slots = work.slots_of(i)
            if team[i].failed:
                leases = stream.fail(leases, slots, work.numbers[i])
            else:
                leases = stream.give_back(leases, slots)
        for place in leases.skipped[len(work.leases.skipped) :]:
            self.events.write("set aside", round=r, why=self.run.batches.name(place))
        stats = sum((slot.stats for slot in team if slot.stats), Stats())
        back = [dealt[i] for i in there]
        sent = traffic(self.run, dealt, back)
        wired = sent.down + sent.up + sent.teacher + 4 * work.ids.size
        wired += self.run.state_bytes if self.owners.n > 1 else 0  # copies
        outcome = work.outcome(stats, wired, leases, back)
        # noted before it is there, and perhaps twice: a process that dies later cannot note it
        self.durations.append(time.monotonic() - began)
        row: dict[str, Any] = {"seconds": {team[i].name: team[i].seconds for i in there}}
        row |= {"took": self.durations[-1], "places": list(work.numbers)}
        self.events.write("round", round=r, **row, lost=[work.numbers[i] for i in lost])
        try:
            self.owners.prepare(there, outcome.progress)
        except Lost:
            if self._mend().round == r:  # of some range nobody has it
                raise
        self.n_done = r + 1
        return outcome

    def _mend(self) -> Progress:
        self.head.wait()  # owners are lost, too, when it is gone
        return self.owners.mend()

    def _drain(self, team: list[WorkerSlot]) -> None:
        """Until workers have ended what will not be used: the next try is for all of them."""
        left = {slot.pending: slot for slot in team if slot.pending is not None}
        end = time.monotonic() + self.deadline()
        with suppress(Lost):  # the next try sees it
            while left and time.monotonic() < end:
                for ref in self._come(left):
                    left.pop(ref).pending = None

    def _come(self, refs: Iterable[Any], left: float = math.inf) -> list[Any]:
        """The first of the references that is there within a fifth of a second; with no time
        `left` all that are there now. The head and all owners must be there, too."""
        asked = list(refs)
        n, seconds = (1, min(left, 0.2)) if left > 0 else (len(asked), 0.0)
        come, _ = ray.wait(asked, num_returns=n, timeout=seconds, fetch_local=False)
        self.head.check()
        self.owners.check_alive()
        return come

    def _on_a_worker(self, method: str, *args: Any) -> Any:
        """What a worker says of the central weights, which go to it from all owners."""
        since, n = time.monotonic(), self.n_done
        while True:
            team = self.pool.admit(n, 2 * self.deadline())
            if not team:
                if (waited := time.monotonic() - since) > self.run.cfg.ray.patience:
                    raise self._too_few(n, 0, waited)
                time.sleep(0.02)
                continue
            weights = [owner.give.remote(n, i, 1)[1] for i, owner in enumerate(self.owners.actors)]
            ref = getattr(team[0].actor, method).remote(*args, *weights)
            with suppress(Lost):
                while not self._come([ref]):
                    if self.pulse.silent(team[0].actor) > self.deadline():
                        break
                said, wrong = answer(ref)
                if not wrong:
                    return said
                if wrong == "bug":
                    raise said
                if wrong == "gone":
                    self.pool.lose(team[0], "lost", why=words(said))
                    continue
            self._mend()  # an owner is lost, or weights that it sent

    def evaluate(self, progress: Progress, advance: Callable[[], None]) -> tuple[dict, str]:
        with self._on_ray():
            return self._on_a_worker("evaluate", _in_memory(self.text), progress)

    def snapshot(self) -> Callable[[Path], object]:
        return self.owners.snapshot(self.n_done)

    def close(self, crashed: bool) -> None:
        """Actors of a run that crashed stay, for `--resume`; else they end with it."""
        if self.pulse.close(leave=crashed):
            ray_cluster.leave()

    def deadline(self) -> float:
        """Seconds that a round may take: three times the median of the last ones, or the floor."""
        floor = self.run.cfg.ray.floor
        if not self.durations:
            return FIRST * floor
        return max(floor, 3 * statistics.median(self.durations))

    def _gather(self, r: int, since: float) -> list[WorkerSlot]:
        """The workers of a round in order of their numbers; a run that has just started waits for
        all S, so that a restarted one deals as before."""
        cfg, stop = self.run.cfg, self.run.stop
        wait = 0.0 if self.durations else cfg.ray.wait
        reported, delay = 0.0, 1.0
        while True:
            self.head.check()
            self.owners.check_alive()
            team = self.pool.admit(r, 2 * self.deadline())
            waited = time.monotonic() - since
            need = cfg.train.n_workers if waited < wait else cfg.ray.min_workers
            if stop.requested:
                raise stopped(stop, r)
            if len(team) >= max(1, need):
                return team
            if waited > max(cfg.ray.patience, wait):
                raise self._too_few(r, len(team), waited)
            if waited >= reported + delay:
                reported, delay = waited, 2 * delay
                why = f"the others start, or have no place on {ray_cluster.room()}"
                state: dict[str, Any] = {"n_workers": len(team), "need": need, "seconds": waited}
                self.events.write("waiting", round=r, **state, why=why)
            time.sleep(0.02)

    def _post(self, work: Assignments, team: list[WorkerSlot]) -> None:
        """Tell everybody where its subnet is; nothing but the owners' word is waited for."""
        r, blueprints = work.progress.round, [dict(each) for each in work.blueprints]
        for i, (slot, pieces) in enumerate(zip(team, self.owners.cut(r, blueprints), strict=True)):
            tokens, topk = packed(work.tokens(i).to(torch.int32)), work.teacher_topk(i)
            beside = None if topk is None else packed(topk)
            at = r, self.owners.attempt, self.run.schedule_round(work.progress)
            order = RoundOrder(*at, i, blueprints[i], packed(work.gates(i)), tokens, beside)
            slot.round, slot.since, slot.stats, slot.failed = r, time.monotonic(), None, False
            slot.pending = slot.actor.train.remote(order, self.owners.actors, *pieces)

    def _collect(self, work: Assignments, team: list[WorkerSlot], began: float) -> None:
        """Wait for results until the deadline, or a signal."""
        r, limit, stop = work.progress.round, self.deadline(), self.run.stop
        open_, left = {slot.pending: i for i, slot in enumerate(team)}, limit
        while open_ and left > 0 and not stop.requested:
            left = began + limit - time.monotonic()
            for ref in self._come(open_, left):
                i = open_.pop(ref)
                team[i].seconds = time.monotonic() - began
                self._came(team[i], r, work.n_params(i))
        for i in () if stop.requested else open_.values():
            why = f"no result within {limit:.1f} s"
            self.events.write("late", team[i].name, round=r, seconds=limit, why=why)

    def _came(self, slot: WorkerSlot, r: int, n_params: int) -> None:
        """What a worker and the owners say of its result: it is in, refused, or lost."""
        t, (said, wrong) = self.run.cfg.train, answer(slot.pending)
        slot.pending = None
        if wrong == "gone":
            return self.pool.lose(slot, "lost", round=r, why=words(said))
        if wrong == "input":  # what an owner sent is lost
            return None
        loss_sum, told = (0.0, []) if wrong else said
        if isinstance(told, exceptions.RayTaskError):
            if not isinstance(told.cause, exceptions.RayError):
                raise told  # an owner's bug
            lost = f"its result is lost: {type(told.cause).__name__}"
            return self.events.write("lost", slot.name, round=r, why=lost)
        if isinstance(told, Exception):  # whether an owner is gone is seen from here, not by it
            return None
        reasons = [words(said)] if wrong else [each for each in told if isinstance(each, str)]
        if why := reasons[0] if reasons else reason_to_reject(t, told, n_params, loss_sum):
            slot.failed = True
            return self.pool.strike(slot, r, why)
        n_tokens = t.interval * t.batch * self.run.batches.seq_len
        slot.stats, slot.fresh = Stats(loss_sum, t.interval, n_tokens), False

    def _too_few(self, r: int, n: int, waited: float, why: str = "") -> Ended:
        cfg, room = self.run.cfg.ray, ray_cluster.room() + (f" ({why})" if why else "")
        self.events.write("giving up", round=r, n_workers=n, need=cfg.min_workers)
        return Ended(
            f"round {r} needs {cfg.min_workers} workers (ray.min_workers), {n} are in after "
            f"{waited:.0f} s (ray.patience = {cfg.patience:g}) on a cluster of {room}; the last "
            f"checkpoint is unharmed, start the run again with --resume",
            TOO_FEW,
        )


def _in_memory(text: Text) -> Text:
    """Its windows alone: workers have no files."""
    first, n = text.first * text.seq_len, text.n_sequences * text.seq_len
    meta, tokens = replace(text.file.meta, n_tokens=n), text.file.tokens[first : first + n]
    file = replace(text.file, meta=meta, tokens=np.array(tokens))
    return replace(text, file=file, max_tokens=0, first=0)
