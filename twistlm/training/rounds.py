"""(1)-(5) The loop: generate, dispatch, train, aggregate, evaluate, save."""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from .. import config as configs
from ..config import Config
from ..data import leases
from ..model import generator
from ..model.blocks import Blueprint, widths_of_ratio
from ..model.layout import holders
from ..model.subnet import Rho, measure_rho, scales
from ..system import device
from ..system.lock import alone
from ..system.signals import Ended, on_signals, stopped
from ..system.terminal import console, progress
from ..transport import listener
from ..transport.address import address_of
from ..transport.events import Events
from ..transport.hub import Hub
from ..transport.listener import Door
from ..transport.ranks import Cluster
from ..transport.traffic import Bytes, Traffic, other_counts, subnet_bytes
from . import aggregator, checkpoint, dispatcher, worker
from . import team as teams
from .aggregator import Result, Stats
from .dispatcher import Parcel
from .engines import dataparallel, remote, sharded
from .metrics import Metrics
from .startup import Run, set_up
from .writer import Writer

RHO_DECAY = 0.9  # of the running rho per layer

Opened = tuple[socket.socket, bytes]  # where workers knock, and the secret that lets them in


def train(
    cfg: Config, *, resume: bool = False, quiet: bool = False, opened: Opened | None = None,
    is_late: Callable[[], bool] | None = None,
) -> Path:  # fmt: skip
    """Run all rounds of a config, or as many as end before it is late; returns the last checkpoint.

    With `opened`, workers come and go there; under torchrun, the other ranks are the workers.
    """
    if cfg.run.threads:
        torch.set_num_threads(cfg.run.threads)
    together = cfg.train.method != "twist" or cfg.run.variant == "sharded"
    cluster = Cluster(
        cfg.run.variant, cfg.train.n_workers, cfg.run.seat, cfg.run.device,
        together=together, hub=opened is not None,
    )  # fmt: skip
    try:
        if not together and cluster.world_size > 1:
            if not cluster.is_central:
                address, secret = cluster.share().split()
                remote.work(
                    remote.Knock(address, secret.encode(), device=cfg.run.device, quiet=True)
                )
                return Path(cfg.run.out)
            opened = listener.for_ranks(cluster, cfg.hub.public)
        with alone(Path(cfg.run.out)) if cluster.is_central else contextlib.nullcontext():
            run = set_up(cfg, cluster, resume, quiet)
            with on_signals(run.stop, quiet):
                if opened is not None:
                    run.hub = _open_hub(run, opened, quiet)
                try:
                    return _train(run, quiet or not cluster.is_central, is_late)
                finally:
                    if run.hub is not None:
                        run.hub.close()
    finally:
        cluster.close()


def _open_hub(run: Run, opened: Opened, quiet: bool) -> Hub:
    cfg, events = run.cfg, Events(Path(run.cfg.run.out), quiet)
    welcome = {
        "config": configs.to_dict(cfg),
        "model": run.template.config.to_dict(),
        "total_steps": run.total_steps,
        "rows": run.rows,
    }
    entrance = Door(
        *opened, welcome, lambda own: generator.check_own(run.block_map, cfg.blocks, own),
        events, cfg.hub.patience,
    )  # fmt: skip
    n_local = len(run.cluster.workers)
    events.write("started", round=run.start, address=address_of(opened[0]))
    return Hub(entrance, cfg, events, n_local, lambda: run.stop.wished)


def _train(run: Run, quiet: bool, is_late: Callable[[], bool] | None) -> Path:
    cfg, central, r = run.cfg, run.central, run.start
    folder = Path(cfg.run.out) / "checkpoints"
    metrics = Metrics(Path(cfg.run.out), run.start) if central is not None else None
    tokenizer = run.batches.file.tokenizer_path
    writer = Writer(folder, cfg, run.template, tokenizer if tokenizer.is_file() else None, central)
    with writer, progress(quiet, run.hub.events if run.hub else None) as bar:
        task = bar.add_task(
            f"{cfg.train.method} rounds", total=run.end(r), completed=run.start, note=""
        )
        while r < run.end(r):
            began = time.perf_counter()
            try:
                stats, traffic = one_round(run, r)
            except Ended:  # the round is abandoned, nothing of it is in the central model
                unsaved = r > run.start and (writer.failure or not _due(run, r))
                if central is not None and run.shard is None and unsaved:
                    writer.save(central)  # the copy of a sharded one may be of an earlier round
                raise
            final, every, stop = r + 1 >= run.end(r + 1), cfg.run.eval_every, run.stop.wished
            if run.shard is not None:
                stop = run.shard.ends  # what all ranks know
            # the central rank's clock decides for all
            late = is_late is not None and run.cluster.broadcast([float(is_late())])[0] > 0
            evaluates = (final and every >= 0) or (every > 0 and (r + 1) % every == 0)
            saves = stop or late or _due(run, r + 1)
            if run.shard is not None and (evaluates or saves):
                sharded.collect_(central, run.shard, run.cluster)
            if central is None or metrics is None:
                if stop and not final:
                    raise stopped(run.stop, r + 1)
                r += 1
                if late:
                    break
                continue
            central.round, central.leases = r + 1, run.leases
            loss = float(stats.loss_sum) / stats.n_steps  # the round's only wait for a GPU
            if not math.isfinite(loss):
                raise FloatingPointError(
                    f"the training loss is {loss} in round {r}: lower train.lr = {cfg.train.lr}, or set "
                    f"train.clip; the last checkpoint is unharmed"
                )
            seconds = time.perf_counter() - began
            row: dict[str, Any] = {
                "round": r + 1,
                "loss": loss,
                "lr": worker.learning_rate(
                    cfg.train, (r + 1) * cfg.train.interval - 1, run.total_steps
                ),
                "n_steps": stats.n_steps,
                "n_tokens": stats.n_tokens,
                "seconds": seconds,
                **traffic.to_dict(),
            }
            note = f"loss {loss:.3f}  {stats.n_tokens / seconds:,.0f} tokens/s"
            bar.update(task, total=run.end(r + 1), completed=r + 1, note=note)
            if evaluates:
                row["eval"], line = evaluate(run)
                if not quiet:
                    console.print(f"round {r + 1}: loss {loss:.3f}   {line}")
            metrics.write(row)
            # a shard's failed save waits for the next one: the copy here is filled only for that
            if saves or (writer.failure and run.shard is None):
                writer.save(central)
            if stop and not final:
                raise stopped(run.stop, r + 1)
            r += 1
            if late:
                break
    if metrics is not None:
        metrics.close()
    return folder / checkpoint.folder_name(r)


def _due(run: Run, n_done: int) -> bool:
    """Whether a checkpoint is written after so many rounds."""
    every = run.cfg.run.save_every
    return n_done >= run.end(n_done) or bool(every and n_done % every == 0)


def one_round(run: Run, r: int) -> tuple[Stats, Traffic]:
    if run.cfg.train.method != "twist":
        return dense_round(run, r)
    return twist_round(run, r) if run.shard is None else sharded_round(run, r)


def twist_round(run: Run, r: int) -> tuple[Stats, Traffic]:
    """One round of the paper: generate, dispatch, train, aggregate.

    Who has no result in time costs its own update: blocks that it alone held stay as they are, and its
    sequences are the first to go out again. Weights, counts and leases change together, or not at all.
    """
    cfg, t, hub = run.cfg, run.cfg.train, run.hub
    assert run.central is not None
    rho = _measured_rho(run) if t.scale == "measured" else run.rho
    before, first = hub.traffic() if hub else (0, 0), time.monotonic()
    while True:
        team = teams.gather(run, r, first)
        deal = teams.deal_for(run, r, team)
        slots, after = leases.take(run.leases, t.interval * len(team), t.batch)
        began = time.monotonic()
        factors = [
            scales(run.block_map, run.block_map.widths(b), t.scale, rho) for b in deal.blueprints
        ]
        teams.post(run, deal, team, slots, factors)
        results: Iterator[Result] | list[Result] = teams.local_results(
            run, deal, team, slots, factors
        )
        there, held_by = list(range(len(team))), deal.holders
        if hub is None:
            break
        results = [*results, *teams.remote_results(run, deal, team, r, began)]
        there = [result.worker for result in results]
        if run.stop.wished and len(there) < len(team):
            raise stopped(run.stop, r)
        if len(there) < len(team):
            held_by = holders(run.runs, [deal.blueprints[i] for i in there])
            for i in set(range(len(team))) - set(there):
                after = leases.give_back(after, leases.of_worker(slots, i, len(team)))
        if len(there) >= cfg.hub.min_workers:
            break
        hub.abandoned(r, len(there), first)
    stats = aggregator.aggregate_(run.central, results, held_by, t.nesterov())
    blueprints = [deal.blueprints[i] for i in there]
    generator.count_(run.held, blueprints)
    run.leases = after
    run.rho.update(rho)
    if hub is not None:
        lost = [place for i, (place, _) in enumerate(team) if i not in there]
        places = [place for place, _ in team]
        hub.committed(r, time.monotonic() - began, places=places, lost=lost)
    else:
        run.ahead = teams.deal_for(run, r + 1, team)  # while a GPU still works on this round
    now = hub.traffic() if hub else (0, 0)
    return stats, _traffic(run, deal.blueprints, blueprints, sum(now) - sum(before))


def sharded_round(run: Run, r: int) -> tuple[Stats, Traffic]:
    """The same round with the central model in shards: every rank deals for itself, and all agree."""
    t, cluster, shard = run.cfg.train, run.cluster, run.shard
    assert shard is not None
    rho = run.rho
    if t.scale == "measured":
        sharded.collect_(run.central, shard, cluster)
        rho = _measured_rho(run)
    team: teams.Team = [(place, None) for place in range(t.n_workers)]
    deal = teams.deal_for(run, r, team)
    slots, after = leases.take(run.leases, t.interval * len(team), t.batch)
    before = cluster.n_sent + cluster.n_received

    def train(parcel: Parcel) -> Result:
        i = parcel.worker
        factors = scales(run.block_map, run.block_map.widths(parcel.blueprint), t.scale, rho)
        return run.seats.train(
            cluster.seating.kinds[i], parcel, factors, teams.tokens(run, slots, i, len(team)), r,
            run.total_steps,
        )  # fmt: skip

    stats = sharded.round_(shard, deal, cluster, train, t.nesterov(), run.stop)
    generator.count_(run.held, deal.blueprints)
    run.leases = after
    run.rho.update(rho)
    run.ahead = teams.deal_for(run, r + 1, team)
    wired = cluster.n_sent + cluster.n_received - before
    return stats, _traffic(run, deal.blueprints, deal.blueprints, wired)


def _traffic(run: Run, dealt: list[Blueprint], back: list[Blueprint], wired: int) -> Traffic:
    """What a round's subnets cost both ways; without a wire they are counted as they lie in memory."""
    kind = run.cfg.run.wire if wired else "fp32"

    def size(blueprint: Blueprint) -> int:
        return run.full.narrowed(run.block_map, run.block_map.widths(blueprint)).n_params

    def cost(blueprints: list[Blueprint], way: int) -> Bytes:
        n_shared, start = run.full.n_shared, Bytes()
        parts = (subnet_bytes(n_shared, size(b), run.rows, kind, run.dtype) for b in blueprints)
        return sum((part[way] for part in parts), start)

    other = other_counts(run.full.n_params, [size(b) for b in dealt], run.cfg.train.interval)
    return Traffic(cost(dealt, 0), cost(back, 1), wired, other)


def dense_round(run: Run, r: int) -> tuple[Stats, Traffic]:
    """A control's round: data parallel steps of a full seat on every rank, masked for dropout."""
    key, drops = ("dense",), run.cfg.train.method == "dropout"
    seats = run.seats.made
    if key not in seats:
        seat = run.seats.new(run.full, "masked" if drops else "physical")
        source = run.central.buffer if run.central is not None else seat.buffer[: run.rows].clone()
        whole = dispatcher.prepare(run.runs, r, [run.block_map.full()])
        parcel = dispatcher.parcel(whole, 0, run.runs, run.cluster.broadcast_(source))
        unscaled = scales(run.block_map, run.block_map.full_widths(), "none")
        seat.load(parcel, unscaled, r * run.cfg.train.interval)
        seats[key] = seat
    cluster, t = run.cluster, run.cfg.train
    if drops and t.scale == "measured":
        run.rho.update(_measured_rho(run))
    slots, after = leases.take(run.leases, t.interval * t.n_workers, t.batch)

    def mask_(step: int) -> None:
        kept = generator.for_step(run.block_map, run.cfg.blocks, seed=run.cfg.run.seed, step=step)
        subnet, widths = seats[key].subnet, run.block_map.widths(kept)
        subnet.mask_(kept)
        subnet.scale_(scales(run.block_map, widths, t.scale, run.rho))

    stats = dataparallel.round_(
        run.central, seats[key], cluster, run.batches, slots, t, r, run.total_steps,
        mask_ if drops else lambda step: None,
    )  # fmt: skip
    run.leases = after
    gradients = run.full.n_params * seats[key].grad.element_size() * t.interval * t.n_workers
    moved = Bytes(shared=gradients)
    return stats, Traffic(moved, moved, 2 * gradients if cluster.world_size > 1 else 0)


def evaluate(run: Run) -> tuple[dict[str, Any], str]:
    """Full model and random subnets of the configured ratios, now: for the metrics and for a person."""
    assert run.evaluator is not None
    full = run.evaluator.full_perplexity()
    scores: dict[str, Any] = {"full": full}
    line = f"perplexity full {full:.2f}"
    for ratio in run.cfg.run.eval_ratios:
        widths = widths_of_ratio(run.block_map, ratio)
        spread = run.evaluator.random_subnets(ratio, widths, run.cfg.run.eval_n, run.cfg.run.seed)
        scores[ratio] = spread.summary()
        line += f"   {ratio} {spread}"
    return scores, line


def _measured_rho(run: Run) -> Rho:
    """The running rho with a measurement on the central model and the round's first sequence."""
    rho = dict(run.rho)
    names = [group.name for group in run.block_map.groups]
    if run.central is not None:
        assert run.evaluator is not None
        ids = run.batches.slot(leases.take(run.leases, 1, 1)[0][0])
        fresh = measure_rho(run.evaluator.full, device.to_device(ids, run.cluster.device))
        for name in names:
            rho[name] = RHO_DECAY * rho.get(name, fresh[name]) + (1 - RHO_DECAY) * fresh[name]
    values = run.cluster.broadcast([rho.get(name, 1.0) for name in names])
    return dict(zip(names, values, strict=True))
