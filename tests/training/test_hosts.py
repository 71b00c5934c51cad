"""Behind `make chaos`: hosts as network namespaces, killed, frozen and cut off during a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from commands import toml
from conftest import make_tokens, tiny_table
from processes import environment, read_events, replay, same_bits
from ranks import wait_for

from twistlm import config
from twistlm.lab.bench import comm
from twistlm.system.signals import TOO_FEW, children

PORT = 6379
SLOW = 180.0
TRAIN = {"n_workers": 4, "interval": 2, "rounds": 100000, "outer": "nesterov(0.7, 0.6)"}
pytestmark = pytest.mark.chaos


class Hosts:
    """A head that trains nothing and four machines with a core each, all by `twistlm node`."""

    def __init__(self, hosts: list[comm.NetworkHost], folder: Path):
        self.hosts, self.folder = hosts, folder
        self.address = f"{hosts[0].address}:{PORT}"
        self.nodes: dict[int, subprocess.Popen] = {}
        self.drivers: list[subprocess.Popen] = []
        self.log = (folder / "hosts.txt").open("w")

    def start(self, i: int) -> None:
        host = self.hosts[i]
        role = ["--head"] if i == 0 else ["--join", self.address]
        more = ["--", "--num-cpus", str(int(i > 0)), "--object-store-memory=200000000"]
        more += [f"--temp-dir=/tmp/{host.prefix[-1]}"]
        more += ["--include-dashboard=false"] if i == 0 else []
        command = [*host.prefix, sys.executable, "-m", "twistlm", "node", *role]
        n_started = self.n_started()
        if i in self.nodes:
            self.nodes[i].wait()
        command += ["--host", host.address, *more]
        streams = {"stdout": self.log, "stderr": self.log}
        self.nodes[i] = subprocess.Popen(command, env=environment(), **streams)
        said = (self.folder / "hosts.txt").read_text
        # it tries again where Ray gives up
        wait_for(lambda: i > 0 or self.n_started() > n_started, SLOW, lambda: said()[-3000:])

    def n_started(self) -> int:
        return (self.folder / "hosts.txt").read_text().count("Ray runtime started")

    def signal(self, i: int, number: int, spare: int = 0) -> None:
        """To every process of a host, as if the machine was meant; not to `spare` and its child."""
        name = self.hosts[i].prefix[-1]
        done = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
        spared = {spare, *children(spare)} if spare else set()
        for pid in map(int, done.stdout.split()):
            if pid not in spared:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def link(self, i: int, state: str) -> None:
        subprocess.run(["ip", "link", "set", self.hosts[i].prefix[-1], state], check=True)

    def drive(self, path: str, *more: str) -> subprocess.Popen:
        command = [*self.hosts[0].prefix, sys.executable, "-m", "twistlm", "train", path]
        with (self.folder / "driver.txt").open("a") as log:
            made = subprocess.Popen([*command, *more], env=environment(), stdout=log, stderr=log)
        self.drivers.append(made)
        return made

    def close(self) -> None:
        for i in range(len(self.hosts)):
            self.signal(i, signal.SIGCONT)
            self.signal(i, signal.SIGKILL)
        for process in (*self.nodes.values(), *self.drivers):
            process.wait()
        self.log.close()


@pytest.fixture
def hosts(tmp_path):
    if why := comm.why_not():
        pytest.skip(why)
    with comm.slow_hosts(5, 10.0) as made:
        here = Hosts(made, tmp_path)
        try:
            yield here
        finally:
            here.close()


def until(seen, driver: subprocess.Popen, out: Path) -> None:
    wait_for(lambda: seen() or driver.poll() is not None, SLOW)
    assert driver.poll() is None, (out.parent / "driver.txt").read_text()[-2000:]


def test_hosts_killed_frozen_and_cut_off_and_the_head(hosts, tmp_path):
    """Rows 3, 4, 8: a host costs its own results, and is back within 30 s of being well."""
    out = tmp_path / "run"
    table = tiny_table(
        make_tokens(tmp_path / "tokens"), out, train=TRAIN,
        run={"variant": "ray", "save_every": 20},
        ray={"address": hosts.address, "floor": 5.0, "patience": 300.0},
    )  # fmt: skip
    path = toml(tmp_path / "config.toml", table)
    for i in range(5):
        hosts.start(i)
    driver = hosts.drive(path)

    def full() -> bool:
        rows = read_events(out, "round")
        return bool(rows) and len(rows[-1]["places"]) == 4 and not rows[-1]["lost"]

    def missing() -> bool:
        return any(row["lost"] or len(row["places"]) < 4 for row in read_events(out, "round")[-3:])

    until(full, driver, out)
    took = {}

    def trouble(name: str, hurt, seconds: float, mend) -> None:
        hurt()
        until(missing, driver, out)
        time.sleep(seconds)
        mend()
        well = time.monotonic()
        until(full, driver, out)
        took[name] = time.monotonic() - well

    trouble("killed", lambda: hosts.signal(1, signal.SIGKILL), 5, lambda: hosts.start(1))
    for seconds in (20, 90):
        stop, go = (partial(hosts.signal, 2, number) for number in (signal.SIGSTOP, signal.SIGCONT))
        trouble(f"frozen {seconds} s", stop, seconds, go)
        down, up = (partial(hosts.link, 3, state) for state in ("down", "up"))
        trouble(f"cut off {seconds} s", down, seconds, up)
    hosts.signal(0, signal.SIGKILL, spare=driver.pid)
    code = driver.wait(SLOW)
    said = (tmp_path / "driver.txt").read_text()
    assert code == TOO_FEW
    assert "Traceback" not in said
    hosts.nodes[0].wait()
    hosts.start(0)
    driver = hosts.drive(path, "--resume")
    began = time.monotonic()
    started = len(read_events(out, "round"))
    until(lambda: len(read_events(out, "round")) > started and full(), driver, out)
    took["head"] = time.monotonic() - began
    driver.send_signal(signal.SIGTERM)
    assert driver.wait(60) == 143
    print(took)
    # four workers that begin anew at once share this machine's cores: a head has no limit
    assert all(seconds < 30 for name, seconds in took.items() if name != "head")
    committed = {row["round"]: row for row in read_events(out, "round")}
    last = sorted((out / "checkpoints").glob("round-*"))[-1]
    local = tiny_table(table["data"]["train"], tmp_path / "replay", train=TRAIN)
    again = replay(config.from_dict(local), list(committed.values()), read_events(out, "joined"))
    assert same_bits(again, last)
