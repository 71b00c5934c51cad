"""Checkpoints written by a thread: what they hold, when they fail, and what a kill leaves."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import ranks
import torch
from checkpoints import CPU, random_central, random_progress
from commands import toml
from conftest import make_tokens, tiny, tiny_table

from twistlm import config
from twistlm.data.stream import Leases
from twistlm.model import families, huggingface
from twistlm.system import files
from twistlm.training import checkpoint, rounds
from twistlm.training.checkpoint import Writer
from twistlm.training.run import Progress


@pytest.fixture(scope="module")
def cfg(tmp_path_factory):
    folder = tmp_path_factory.mktemp("writer")
    return tiny(
        make_tokens(folder / "tokens"),
        folder / "run",
        train={"outer": "nesterov(0.7, 0.6)", "scale": "measured"},
    )


@pytest.fixture(scope="module")
def model(cfg):
    return huggingface.load(cfg.model, seed=3)


def test_what_changes_after_save_is_not_in_it(tmp_path, cfg, model, monkeypatch):
    """The very bits of the call, though all has changed when they are written; one in flight."""
    open_, reached = threading.Event(), threading.Event()
    whole = files.save_tensors

    def waiting(*args):
        reached.set()
        assert open_.wait(30)
        whole(*args)

    monkeypatch.setattr(checkpoint, "save_tensors", waiting)
    central, progress = random_central(model, cfg), random_progress(model, cfg)
    before = {"buffer": central.buffer.clone(), "velocity": central.velocity.clone()}
    with Writer(tmp_path, cfg, model, None, central) as writer:
        writer.save(central, progress)
        assert reached.wait(30)
        central.buffer.zero_()
        central.velocity.zero_()
        assert writer.last is None
        second = threading.Thread(target=writer.save, args=(central, replace(progress, round=18)))
        second.start()
        second.join(0.3)
        assert second.is_alive()  # waits for the first
        open_.set()
        second.join(30)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["round-000017", "round-000018"]
    assert not any(thread.name == "checkpoint" for thread in threading.enumerate())
    saved, block_map = (
        checkpoint.verify(tmp_path / "round-000017"),
        families.partition(model, cfg.blocks),
    )
    after = checkpoint.restore(saved, model, block_map, CPU)
    assert torch.equal(after.buffer, before["buffer"])
    assert torch.equal(after.velocity, before["velocity"])
    assert checkpoint.progress_of(saved, block_map) == progress


def test_a_full_disk_is_said_at_once_and_an_error_only_at_the_end(
    tmp_path, cfg, model, monkeypatch, capsys
):
    def full(*args):
        raise OSError(28, "No space left on device")

    central, progress = random_central(model, cfg), random_progress(model, cfg)
    writer = Writer(tmp_path, cfg, model, None, central)
    monkeypatch.setattr(checkpoint, "save_tensors", full)
    with writer:
        writer.save(central, progress)
        writer.wait()  # no exception: the run goes on
        n_bytes = 4 * 4 * central.layout.n_params  # weights, m, v, velocity in float32
        assert writer.failure in capsys.readouterr().out
        for part in (str(tmp_path / "round-000017"), f"{n_bytes:,} bytes", "disk is full"):
            assert part in writer.failure
        monkeypatch.undo()
        writer.save(central, replace(progress, round=18))
    assert writer.failure is None
    monkeypatch.setattr(checkpoint, "save_tensors", full)
    with pytest.raises(OSError, match=r"round-000019 .* bytes.*disk is full"), writer:
        writer.save(central, replace(progress, round=19))
    assert [p.name for p in tmp_path.iterdir()] == ["round-000018"]
    with pytest.raises(KeyboardInterrupt), writer:  # another reason to stop is not hidden
        raise KeyboardInterrupt


def test_a_bug_in_the_thread_reaches_the_run(tmp_path, cfg, model, monkeypatch):
    def bug(*args):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(checkpoint, "save_tensors", bug)
    central = random_central(model, cfg)
    writer = Writer(tmp_path, cfg, model, None, central)
    with pytest.raises(ZeroDivisionError, match="ours"), writer:
        writer.save(central, random_progress(model, cfg))
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- row 11: a disk that takes no more


def test_a_run_outlives_a_full_disk(tmp_path):
    """A real process whose files may not grow past 2 KiB for a while: it trains on, retries."""
    n, every = 60, 20
    tokens = make_tokens(tmp_path / "tokens")
    train = {"rounds": n, "interval": 1}
    straight = tiny(tokens, tmp_path / "straight", train=train, run={"save_every": 0})
    rounds.train(straight, quiet=True)
    table = tiny_table(tokens, tmp_path / "run", train=train, run={"save_every": every})
    file = toml(tmp_path / "c.toml", table)
    folder, told = tmp_path / "run/checkpoints", []
    os.mkfifo(tmp_path / "output")  # a file of its own would not grow either
    process = ranks.twistlm(tmp_path / "output", "train", file)
    with (tmp_path / "output").open() as output:
        ranks.wait_for(lambda: list(folder.glob("round-*")))
        limit(process.pid, 2048)
        while len(told) < 3:
            line = output.readline()
            assert line, "the run ended"
            told += [line] if "could not be written" in line else []
        before = {path.name for path in folder.iterdir()}
        limit(process.pid, resource.RLIM_INFINITY)
        rest = output.read()
    process.join(120)
    assert process.exitcode == 0, rest
    rows = [re.search(r"round-(\d+) \(([\d,]+) bytes, [\d,]+ free\)", line) for line in told]
    failed = [int(row[1]) for row in rows]
    assert failed[0] == 2 * every
    assert failed[0] < failed[1] < failed[2] < 3 * every  # it did not wait for the next 20
    assert all(str(folder) in line and "File too large" in line for line in told)
    assert before == {f"round-{every:06d}"}  # nothing half-written
    for name in ("model.safetensors", "moments.safetensors"):
        straight, run = (
            tmp_path / x / f"checkpoints/round-{n:06d}" / name for x in ("straight", "run")
        )
        assert straight.read_bytes() == run.read_bytes()
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == list(range(1, n + 1))


def limit(pid: int, n_bytes: int) -> None:
    """From now on no file of this process grows past n_bytes."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (n_bytes, resource.RLIM_INFINITY))


# ---------------------------------------------------------------- row 10: killed while writing


def victim(folder: str, table: dict) -> None:
    """Saves one checkpoint after another; every number in it is the round's."""
    torch.set_num_threads(1)
    cfg = config.from_dict(table)
    model = huggingface.load(cfg.model, seed=3)
    found, _ = checkpoint.newest(Path(folder))
    central, progress = random_central(model, cfg), random_progress(model, cfg)
    first = found.round + 1 if found else 1
    with Writer(Path(folder), cfg, model, None, central) as writer:
        for r in range(first, first + 10_000):
            central.buffer.fill_(r)
            central.velocity.fill_(r)
            held = {name: (r,) * len(counts) for name, counts in progress.held.items()}
            writer.save(central, Progress(r, Leases(r), held))


@pytest.mark.parametrize("n", [3, pytest.param(100, marks=pytest.mark.chaos)])
def test_killed_while_writing(tmp_path, cfg, model, n):
    """Kill n processes, and more until one was writing; the newest valid one is of one round."""
    folder = tmp_path / "checkpoints"
    rng, block_map, done, n_broken = random.Random(n), families.partition(model, cfg.blocks), 0, 0
    for i in range(10 * n):
        if i >= n and n_broken:
            break
        process = ranks.SERVER.Process(target=victim, args=(str(folder), config.to_dict(cfg)))
        process.start()
        target = folder / checkpoint.folder_name(done + 1)
        ranks.wait_for(lambda: target.exists() or not process.is_alive())  # noqa: B023
        time.sleep(rng.uniform(0, 0.15))
        assert process.is_alive()
        process.kill()
        process.join(30)
        found, broken = checkpoint.newest(folder)
        assert found.round > done
        assert broken == []
        done = found.round
        central = checkpoint.restore(found, model, block_map, CPU)
        assert (central.buffer == done).all()
        assert (central.velocity == done).all()
        progress = checkpoint.progress_of(found, block_map)
        assert {count for counts in progress.held.values() for count in counts} == {done}
        assert (progress.round, progress.leases) == (done, Leases(done))
        n_broken += len(list(folder.glob(".draft-*")))
    assert n_broken > 0, "no kill fell into a write"
    assert len(list(folder.glob(".draft-*"))) <= 1
