"""SIGKILL at a random moment, `--resume`, and the end is bitwise that of an uninterrupted run."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest
import ranks
import torch
from checkpoints import FILES
from commands import in_process, toml
from conftest import THREADS, make_tokens, tiny, tiny_table

from twistlm.data.stream import Leases
from twistlm.system.signals import SIGNALS, Ended, Stop, on_signals
from twistlm.training import checkpoint, rounds

TRAIN = {"rounds": 30, "interval": 2, "outer": "nesterov(0.7, 0.6)", "scale": "measured"}
TRAIN |= {"schedule": "cosine"}
BLOCKS = {"deal": "balanced", "k_attn": [2, 3], "k_ffn": [3, 2]}


def test_s_k_and_threads_may_change(tmp_path: Path, capsys):
    """Said on the console and in `resumes.jsonl`; the data goes on where it was."""
    tokens = make_tokens(tmp_path / "tokens")
    rounds.train(tiny(tokens, tmp_path / "run", train={"rounds": 2}), quiet=True)
    assert not (tmp_path / "run/resumes.jsonl").exists()
    capsys.readouterr()
    train = {"rounds": 3, "n_workers": 4, "batch": 1}
    cfg = tiny(
        tokens, tmp_path / "run", train=train, blocks={"k_ffn": 2}, run={"threads": THREADS + 1}
    )
    rounds.train(cfg, resume=True)
    assert torch.get_num_threads() == THREADS  # as before: what computes next is not this run's
    out = " ".join(capsys.readouterr().out.split())
    assert "train.n_workers was 3 and is now 4" in out
    assert "blocks.k_ffn was (3,) and is now (2,)" in out
    assert f"cpu, {THREADS} threads' and is now" in out
    assert "run.threads" in out
    (line,) = (tmp_path / "run/resumes.jsonl").read_text().splitlines()
    told = json.loads(line)
    assert told["round"] == 2
    assert told["changed"] == {
        "train.n_workers": [3, 4], "train.batch": [2, 1],
        "train.rounds": [2, 3], "blocks.k_ffn": [[3], [2]],
    }  # fmt: skip
    assert told["device"].endswith(f"cpu, {THREADS + 1} threads")
    saved = checkpoint.open_(tmp_path / "run")
    assert (saved.config.train.n_workers, saved.config.blocks.k_ffn) == (4, (2,))
    assert saved.manifest["device"].endswith(
        f"cpu, {THREADS + 1} threads"
    )  # also from the writing thread
    assert saved.leases == Leases(2 * 3 * 3 * 2 + 3 * 4 * 1)
    rounds.train(cfg, resume=True)  # nothing left to do, nothing to tell
    assert len((tmp_path / "run/resumes.jsonl").read_text().splitlines()) == 1


def test_resume_needs_a_checkpoint_and_something_to_train(tmp_path, monkeypatch, capsys):
    """What can have no effect is refused and leaves nothing; a finished run says that it is."""
    tokens, out = make_tokens(tmp_path / "tokens"), tmp_path / "run"
    path = toml(tmp_path / "run.toml", tiny_table(tokens, out, train={"rounds": 2}))

    def train(*args: str) -> tuple[int, str, str]:
        return in_process(monkeypatch, capsys, "train", path, *args)

    code, _, err = train("--resume")
    assert code == 2
    assert all(part in err for part in (str(out), "no checkpoint to resume", "--auto-resume"))
    assert not out.exists()
    assert train("--auto-resume")[0] == 0
    code, said, _ = train("--resume")
    assert code == 0
    said = " ".join(said.split())
    assert all(part in said for part in ("finished after round 2", "nothing was trained"))
    assert "train.rounds=N" in said
    code, said, err = train("--resume", "train.lr=1")
    assert code == 2
    assert all(part in err for part in ("finished after round 2", "train.lr = 1.0", "train.rounds"))
    assert "is now" not in said
    assert train("--resume", "train.rounds=3", "train.lr=1e-4")[0] == 0
    assert checkpoint.open_(out).round == 3


def test_a_start_that_is_a_run_of_yours_says_how_to_make_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, _, err = in_process(monkeypatch, capsys, "train", "wiki-gpt2")
    assert code == 2
    assert "twistlm train wiki-gpt2 model.weights=random train.method=dense" in err
    assert "run.out=runs/wiki-start" in err
    assert not list(tmp_path.iterdir())


def test_a_signal_after_the_round_loses_nothing_either(tmp_path: Path):
    """During an evaluation, say: whether to save was decided before, and the run ended without."""
    tokens = make_tokens(tmp_path / "tokens")
    cfg = tiny(tokens, tmp_path / "run", run={"save_every": 0})

    def note(where: str) -> None:
        if where == "round 2/4":
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Ended, match="SIGTERM after round 2"):
        rounds.train(cfg, quiet=True, note=note)
    assert checkpoint.open_(tmp_path / "run").round == 2


def test_killed_and_resumed_is_bitwise_the_straight_run(tmp_path: Path):
    tokens = make_tokens(tmp_path / "tokens")
    configs = {}
    for name in ("straight", "killed"):
        own = {"train": TRAIN, "blocks": BLOCKS, "run": {"save_every": 3}}
        table = tiny_table(tokens, tmp_path / name, **own)
        configs[name] = toml(tmp_path / f"{name}.toml", table)
    log, straight = tmp_path / "killed.txt", tmp_path / "straight.txt"
    reference = ranks.twistlm(straight, "train", configs["straight"])
    rng, metrics = random.Random(1), tmp_path / "killed/metrics.jsonl"

    def n_done() -> int:
        return len(metrics.read_text().splitlines()) if metrics.is_file() else 0

    victim = ranks.twistlm(log, "train", configs["killed"])
    for attempt in range(3):
        # wait until it trains, then any moment: in a round, while saving, between the two
        n, now = n_done(), victim
        ranks.wait_for(lambda n=n, now=now: n_done() > n or not now.is_alive())
        time.sleep(rng.uniform(0, 0.4))
        assert attempt or victim.is_alive(), "the run ended before it could be killed"
        victim.kill()
        victim.join()
        victim = ranks.twistlm(log, "train", configs["killed"], "--auto-resume")
    for process, output in ((reference, straight), (victim, log)):
        process.join(300)
        assert process.exitcode == 0, output.read_text()
    last = "checkpoints/round-000030"
    for name in FILES:
        straight, killed = (tmp_path / run / last / name for run in ("straight", "killed"))
        assert straight.read_bytes() == killed.read_bytes(), name
    reference, lines = (
        [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("straight", "killed")
    )
    assert [line["round"] for line in lines] == list(range(1, 31))
    assert [line["loss"] for line in lines] == [line["loss"] for line in reference]
    assert not list((tmp_path / "killed/checkpoints").glob(".draft-*"))  # dead ones are removed


def test_one_signal_is_a_request_and_a_later_one_stops_at_once():
    """Schedulers send one twice within a second; afterwards the handlers are as they were."""
    before = [signal.getsignal(number) for number in SIGNALS]
    with on_signals(Stop(), quiet=True) as stop:
        assert not stop.requested
        signal.raise_signal(signal.SIGTERM)
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:  # it would end all tests
            pytest.fail("the same signal, passed on by a parent, stopped at once")
        assert stop.signal == signal.SIGTERM
        stop.since -= 1.1  # seconds
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(number) for number in SIGNALS] == before
