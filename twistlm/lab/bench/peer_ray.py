"""The driver of `bench comm` on Ray: every worker gets and returns its subnet.

    python -m twistlm.lab.bench.peer_ray JOB     (JSON; `address` of the cluster, empty: its own)

`ray` is the store alone, with nothing checked and nothing added up, as bare gloo; `ray, checked` is
the engine's round without its local steps: cut, checksums both ways, the guard, the sum.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor

from ... import config
from ...model.central import cut_subnet
from ...training.engines.actor import as_tensor
from ...transport import ray_cluster, wire
from ...transport.protocol import RoundResult, check_result, checksum
from ...transport.ray_cluster import ray
from .peer import add_up, deal, make, measure, n_subnet


class Echo:
    """A worker that trains nothing."""

    def bare(self, weights: Any) -> Any:
        return weights

    def checked(self, kind: config.Wire, n: int, weights: Any, announced: str) -> RoundResult:
        got = as_tensor(weights)
        if checksum(got) != announced:
            raise ValueError("the weights did not arrive as they were sent")
        sent = wire.read_down(kind, got, (1, n))
        update = wire.up(kind, sent, sent[0])
        return RoundResult(0, update.numpy(), checksum(update), 0.0)


class RayExchange:
    """Both engines over the same actors."""

    def __init__(self, job: dict[str, Any]):
        self.cfg = config.from_dict({"run": {"wire": job["wire"]}, "train": {"lr": 1.0}})
        self.central, self.segments = make(job["megabytes"])
        self.n, self.n_workers = n_subnet(self.segments), job["n_workers"]
        self.buffers = [torch.ones(self.n).view(torch.uint8).numpy() for _ in range(self.n_workers)]
        settings = {"num_cpus": 1, "scheduling_strategy": "SPREAD"}
        self.actors = [ray.remote(Echo).options(**settings).remote() for _ in range(self.n_workers)]

    def bare(self, r: int) -> None:
        asked = [
            actor.bare.remote(ray.put(buffer))
            for actor, buffer in zip(self.actors, self.buffers, strict=True)
        ]
        while asked:
            ready, asked = ray.wait(asked)
            ray.get(ready)

    def checked(self, r: int) -> None:
        kind, there = self.cfg.run.wire, deal(self.segments, self.n_workers, r)
        asked = {}
        for i, actor in enumerate(self.actors):
            cut = cut_subnet(self.central, there.blueprints[i])
            payload = wire.down(kind, cut)
            weights = ray.put(payload.numpy())
            asked[actor.checked.remote(kind, self.n, weights, checksum(payload))] = (i, cut)
        back: dict[int, Tensor] = {}
        while len(back) < self.n_workers:
            (ref,), _ = ray.wait(list(asked))
            i, cut = asked.pop(ref)
            result = ray.get(ref)
            back[i] = check_result(self.cfg, result, as_tensor(result.update), cut)
        add_up(self.central, there, [back[i] for i in range(self.n_workers)])


def main(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    n_bytes = int(2 * 1e6 * job["megabytes"] * job["n_workers"])
    section = {"address": job["address"], "open": True}
    train = {"n_workers": job["n_workers"]}
    ray_cluster.enter(
        config.from_dict({"ray": section, "train": train, "run": {"device": "cpu"}}), n_bytes
    )
    both = RayExchange(job)
    made = measure({"ray": both.bare, "ray, checked": both.checked}, job, lambda: None)
    ray.shutdown()
    print(json.dumps(made), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
