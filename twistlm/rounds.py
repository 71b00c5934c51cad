"""(1)-(5) The loop: generate, dispatch, train, aggregate, evaluate, save."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from . import aggregator, checkpoint, dense, dispatcher, generator, sharded, worker
from .aggregator import Result, Stats
from .blocks import Blueprint, widths_of_ratio
from .cluster import Cluster, SeatKind
from .config import Config
from .dispatcher import Deal, Parcel
from .flat import Layout
from .ledger import Bytes, Metrics, Traffic, other_counts, subnet_bytes
from .startup import Run, set_up
from .subnet import measure_rho, scales
from .terminal import console, progress
from .worker import Seat

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
    metrics = Metrics(Path(cfg.run.out), run.start) if central is not None else None
    last = None
    with progress(quiet) as bar:
        task = bar.add_task(
            f"{cfg.train.method} rounds", total=run.n_rounds, completed=run.start, note=""
        )
        for r in range(run.start, run.n_rounds):
            began = time.perf_counter()
            stats, traffic = (
                twist_round(run, r) if cfg.train.method == "twist" else dense_round(run, r)
            )
            final, every = r + 1 == run.n_rounds, cfg.run.eval_every
            evaluates = (final and every >= 0) or (every > 0 and (r + 1) % every == 0)
            saves = final or (cfg.run.save_every and (r + 1) % cfg.run.save_every == 0)
            if run.shard is not None and (evaluates or saves):
                sharded.collect_(central, run.shard, run.cluster)
            if central is None or metrics is None:
                continue
            central.round = r + 1
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
            bar.update(task, completed=r + 1, note=note)
            if evaluates:
                row["eval"], line = evaluate(run)
                if not quiet:
                    console.print(f"round {r + 1}: loss {loss:.3f}   {line}")
            metrics.write(row)
            if saves:
                tokenizer = run.batches.file.tokenizer_path
                last = checkpoint.save(
                    Path(cfg.run.out) / "checkpoints", central, cfg, run.template,
                    tokenizer if tokenizer.is_file() else None, cfg.run.keep,
                )  # fmt: skip
    return last or Path(cfg.run.out) / "checkpoints" / f"round-{run.n_rounds:06d}"


def twist_round(run: Run, r: int) -> tuple[Stats, Traffic]:
    """One round of the paper: generate, dispatch, train, aggregate."""
    cfg, cluster = run.cfg, run.cluster
    deal = run.ahead if run.ahead is not None and run.ahead.round == r else _deal(run, r)
    blueprints = deal.blueprints
    generator.count_(run.held, blueprints)
    if cfg.train.scale == "measured":
        if run.shard is not None:
            sharded.collect_(run.central, run.shard, cluster)
        _update_rho(run, r)
    sent, received = cluster.bytes_sent, cluster.bytes_received
    if run.shard is not None:
        stats = sharded.round_(
            run.shard, deal, cluster, lambda parcel: _work(run, parcel, r), cfg.train.nesterov()
        )
    elif run.central is not None:
        stats = aggregator.aggregate_(
            run.central, _results(run, deal, r), deal.holders, cfg.train.nesterov()
        )
    else:
        for _ in _local_results(run, deal, r):
            pass
        return Stats(0.0, 0, 0), Traffic(Bytes(), Bytes(), 0)
    run.ahead = _deal(run, r + 1)  # while a GPU still works on this round
    wired = cluster.bytes_sent - sent + cluster.bytes_received - received
    return stats, _traffic(run, blueprints, wired)


def _traffic(run: Run, blueprints: list[Blueprint], wired: int) -> Traffic:
    """What a round's subnets cost both ways; without a wire they are counted as they lie in memory."""
    kind, down, up, subnets = run.cfg.run.wire if wired else "fp32", Bytes(), Bytes(), []
    for blueprint in blueprints:
        subnets.append(run.full.narrowed(run.block_map, run.block_map.widths(blueprint)).n_params)
        there, back = subnet_bytes(run.full.n_shared, subnets[-1], run.rows, kind, run.dtype)
        down, up = down + there, up + back
    return Traffic(
        down, up, wired, other_counts(run.full.n_params, subnets, run.cfg.train.interval)
    )


def _deal(run: Run, r: int) -> Deal:
    blueprints = generator.for_training(
        run.block_map, run.cluster.seating.n_workers, run.cfg.blocks,
        seed=run.cfg.run.seed, round=r, held=run.held,
    )  # fmt: skip
    return dispatcher.prepare(run.runs, r, blueprints)


def _local_results(run: Run, deal: Deal, r: int) -> Iterator[Result]:
    """Train this rank's workers; a remote rank sends each result to the central one."""
    cluster = run.cluster
    for parcel in dispatcher.dispatch(run.central, run.runs, deal, cluster, run.rows, run.dtype):
        result = _work(run, parcel, r)
        if not cluster.is_central:
            s = result.stats
            told = torch.tensor([s.loss_sum, s.n_steps, s.n_tokens], dtype=torch.float64)
            cluster.post(0, told.to(cluster.device))
            cluster.post(0, result.buffer)
            cluster.wait()  # the seat's buffer is overwritten by the next parcel
        yield result


def _work(run: Run, parcel: Parcel, r: int) -> Result:
    """The local steps of one worker."""
    t = run.cfg.train
    seat = seat_for(run, parcel.worker, parcel.layout)
    factors = scales(run.block_map, run.block_map.widths(parcel.blueprint), t.scale, run.rho)
    seat.load(parcel, factors, step=r * t.interval)
    return worker.train(seat, run.batches, t, r, run.total_steps)


def _results(run: Run, deal: Deal, r: int) -> Iterator[Result]:
    """All workers' results on the central rank, in worker order (its own workers come first)."""
    yield from _local_results(run, deal, r)
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
        _update_rho(run, r)

    def mask_(step: int) -> None:
        kept = generator.for_step(run.block_map, run.cfg.blocks, seed=run.cfg.run.seed, step=step)
        subnet, widths = run.seats[key].subnet, run.block_map.widths(kept)
        subnet.mask_(kept)
        subnet.scale_(scales(run.block_map, widths, t.scale, run.rho))

    stats = dense.round_(
        run.central, run.seats[key], cluster, run.batches, t, r, run.total_steps,
        mask_ if drops else lambda step: None,
    )  # fmt: skip
    gradients = run.full.n_params * run.seats[key].grad.element_size() * t.interval * t.n_workers
    moved = Bytes(shared=gradients)
    return stats, Traffic(moved, moved, 2 * gradients if cluster.world_size > 1 else 0)


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


def _update_rho(run: Run, r: int) -> None:
    """Measure rho on the central model with worker 0's next batch; every rank hears the result."""
    names = [group.name for group in run.block_map.groups]
    if run.central is not None:
        assert run.evaluator is not None
        ids = run.batches(0, r * run.cfg.train.interval)[:1]
        fresh = measure_rho(run.evaluator.full, worker.to_device(ids, run.cluster.device))
        for name in names:
            old = run.rho.get(name, fresh[name])
            run.rho[name] = RHO_DECAY * old + (1 - RHO_DECAY) * fresh[name]
    values = run.cluster.broadcast([run.rho.get(name, 1.0) for name in names])
    run.rho.update(zip(names, values, strict=True))
