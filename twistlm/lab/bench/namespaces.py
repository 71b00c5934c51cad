"""Hosts of their own on one machine: network namespaces behind a bridge, each with a slow link."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """Where a process runs."""

    prefix: tuple[str, ...]  # of its command
    address: str
    interface: str


LOOPBACK = Host((), "127.0.0.1", "lo")


def why_not() -> str | None:
    """What is missing for namespaces with slow links; None when they can be made."""
    if missing := [name for name in ("ip", "tc") if shutil.which(name) is None]:
        return f"{' and '.join(missing)} not found (package iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with slow_hosts(1, 1.0):
            return None
    except OSError as error:
        return str(error)


@contextmanager
def slow_hosts(n: int, gbit: float) -> Iterator[list[Host]]:
    """n hosts whose links carry `gbit` Gbit/s each way; they are gone afterwards."""
    bridge = f"tw{os.getpid()}"
    names = [f"{bridge}n{i}" for i in range(n)]
    subnet = f"10.213.{os.getpid() % 256}"
    try:
        _do(f"ip link add {bridge} type bridge")
        _do(f"ip link set {bridge} up")
        for i, name in enumerate(names):
            _do(f"ip netns add {name}")
            _do(f"ip link add {name} type veth peer name eth0 netns {name}")
            _do(f"ip link set {name} master {bridge} up")
            _do(f"ip -n {name} addr add {subnet}.{i + 1}/24 dev eth0")
            for device in ("eth0", "lo"):
                _do(f"ip -n {name} link set {device} up")
            # both ends: a link is as slow inwards as outwards
            limit = f"root tbf rate {gbit}gbit burst 256kb latency 100ms"
            _do(f"tc -n {name} qdisc add dev eth0 {limit}")
            _do(f"tc qdisc add dev {name} {limit}")
        yield [
            Host(("ip", "netns", "exec", name), f"{subnet}.{i + 1}", "eth0")
            for i, name in enumerate(names)
        ]
    finally:
        # the link first: that of a dying namespace lingers, and so would its name
        for name in names:
            subprocess.run(["ip", "link", "del", name], capture_output=True)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)


def _do(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{command}: {done.stderr.strip() or done.returncode}")
