"""Many faults: every worker in every phase, data exactly once under random faults, and the soak."""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import numbered_tokens
from processes import Scene, same_bits

from twistlm.data.stream import Batches, Leases
from twistlm.data.token_file import open_tokens
from twistlm.training import rounds

TRAIN = {"n_workers": 3, "interval": 1, "outer": "nesterov(0.7, 0.6)"}


@pytest.mark.chaos
@pytest.mark.parametrize("phase", ["receive", "train", "send", "sent"])
@pytest.mark.parametrize("victim", range(3))
def test_every_worker_in_every_phase(scene, phase, victim):
    """Row 1, in full: each ends bitwise as a run in which that worker was left out by plan."""
    here = scene(train=TRAIN | {"rounds": 6, "interval": 2})
    hub = here.hub()
    names = [f"w{i}" for i in range(3)]
    for i, name in enumerate(names):
        fault = {"at": phase, "do": "die", "round": 2}
        here.worker(name, *([fault] if i == victim else []))
    assert hub.wait() == 0, hub.text
    committed = here.events("round")
    lost = [len(row["lost"]) for row in committed]
    if phase == "sent":  # its result counts; the next round may begin before its death is noticed
        assert lost in ([0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0])
    else:
        assert lost == [0, 0, 1, 0, 0, 0]
        assert [len(row["places"]) for row in committed] == [3, 3, 3, 2, 2, 2]
    assert same_bits(here.replay(), here.last())


def torment(here: Scene, hub, rng: random.Random) -> list[str]:
    """Kill, stop and poison workers, round by round, until the hub is done; names of all that were."""
    names, alive, stopped, n_seen = [], {}, [], 0

    def start() -> None:
        name = f"w{len(names)}"
        names.append(name)
        after = len(here.events("round"))
        what = rng.choice(["nan", "huge", "garbage", None, None])
        faults = [{"at": "result", "do": what, "round": after + rng.randint(1, 20)}] if what else []
        sends = rng.choice(["corrupt", "twice", "wrong round", "cut short", "die", None])
        if sends:
            faults.append({"at": "send", "do": sends, "round": after + rng.randint(1, 20)})
        alive[name] = here.worker(name, *faults)

    for _ in range(3):
        start()
    while hub.running:
        time.sleep(rng.uniform(0, 0.1))
        for name in [name for name, child in alive.items() if not child.running]:
            del alive[name]
        while len(alive) < 3:
            start()
        n_now = len(here.events("round"))
        if n_now == n_seen:  # faults are counted in rounds, however slow the machine is
            continue
        n_seen = n_now
        name = rng.choice(list(alive))
        what = rng.choice(["kill", "stop", "none", "none"])
        if what == "none" or not alive[name].running:
            continue
        try:
            alive[name].signal(signal.SIGKILL if what == "kill" else signal.SIGSTOP)
        except ProcessLookupError:
            continue
        if what == "stop":
            stopped.append(alive[name])
        if len(stopped) > 1:
            child = stopped.pop(0)
            if child.running:
                child.signal(signal.SIGCONT)
    for child in stopped:
        if child.running:
            child.signal(signal.SIGCONT)
    return names


def audit(here: Scene, names: list[str], tokens: str, batch: int) -> Leases:
    """What the workers say they trained, in the rounds in which the hub says it accepted them, is
    exactly what the saved ledger says: every place of the stream once."""
    logs: dict[tuple[str, int], list[int]] = {}
    for name in names:
        path = here.folder / f"{name}.log.trained"
        for line in path.read_text().splitlines() if path.is_file() else ():
            row = json.loads(line)
            logs[name, row["round"]] = row["first_ids"]  # the last try of a round counts
    trained: Counter[int] = Counter()
    for row in here.events("round"):
        for name in row["seconds"]:
            trained.update(logs[name, row["round"]])
    saved = json.loads((here.last() / "checkpoint.json").read_text())["leases"]
    places = [p for p in range(saved["next"]) if p not in set(saved["returned"])]
    batches = Batches(open_tokens(tokens), 16, 3, batch, 0)
    assert trained == Counter(batches.rows_at(places).tolist())
    return Leases(saved["next"], tuple(saved["returned"]))


@pytest.mark.parametrize(
    "n_rounds", [pytest.param(24, id="quick"), pytest.param(200, marks=pytest.mark.chaos, id="200")]
)
def test_every_sequence_exactly_once(scene, tmp_path, n_rounds):
    """Row 19: kills, stops, NaN, wrong checksums, doubles at random moments; one epoch, each once."""
    n = n_rounds * 2  # sequences in an epoch; three workers would train 6 in a round
    tokens = numbered_tokens(tmp_path / "numbered", n)
    here = scene(
        train=TRAIN | {"rounds": n_rounds},
        hub={"floor": 0.4},
        data={"train": tokens, "valid": tokens},
        model={
            "config": {"vocab_size": n, "n_positions": 16, "n_embd": 16, "n_head": 4, "n_layer": 2}
        },
    )
    rng = random.Random(n_rounds)
    hub = here.hub()
    names = torment(here, hub, rng)
    assert hub.wait() == 0, hub.text
    ledger = audit(here, names, tokens, 2)
    committed = here.events("round")
    assert [row["round"] for row in committed] == list(range(n_rounds))
    assert any(row["lost"] for row in committed)
    if n_rounds >= 200:
        assert ledger.next > n, "an epoch and more"
        assert not [place for place in ledger.returned if place < n], "the epoch is complete"
    assert same_bits(here.replay(), here.last())


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.chaos
@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="needs Linux's /proc")
def test_soak(scene, tmp_path):
    """Row 20: 1,000 rounds, each worker killed with p = 2% a round: nothing grows, and it learns."""
    n_rounds, p = 1000, 0.02
    here = scene(
        train=TRAIN | {"rounds": n_rounds, "outer": "none", "lr": 3e-3}, run={"save_every": 50}
    )
    hub = here.hub()
    n_workers, samples, alive = 0, [], []
    while hub.running:
        alive = [child for child in alive if child.running]
        while len(alive) < 6:  # three places, three spares: a death costs one round
            fault = {"at": "receive", "round": "any", "p": p}
            alive.append(here.worker(f"w{n_workers}", fault))
            n_workers += 1
        if len(here.events("round")) >= 100:
            with suppress(OSError):  # it has just ended
                fds = len(os.listdir(f"/proc/{hub.pid}/fd"))
                if size := resident(hub.pid):
                    samples.append((size, fds))
        time.sleep(0.25)
    assert hub.wait() == 0, hub.text
    lost = here.events("lost")
    assert len(lost) > 0.5 * p * sum(len(row["places"]) for row in here.events("round"))
    tenth = max(1, len(samples) // 10)
    first, last = ([s[0] for s in part] for part in (samples[:tenth], samples[-tenth:]))
    growth = statistics.median(last) / statistics.median(first) - 1
    descriptors = [s[1] for s in samples]
    losses = [json.loads(x)["loss"] for x in (here.out / "metrics.jsonl").read_text().splitlines()]
    cfg = here.config(tmp_path / "local", run={"variant": "local"})
    rounds.train(cfg, quiet=True)
    calm = [
        json.loads(x)["loss"] for x in (tmp_path / "local/metrics.jsonl").read_text().splitlines()
    ]
    tail = [statistics.fmean(row[-200:]) for row in (losses, calm)]
    print(
        f"lost {len(lost)}, growth {growth:.2%}, fds {min(descriptors)}..{max(descriptors)}, loss {tail}"
    )
    assert growth < 0.02
    # six sessions come and go: what is open at one moment varies, what is open in the middle does not
    middle = [statistics.median(part) for part in (descriptors[:tenth], descriptors[-tenth:])]
    assert abs(middle[1] - middle[0]) <= 12
    assert tail[0] == pytest.approx(tail[1], rel=0.01)
