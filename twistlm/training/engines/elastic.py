"""The elastic engine: workers are Ray actors on machines that come and go."""

from __future__ import annotations

import secrets
import statistics
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import config
from ...data import stream
from ...model import generator
from ...model.layout import holders
from ...system.device import BufferPool
from ...system.provenance import version
from ...system.signals import TOO_FEW, Ended, stopped
from ...transport import checks, ray_cluster, wire
from ...transport.checks import RejectedResult
from ...transport.events import Events
from ...transport.protocol import RoundOrder, RoundResult, RunDescription, checksum
from ...transport.ray_cluster import exceptions, ray
from .. import aggregator, dispatcher
from ..aggregator import Result, Stats
from ..assignments import (
    Assignments,
    assign,
    committed,
    deal,
    measured_rho,
    teacher_cache_bytes,
    traffic,
)
from ..progress import Progress
from ..run import Run
from ..teacher import pack
from .actor import as_tensor
from .protocol import Outcome
from .worker_pool import WorkerPool, WorkerSlot

RECENT = 9  # rounds behind the median
FIRST = 10  # times the floor: the deadline of a round with nothing to compare it with
CHECKERS = 4  # threads; more of them would wait for memory


@dataclass
class Sent:
    """What one worker was asked for in a round."""

    place: WorkerSlot
    weights: Any  # the reference that keeps what was sent in the object store
    buffer: Tensor  # [rows, n]: the centre's copy of it
    finding: Future[Tensor] | None = None  # its result, once that is checked
    loss_sum: float = 0.0
    seconds: float = 0.0  # until it was there
    failed: bool = False  # it answered with an error, or with what is not believed


@dataclass
class Elastic:
    """Rounds with whoever is in.

    Who has no result in time costs its own update: blocks that it alone held stay as they are, and its
    sequences are the first to go out again. Weights, counts and leases change together, or not at all.
    """

    run: Run
    start: int
    quiet: bool
    is_whole = True
    began: bool = False  # whether a round has been committed since this process started
    n_bytes: int = 0  # that went through the store
    durations: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    buffers: BufferPool = field(default_factory=BufferPool)

    def __post_init__(self) -> None:
        run, cfg = self.run, self.run.cfg
        self.events = Events(Path(cfg.run.out), self.quiet)
        there = ray_cluster.enter(cfg, self._store_bytes())
        described = RunDescription(
            version=version("twistlm"),
            config=config.to_dict(cfg),
            model=run.template.config.to_dict(),
            total_steps=run.total_steps,
            rows=run.rows,
        )
        teacher = pack(run.teacher)
        self.head = ray_cluster.Head(there["address"])
        self.pool = WorkerPool(cfg, run_id(Path(cfg.run.out)), described, teacher, self.events)
        self.pool.check_widths = lambda own: generator.check_own(run.block_map, cfg.blocks, own)
        self.checkers = ThreadPoolExecutor(CHECKERS)
        url = there.get("webui_url") or ""
        more = {"dashboard": f"http://{url}"} if url else {}
        self.events.write("started", round=self.start, address=there["address"], **more)

    def _store_bytes(self) -> int:
        """What a round puts in this machine's object store: subnets down and up, a teacher's predictions."""
        run = self.run
        full, blocks, s = run.full, run.cfg.blocks, run.cfg.train.n_workers
        blueprints = generator.for_training(run.block_map, s, blocks, seed=0, round=0)
        shapes = [
            (run.rows, full.narrowed(run.block_map, run.block_map.widths(b)).n_params)
            for b in blueprints
        ]
        kind, dtype = run.cfg.run.wire, run.cut.dtype
        ways = (wire.down_bytes, wire.up_bytes)
        subnets = sum(way(kind, shape, dtype) for shape in shapes for way in ways)
        return subnets + teacher_cache_bytes(run, s)

    def round(self, progress: Progress) -> Outcome:
        """One round with those who are in, unless Ray itself is gone."""
        try:
            return self._round(progress)
        except (OSError, exceptions.RayError) as error:
            raise self._headless(str(error).strip().splitlines()[0]) from None

    def _headless(self, why: str) -> Ended:
        self.events.write("giving up", why=why)
        return Ended(
            f"Ray at {self.head.address} is gone ({why}): start its head again, and the run with --resume; "
            f"the last checkpoint is unharmed",
            TOO_FEW,
        )

    def _round(self, progress: Progress) -> Outcome:
        """Tried again until `ray.min_workers` results are there."""
        run, r = self.run, progress.round
        assert run.central is not None
        rho = measured_rho(run, progress)
        before, first = self.n_bytes, time.monotonic()
        while True:
            team = self._gather(r, first)
            present = [(place.number, place.widths) for place in team]
            dealt = deal(run, progress, present)
            work = assign(run, progress, dealt, present, rho)
            began = time.monotonic()
            sent = self._post(work, team)
            self._collect(r, sent, began)
            results = list(self._results(work, sent))
            there = [result.worker for result in results]
            if run.stop.requested and len(there) < len(team):
                raise stopped(run.stop, r)
            if len(there) >= run.cfg.ray.min_workers:
                break
            self._abandoned(r, len(there), first)
        back, held_by, after = [dealt.blueprints[i] for i in there], dealt.holders, work.leases
        if len(there) < len(team):
            held_by = holders(run.segments, back)
            for i in set(range(len(team))) - set(there):
                slots = stream.of_worker(work.slots, i, len(team))
                if sent[i].failed:
                    after = stream.fail(after, slots, work.places[i])
                else:
                    after = stream.give_back(after, slots)
            for place in after.skipped[len(work.leases.skipped) :]:
                self.events.write("set aside", round=r, why=run.batches.name(place))
        stats = aggregator.aggregate_(run.central, results, held_by, run.cfg.train.nesterov())
        took = time.monotonic() - began
        self.began = True
        self.durations.append(took)
        self.events.write(
            "round",
            round=r,
            seconds={sent[i].place.name: sent[i].seconds for i in there},
            took=took,
            places=list(work.places),
            lost=[place for i, place in enumerate(work.places) if i not in there],
        )
        now = committed(progress, after, back, rho)
        wired = self.n_bytes - before
        return Outcome(stats, traffic(run, dealt.blueprints, back, wired), now)

    def collect_(self) -> None:
        pass

    @property
    def stops(self) -> bool:
        return self.run.stop.requested

    def close(self, crashed: bool) -> None:
        """Workers of a run that crashed stay, for `--resume`; else they end with it."""
        self.checkers.shutdown()
        self.pool.close(end=not crashed)
        ray.shutdown()

    def deadline(self) -> float:
        """Seconds that a round may take: three times the median of the last ones, or the floor."""
        floor = self.run.cfg.ray.floor
        return (
            max(floor, 3 * statistics.median(self.durations)) if self.durations else FIRST * floor
        )

    def _gather(self, r: int, since: float) -> list[WorkerSlot]:
        """The workers of a round in order of their places; a run that has just started waits for all S,
        so that a restarted one deals as before."""
        cfg, stop = self.run.cfg, self.run.stop
        reported, delay = 0.0, 1.0
        while True:
            if self.head.silent > ray_cluster.GONE:
                raise self._headless("its head does not answer")
            team = self.pool.admit(r, 2 * self.deadline(), FIRST * cfg.ray.floor)
            waited = time.monotonic() - since
            starts = not self.began and waited < cfg.ray.wait
            need = cfg.train.n_workers if starts else cfg.ray.min_workers
            if stop.requested:
                raise stopped(stop, r)
            if len(team) >= max(1, need):
                return team
            if waited > max(cfg.ray.patience, 0.0 if self.began else cfg.ray.wait):
                raise self._too_few(r, len(team), waited)
            if waited >= reported + delay:
                reported, delay = waited, 2 * delay
                self.events.write(
                    "waiting",
                    round=r,
                    n_workers=len(team),
                    need=need,
                    seconds=waited,
                    why=f"the others start, or have no place on {ray_cluster.room()}",
                )
            time.sleep(0.02)

    def _post(self, work: Assignments, team: list[WorkerSlot]) -> list[Sent]:
        """Send everybody a subnet; nothing is waited for."""
        run, dealt, kind = self.run, work.deal, self.run.cfg.run.wire
        assert run.central is not None
        posted = []
        for i, place in enumerate(team):
            cut = dispatcher.cut(run.central, dealt.blueprints[i], buffers=self.buffers).to("cpu")
            shape, payload = (cut.shape[0], cut.shape[1]), wire.down(kind, cut)
            tokens, teacher_topk = work.tokens(run, i).to(torch.int32), work.teacher_topk(run, i)
            order = RoundOrder(
                round=dealt.round,
                worker=i,
                blueprint=dict(dealt.blueprints[i]),
                trainer=run.cluster.placement.kinds[place.number],
                gates=work.gates(run, i).numpy(),
                weights_checksum=checksum(payload),
                tokens_checksum=checksum(tokens.view(-1).view(torch.uint8)),
                teacher_checksum="" if teacher_topk is None else checksum(teacher_topk.view(-1)),
            )
            weights = ray.put(payload.numpy())
            # exact values need no reference, and what lies in the store is no memory more
            lies = as_tensor(ray.get(weights))
            own = wire.read_down(kind, lies, shape, cut.dtype) if kind == "fp32" else cut.clone()
            place.ask(
                order,
                weights,
                tokens.numpy(),
                None if teacher_topk is None else teacher_topk.numpy(),
            )
            posted.append(Sent(place, weights, own))
            self.n_bytes += (
                payload.numel()
                + tokens.nbytes
                + (0 if teacher_topk is None else teacher_topk.nbytes)
            )
        return posted

    def _collect(self, r: int, sent: list[Sent], began: float) -> None:
        """Wait for every result until the deadline; each is checked while others are on their way."""
        limit, open_ = self.deadline(), {each.place.asked: each for each in sent}
        while open_ and not self.run.stop.requested:
            left = began + limit - time.monotonic()
            if left <= 0:
                break
            ready, _ = ray.wait(list(open_), num_returns=1, timeout=min(left, 0.2))
            for ref in ready:
                each = open_.pop(ref)
                each.place.asked = None
                try:
                    result: RoundResult = ray.get(ref)
                except exceptions.RayTaskError as error:  # the worker lives, its round failed
                    self.pool.strike(each.place, r, _words(error))
                    each.failed = True
                    continue
                except exceptions.RayError as error:
                    self.pool.lose(each.place, "lost", round=r, why=_words(error))
                    continue
                each.place.fresh = False
                each.loss_sum, each.seconds = result.loss_sum, time.monotonic() - began
                payload = as_tensor(result.update)
                self.n_bytes += payload.numel()
                each.finding = self.checkers.submit(
                    checks.check_result, self.run.cfg, result, payload, each.buffer
                )
        if not self.run.stop.requested:
            for each in open_.values():
                why = f"no result within {limit:.1f} s"
                self.events.write("late", each.place.name, round=r, seconds=limit, why=why)

    def _results(self, work: Assignments, sent: list[Sent]) -> Iterator[Result]:
        """The results that came in time and are believed, in worker order."""
        run, t = self.run, self.run.cfg.train
        n_tokens = t.interval * t.batch * run.batches.seq_len
        for i, each in enumerate(sent):
            if each.finding is None:
                continue
            try:
                buffer = each.finding.result().to(run.cluster.device, non_blocking=True)
            except RejectedResult as why:
                self.pool.strike(each.place, work.deal.round, str(why))
                each.failed = True
                continue
            stats = Stats(each.loss_sum, t.interval, n_tokens)
            yield Result(i, buffer, work.deal.indices[i], stats)

    def _abandoned(self, r: int, n: int, since: float) -> None:
        """Too few results: the round will be tried again, unless that has been so for long."""
        need, waited = self.run.cfg.ray.min_workers, time.monotonic() - since
        self.events.write("not committed", round=r, n_results=n, need=need)
        if waited > self.run.cfg.ray.patience:
            raise self._too_few(r, n, waited)

    def _too_few(self, r: int, n: int, waited: float) -> Ended:
        cfg, room = self.run.cfg.ray, ray_cluster.room()
        self.events.write("giving up", round=r, n_workers=n, need=cfg.min_workers)
        return Ended(
            f"round {r} needs {cfg.min_workers} workers (ray.min_workers), {n} are in after {waited:.0f} s "
            f"(ray.patience = {cfg.patience:g}) on a cluster of {room}; the last checkpoint is unharmed, "
            f"start the run again with --resume",
            TOO_FEW,
        )


def _words(error: exceptions.RayError) -> str:
    """The last line of what Ray tells."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    words = lines[-1] if isinstance(error, exceptions.RayTaskError) else lines[0]
    return f"{type(error).__name__}: {words}"[:200]


def run_id(out: Path) -> str:
    """A word in the run's folder by which a restarted process finds the run's workers again."""
    path = out / "ray-id.txt"
    if not path.is_file():
        path.write_text(secrets.token_hex(6) + "\n")
    return path.read_text().strip()
