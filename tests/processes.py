"""Hubs and workers as real processes, forked from one that has imported everything (nursery.py)."""

from __future__ import annotations

import itertools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from conftest import tiny
from safetensors.torch import load_file

from twistlm.data import stream
from twistlm.model import generator
from twistlm.model.layout import holders
from twistlm.model.subnet import gate_values, scales
from twistlm.training import aggregator, dispatcher
from twistlm.training.progress import Progress
from twistlm.training.run import Run
from twistlm.training.startup import set_up
from twistlm.transport.ranks import Cluster

SLOW = 60.0  # seconds: a bound that only a hang reaches, however busy the machine is


class Child:
    """One process; `log` has what it printed."""

    def __init__(self, nursery: Nursery, pid: int, log: Path):
        self.nursery, self.pid, self.log = nursery, pid, log

    @property
    def text(self) -> str:
        return self.log.read_text() if self.log.is_file() else ""

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, seconds: float = SLOW) -> int:
        """Its exit code, negative for a signal."""
        until = time.monotonic() + seconds
        while self.pid not in self.nursery.codes:
            assert time.monotonic() < until, f"process {self.pid} still runs: {self.text[-2000:]}"
            time.sleep(0.02)
        return self.nursery.codes[self.pid]

    @property
    def running(self) -> bool:
        return self.pid not in self.nursery.codes


class Nursery:
    """Forks processes in milliseconds; all of them are gone when it closes."""

    def __init__(self):
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "nursery.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        self.codes: dict[int, int] = {}
        self.born: queue.Queue[dict] = queue.Queue()
        self.children: list[Child] = []
        self.ids = itertools.count()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        assert "ready" in self.born.get(timeout=120)

    def _read(self) -> None:
        for line in self.process.stdout or ():
            told = json.loads(line)
            if "exit" in told:
                self.codes[told["exit"]] = told["code"]
            else:
                self.born.put(told)
        self.born.put({})  # it is gone

    def fork(self, call: str, log: Path, **order) -> Child:
        order |= {"id": next(self.ids), "call": call, "log": str(log)}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        child = Child(self, self.born.get(timeout=SLOW)["pid"], log)
        self.children.append(child)
        return child

    def end_children(self) -> None:
        for child in self.children:
            if child.running:
                os.kill(child.pid, signal.SIGKILL)
                child.wait()
        self.children.clear()

    def close(self) -> None:
        self.end_children()
        self.process.stdin.close()
        self.process.wait(30)
        self.reader.join(10)
        self.process.stdout.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Scene:
    """A run folder, a hub in it and its workers."""

    def __init__(self, nursery: Nursery, folder: Path, tokens: str, **sections: dict):
        self.nursery, self.folder, self.tokens, self.sections = nursery, folder, tokens, sections
        self.port, self.out = free_port(), folder / "run"
        sections["hub"] = {"wait": 30.0, "floor": 20.0, "patience": 30.0} | sections.get("hub", {})
        sections["run"] = {"variant": "true"} | sections.get("run", {})
        self.n_logs = itertools.count()
        self.host = "127.0.0.1"

    def config(self, out: Path, **more: dict):
        sections = {k: dict(self.sections.get(k, {})) for k in {*self.sections, *more}}
        for name, values in more.items():
            sections[name] |= values
        return tiny(self.tokens, out, **sections)

    def hub(self, **order) -> Child:
        from twistlm import config as configs

        table = configs.to_dict(self.config(self.out))
        log = self.folder / f"hub-{next(self.n_logs)}.log"
        return self.nursery.fork("hub", log, config=table, port=self.port, host=self.host, **order)

    def worker(self, name: str, *faults: dict, **order) -> Child:
        order = {"connect": f"{self.host}:{self.port}", "name": name, "faults": faults} | order
        return self.nursery.fork("worker", self.folder / f"{name}.log", **order)

    def events(self, event: str = "", **fields) -> list[dict]:
        path = self.out / "events.jsonl"
        rows = (
            [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
        )
        keep = lambda row: (not event or row["event"] == event) and fields.items() <= row.items()  # noqa: E731
        return [row for row in rows if keep(row)]

    def until(self, seen: Callable[[], object], seconds: float = SLOW):
        """Wait until `seen()` is true, and return it."""
        end = time.monotonic() + seconds
        while not (found := seen()):
            logs = "".join(child.text[-1500:] for child in self.nursery.children)
            assert time.monotonic() < end, (
                f"waited {seconds} s in vain: {self.events()[-5:]} {logs}"
            )
            time.sleep(0.02)
        return found

    def last(self) -> Path:
        return sorted((self.out / "checkpoints").glob("round-*"))[-1]

    def replay(self) -> tuple[Run, Progress]:
        """The same rounds in this process: who was in and who was left out, as the events say."""
        cfg = self.config(self.folder / "replay", run={"variant": "local"})
        return replay(cfg, self.events("round"), self.events("joined"))


def replay(cfg, committed: list[dict], joined: list[dict]) -> tuple[Run, Progress]:
    cluster = Cluster("local", cfg.train.n_workers, "physical", "cpu")
    run, progress = set_up(cfg, cluster, False, quiet=True)
    t = cfg.train
    for r, event in enumerate(committed):
        assert event["round"] == r
        present = []
        for place in event["places"]:
            came = [j for j in joined if j["place"] == place and j["time"] <= event["time"]]
            own = {k: came[-1][k] for k in ("attn", "ffn") if came and k in came[-1]}
            present.append((place, own))
        blueprints = generator.for_training(
            run.block_map,
            t.n_workers,
            cfg.blocks,
            seed=cfg.run.seed,
            round=r,
            held=progress.held,
            present=present,
        )
        deal = dispatcher.prepare(run.segments, r, blueprints)
        n = len(present)
        slots, after = stream.take(progress.leases, t.interval * n, t.batch)
        results, there = [], []
        for i, (place, _) in enumerate(present):
            mine = stream.of_worker(slots, i, n)
            if place in event["lost"]:
                after = stream.give_back(after, mine)
                continue
            factors = scales(run.block_map, run.block_map.widths(blueprints[i]), t.scale)
            result = run.seats.train(
                "physical",
                dispatcher.parcel(deal, i, run.segments, run.central.buffer),
                gate_values(run.block_map, blueprints[i], factors)[None],
                torch.stack([run.batches.slot(slot) for slot in mine]),
                r,
                run.total_steps,
            )
            there.append(blueprints[i])
            results.append(replace(result, worker=len(results), buffer=result.buffer.clone()))
        aggregator.aggregate_(run.central, results, holders(run.segments, there), t.nesterov())
        held = generator.counted(progress.held, there)
        progress = Progress(r + 1, after, held, progress.rho)
    return run, progress


def same_bits(replayed: tuple[Run, Progress], path: Path) -> bool:
    """Whether a checkpoint holds exactly this central state: weights, moments, momentum, leases."""
    run, progress = replayed
    state = json.loads((path / "checkpoint.json").read_text())
    assert state["round"] == progress.round
    views = run.central.layout.views
    expected = dict(views(run.central.buffer[0]))
    found = load_file(path / "model.safetensors")
    if len(run.central.buffer) > 1:
        found |= load_file(path / "moments.safetensors")
        expected |= {f"m/{n}": x for n, x in views(run.central.buffer[1]).items()}
        expected |= {f"v/{n}": x for n, x in views(run.central.buffer[2]).items()}
    if run.central.velocity is not None:
        outer = load_file(path / "outer.safetensors")
        found |= {f"outer/{n}": x for n, x in outer.items()}
        expected |= {f"outer/{n}": x for n, x in views(run.central.velocity).items()}
    assert found.keys() == expected.keys()
    same = all(torch.equal(found[name], expected[name]) for name in found)
    return same and state["leases"] == stream.to_dict(progress.leases)
