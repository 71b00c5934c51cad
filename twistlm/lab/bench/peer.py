"""One process of `bench comm`: it takes its part in every exchange and nobody trains.

    python -m twistlm.lab.bench.peer JOB    (JSON; RANK, WORLD_SIZE, MASTER_ADDR as under torchrun)

Rank 0, or the driver of `ray`, prints what it measured as the last line.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ... import config
from ...config import BlocksConfig, Config
from ...model import generator
from ...model.blocks import BlockGroup, BlockMap, Blueprint, Partition
from ...model.central import Central
from ...model.layout import cut_segments, layout
from ...model.ranges import Ranges
from ...system.provenance import version
from ...training.engines.sharded import Shard
from ...training.run import Progress
from ...transport import protocol, wire
from ...transport.events import Events
from ...transport.ranks import Cluster

N_BLOCKS, LAYERS = 12, 12
WARM = 2  # exchanges that are not counted: pages are touched once
SHARED = 0.78  # of a subnet, as of GPT-2 124M with a third of the blocks
UNIT = 1024  # elements: the grain
Exchange = Callable[[int], object]  # of round r
Count = Callable[[], list[int]]  # bytes on links
Job = dict[str, Any]


def blocks(job: Job) -> BlocksConfig:
    """A subnet has a third of the blocks, or half where only two workers cover them all."""
    return BlocksConfig(k_ffn=(max(4, -(-N_BLOCKS // job["n_workers"])),))


def make(job: Job) -> tuple[Central, int]:
    """One shared matrix and one in every layer; a subnet has `megabytes` in float32.

    Returns the elements of a subnet, too.
    """
    megabytes, (k,) = job["megabytes"], blocks(job).k_ffn
    rows = max(1, round(1e6 * megabytes * (1 - SHARED) / k / LAYERS / UNIT / 4))
    n_shared = max(1, round(1e6 * megabytes * SHARED / UNIT / 4))
    groups = []
    for i, name in enumerate(names := [f"layer {i}" for i in range(LAYERS)]):
        groups.append(BlockGroup(name, "ffn", i, N_BLOCKS, (Partition(name, 0, rows),), (name,)))
    block_map = BlockMap(tuple(groups))
    shapes = {"shared": (n_shared, UNIT)} | dict.fromkeys(names, (N_BLOCKS * rows, UNIT))
    where = layout(block_map, shapes)
    whole = cut_segments(where, block_map, torch.device("cpu"))
    return Central(whole, torch.ones(1, where.n_params)), (n_shared + k * rows * LAYERS) * UNIT


def deal(job: Job, block_map: BlockMap, n_workers: int, r: int) -> list[Blueprint]:
    return generator.for_training(block_map, n_workers, blocks(job), seed=0, round=r)


def as_config(job: Job) -> Config:
    """A run that exchanges as much; no update is too large for its guard."""
    train = {"n_workers": job["n_workers"], "lr": 1.0, "moments": "reset"}
    variant = {"sharded": "sharded", "ray": "ray"}.get(job["engines"][0], "true")
    run = {"device": "cpu", "wire": job["wire"], "variant": variant, "threads": 1}
    ray = {"address": job.get("address", ""), "open": True, "owners": job.get("owners", 1)}
    return config.from_dict({"train": train, "run": run, "ray": ray})


def torchrun(job: Job, cluster: Cluster) -> Exchange:
    """A round of torchrun's ranks without its local steps: all of them own, or rank 0 alone."""
    central, _ = make(job)
    held, segments = central if cluster.is_central else None, central.segments
    shard = Shard(held, segments, cluster, as_config(job))

    def exchange(r: int) -> None:
        sent = shard.send_down(deal(job, segments.block_map, len(cluster.ranks), r))
        shard.send_up_(sent, sent)

    return exchange


def bare(job: Job, cluster: Cluster) -> Exchange:
    """What gloo does by itself: isend to all, irecv from all; nothing checked or added up."""
    n, central = make(job)[1], cluster.is_central
    buffers = {i: torch.ones(n) for i in (range(1, cluster.world_size) if central else [0])}

    def exchange(r: int) -> None:
        for move in (dist.isend, dist.irecv) if central else (dist.irecv, dist.isend):
            for work in [move(buffer, peer) for peer, buffer in buffers.items()]:
                if work is not None:
                    work.wait()

    return exchange


def on_ray(job: Job) -> tuple[Exchange, Count, Callable[[], None]]:
    """A round on Ray without its local steps: cut, checksums both ways, the guard, the sum, copies.

    The actors are those of a training, but for what they build their model from.
    """
    from ...training.engines import owner, owners
    from ...transport import ray_cluster
    from ...transport.ray_cluster import ray

    n_workers, kind = job["n_workers"], job["wire"]
    cfg, (central, _) = as_config(job), make(job)
    segments = central.segments
    ray_cluster.enter(cfg, int(2e6 * job["megabytes"] * n_workers), 2 * central.buffer.nbytes)

    while job["gbit"] and len(ray_cluster.machines()) < n_workers:  # they join one by one
        time.sleep(0.2)

    class EchoOwner(owner.Owner):
        def link(self):
            return on_the_link(job["interface"])

    class Echo:
        """A worker that trains nothing."""

        def __init__(self):
            self.segments = make(job)[0].segments

        def turn(self, blueprint, owners, attempt, worker, *pieces):
            segments = self.segments
            split = Ranges(segments, len(pieces)).split(segments.index(blueprint))
            checks = []
            for i, piece in enumerate(pieces):
                sent = wire.read_down(kind, protocol.unpacked(piece), (1, split.size(i)))
                update = protocol.packed(wire.up(kind, sent, sent[0]))
                checks.append(owners[i].check.remote(attempt, worker, update))
            return ray.get(checks)

    owner.OWNER = EchoOwner
    settings = {"num_cpus": 1, "scheduling_strategy": "SPREAD"}
    actors = [ray.remote(Echo).options(**settings).remote() for _ in range(n_workers)]
    pulse = owners.Pulse(600.0)
    ranges, log = Ranges(segments, job["owners"]), Events(Path(tempfile.mkdtemp()), True)
    about = protocol.RunDescription(version("twistlm"), config.to_dict(cfg), {}, 1)
    keepers = owners.Owners(cfg, ranges, about, f"bench-{os.getpid()}", pulse, log)
    keepers.begin(central, Progress(), False)

    def exchange(r: int) -> None:
        there = deal(job, segments.block_map, n_workers, r)
        parts, checks = keepers.cut(r, there), []
        for i, (worker, pieces) in enumerate(zip(actors, parts, strict=True)):
            where = keepers.actors, keepers.attempt, i
            checks.append(worker.turn.remote(there[i], *where, *pieces))
        said = ray.get(checks)
        assert not [word for told in said for word in told if isinstance(word, str)], said
        keepers.prepare(list(range(n_workers)), Progress(round=r + 1))

    def count() -> list[int]:
        return ray.get([actor.link.remote() for actor in keepers.actors])

    def close() -> None:
        pulse.close()
        ray.shutdown()

    return exchange, count, close


def on_the_link(interface: str) -> int:
    """Bytes that an interface has sent and received, headers and all."""
    lines = Path("/proc/net/dev").read_text().splitlines()  # of this process's own network
    counts = next(line.split(":")[1].split() for line in lines if f" {interface}:" in f" {line}")
    return int(counts[0]) + int(counts[8])


def measure(
    engines: dict[str, Exchange], job: Job, barrier: Callable[[], object], count: Count
) -> Job:
    """Seconds and the busiest link's bytes of every engine's exchanges, in turn."""
    central, n_subnet = make(job)
    made: Job = {"n_subnet": n_subnet, "state": central.buffer.nbytes}
    made |= {what: {name: [] for name in engines} for what in ("seconds", "link")}
    for r in range(WARM + job["repeats"]):
        for name, exchange in engines.items():
            barrier()
            before, began = count(), time.perf_counter()
            exchange(r)
            barrier()
            if r >= WARM:
                made["seconds"][name].append(time.perf_counter() - began)
                made["link"][name].append(max(np.subtract(count(), before).tolist()))
    return made


def main(job: Job) -> None:
    torch.set_num_threads(1)
    if job["engines"] == ["ray"]:
        exchange, count, close = on_ray(job)
        made = measure({"ray": exchange}, job, lambda: None, count)
        close()
        return print(json.dumps(made), flush=True)
    is_star, n = job["engines"] != ["sharded"], int(os.environ["WORLD_SIZE"])
    cluster = Cluster("true" if is_star else "sharded", n - is_star, "physical", "cpu")
    engines = {e: (bare if e == "bare" else torchrun)(job, cluster) for e in job["engines"]}
    made = measure(engines, job, cluster.barrier, lambda: [on_the_link(job["interface"])])
    if cluster.is_central:
        print(json.dumps(made), flush=True)
    cluster.barrier()
    cluster.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
