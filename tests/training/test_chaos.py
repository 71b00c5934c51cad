"""Behind `make chaos`: hubs that die too, and what is learned when a tenth of all results is lost."""

from __future__ import annotations

import json
import math
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import numbered_tokens
from processes import Scene, replay

from twistlm import config
from twistlm.data.builtin import build
from twistlm.data.stream import Batches
from twistlm.data.token_file import open_tokens
from twistlm.model.blocks import widths_of_ratio
from twistlm.training import checkpoint

RATIO = "6/12"


def committed(scene: Scene) -> Counter:
    """How often each sequence is in the final model: by what the workers noted as they trained."""
    last = {event["round"]: event for event in scene.events("round")}  # a round may be redone
    trained: Counter[int] = Counter()
    for r, event in last.items():
        for name in event["seconds"]:
            notes = (scene.folder / f"{name}.log.trained").read_text().splitlines()
            mine = [note for note in map(json.loads, notes) if note["round"] == r]
            trained.update(mine[-1]["first_ids"])
    return trained


@pytest.mark.chaos
def test_every_sequence_exactly_once_though_hubs_die(scene, tmp_path):
    """Row 19 and more: 200 rounds, workers and now and then the hub killed at any moment.

    A hub goes on from its last checkpoint; rounds after it are redone, with whoever is there then.
    """
    n_rounds, n_sequences = 200, 40
    tokens = numbered_tokens(tmp_path / "numbered", n_sequences)
    here = scene(
        train={"rounds": n_rounds, "interval": 2}, hub={"floor": 2.0, "wait": 1.0},
        data={"train": tokens, "valid": tokens},
        model={"config": {"vocab_size": n_sequences, "n_positions": 16, "n_embd": 16, "n_head": 4, "n_layer": 2}},
    )  # fmt: skip
    rng, hub, n_workers, n_hubs = random.Random(0), here.hub(), 0, 1
    alive: list = [None] * 3
    until = time.monotonic() + 1500
    while hub.running or hub.wait() != 0:
        assert time.monotonic() < until, hub.text[-2000:]
        if not hub.running:
            assert hub.wait() == -signal.SIGKILL, hub.text[-2000:]
            hub, n_hubs = here.hub(resume=True), n_hubs + 1
        for i in range(3):
            if alive[i] is None or not alive[i].running:
                n_workers += 1
                alive[i] = here.worker(f"w{n_workers}")
        time.sleep(rng.uniform(0.05, 0.5))
        victim = hub if rng.random() < 0.05 else rng.choice(alive)
        with suppress(ProcessLookupError):  # the run may just have ended
            victim.signal(signal.SIGKILL)
            victim.wait()
    saved = checkpoint.open_(here.out)
    assert saved.round == n_rounds
    ledger = saved.leases
    done = sorted(set(range(ledger.next)) - set(ledger.returned))
    batches = Batches(open_tokens(tokens), 16, 3, 2, saved.config.run.seed)
    assert committed(here) == Counter(batches.rows_at(done).tolist())
    n_epochs = (ledger.returned or (ledger.next,))[0] // n_sequences  # complete ones
    n_lost = sum(len(event["lost"]) for event in here.events("round"))
    print(
        f"{n_epochs} epochs, {n_workers - 3} workers and {n_hubs - 1} hubs killed, {n_lost} results lost"
    )
    assert min(n_epochs, n_hubs - 1, n_lost) >= 1


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
    run, _ = replay(cfg, plan, [])
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
