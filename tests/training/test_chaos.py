"""Behind `make chaos`: hundreds of faults on Ray, and learning when a tenth of results is lost."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
import ranks
from checkpoints import FILES
from commands import toml
from conftest import make_tokens, numbered_tokens, tiny_table
from processes import (
    HALVES,
    Scene,
    environment,
    replay,
    same_bits,
    start_head,
    start_node,
    wait_for_head,
)

from twistlm import config
from twistlm.data.builtin import build
from twistlm.data.stream import Batches
from twistlm.data.token_file import open_tokens
from twistlm.model.blocks import widths_of_ratio
from twistlm.system import signals
from twistlm.system.signals import TOO_FEW
from twistlm.training import checkpoint, rounds

RATIO = "6/12"
TRAIN = {"n_workers": 3, "interval": 2, "outer": "nesterov(0.7, 0.6)"}
pytestmark = pytest.mark.chaos


@pytest.mark.parametrize("at", ["receive", "train", "send"])
@pytest.mark.parametrize("place", range(3))
def test_every_worker_in_every_phase(scene, at, place):
    """Row 1, in full: each ends bitwise as a run in which that worker was left out by plan."""
    here = scene(train=TRAIN | {"rounds": 6})
    here.suffers({"place": place, "round": 2, "at": at, "do": "SIGKILL"})
    here.train()
    assert [row["lost"] for row in here.events("round")] == [[], [], [place], [], [], []]
    assert same_bits(here.replay(), here.last())


PHASES = {
    "elastic.Elastic._gather": 2,
    "elastic.Elastic._post": 2,
    "elastic.Elastic._collect": 2,
    "aggregator.aggregate_": 2,
    "elastic.Assignments.committed": 2,
    "checkpoint.save_tensors": 5,
}


@pytest.mark.parametrize("at", PHASES)
def test_a_driver_killed_in_any_phase(scene, tmp_path, at):
    """Row 7: started again, it goes on bit for bit with the workers of the first."""
    here = scene(train=TRAIN | {"rounds": 5, "scale": "measured"})
    driver = here.start(kill={"at": at, "n": PHASES[at]})
    driver.join(120)
    assert driver.exitcode == -signal.SIGKILL, here.text
    here.train(resume=True)
    local = rounds.train(here.config(tmp_path / "local", run={"variant": "local"}), quiet=True)
    for name in FILES:
        assert (local / name).read_bytes() == (here.last() / name).read_bytes(), name


def test_workers_without_a_run_end_by_themselves(scene):
    """Row 7: no orphans after `patience`."""
    here = scene(train=TRAIN | {"rounds": 2000}, ray={"patience": 6.0})
    (here.out / "ray-id.txt").write_text("alone\n")  # workers of its own
    driver = here.start()
    here.until(lambda: here.events("round"))
    driver.kill()
    pids = [int(row["worker"].rpartition("-")[2]) for row in here.events("joined")]
    here.until(lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()], 40)


def of_session(sid: int) -> list[int]:
    """A process and all that it started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            words = path.read_text().rpartition(")")[2].split()
            if int(words[3]) == sid and words[0] != "Z":
                found.append(int(path.parent.name))
    return found


def kill_session(sid: int) -> None:
    """SIGKILL for all of them, as if their machine had lost power."""
    for pid in of_session(sid):
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def test_a_killed_head(tmp_path):
    """Row 8: one sentence and exit code 4, also where Ray ends the process; with a new head it
    goes on, bit for bit."""
    head, address = start_head(tmp_path, cpus=2)
    wait_for_head(head, tmp_path)
    tokens, said = make_tokens(tmp_path / "tokens"), tmp_path / "said.txt"
    train = TRAIN | {"n_workers": 2, "rounds": 2000}
    here = Scene(address, tmp_path, tokens, train=train, blocks={"k_attn": 3})
    path = toml(tmp_path / "run.toml", config.to_dict(here.config(here.out)))
    try:
        for more in ([], ["--resume"]):
            here.drivers.append(driver := ranks.twistlm(said, "train", path, *more))
            n_rounds = len(here.events("round"))
            here.until(lambda n=n_rounds: len(here.events("round")) > n + 3)
            kill_session(head.pid)
            head.wait()
            driver.join(90)
            errors = [line for line in said.read_text().splitlines() if "error" in line]
            assert driver.exitcode == TOO_FEW, said.read_text()
            assert len(errors) == 1 + len(more), said.read_text()
            assert "the run with --resume" in errors[-1]
            assert "Traceback" not in said.read_text()
            (tmp_path / "head.txt").write_text("")
            head, _ = start_head(tmp_path, cpus=2, port=int(address.rpartition(":")[2]))
            wait_for_head(head, tmp_path)
        here.sections["train"]["rounds"] = len(here.events("round")) + 2
        here.train(resume=True)
        assert same_bits(here.replay(), here.last())
    finally:
        here.close()
        head.terminate()
        head.wait()


STRANGER = """
import sys, time, numpy, ray
ray.init(sys.argv[1], log_to_driver=False)

@ray.remote(num_cpus=0)
def work(array):
    return array.sum()

for i in range(20):  # stores, tasks, and a look at what is there
    assert ray.get(work.remote(ray.put(numpy.ones(100_000)))) == 100_000
print(len(ray.util.list_named_actors(all_namespaces=True)), flush=True)
"""


def test_a_machine_with_its_own_k_joins_and_strangers_do_no_harm(tmp_path):
    """Rows 4 and 12: a second raylet with a label; a program with the token, one without."""
    head, address = start_head(tmp_path, cpus=1)
    wait_for_head(head, tmp_path)
    sections = {"train": TRAIN | {"n_workers": 2, "rounds": 100000}, "ray": {"wait": 2.0}}
    sections |= {"blocks": {"k_attn": 4, "k_ffn": 4}}
    here = Scene(address, tmp_path, make_tokens(tmp_path / "tokens"), **sections)
    started, env = [head], os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
    try:
        driver = here.start(keep=False)
        here.until(lambda: here.events("round"))
        assert here.events("round")[0]["places"] in ([0], [1])
        role = ["--join", address, "--k-attn", "1", "--k-ffn", "2"]
        started.append(start_node(tmp_path / "second.txt", role, 1))
        here.until(lambda: len(here.events("joined")) == 2)
        n = len(here.events("round"))
        assert here.events("joined")[1].items() >= {"attn": 1, "ffn": 2}.items()
        here.until(lambda: len(here.events("round")) >= n + 3)
        assert here.events("round")[n + 1]["places"] == [0, 1]  # in within two rounds
        for token, code in ((os.environ["RAY_AUTH_TOKEN"], 0), ("f" * 64, 1)):
            command = [sys.executable, "-c", STRANGER, address]
            own = env | {"RAY_AUTH_TOKEN": token}
            done = subprocess.run(command, env=own, capture_output=True, text=True)
            assert (done.returncode != 0) == bool(code), done.stderr[-2000:]
        assert "token" in done.stderr.lower()
        n = len(here.events("round"))
        here.until(lambda: len(here.events("round")) > n + 20)
        os.kill(driver.pid, signal.SIGTERM)
        driver.join(60)
        assert driver.exitcode == 128 + signal.SIGTERM, here.text
        assert not here.events("lost") + here.events("late") + here.events("refused")
        pids = [int(row["worker"].rpartition("-")[2]) for row in here.events("joined")]
        here.until(lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()])
        assert same_bits(here.replay(), here.last())
    finally:
        here.close()
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait()


@pytest.mark.parametrize("who", ["command", "child"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_of_a_local_ray(tmp_path, number, who):
    """Rows 7 and 13: with the driver go its workers, raylet and head."""
    tokens, said = make_tokens(tmp_path / "tokens"), tmp_path / "said.txt"
    table = tiny_table(
        tokens, tmp_path / "run", run={"variant": "ray"}, ray={"patience": 20.0, "floor": 20.0},
        train=TRAIN | {"n_workers": 1, "rounds": 100000}, blocks={"k_attn": 4, "k_ffn": 4},
    )  # fmt: skip
    command = [sys.executable, "-m", "twistlm", "train", toml(tmp_path / "run.toml", table)]
    with said.open("w") as log:
        streams = {"stdout": log, "stderr": log}
        driver = subprocess.Popen(command, env=environment(), **streams, start_new_session=True)
    try:
        made = (tmp_path / "run/checkpoints").glob
        ranks.wait_for(lambda: list(made("round-*")), 120, said.read_text)
        everyone = of_session(driver.pid)
        assert len(everyone) > 4  # gcs, raylet, worker, and the command twice
        os.kill(driver.pid if who == "command" else signals.children(driver.pid)[0], number)
        assert driver.wait(60) in (128 + number, -number)
        ranks.wait_for(lambda: not set(everyone) & set(of_session(driver.pid)), 30)
    finally:
        kill_session(driver.pid)
        driver.wait()


def audit(here: Scene, tokens: str, n_workers: int) -> None:
    """What workers noted as they trained, in the rounds that were committed with them, is what the
    saved ledger says: every place of the stream once."""
    saved = checkpoint.open_(here.out)
    last = {event["round"]: event for event in here.events("round")}  # a round may be redone
    trained: Counter[int] = Counter()
    noted: dict[str, dict[int, list[int]]] = {}  # by worker: the last time that it trained a round
    for path in here.out.glob("trained-*.jsonl"):
        notes = map(json.loads, path.read_text().splitlines())
        name = path.name.removeprefix("trained-").removesuffix(".jsonl")
        noted[name] = {note["round"]: note["ids"] for note in notes}
    for r, event in last.items():
        if r < saved.round:
            for name in event["seconds"]:
                trained.update(noted[name.partition("@")[2]][r])
    done = sorted(set(range(saved.leases.next)) - set(saved.leases.returned))
    batches = Batches(open_tokens(tokens), 16, n_workers, 2, saved.config.run.seed)
    assert trained == Counter(batches.rows_at(done).tolist())


def test_every_sequence_exactly_once_though_drivers_die(scene, tmp_path):
    """Row 14: 200 random faults; workers killed, stopped and lying, and the driver killed."""
    n_faults, n_sequences = 200, 40
    tokens = numbered_tokens(tmp_path / "numbered", n_sequences)
    size = {"vocab_size": n_sequences, "n_positions": 16, "n_embd": 16, "n_head": 4, "n_layer": 2}
    here = scene(
        train=TRAIN | {"rounds": 1_000_000},
        ray={"floor": 2.0, "wait": 1.0},
        run={"save_every": 5},
        data={"train": tokens, "valid": tokens},
        model={"config": size},
    )
    rng, done = random.Random(0), Counter()
    lies = ("nan", "huge")  # two: a third would bar the only machine
    here.suffers(
        *({"place": i, "round": 20 + 50 * i, "at": "send", "do": do} for i, do in enumerate(lies))
    )
    driver, until = here.start(), time.monotonic() + 1500
    while done.total() < n_faults:
        assert time.monotonic() < until, here.text[-2000:]
        time.sleep(rng.uniform(0.3, 1.5))
        joined, fault = here.events("joined"), rng.random()
        if not joined:
            continue
        if fault < 0.04:
            driver.kill()
            driver.join()
            driver = here.start(resume=True)
            done["driver"] += 1
            continue
        assert driver.exitcode is None, here.text[-2000:]
        victim = int(rng.choice(joined[-4:])["worker"].rpartition("-")[2])
        with suppress(ProcessLookupError):
            if fault < 0.3:
                os.kill(victim, signal.SIGKILL)
                done["killed"] += 1
            else:
                os.kill(victim, signal.SIGSTOP)
                time.sleep(rng.uniform(0, 3))
                os.kill(victim, signal.SIGCONT)
                done["stopped"] += 1
    here.until(lambda: here.events("round")[-1]["time"] > time.time() - 1)
    os.kill(driver.pid, signal.SIGTERM)
    driver.join(60)
    assert driver.exitcode == 128 + signal.SIGTERM, here.text[-2000:]
    audit(here, tokens, 3)
    rows = here.events("round")
    n_lost = sum(len(event["lost"]) for event in rows)
    print(f"{dict(done)}, {n_lost} results lost in {len(rows)} rounds")
    assert min(done["killed"], done["driver"], n_lost) >= 5


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("p", [0.0, 0.02])
def test_soak(scene, tmp_path, p):
    """Row 15: 1,000 rounds in which each worker is killed with p: nothing grows, and it learns."""
    n_rounds = 1000
    train = TRAIN | {"rounds": n_rounds, "outer": "none", "lr": 3e-3}
    here = scene(train=train, run={"save_every": 50})
    rng = random.Random(0)
    every = itertools.product(range(n_rounds), range(3))
    killed = {"at": "receive", "do": "SIGKILL"}
    here.suffers(*({"place": i, "round": r} | killed for r, i in every if rng.random() < p))
    driver, samples, workers = here.start(), [], {}
    here.until(lambda: len(here.events("round")) >= 100 or driver.exitcode is not None)
    while driver.exitcode is None:
        with suppress(OSError):  # it has just ended
            samples.append((resident(driver.pid), len(os.listdir(f"/proc/{driver.pid}/fd"))))
        for row in here.events("joined"):
            pid = int(row["worker"].rpartition("-")[2])
            with suppress(OSError):
                workers.setdefault(pid, []).append(resident(pid))
        time.sleep(1.0)
    assert driver.exitcode == 0, here.text
    tenth = max(1, len(samples) // 10)

    def growth(values: list[int]) -> float:
        part = max(1, len(values) // 10)
        return statistics.median(values[-part:]) / statistics.median(values[:part]) - 1

    middle = [statistics.median(s[1] for s in part) for part in (samples[:tenth], samples[-tenth:])]
    rounds.train(here.config(tmp_path / "local", run={"variant": "local"}), quiet=True)
    losses, calm = (
        [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]
        for out in (here.out, tmp_path / "local")
    )
    # places wait for their next worker while rounds go on: compared where as much data is trained
    n_results = [len(row["places"]) - len(row["lost"]) for row in here.events("round")]
    first, last = sum(n_results[:-200]) // 3, sum(n_results) // 3
    tail = [statistics.fmean(row) for row in (losses[-200:], calm[first:last])]
    long = {pid: growth(values) for pid, values in workers.items() if len(values) > 60}
    grown = growth([s[0] for s in samples])
    print(
        f"lost {len(here.events('lost'))}, driver {grown:.2%}, workers {long}, fds {middle}, {tail}"
    )
    assert grown < 0.02
    assert all(each < 0.02 for each in long.values())
    assert abs(middle[1] - middle[0]) <= 12
    assert tail[0] < 1.01 * tail[1]


# ---------------------------------------------------------------- quality under loss


def losses_under_loss(text: Path, out: Path, p: float) -> tuple[float, dict[str, float]]:
    """The share of lost results, and the demo's losses, when workers die with probability p.

    A dead worker's result is left out by plan, bit for bit what its death does (test_ray.py), until
    the data of 300 whole rounds is trained; it is back in the next round.
    """
    rng, places, plan, n_results = random.Random(0), [0, 1, 2, 3], [], 0
    while n_results < 300 * 4:
        lost = [place for place in places if rng.random() < p]
        if len(lost) < 4:  # a round without a result is not committed, but tried again
            plan.append({"round": len(plan), "places": places, "lost": lost, "time": 0.0})
            n_results += 4 - len(lost)
    own = [f"train.rounds={len(plan)}", "run.threads=1", "run.device=cpu", f"run.out={out}"]
    own += [f"data.{split}={text}/{split}" for split in ("train", "valid")]
    run, _ = replay(config.load("demo", [*HALVES, *own]), plan, [])
    widths = widths_of_ratio(run.block_map, RATIO)
    spread = run.evaluator.random_subnets(RATIO, widths, 20, 0)
    full = math.log(run.evaluator.full_perplexity())
    n_lost = sum(len(event["lost"]) for event in plan)
    return n_lost / (4 * len(plan)), {
        "full": full,
        RATIO: statistics.fmean(map(math.log, spread.values)),
    }


def test_quality_when_a_tenth_dies(tmp_path):
    """Until the same data is trained: within 1% of the fault-free loss."""
    build(tmp_path / "text", quiet=True)
    _, whole = losses_under_loss(tmp_path / "text", tmp_path / "whole", 0.0)
    share, hurt = losses_under_loss(tmp_path / "text", tmp_path / "hurt", 0.1)
    print(whole, hurt)
    assert 0.07 < share < 0.13
    assert all(hurt[size] < 1.01 * whole[size] for size in ("full", RATIO))
