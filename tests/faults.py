"""A worker on Ray with faults of its own: real signals and bytes, by the run's `faults.json`.

Each fault has `place` and `round`, `at` (receive, train, send) and what to `do`; it happens once,
also when its worker is replaced. Every worker notes which sequences it trained.
"""

import json
import os
import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import ray
import torch

from twistlm.training.engines.actor import Worker
from twistlm.training.engines.owner import Owner
from twistlm.training.worker import TrainerPool
from twistlm.transport.protocol import packed


class Faulty(Worker):
    def enter(self, run, teacher):
        info = super().enter(run, teacher)
        self.out = Path(run.config["run"]["out"])
        self.name = info.name
        path = self.out / "faults.json"
        self.plan = json.loads(path.read_text()) if path.is_file() else []
        self.place = int(ray.get_runtime_context().get_actor_name().rpartition("-")[2])
        get = TrainerPool.get
        self.trainers.get = lambda *args: (self.suffer("train"), get(self.trainers, *args))[1]
        return info

    def suffer(self, at: str) -> str | None:
        do, where = None, (self.place, self.order.round, at)
        for i, fault in enumerate(self.plan):
            if (fault.get("place"), fault["round"], fault["at"]) == where:
                with suppress(FileExistsError):
                    (self.out / f"fault-{i}").touch(exist_ok=False)
                    do = do or fault["do"]
        if do in ("SIGKILL", "SIGSTOP"):
            os.kill(os.getpid(), signal.Signals[do])
        if do == "sleep":
            time.sleep(4.0)
        return do

    def train(self, order, owners, *pieces):
        self.order, first = order, order.tokens.payload[:, :, :3].reshape(-1, 3).tolist()
        if self.suffer("receive") == "flip":  # as if a bit had changed on its way down
            payload = pieces[0].payload.copy()
            payload[3] ^= 1
            pieces = [replace(pieces[0], payload=payload), *pieces[1:]]
        with (self.out / f"trained-{self.name}.jsonl").open("a") as file:
            file.write(json.dumps({"round": order.round, "ids": first}) + "\n")
        return super().train(order, owners, *pieces)

    def send(self, order, owners, updates):
        do, payload = self.suffer("send"), updates[0].payload
        floats = payload.view("<f4")
        if do == "nan":
            floats[7] = float("nan")
        if do == "huge":
            floats[:500] *= 1e6
        if do == "short":
            payload = payload[:-8].copy()
        if do in ("nan", "huge", "short"):
            updates[0] = packed(torch.from_numpy(payload))
        if do == "corrupt":
            payload[5] ^= 1
        return super().send(order, owners, updates)


class FaultyOwner(Owner):
    """An owner that suffers in a round: `owner` and `round`, `at` and what to `do`."""

    def enter(self, run, whole, i, n):
        self.out = Path(run.config["run"]["out"])
        return super().enter(run, whole, i, n)

    def suffer(self, at: str, r: int) -> None:
        path = self.out / "faults.json"
        for n, fault in enumerate(json.loads(path.read_text()) if path.is_file() else []):
            if (fault.get("owner"), fault["round"], fault["at"]) == (self.i, r, at):
                with suppress(FileExistsError):
                    (self.out / f"fault-{n}").touch(exist_ok=False)
                    if fault["do"] == "bug":
                        raise OSError("a bug of an owner")
                    os.kill(os.getpid(), signal.Signals[fault["do"]])

    def cut(self, attempt, after, blueprints):
        self.suffer("cut", after)
        return super().cut(attempt, after, blueprints)

    @ray.method(concurrency_group="pieces")
    def check(self, name, worker, piece):
        self.suffer("add", min(self.progress))
        return super().check(name, worker, piece)

    @ray.method(num_returns=2)
    def prepare(self, there, progress):
        self.suffer("prepare", progress.round - 1)
        return super().prepare(there, progress)

    def keep(self, progress, i, piece):
        if self.progress:
            self.suffer("keep", progress.round - 1)
        return super().keep(progress, i, piece)

    def lend(self, round):
        self.suffer("lend", round)
        return super().lend(round)

    @ray.method(num_returns=2)
    def give(self, round, *args):
        self.suffer("give", round)
        return super().give(round, *args)
