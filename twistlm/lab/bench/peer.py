"""One process of `bench comm`: it takes its part in every exchange and nobody trains.

    python -m twistlm.lab.bench.peer JOB    (JSON; RANK, WORLD_SIZE, MASTER_ADDR as under torchrun)

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
import torch.distributed as dist
from torch import Tensor

from ...model import generator
from ...model.blocks import BlockGroup, BlockMap, Partition
from ...model.central import Central, create, cut_subnet
from ...model.layout import Segments, cut_segments, layout
from ...training import shards
from ...training.aggregator import Result, Stats, aggregate_
from ...training.assignments import Deal, deal_of
from ...transport import wire
from ...transport.ranks import Cluster

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


def make(megabytes: float) -> tuple[Central, Segments]:
    block_map, shapes = model(megabytes)
    params = {name: torch.ones(shape) for name, shape in shapes.items()}
    device = torch.device("cpu")
    whole = cut_segments(layout(block_map, shapes), block_map, device)
    return create(params, shapes, block_map, carry=False, outer=False, device=device), whole


def deal(whole: Segments, n_workers: int, r: int) -> Deal:
    hands = generator.deal(random.Random(r), N_BLOCKS, [K] * n_workers)
    return deal_of(whole, r, [{"blocks": hand} for hand in hands])


def n_subnet(whole: Segments) -> int:
    n_shared = whole.full.n_shared
    return n_shared + (whole.full.n_params - n_shared) * K // N_BLOCKS


class ShardedExchange:
    """A round of the sharded engine without its local steps."""

    def __init__(self, job: dict[str, Any], cluster: Cluster):
        self.cluster = cluster
        central, self.segments = make(job["megabytes"])
        whole = central if cluster.is_central else None
        self.shard = shards.spread(
            whole, self.segments, cluster, 1, False, torch.float32, job["wire"]
        )

    def exchange(self, r: int) -> None:
        there = deal(self.segments, self.cluster.world_size, r)
        sent = self.shard.send_down(there)
        self.shard.send_up_(there, sent, sent, None)


class BareExchange:
    """What gloo does by itself: isend to all, irecv from all; nothing checked or added up."""

    def __init__(self, job: dict[str, Any], cluster: Cluster):
        self.cluster, central = cluster, cluster.is_central
        n = n_subnet(make(job["megabytes"])[1])
        self.peers = list(range(1, cluster.world_size)) if central else [0]
        self.buffers = [torch.ones(n) for _ in self.peers]
        self.moves = (dist.isend, dist.irecv) if central else (dist.irecv, dist.isend)

    def exchange(self, r: int) -> None:
        for move in self.moves:
            works = [move(b, peer) for b, peer in zip(self.buffers, self.peers, strict=True)]
            for work in works:
                if work is not None:
                    work.wait()


class StarExchange:
    """A round of torchrun's star without its local steps: cut, exchange, aggregate."""

    def __init__(self, job: dict[str, Any], cluster: Cluster):
        self.cluster, self.kind = cluster, job["wire"]
        self.central, self.segments = make(job["megabytes"])
        self.shape = (1, n_subnet(self.segments))

    def exchange(self, r: int) -> None:
        n, rank = self.cluster.world_size, self.cluster.rank
        nothing, empty = torch.empty(0, dtype=torch.uint8), [0] * (n - 1)
        n_down, n_up = wire.down_bytes(self.kind, self.shape), wire.up_bytes(self.kind, self.shape)
        if rank:
            got = self.cluster.exchange([nothing] * n, [n_down, *empty])()[0]
            sent = wire.read_down(self.kind, got, self.shape)
            self.cluster.exchange(
                [wire.up(self.kind, sent, sent[0])] + [nothing] * (n - 1), [0] * n
            )()
            return
        there = deal(self.segments, n - 1, r)
        cuts = [cut_subnet(self.central, blueprint) for blueprint in there.blueprints]
        self.cluster.exchange([nothing, *(wire.down(self.kind, c) for c in cuts)], [0] * n)()
        came = self.cluster.exchange([nothing] * n, [0] + [n_up] * (n - 1))()[1:]
        add_up(
            self.central,
            there,
            [
                wire.read_up(self.kind, up, self.shape, cut[0])
                for up, cut in zip(came, cuts, strict=True)
            ],
        )


def add_up(central: Central, there: Deal, buffers: list[Tensor]) -> None:
    results = [
        Result(i, buffer, there.indices[i], Stats(0.0, 1, 1)) for i, buffer in enumerate(buffers)
    ]
    aggregate_(central, results, there.holders)


ENGINES: dict[str, Callable[[dict[str, Any], Cluster], Any]] = {
    "sharded": ShardedExchange,
    "bare": BareExchange,
    "star": StarExchange,
}


def on_the_link(interface: str) -> int:
    """Bytes that an interface has sent and received, headers and all."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            return int(counts.split()[0]) + int(counts.split()[8])
    return 0


def main(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    cluster = Cluster("sharded", int(os.environ["WORLD_SIZE"]), "physical", "cpu")
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
        n = n_subnet(make(job["megabytes"])[1])
        print(json.dumps({"n_subnet": n, "seconds": seconds, "link": link}), flush=True)
    cluster.barrier()
    cluster.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
