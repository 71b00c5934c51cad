"""Behind `make chaos`: what hundreds of faults in one run do to its data and to its quality."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import statistics
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import make_tokens, tiny_table
from processes import Child, Nursery, Scene, replay

from twistlm import checkpoint, config, parent, rounds, score
from twistlm.blocks import widths_of_ratio
from twistlm.corpus import build
from twistlm.data import Batches, TokenMeta, open_tokens, write_meta

RATIO = "6/12"


@pytest.fixture(autouse=True)
def nobody_left(nursery):
    yield
    nursery.end_children()


# ---------------------------------------------------------------- row 19: exactly once

SEQ_LEN, N_SEQUENCES = 16, 40


def numbered_tokens(stem: Path) -> str:
    """A token file whose sequences begin with their own number."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, N_SEQUENCES, (N_SEQUENCES, SEQ_LEN)).astype("<u2")
    tokens[:, 0] = np.arange(N_SEQUENCES)
    tokens.tofile(f"{stem}.bin")
    n, top = tokens.size, N_SEQUENCES - 1
    write_meta(stem, TokenMeta(n, 1, N_SEQUENCES, top, "uint16", "none", None, ["numbers"]))
    return str(stem)


class Mob:
    """Workers that are killed and replaced, each process under a name of its own."""

    def __init__(self, scene: Scene, n: int):
        self.scene, self.n_born, self.n_killed = scene, 0, 0
        first = {"at": "train", "round": 1}  # one death is certain, however the others fall
        self.alive = [self.born(*[first][i:]) for i in range(n)]

    def born(self, *faults: dict) -> Child:
        self.n_born += 1
        return self.scene.worker(f"w{self.n_born}", *faults)

    def refill(self) -> None:
        for i, child in enumerate(self.alive):
            if not child.running:
                self.alive[i] = self.born()

    def kill(self, i: int) -> None:
        self.signal(i, signal.SIGKILL)
        self.alive[i] = self.born()
        self.n_killed += 1

    def signal(self, i: int, number: int) -> None:
        with suppress(ProcessLookupError):  # the run may just have ended
            self.alive[i].signal(number)


def what_was_committed(scene: Scene) -> Counter:
    """How often each sequence is in the final model: by what the workers noted as they trained."""
    committed = {
        event["round"]: event for event in scene.events("round")
    }  # a redone round: the last
    joined, trained = scene.events("joined"), Counter()
    for r, event in committed.items():
        for place in set(event["places"]) - set(event["lost"]):
            who = [j for j in joined if j["place"] == place and j["time"] <= event["time"]][-1]
            notes = scene.folder / f"{who['worker']}.log.trained"
            told = [json.loads(line) for line in notes.read_text().splitlines()]
            trained.update([note for note in told if note["round"] == r][-1]["first_ids"])
    return trained


def exactly_once(nursery: Nursery, folder: Path, n_rounds: int) -> None:
    """Workers killed, stopped and replaced at any moment, and the hub itself killed now and then."""
    tokens = numbered_tokens(folder / "numbered")
    model = tiny_table(tokens, folder)["model"]["config"] | {"vocab_size": N_SEQUENCES}
    scene = Scene(
        nursery, folder, tokens, model={"config": model}, train={"rounds": n_rounds, "interval": 2},
        hub={"floor": 2.0, "wait": 1.0},
    )  # fmt: skip
    rng, hub, n_hubs = random.Random(n_rounds), scene.hub(), 1
    mob = Mob(scene, 3)
    until = time.monotonic() + 3 * n_rounds + 60
    while not (not hub.running and hub.wait() == 0):
        assert time.monotonic() < until, hub.text[-2000:]
        time.sleep(rng.uniform(0.05, 0.5))
        what = rng.random()
        if what < 0.5:
            mob.kill(rng.randrange(3))
        elif what < 0.6:
            i = rng.randrange(3)
            mob.signal(i, signal.SIGSTOP)
            time.sleep(rng.choice([0.1, 3.0]))  # back in time, or after the deadline
            mob.signal(i, signal.SIGCONT)
        elif what < 0.63:
            with suppress(ProcessLookupError):
                hub.signal(signal.SIGKILL)
                hub.wait()
        if not hub.running and hub.wait() != 0:
            assert hub.wait() == -signal.SIGKILL, hub.text[-2000:]
            hub, n_hubs = scene.hub(resume=True), n_hubs + 1
        elif hub.running:
            mob.refill()
    nursery.end_children()
    saved = checkpoint.open_(scene.out)
    assert saved.round == n_rounds
    ledger = saved.leases
    done = sorted(set(range(ledger.next)) - set(ledger.returned))
    batches = Batches(open_tokens(tokens), SEQ_LEN, 3, 2, saved.config.run.seed)
    assert what_was_committed(scene) == Counter(batches.rows_at(done).tolist())
    n_epochs = (ledger.returned or (ledger.next,))[0] // N_SEQUENCES
    assert n_epochs >= 1  # these are complete: every sequence is in once for each
    n_lost = sum(len(event["lost"]) for event in scene.events("round"))
    print(f"{n_rounds} rounds, {n_epochs} epochs: {mob.n_killed} workers and {n_hubs - 1} hubs killed, "
          f"{n_lost} results lost")  # fmt: skip
    assert n_lost > 0


def test_exactly_once(nursery, tmp_path):
    exactly_once(nursery, tmp_path, 12)


@pytest.mark.chaos
def test_exactly_once_over_200_rounds(nursery, tmp_path):
    exactly_once(nursery, tmp_path, 200)


# ---------------------------------------------------------------- row 20: the soak


def resident(pid: int) -> int:
    """Bytes in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def n_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.chaos
def test_soak(nursery, tmp_path):
    """1,000 rounds, each worker killed with p = 2% a round: nothing grows, and it learns as well."""
    n = 1000
    train = {"rounds": n, "interval": 1, "lr": 3e-3, "schedule": "cosine"}
    tokens = make_tokens(tmp_path / "tokens")
    scene = Scene(nursery, tmp_path, tokens, train=train, run={"save_every": 100})
    rng, hub, mob = random.Random(0), scene.hub(), Mob(scene, 3)
    seen: list[tuple[int, int, int]] = []  # round, bytes, descriptors
    until = time.monotonic() + 1800
    while hub.running:
        assert time.monotonic() < until
        done = scene.events("round")
        for _ in range(len(done) - (seen[-1][0] if seen else 0)):
            for i in range(3):
                if rng.random() < 0.02:
                    mob.kill(i)
        mob.refill()
        if done and (not seen or len(done) > seen[-1][0]):
            with suppress(OSError):
                seen.append((len(done), resident(hub.pid), n_descriptors(hub.pid)))
        time.sleep(0.02)
    assert hub.wait() == 0, hub.text[-2000:]
    early, late = (
        [row for row in seen if a <= row[0] < b] for a, b in ((n // 5, 2 * n // 5), (4 * n // 5, n))
    )
    memory, files = (
        [statistics.median(row[i] for row in rows) for rows in (early, late)] for i in (1, 2)
    )
    straight = rounds.train(
        scene.config(tmp_path / "straight", run={"variant": "local", "save_every": 0}), quiet=True
    )
    losses = [
        math.log(score.evaluator(parent.open_(str(path), "cpu")).full_perplexity())
        for path in (straight, scene.last())
    ]
    n_lost = sum(len(event["lost"]) for event in scene.events("round"))
    print(
        f"{mob.n_killed} kills, {n_lost} results lost; resident {memory}, descriptors {files}, losses {losses}"
    )
    assert memory[1] < 1.02 * memory[0]
    assert files[0] == files[1]
    assert losses[1] < 1.01 * losses[0]


# ---------------------------------------------------------------- quality under loss


def plan_of_deaths(p: float, seed: int, n_workers: int, n_rounds: int, more: bool) -> list[dict]:
    """Rounds in which each worker is lost with probability p; with `more`, as many as it takes until all
    the data of n_rounds whole ones is trained."""
    rng, places, plan, n_results = random.Random(seed), list(range(n_workers)), [], 0
    while (n_results < n_rounds * n_workers) if more else (len(plan) < n_rounds):
        lost = [place for place in places if rng.random() < p]
        if len(lost) < n_workers:  # a round without a result is not committed, but tried again
            plan.append({"round": len(plan), "places": places, "lost": lost, "time": 0.0})
            n_results += n_workers - len(lost)
    return plan


def losses_under_loss(
    text: Path, out: Path, p: float, *, more: bool = False, seed: int = 0, n_rounds: int = 300
) -> dict:
    """The demo's model when each worker dies with probability p in every round: losses at the end.

    A dead worker's result is left out by plan, bit for bit what its death does (tests of the hub), and
    it is back in the next round. Its data goes out again.
    """
    plan = plan_of_deaths(p, seed, 4, n_rounds, more)
    cfg = config.load("demo", [f"train.rounds={len(plan)}", "run.threads=1", "run.device=cpu"])
    data = replace(cfg.data, train=str(text / "train"), valid=str(text / "valid"))
    cfg = replace(cfg, data=data, run=replace(cfg.run, out=str(out)))
    run = replay(cfg, plan, [])
    widths = widths_of_ratio(run.block_map, RATIO)
    spread = run.evaluator.random_subnets(RATIO, widths, 20, 0)
    return {
        "p": p,
        "n_rounds": len(plan),
        "n_lost": sum(len(event["lost"]) for event in plan),
        "full": math.log(run.evaluator.full_perplexity()),
        RATIO: sum(map(math.log, spread.values)) / len(spread.values),
    }


@pytest.mark.chaos
def test_quality_when_a_tenth_dies(tmp_path):
    """Each worker dies with p = 0.1 a round, until the same data is trained: within 1% of the fault-free loss."""
    build(tmp_path / "text", quiet=True)
    whole = losses_under_loss(tmp_path / "text", tmp_path / "whole", 0.0)
    hurt = losses_under_loss(tmp_path / "text", tmp_path / "hurt", 0.1, more=True)
    print(whole, hurt)
    assert 0.07 < hurt["n_lost"] / (4 * hurt["n_rounds"]) < 0.13
    for size in ("full", RATIO):
        assert hurt[size] < 1.01 * whole[size]
