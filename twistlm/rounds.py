"""(1)-(5) The loop: generate, dispatch, train, aggregate, evaluate, save."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from . import aggregator, checkpoint, dense, dispatcher, generator, leases, worker
from .aggregator import Result, Stats
from .blocks import widths_of_ratio
from .cluster import Cluster, SeatKind
from .config import Config
from .dispatcher import Deal
from .flat import Layout
from .leases import Leases, Slot
from .ledger import Metrics, Traffic
from .startup import Run, set_up
from .subnet import measure_rho, scales
from .terminal import console, progress
from .worker import Seat
from .writer import Writer

RHO_DECAY = 0.9  # of the running rho per layer


def train(cfg: Config, *, resume: bool = False, quiet: bool = False) -> Path:
    """Run all rounds of a config; returns the last checkpoint."""
    if cfg.run.threads:
        torch.set_num_threads(cfg.run.threads)
    cluster = Cluster(cfg.run.variant, cfg.train.n_workers, cfg.run.seat, cfg.run.device)
    try:
        return _train(set_up(cfg, cluster, resume, quiet), quiet or not cluster.is_central)
    finally:
        cluster.close()


def _train(run: Run, quiet: bool) -> Path:
    cfg, central = run.cfg, run.central
    folder = Path(cfg.run.out) / "checkpoints"
    metrics = Metrics(Path(cfg.run.out), run.start) if central is not None else None
    tokenizer = run.batches.file.tokenizer_path
    writer = Writer(folder, cfg, run.template, tokenizer if tokenizer.is_file() else None, central)
    with writer, progress(quiet) as bar:
        task = bar.add_task(
            f"{cfg.train.method} rounds", total=run.n_rounds, completed=run.start, note=""
        )
        for r in range(run.start, run.n_rounds):
            began = time.perf_counter()
            stats, traffic = (
                twist_round(run, r) if cfg.train.method == "twist" else dense_round(run, r)
            )
            if central is None or metrics is None:
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
                "bytes_down": traffic.down,
                "bytes_up": traffic.up,
                "bytes_wire": traffic.wire,
            }
            final = r + 1 == run.n_rounds
            note = f"loss {loss:.3f}  {stats.n_tokens / seconds:,.0f} tokens/s"
            bar.update(task, completed=r + 1, note=note)
            every = cfg.run.eval_every
            if (final and every >= 0) or (every > 0 and (r + 1) % every == 0):
                row["eval"], line = evaluate(run)
                if not quiet:
                    console.print(f"round {r + 1}: loss {loss:.3f}   {line}")
            metrics.write(row)
            every = cfg.run.save_every
            if final or writer.failure or (every and (r + 1) % every == 0):
                writer.save(central)
    return folder / checkpoint.folder_name(run.n_rounds)


def twist_round(run: Run, r: int) -> tuple[Stats, Traffic]:
    """One round of the paper: generate, dispatch, train, aggregate."""
    cfg, cluster, block_map = run.cfg, run.cluster, run.block_map
    deal = run.ahead if run.ahead is not None and run.ahead.round == r else _deal(run, r)
    blueprints = deal.blueprints
    generator.count_(run.held, blueprints)
    if cfg.train.scale == "measured":
        _update_rho(run)
    sent, received = cluster.bytes_sent, cluster.bytes_received
    slots, after = _take(run)
    if run.central is None:
        for _ in _local_results(run, deal, slots, r):
            pass
        run.leases = after
        return Stats(0.0, 0, 0), Traffic(0, 0, 0)
    stats = aggregator.aggregate_(
        run.central, _results(run, deal, slots, r), deal.holders, cfg.train.nesterov()
    )
    run.leases = after
    run.ahead = _deal(run, r + 1)  # while a GPU still works on this round
    moved = sum(
        run.full.narrowed(block_map, block_map.widths(b)).n_params
        for b in blueprints
    )  # fmt: skip
    moved *= run.rows * run.central.buffer.element_size()
    wire = cluster.bytes_sent - sent + cluster.bytes_received - received
    return stats, Traffic(moved, moved, wire)


def _deal(run: Run, r: int) -> Deal:
    blueprints = generator.for_training(
        run.block_map, run.cluster.seating.n_workers, run.cfg.blocks,
        seed=run.cfg.run.seed, round=r, held=run.held,
    )  # fmt: skip
    return dispatcher.prepare(run.runs, r, blueprints)


def _take(run: Run) -> tuple[tuple[Slot, ...], Leases]:
    """The next round's slots of all workers, and the ledger once they are trained."""
    t = run.cfg.train
    return leases.take(run.leases, t.interval * t.n_workers, t.batch)


def _local_results(run: Run, deal: Deal, slots: tuple[Slot, ...], r: int) -> Iterator[Result]:
    """Train this rank's workers; a remote rank sends each result to the central one."""
    cfg, cluster = run.cfg, run.cluster
    for parcel in dispatcher.dispatch(run.central, run.runs, deal, cluster, run.rows, run.dtype):
        seat = seat_for(run, parcel.worker, parcel.layout)
        factors = scales(
            run.block_map, run.block_map.widths(parcel.blueprint), cfg.train.scale, run.rho
        )
        seat.load(parcel, factors, step=r * cfg.train.interval)
        mine = leases.of_worker(slots, parcel.worker, cfg.train.n_workers)
        result = worker.train(seat, run.batches, mine, cfg.train, r, run.total_steps)
        if not cluster.is_central:
            s = result.stats
            told = torch.tensor([s.loss_sum, s.n_steps, s.n_tokens], dtype=torch.float64)
            cluster.post(0, told.to(cluster.device))
            cluster.post(0, result.buffer)
            cluster.wait()  # the seat's buffer is overwritten by the next parcel
        yield result


def _results(run: Run, deal: Deal, slots: tuple[Slot, ...], r: int) -> Iterator[Result]:
    """All workers' results on the central rank, in worker order (its own workers come first)."""
    yield from _local_results(run, deal, slots, r)
    cluster = run.cluster
    cluster.wait()
    for i, rank in enumerate(cluster.seating.ranks):
        if rank == cluster.rank:
            continue
        told = cluster.receive(rank, (3,), torch.float64).tolist()
        widths = run.block_map.widths(deal.blueprints[i])
        where = run.full.narrowed(run.block_map, widths)
        buffer = cluster.receive(rank, (run.rows, where.n_params), run.dtype)
        yield Result(i, buffer, deal.indices[i], Stats(told[0], int(told[1]), int(told[2])))


def dense_round(run: Run, r: int) -> tuple[Stats, Traffic]:
    """A control's round: data parallel steps of a full seat on every rank, masked for dropout."""
    key, drops = ("dense",), run.cfg.train.method == "dropout"
    if key not in run.seats:
        seat = _new_seat(run, run.full, "masked" if drops else "physical")
        n_workers = run.cluster.seating.n_workers
        everything = dispatcher.prepare(run.runs, r, [run.block_map.full()] * n_workers)
        parcel = next(
            dispatcher.dispatch(run.central, run.runs, everything, run.cluster, run.rows, run.dtype)
        )
        unscaled = scales(run.block_map, run.block_map.full_widths(), "none")
        seat.load(parcel, unscaled, r * run.cfg.train.interval)
        run.cluster.wait()
        run.seats[key] = seat
    cluster, t = run.cluster, run.cfg.train
    if drops and t.scale == "measured":
        _update_rho(run)
    slots, after = _take(run)

    def mask_(step: int) -> None:
        kept = generator.for_step(run.block_map, run.cfg.blocks, seed=run.cfg.run.seed, step=step)
        subnet, widths = run.seats[key].subnet, run.block_map.widths(kept)
        subnet.mask_(kept)
        subnet.scale_(scales(run.block_map, widths, t.scale, run.rho))

    stats = dense.round_(
        run.central, run.seats[key], cluster, run.batches, slots, t, r, run.total_steps,
        mask_ if drops else lambda step: None,
    )  # fmt: skip
    run.leases = after
    gradients = run.full.n_params * run.seats[key].grad.element_size() * t.interval * t.n_workers
    return stats, Traffic(gradients, gradients, 2 * gradients if cluster.world_size > 1 else 0)


def seat_for(run: Run, i: int, where: Layout) -> Seat:
    """The seat of worker i for subnets of this shape; workers played by one process share it."""
    kind = run.cluster.seating.kinds[i]
    key = (kind, tuple(where.shapes.values()))
    if key not in run.seats:
        run.seats[key] = _new_seat(run, where, kind)
    return run.seats[key]


def _new_seat(run: Run, where: Layout, kind: SeatKind) -> Seat:
    weights = run.central.weights if run.central is not None else None
    return Seat(
        run.template,
        run.block_map,
        run.full,
        where,
        kind,
        run.cfg.train,
        run.cluster.device,
        run.dtype,
        weights,
    )


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


def _update_rho(run: Run) -> None:
    """Measure rho on the central model with the round's first sequence; every rank hears the result."""
    names = [group.name for group in run.block_map.groups]
    if run.central is not None:
        assert run.evaluator is not None
        ids = run.batches.slot(leases.take(run.leases, 1, 1)[0][0])
        fresh = measure_rho(run.evaluator.full, worker.to_device(ids, run.cluster.device))
        for name in names:
            old = run.rho.get(name, fresh[name])
            run.rho[name] = RHO_DECAY * old + (1 - RHO_DECAY) * fresh[name]
    values = run.cluster.broadcast([run.rho.get(name, 1.0) for name in names])
    run.rho.update(zip(names, values, strict=True))
