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
from ...training.aggregator import Result, Stats, aggregate_
from ...training.assignments import Deal, deal_of
from ...training.engines.sharded import spread
from ...transport import wire
from ...transport.ranks import Cluster

N_BLOCKS, K = 12, 4
WARM = 2  # exchanges that are not counted: pages are touched once
SHARED = 0.78  # of a subnet, as of GPT-2 124M with a third of the blocks
UNIT = 1024  # elements: the grain
Exchange = Callable[[int], None]  # of round r


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


def sharded(job: dict[str, Any], cluster: Cluster) -> Exchange:
    """A round of the sharded engine without its local steps."""
    central, segments = make(job["megabytes"])
    whole = central if cluster.is_central else None
    shard = spread(whole, segments, cluster, 1, False, torch.float32, job["wire"])

    def exchange(r: int) -> None:
        there = deal(segments, cluster.world_size, r)
        sent = shard.send_down(there)
        shard.send_up_(there, sent, sent, None)

    return exchange


def bare(job: dict[str, Any], cluster: Cluster) -> Exchange:
    """What gloo does by itself: isend to all, irecv from all; nothing checked or added up."""
    n, central = n_subnet(make(job["megabytes"])[1]), cluster.is_central
    buffers = {i: torch.ones(n) for i in (range(1, cluster.world_size) if central else [0])}

    def exchange(r: int) -> None:
        for move in (dist.isend, dist.irecv) if central else (dist.irecv, dist.isend):
            for work in [move(buffer, peer) for peer, buffer in buffers.items()]:
                if work is not None:
                    work.wait()

    return exchange


def star(job: dict[str, Any], cluster: Cluster) -> Exchange:
    """A round of torchrun's star without its local steps: cut, exchange, aggregate."""
    kind, n = job["wire"], cluster.world_size
    central, segments = make(job["megabytes"])
    shape = (1, n_subnet(segments))
    nothing, others = torch.empty(0, dtype=torch.uint8), n - 1

    def work(r: int) -> None:
        n_down = wire.down_bytes(kind, shape)
        got = cluster.exchange([nothing] * n, [n_down] + [0] * others)()[0]
        sent = wire.read_down(kind, got, shape)
        cluster.exchange([wire.up(kind, sent, sent[0])] + [nothing] * others, [0] * n)()

    def lead(r: int) -> None:
        there = deal(segments, others, r)
        cuts = [cut_subnet(central, blueprint) for blueprint in there.blueprints]
        cluster.exchange([nothing, *(wire.down(kind, c) for c in cuts)], [0] * n)()
        n_up = wire.up_bytes(kind, shape)
        came = cluster.exchange([nothing] * n, [0] + [n_up] * others)()[1:]
        pairs = zip(came, cuts, strict=True)
        add_up(central, there, [wire.read_up(kind, up, shape, cut[0]) for up, cut in pairs])

    return work if cluster.rank else lead


def add_up(central: Central, there: Deal, buffers: list[Tensor]) -> None:
    results = [
        Result(i, buffer, there.indices[i], Stats(0.0, 1, 1)) for i, buffer in enumerate(buffers)
    ]
    aggregate_(central, results, there.holders)


ENGINES = {"sharded": sharded, "bare": bare, "star": star}


def on_the_link(interface: str) -> int:
    """Bytes that an interface has sent and received, headers and all."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            return int(counts.split()[0]) + int(counts.split()[8])
    return 0


def measure(
    engines: dict[str, Exchange], job: dict[str, Any], barrier: Callable[[], object]
) -> dict[str, Any]:
    """Seconds and the link's bytes of every engine's exchanges, in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    link: dict[str, list[int]] = {name: [] for name in engines}
    for r in range(WARM + job["repeats"]):
        for name, exchange in engines.items():
            barrier()
            before, began = on_the_link(job["interface"]), time.perf_counter()
            exchange(r)
            barrier()
            if r >= WARM:
                seconds[name].append(time.perf_counter() - began)
                link[name].append(on_the_link(job["interface"]) - before)
    n = n_subnet(make(job["megabytes"])[1])
    return {"n_subnet": n, "seconds": seconds, "link": link}


def main(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    cluster = Cluster("sharded", int(os.environ["WORLD_SIZE"]), "physical", "cpu")
    engines = {name: ENGINES[name](job, cluster) for name in job["engines"]}
    made = measure(engines, job, cluster.barrier)
    if cluster.is_central:
        print(json.dumps(made), flush=True)
    cluster.barrier()
    cluster.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
