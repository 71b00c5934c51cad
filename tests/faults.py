"""A worker on Ray with faults of its own: real signals and bytes, by the run's `faults.json`.

Each fault has `place` and `round`, `at` (receive, train, send) and what to `do`; it happens once,
also when its worker is replaced. Every worker notes which sequences it trained.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import ray
import torch

from twistlm.training.engines.actor import Worker
from twistlm.transport.protocol import checksum


class Faulty(Worker):
    def enter(self, run, teacher):
        info = super().enter(run, teacher)
        self.out = Path(run.config["run"]["out"])
        self.name = info.name
        path = self.out / "faults.json"
        self.plan = json.loads(path.read_text()) if path.is_file() else []
        self.place = int(ray.get_runtime_context().get_actor_name().rpartition("-")[2])
        return info

    def due(self, at: str, order) -> str | None:
        for i, fault in enumerate(self.plan):
            if (fault["place"], fault["round"], fault["at"]) == (self.place, order.round, at):
                try:
                    (self.out / f"fault-{i}").touch(exist_ok=False)
                except FileExistsError:
                    continue
                return fault["do"]
        return None

    def suffer(self, at: str, order) -> str | None:
        do = self.due(at, order)
        if do in ("SIGKILL", "SIGSTOP"):
            os.kill(os.getpid(), signal.Signals[do])
        if do == "sleep":
            time.sleep(4.0)
        if do == "fail":
            raise RuntimeError("out of memory, or so")
        return do

    def receive(self, order, weights, tokens, teacher_topk):
        if self.suffer("receive", order) == "flip":  # as if a bit had changed on its way down
            weights = weights.clone()
            weights[3] ^= 1
        return super().receive(order, weights, tokens, teacher_topk)

    def steps(self, order, sent, ids, teacher_topk):
        with (self.out / f"trained-{self.name}.jsonl").open("a") as file:
            file.write(json.dumps({"round": order.round, "ids": ids[:, :, 0].flatten().tolist()}))
            file.write("\n")
        self.suffer("train", order)
        return super().steps(order, sent, ids, teacher_topk)

    def send(self, order, update, loss_sum):
        do = self.suffer("send", order)
        floats = update.view(torch.float32)
        if do == "nan":
            floats[7] = float("nan")
        if do == "inf":
            floats[-1] = float("inf")
        if do == "huge":
            floats[:500] *= 1e6
        if do == "short":
            update = update[:-8].clone()
        result = super().send(order, update, loss_sum)
        if do == "corrupt":
            result.update[5] ^= 1
            assert checksum(update) != result.checksum
        return result
