"""The elastic engine: workers are Ray actors on machines that come and go."""

from __future__ import annotations

import secrets
import statistics
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import config
from ...data import stream
from ...data.stream import Leases
from ...model import generator
from ...model.central import cut_subnet
from ...model.layout import holders
from ...system.device import BufferPool
from ...system.provenance import version
from ...system.signals import TOO_FEW, Ended, stopped
from ...transport import ray_cluster, wire
from ...transport.events import Events
from ...transport.protocol import (
    RejectedResult,
    RoundOrder,
    RoundResult,
    RunDescription,
    check_result,
    checksum,
)
from ...transport.ray_cluster import exceptions, ray
from .. import aggregator
from ..aggregator import Result, Stats
from ..assignments import Assignments, assign, deal, measured_rho, teacher_cache_bytes
from ..run import Progress, Run
from ..teacher import pack
from .actor import as_tensor
from .engine import Engine, Outcome
from .worker_pool import WorkerPool, WorkerSlot, last_words

RECENT = 9  # rounds behind the median
FIRST = 10  # times the floor: the deadline of a round with nothing to compare it with
CHECKERS = 4  # threads; more of them would wait for memory


@dataclass
class Asked:
    """What one worker was asked for in a round, and what came of it."""

    slot: WorkerSlot
    weights: Any  # the reference that keeps what was sent in the object store
    buffer: Tensor  # [rows, n]: the centre's copy of it
    checked: Future[Tensor] | None = None  # its result, being checked by a thread
    loss_sum: float = 0.0
    seconds: float = 0.0  # until it was there
    failed: bool = False  # it answered with an error, or its result was rejected


class Elastic(Engine):
    """Rounds with whoever is in.

    Who has no result in time costs its own update: blocks that it alone held stay as they are, and
    its sequences are the first to go out again. Weights, counts and leases change together, or not
    at all.
    """

    events: Events

    def __init__(self, run: Run, start: int, quiet: bool):
        super().__init__(run)
        cfg, out = run.cfg, Path(run.cfg.run.out)
        self.began = False  # whether a round has been committed since this process started
        self.n_bytes = 0  # that went through the store
        self.durations: deque[float] = deque(maxlen=RECENT)
        self.buffers = BufferPool()
        self.events = Events(out, quiet)
        there = ray_cluster.enter(cfg, self._store_bytes())
        described = RunDescription(
            version=version("twistlm"),
            config=config.to_dict(cfg),
            model=run.template.config.to_dict(),
            total_steps=run.total_steps,
            rows=run.rows,
        )
        self.head = ray_cluster.Head(there["address"])
        self.pool = WorkerPool(cfg, run_id(out), described, pack(run.teacher), self.events)
        self.pool.check_widths = lambda own: generator.check_own(run.block_map, cfg.blocks, own)
        self.checkers = ThreadPoolExecutor(CHECKERS)
        url = there.get("webui_url") or ""
        more = {"dashboard": f"http://{url}"} if url else {}
        self.events.write("started", round=start, address=there["address"], **more)

    def _store_bytes(self) -> int:
        """What a round puts in this machine's object store: subnets, a teacher's cache."""
        run, s, kind = self.run, self.run.cfg.train.n_workers, self.run.cfg.run.wire
        n_bytes = teacher_cache_bytes(run, s)
        for blueprint in generator.for_training(run.block_map, s, run.cfg.blocks, seed=0, round=0):
            narrow = run.full.narrowed(run.block_map, run.block_map.widths(blueprint))
            shape = (run.rows, narrow.n_params)
            n_bytes += wire.down_bytes(kind, shape, run.cut.dtype)
            n_bytes += wire.up_bytes(kind, shape, run.cut.dtype)
        return n_bytes

    def round(self, progress: Progress) -> Outcome:
        """One round with those who are in, unless Ray itself is gone."""
        try:
            return self._round(progress)
        except (OSError, exceptions.RayError) as error:
            raise self._headless(str(error).strip().splitlines()[0]) from None

    def _headless(self, why: str) -> Ended:
        self.events.write("giving up", why=why)
        return Ended(
            f"Ray at {self.head.address} is gone ({why}): start its head again, and the run with "
            f"--resume; the last checkpoint is unharmed",
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
            present = [(slot.number, slot.widths) for slot in team]
            work = assign(run, progress, deal(run, progress, present), present, rho)
            began = time.monotonic()
            asked = self._post(work, team)
            self._collect(r, asked, began)
            results = self._results(work, asked)
            if run.stop.requested and len(results) < len(team):
                raise stopped(run.stop, r)
            if len(results) >= run.cfg.ray.min_workers:
                break
            self._abandoned(r, len(results), first)
        there = [result.worker for result in results]
        back, held_by, leases = work.deal.blueprints, work.deal.holders, work.leases
        if len(there) < len(team):
            back = [back[i] for i in there]
            held_by = holders(run.segments, back)
            leases = self._returned(work, asked, there)
        stats = aggregator.aggregate_(run.central, results, held_by, run.cfg.train.nesterov())
        took = time.monotonic() - began
        self.began = True
        self.durations.append(took)
        self.events.write(
            "round",
            round=r,
            seconds={asked[i].slot.name: asked[i].seconds for i in there},
            took=took,
            places=list(work.numbers),
            lost=[number for i, number in enumerate(work.numbers) if i not in there],
        )
        traffic = work.traffic(self.n_bytes - before, back)
        return Outcome(stats, traffic, work.committed(leases, back))

    def _returned(self, work: Assignments, asked: list[Asked], there: list[int]) -> Leases:
        """The ledger without the sequences of those who brought nothing."""
        leases = work.leases
        for i in set(range(len(asked))) - set(there):
            slots = work.slots_of(i)
            if asked[i].failed:
                leases = stream.fail(leases, slots, work.numbers[i])
            else:
                leases = stream.give_back(leases, slots)
        for place in leases.skipped[len(work.leases.skipped) :]:
            why = self.run.batches.name(place)
            self.events.write("set aside", round=work.deal.round, why=why)
        return leases

    def close(self, crashed: bool) -> None:
        """Workers of a run that crashed stay, for `--resume`; else they end with it."""
        self.checkers.shutdown()
        self.pool.close(end=not crashed)
        ray.shutdown()

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
                why = f"the others start, or have no place on {ray_cluster.room()}"
                state: dict[str, Any] = {"n_workers": len(team), "need": need, "seconds": waited}
                self.events.write("waiting", round=r, **state, why=why)
            time.sleep(0.02)

    def _post(self, work: Assignments, team: list[WorkerSlot]) -> list[Asked]:
        """Send everybody a subnet; nothing is waited for."""
        run, blueprints, kind = self.run, work.deal.blueprints, self.run.cfg.run.wire
        assert run.central is not None
        posted = []
        for i, slot in enumerate(team):
            cut = cut_subnet(run.central, blueprints[i], buffers=self.buffers).to("cpu")
            payload = wire.down(kind, cut)
            tokens, topk = work.tokens(i).to(torch.int32), work.teacher_topk(i)
            order = RoundOrder(
                round=work.deal.round,
                worker=i,
                blueprint=dict(blueprints[i]),
                trainer=work.kind(i),
                gates=work.gates(i).numpy(),
                weights_checksum=checksum(payload),
                tokens_checksum=checksum(tokens.view(-1).view(torch.uint8)),
                teacher_checksum="" if topk is None else checksum(topk.view(-1)),
            )
            weights = ray.put(payload.numpy())
            own = cut.clone() if kind != "fp32" else cut
            if kind == "fp32":  # exact values are read where they lie in the store: no copy more
                stored = as_tensor(ray.get(weights))
                own = wire.read_down(kind, stored, (cut.shape[0], cut.shape[1]), cut.dtype)
            slot.ask(order, weights, tokens.numpy(), None if topk is None else topk.numpy())
            posted.append(Asked(slot, weights, own))
            self.n_bytes += payload.numel() + tokens.nbytes + (0 if topk is None else topk.nbytes)
        return posted

    def _collect(self, r: int, asked: list[Asked], began: float) -> None:
        """Wait for results until the deadline; each is checked while others are on their way."""
        limit, open_ = self.deadline(), {each.slot.asked: each for each in asked}
        while open_ and not self.run.stop.requested:
            left = began + limit - time.monotonic()
            if left <= 0:
                break
            ready, _ = ray.wait(list(open_), num_returns=1, timeout=min(left, 0.2))
            for ref in ready:
                each = open_.pop(ref)
                each.slot.asked = None
                try:
                    result: RoundResult = ray.get(ref)
                except exceptions.RayTaskError as error:  # the worker lives, its round failed
                    self.pool.strike(each.slot, r, last_words(error))
                    each.failed = True
                    continue
                except exceptions.RayError as error:
                    self.pool.lose(each.slot, "lost", round=r, why=last_words(error))
                    continue
                each.slot.fresh = False
                each.loss_sum, each.seconds = result.loss_sum, time.monotonic() - began
                payload = as_tensor(result.update)
                self.n_bytes += payload.numel()
                each.checked = self.checkers.submit(
                    check_result, self.run.cfg, result, payload, each.buffer
                )
        if not self.run.stop.requested:
            for each in open_.values():
                why = f"no result within {limit:.1f} s"
                self.events.write("late", each.slot.name, round=r, seconds=limit, why=why)

    def _results(self, work: Assignments, asked: list[Asked]) -> list[Result]:
        """The results that came in time and were accepted, in worker order."""
        run, t, results = self.run, self.run.cfg.train, []
        n_tokens = t.interval * t.batch * run.batches.seq_len
        for i, each in enumerate(asked):
            if each.checked is None:
                continue
            try:
                buffer = each.checked.result().to(run.cluster.device, non_blocking=True)
            except RejectedResult as why:
                self.pool.strike(each.slot, work.deal.round, str(why))
                each.failed = True
                continue
            stats = Stats(each.loss_sum, t.interval, n_tokens)
            results.append(Result(i, buffer, work.deal.indices[i], stats))
        return results

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
            f"round {r} needs {cfg.min_workers} workers (ray.min_workers), {n} are in after "
            f"{waited:.0f} s (ray.patience = {cfg.patience:g}) on a cluster of {room}; the last "
            f"checkpoint is unharmed, start the run again with --resume",
            TOO_FEW,
        )


def run_id(out: Path) -> str:
    """A word in the run's folder by which a restarted process finds the run's workers again."""
    path = out / "ray-id.txt"
    if not path.is_file():
        path.write_text(secrets.token_hex(6) + "\n")
    return path.read_text().strip()
