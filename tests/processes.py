"""Runs on one Ray cluster for all tests, workers' faults, and the same rounds in one process."""

import fcntl
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import faults
import ranks
import torch
from checkpoints import FILES, joined, same
from conftest import PATIENT, tiny
from ranks import free_port

from twistlm import config
from twistlm.data import stream
from twistlm.model import generator
from twistlm.model.central import SubnetBuffer
from twistlm.model.layout import holders
from twistlm.model.subnet import gate_values, scales
from twistlm.training import aggregator, checkpoint, rounds
from twistlm.training.run import Progress, Run
from twistlm.training.startup import set_up
from twistlm.transport.ranks import Cluster

SLOW = 300.0  # seconds: a bound that only a hang reaches, however busy the machine is
TESTS = Path(__file__).parent


def environment(**more: str) -> dict[str, str]:
    """Of processes that start Ray: workers import the tests' faults, one thread each."""
    paths = [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
    own = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    own |= {"TRANSFORMERS_VERBOSITY": "error", "RAY_prestart_worker_first_driver": "0"}
    own |= {"RAY_memory_monitor_refresh_ms": "0"}  # what others use is not our fault
    return {k: v for k, v in os.environ.items() if k not in PATIENT} | own | more


def start_head(
    folder: Path, cpus: int = 12, port: int = 0, **env: str
) -> tuple[subprocess.Popen, str]:
    """`twistlm node --head` as a process of its own, and its address."""
    port = port or free_port()
    role = ["--head", "--port", str(port)]
    process = start_node(folder / "head.txt", role, cpus, "--include-dashboard=false", **env)
    return process, f"127.0.0.1:{port}"


def start_node(log: Path, role: list[str], cpus: int, *more: str, **env: str) -> subprocess.Popen:
    """`twistlm node`, as a head or as one of several raylets of this machine."""
    more = (f"--temp-dir={tempfile.mkdtemp(prefix='tw')}", f"--num-cpus={cpus}", *more)
    command = [sys.executable, "-m", "twistlm", "node", *role, "--host", "127.0.0.1", "--", *more]
    command += ["--object-store-memory=200000000"]
    with log.open("a") as file:
        streams = {"stdout": file, "stderr": file}
        return subprocess.Popen(command, env=environment(**env), **streams, start_new_session=True)


def wait_for_head(process: subprocess.Popen, folder: Path) -> None:
    """Until workers can be placed there."""
    said = (folder / "head.txt").read_text
    ranks.wait_for(
        lambda: "Ray runtime started" in said() or process.poll() is not None, SLOW, said
    )
    assert process.poll() is None, said()


@contextmanager
def shared_head(folder: Path):
    """One cluster for all pytest processes: started by the first, ended by the last."""
    mine, note = folder / f"ray-user-{os.getpid()}", folder / "ray-head.json"
    lock = (folder / "ray-lock").open("a")
    fcntl.flock(lock, fcntl.LOCK_EX)
    mine.touch()
    if not note.is_file():
        process, address = start_head(folder, **PATIENT)
        wait_for_head(process, folder)
        note.write_text(json.dumps({"address": address, "pid": process.pid}))
        process.returncode = 0  # it may outlive this process
    fcntl.flock(lock, fcntl.LOCK_UN)
    try:
        yield json.loads(note.read_text())["address"]
    finally:
        fcntl.flock(lock, fcntl.LOCK_EX)
        mine.unlink()
        if not list(folder.glob("ray-user-*")):
            os.kill(json.loads(note.read_text())["pid"], signal.SIGTERM)
        lock.close()


def signal_host(host, number: int) -> None:
    """To every process of a network namespace, as if the machine was meant."""
    name = host.prefix[-1]
    done = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
    for pid in map(int, done.stdout.split()):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def drive(table: dict, resume: bool, keep: bool, kill: dict | None = None) -> None:
    """A run on Ray whose workers have faults; `keep` leaves them for the next run of the same name.

    With `kill` the process dies before its n-th call of a function: {"at": "elastic.f", "n": 3}.
    """
    from twistlm.training.engines import actor, elastic, owner, owners

    actor.WORKER, owner.OWNER, close = faults.Faulty, faults.FaultyOwner, elastic.Elastic.close
    if keep:
        elastic.Elastic.close = lambda self, crashed: close(self, True)
    if kill:
        _dies({"elastic": elastic, "owners": owners, "checkpoint": checkpoint}, **kill)
    try:
        rounds.train(config.from_dict(table), resume=resume, quiet=True)
    finally:
        elastic.Elastic.close, actor.WORKER, owner.OWNER = close, actor.Worker, owner.Owner


def _dies(modules: dict, at: str, n: int) -> None:
    *path, name = at.split(".")
    where = modules[path[0]]
    for part in path[1:]:
        where = getattr(where, part)
    original, calls = getattr(where, name), itertools.count()

    def wrapped(*args, **more):
        if next(calls) == n:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **more)

    setattr(where, name, wrapped)


def read_events(out: Path, event: str = "", **fields) -> list[dict]:
    """The lines of a run's events.jsonl, of one kind and with these fields."""
    path, fields = out / "events.jsonl", fields | ({"event": event} if event else {})
    lines = path.read_text().splitlines() if path.is_file() else []
    return [row for row in map(json.loads, lines) if fields.items() <= row.items()]


class Scene:
    """A run folder on the tests' cluster; runs of one process share their workers in turn."""

    def __init__(self, address: str, folder: Path, tokens: str, **sections: dict):
        self.folder, self.tokens, self.sections, self.out = folder, tokens, sections, folder / "run"
        own = {"address": address, "wait": SLOW, "floor": 20.0, "patience": 60.0}
        sections["ray"] = own | sections.get("ray", {})
        sections["run"] = {"variant": "ray"} | sections.get("run", {})
        self.out.mkdir(exist_ok=True)
        (self.out / "ray-id.txt").write_text(f"tests-{os.getpid()}\n")
        self.drivers: list[BaseProcess] = []

    def config(self, out: Path, **more: dict):
        sections = {k: dict(self.sections.get(k, {})) for k in {*self.sections, *more}}
        for name, values in more.items():
            sections[name] |= values
        return tiny(self.tokens, out, **sections)

    def suffers(self, *plan: dict) -> None:
        (self.out / "faults.json").write_text(json.dumps(plan))

    def train(self, resume: bool = False, keep: bool = True) -> None:
        """The run in this process."""
        drive(config.to_dict(self.config(self.out)), resume, keep)

    def start(self, resume=False, keep=True, kill: dict | None = None) -> BaseProcess:
        """The run in a process of its own; its words are in `text`."""
        table = config.to_dict(self.config(self.out))
        self.drivers += ranks.start(1, self.folder / "driver", drive, table, resume, keep, kill)
        return self.drivers[-1]

    def start_and_die(self, at: str, n: int, resume: bool = False) -> None:
        """The run in a process that kills itself before the n-th call of a function."""
        driver = self.start(resume, kill={"at": at, "n": n})
        driver.join(SLOW)
        assert driver.exitcode == -signal.SIGKILL, self.text

    def stop(self) -> None:
        """End the last driver in good order."""
        driver = self.drivers[-1]
        os.kill(driver.pid, signal.SIGTERM)
        driver.join(SLOW)
        assert driver.exitcode == 128 + signal.SIGTERM, self.text[-2000:]

    def same_as_local(self, out: Path) -> None:
        same(rounds.train(self.config(out, run={"variant": "local"}), quiet=True), self.last())

    @property
    def text(self) -> str:
        return ranks.said(self.folder / "driver", 0)

    def events(self, *event: str, **fields) -> list[dict]:
        return read_events(self.out, *event, **fields)

    def workers(self, place: int | None = None) -> list[int]:
        """The processes of a place, or of all, in the order of their coming."""
        joined = self.events("joined", **({} if place is None else {"place": place}))
        return [int(row["worker"].rpartition("-")[2]) for row in joined]

    def until(self, seen: Callable[[], object], seconds: float = SLOW):
        """Wait until `seen()` is true, and return it."""
        return ranks.wait_for(seen, seconds, lambda: self.events()[-5:])

    def last(self) -> Path:
        return sorted((self.out / "checkpoints").glob("round-*"))[-1]

    def replay(self) -> tuple[Run, Progress]:
        """The same rounds in this process: who was in and who was left out, as the events say."""
        cfg = self.config(self.folder / "replay", run={"variant": "local"})
        committed = {row["round"]: row for row in self.events("round")}  # one may be done again
        wrong = {
            (row["round"], int(row["worker"].partition("@")[0]))
            for row in self.events("refused")
            if not row["why"].startswith("late")
        }
        return replay(cfg, list(committed.values()), self.events("joined"), wrong)

    def close(self) -> None:
        for driver in self.drivers:
            driver.kill()
            driver.join()


def replay(
    cfg, committed: list[dict], joined: list[dict], wrong: set[tuple[int, int]] = frozenset()
) -> tuple[Run, Progress]:
    """Rounds by plan; `wrong` are the rounds and places whose results were there and refused."""
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
        now = {"seed": cfg.run.seed, "round": r, "present": present}
        blueprints = generator.for_training(run.cut.block_map, t.n_workers, cfg.blocks, **now)
        n = len(present)
        slots, after = stream.take(progress.leases, t.interval * n, t.batch)
        results, there = [], []
        for i, (place, _) in enumerate(present):
            mine = slots[i::n]
            if place in event["lost"]:
                failed = (r, place) in wrong
                after = stream.fail(after, mine, place) if failed else stream.give_back(after, mine)
                continue
            factors = scales(run.cut.block_map, run.cut.block_map.widths(blueprints[i]), t.scale)
            part = SubnetBuffer(run.cut.segments, blueprints[i], run.central.buffer)
            gates = gate_values(run.cut.block_map, blueprints[i], factors)
            rows = [run.batches.rows_at(slot) for slot in mine]
            ids = torch.stack([run.batches.file.sequences(r, run.batches.seq_len) for r in rows])
            trainer = run.trainers.get(part.layout, "physical")
            schedule = run.schedule_round(progress), run.total_steps
            result = trainer.train(part, gates, ids, None, *schedule)
            there.append(blueprints[i])
            results.append(replace(result, buffer=result.buffer.clone()))
        held, share = holders(run.cut.segments, there), len(there) / t.n_workers
        aggregator.Mean(run.central, held, t.nesterov(), share).add(*results).commit_()
        progress = Progress(r + 1, after, progress.rho)
    return run, progress


def same_bits(replayed: tuple[Run, Progress], path: Path) -> bool:
    """Whether a checkpoint holds exactly this central state: weights, moments, momentum, leases."""
    run, progress = replayed
    where, how = Path(run.cfg.run.out) / "checkpoints", (run.cfg, run.cut.template, None)
    made = checkpoint.save(where, checkpoint.snapshot(run.central), progress, *how, keep=1)
    ours, theirs = (json.loads((p / "checkpoint.json").read_text()) for p in (made, path))
    assert ours["round"] == theirs["round"]
    apart = []
    for name in FILES:
        left, right = joined(made, name), joined(path, name)
        same = left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)
        apart += [] if same else [name]
    print(f"files apart: {apart}\nleases: {theirs['leases']}\nreplayed: {ours['leases']}")
    return not apart and ours["leases"] == theirs["leases"]
