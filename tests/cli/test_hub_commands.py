"""`twistlm hub` and `twistlm worker` as a user starts them: supervisor, secrets, addresses, signals."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoints import FILES
from commands import toml
from conftest import make_tokens, tiny_table
from preloaded import Forked
from processes import free_port

from twistlm import config
from twistlm.training import rounds
from twistlm.transport.address import check_address, parse_address, read_secret

SECRET = {"TWISTLM_SECRET": "a secret of sixteen bytes or more"}
ENV = os.environ | {"OMP_NUM_THREADS": "1"} | SECRET
TRAIN = {"n_workers": 2, "rounds": 40, "interval": 2, "outer": "nesterov(0.7, 0.6)"}
SLOW = 120.0


def start(*args: str, env: dict | None = None) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "twistlm", *args],
        env=env or ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def events(out: Path, event: str) -> list[dict]:
    path = out / "events.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return [row for row in rows if row["event"] == event]


def until(seen, process: subprocess.Popen | Forked):
    end = time.monotonic() + SLOW
    while not (found := seen()):
        assert time.monotonic() < end, "waited in vain"
        assert process.poll() is None, "it has ended"
        time.sleep(0.05)
    return found


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's /proc")
def test_a_crashed_hub_is_restarted_and_a_stopped_one_resumed(tmp_path, preloaded):
    """Rows 9, 18: the hub is killed, later the command is stopped, then resumed: bitwise one run.

    The workers are the same two processes from the first hub to the stop.
    """
    tokens, port = make_tokens(tmp_path / "tokens"), free_port()
    table = tiny_table(tokens, tmp_path / "run", train=TRAIN, hub={"bind": f"127.0.0.1:{port}"})
    preset = toml(tmp_path / "config.toml", table)
    command = start("hub", preset)
    workers = []
    try:
        until(
            lambda: events(tmp_path / "run", "started"), command
        )  # they wait 8 s for a first answer
        connect = ("worker", "--connect", f"127.0.0.1:{port}")
        workers += [preloaded.start(*connect, cwd=tmp_path, **SECRET) for _ in range(2)]
        until(lambda: list((tmp_path / "run").glob("checkpoints/round-*")), command)
        (killed,) = children(command.pid)
        os.kill(killed, signal.SIGKILL)
        until(lambda: len(events(tmp_path / "run", "started")) == 2, command)
        assert events(tmp_path / "run", "started")[-1]["round"] > 0
        began = events(tmp_path / "run", "started")[-1]["time"]
        until(lambda: [e for e in events(tmp_path / "run", "round") if e["time"] > began], command)
        joined = [
            e["time"] - began for e in events(tmp_path / "run", "joined") if e["time"] > began
        ]
        assert len(joined) == 2
        assert max(joined) < 10
        (hub,) = children(command.pid)
        command.send_signal(signal.SIGTERM)
        said = command.communicate(timeout=SLOW)[0]
        assert command.returncode == 143, said
        assert "the hub ended by SIGKILL: starting it again" in said
        assert "stopped by SIGTERM" in said
        for worker in workers:
            assert worker.wait(SLOW) == 0, worker.output
        for pid in (hub, killed):
            assert not Path(f"/proc/{pid}").exists(), "an orphan"
    finally:
        if command.poll() is None:
            for pid in (*children(command.pid), command.pid):
                os.kill(pid, signal.SIGKILL)
        command.communicate()
        for worker in workers:
            worker.end()
    cfg = config.load(preset, ["run.variant=local"])
    n_done = int(max(p.name for p in (tmp_path / "run/checkpoints").glob("round-*"))[6:])
    assert 0 < n_done < 40
    # what is left of the run goes on in one process: S workers or one, the bits are the same
    resumed = rounds.train(cfg, resume=True, quiet=True)
    straight = config.override(cfg, [f"run.out={tmp_path / 'straight'}"])
    reference = rounds.train(straight, quiet=True)
    for name in FILES:
        assert (resumed / name).read_bytes() == (reference / name).read_bytes(), name


def test_mistakes_of_the_call(tmp_path):
    """Rows 16, 17: one sentence and exit code 2, before torch is imported."""
    port = free_port()
    table = tiny_table("nowhere", tmp_path / "run", hub={"bind": f"127.0.0.1:{port}"})
    preset = toml(tmp_path / "config.toml", table)
    without = {key: value for key, value in ENV.items() if key != "TWISTLM_SECRET"}
    with socket.create_server(("127.0.0.1", port)):
        cases = {
            f"cannot listen on 127.0.0.1:{port}": start("hub", preset),
            "neither a loopback nor a private address": start("hub", preset, "hub.bind=0.0.0.0:1"),
            "use host:port": start("worker", "--connect", "nonsense"),
            "at least 16": start("worker", "--connect", "127.0.0.1:1", env=without),
            "say --public": start("worker", "--connect", "8.8.8.8:1"),
            "a hub trains in TwIST rounds": start("hub", preset, "train.method=dense"),
        }
        for sentence, process in cases.items():
            said = process.communicate(timeout=SLOW)[0]
            assert process.returncode == 2, said
            assert said.startswith("error: "), said
            assert sentence in said


def test_train_finishes_its_round_on_sigterm(tmp_path, preloaded):
    """Row 18 without a hub: the round ends, the checkpoint is written, and the rest is bitwise the rest."""
    tokens = make_tokens(tmp_path / "tokens")
    train = TRAIN | {"rounds": 300}
    table = tiny_table(tokens, tmp_path / "run", train=train, run={"save_every": 0})
    process = preloaded.start("train", toml(tmp_path / "config.toml", table), cwd=tmp_path)
    until(lambda: (tmp_path / "run/metrics.jsonl").is_file(), process)
    until(lambda: (tmp_path / "run/metrics.jsonl").read_text().count("\n") > 2, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(SLOW) == 143, process.output
    said = process.output
    assert "resume with --resume" in said
    (saved,) = (tmp_path / "run/checkpoints").glob("round-*")
    n_done = (tmp_path / "run/metrics.jsonl").read_text().count("\n")
    assert saved.name == f"round-{n_done:06d}"


@pytest.mark.parametrize(
    ("host", "near"),
    [
        ("127.0.0.1", True),
        ("10.1.2.3", True),
        ("192.168.0.9", True),
        ("fd00::1", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("8.8.8.8", False),
        ("::", False),
        ("2001:4860:4860::8888", False),
    ],
)
def test_addresses_beyond_the_private_ones_need_a_word(host, near):
    check_address(host, True, "--public")
    if near:
        check_address(host, False, "--public")
    else:
        with pytest.raises(ValueError, match="say --public"):
            check_address(host, False, "--public")


def test_addresses_and_secrets(tmp_path, monkeypatch):
    assert parse_address("10.0.0.1:29400") == ("10.0.0.1", 29400)
    assert parse_address("[fd00::1]:7") == ("fd00::1", 7)
    for wrong in ("10.0.0.1", ":7", "host:", "host:x", "host:70000"):
        with pytest.raises(ValueError, match="host:port"):
            parse_address(wrong)
    (tmp_path / "secret").write_text("0123456789abcdef\n")
    assert read_secret(tmp_path / "secret") == b"0123456789abcdef"
    monkeypatch.setenv("TWISTLM_SECRET", "short")
    with pytest.raises(ValueError, match="at least 16"):
        read_secret(None)
