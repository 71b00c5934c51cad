"""One process of `bench comm`: it takes its part in every exchange and nobody trains.

    python -m twistlm.bench.peer JOB     (JSON; RANK, WORLD_SIZE and MASTER_ADDR as under torchrun)

Rank 0 prints what it measured as the last line.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .. import dispatcher, generator, sharded
from ..aggregator import Result, Stats
from ..blocks import BlockGroup, BlockMap, Partition
from ..central import Central, create
from ..cluster import Cluster
from ..dispatcher import Deal, Parcel
from ..flat import Runs, layout, runs
from ..stop import Stop

N_BLOCKS, K = 12, 4
SHARED = 0.78  # of a subnet, as of GPT-2 124M with a third of the blocks
UNIT = 1024  # elements: the grain


def model(megabytes: float) -> tuple[BlockMap, dict[str, tuple[int, ...]]]:
    """One shared and one partitioned matrix; a subnet of K blocks has so many MB in float32."""
    rows = max(1, round(1e6 * megabytes * (1 - SHARED) / K / UNIT / 4))
    n_shared = max(1, round(1e6 * megabytes * SHARED / UNIT / 4))
    part = Partition("blocks", 0, rows)
    group = BlockGroup("blocks", "ffn", 0, N_BLOCKS, (part,), ("blocks",))
    return BlockMap((group,)), {"shared": (n_shared, UNIT), "blocks": (N_BLOCKS * rows, UNIT)}


def make(megabytes: float) -> tuple[Central, Runs]:
    block_map, shapes = model(megabytes)
    params = {name: torch.ones(shape) for name, shape in shapes.items()}
    device = torch.device("cpu")
    whole = runs(layout(block_map, shapes), block_map, device)
    return create(params, shapes, block_map, carry=False, outer=False, device=device), whole


def deal(whole: Runs, n_workers: int, r: int) -> Deal:
    hands = generator.deal(random.Random(r), N_BLOCKS, [K] * n_workers)
    return dispatcher.prepare(whole, r, [{"blocks": hand} for hand in hands])


def untrained(parcel: Parcel) -> Result:
    return Result(parcel.worker, parcel.source, parcel.index, Stats(0.0, 1, 1))


class Sharded:
    """Every rank owns a part."""

    def __init__(self, job: dict[str, Any], cluster: Cluster):
        self.cluster = cluster
        central, self.runs = make(job["megabytes"])
        whole = central if cluster.is_central else None
        self.shard = sharded.spread(whole, self.runs, cluster, 1, False, torch.float32, job["wire"])

    def exchange(self, r: int) -> None:
        there = deal(self.runs, self.cluster.world_size, r)
        sharded.round_(self.shard, there, self.cluster, untrained, None, Stop())

    def bytes(self) -> int:
        return self.cluster.n_sent


class Bare:
    """What gloo does by itself: isend to all, irecv from all, nothing checked and nothing added up."""

    def __init__(self, job: dict[str, Any], cluster: Cluster):
        self.cluster = cluster
        _, whole = make(job["megabytes"])
        n = whole.full.n_shared + (whole.full.n_params - whole.full.n_shared) * K // N_BLOCKS
        self.buffers = [
            torch.ones(n) for _ in range(cluster.world_size - 1 if cluster.is_central else 1)
        ]

    def exchange(self, r: int) -> None:
        from torch import distributed as dist

        peers = range(1, self.cluster.world_size) if self.cluster.is_central else [0]
        first, then = (
            (dist.isend, dist.irecv) if self.cluster.is_central else (dist.irecv, dist.isend)
        )
        for move in (first, then):
            for work in [move(b, p) for b, p in zip(self.buffers, peers, strict=True)]:
                if work is not None:
                    work.wait()

    def bytes(self) -> int:
        return 0


ENGINES: dict[str, Callable[[dict[str, Any], Cluster], Any]] = {"sharded": Sharded, "bare": Bare}


def on_the_link(interface: str) -> int:
    """Bytes that an interface has sent and received, headers and all."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            return int(counts.split()[0]) + int(counts.split()[8])
    return 0


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    sharded.AHEAD = job.get("ahead", sharded.AHEAD)
    sharded.PIECE = job.get("piece", sharded.PIECE)
    cluster = Cluster("sharded", int(os.environ["WORLD_SIZE"]), "physical", "cpu", together=True)
    engines = {name: ENGINES[name](job, cluster) for name in job["engines"]}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    link: dict[str, list[int]] = {name: [] for name in engines}
    for r in range(1 + job["repeats"]):  # the first one warms up
        for name, engine in engines.items():
            cluster.barrier()
            before, began = on_the_link(job["interface"]), time.perf_counter()
            engine.exchange(r)
            cluster.barrier()
            if r:
                seconds[name].append(time.perf_counter() - began)
                link[name].append(on_the_link(job["interface"]) - before)
    if cluster.is_central:
        print(json.dumps({"seconds": seconds, "link": link}), flush=True)
    cluster.close()


if __name__ == "__main__":
    main()
