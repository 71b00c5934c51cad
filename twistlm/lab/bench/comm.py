"""Exchanges without training: bare gloo, Ray, torchrun's star and shards, also on slow links."""

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, cast

from rich.table import Table

from ...config import Wire
from ...system import terminal
from ...system.provenance import describe_run
from ...system.terminal import progress
from ...training.plan import busiest
from ...transport import wire
from . import CommRequest

LONGEST = 1800  # seconds for one set of processes
RAY_PORT = 6379


class NetworkHost(NamedTuple):
    """Where a process runs."""

    prefix: tuple[str, ...]  # of its command
    address: str
    interface: str


LOOPBACK = NetworkHost((), "127.0.0.1", "lo")


def bench(request: CommRequest, save: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """S = `workers` on this machine; S in `slow` on hosts with links of `gbit` Gbit/s.

    `save` gets what there is after every exchange: a run that is cut off loses nothing.
    """
    about = describe_run() | {"cores": os.cpu_count(), "load before": os.getloadavg()[0]}
    made: dict[str, Any] = {"rows": [], "left_out": {}, "about": about}
    job: dict[str, Any] = {"repeats": request.repeats, "wire": request.wire}
    here = {"where": "loopback", "n_workers": request.workers, "megabytes": request.mb, "gbit": 0.0}
    slow = {"where": "slow", "megabytes": request.slow_mb, "gbit": request.gbit}
    places = [job | here, *(job | slow | {"n_workers": n} for n in request.slow)]
    if request.slow and (why := why_not()):
        made["left_out"]["slow links"], places = f"not measured: {why}", places[:1]
    jobs = []
    for job in places:
        jobs += [job | {"engines": each} for each in (["bare", "star"], ["sharded"])]
        jobs += [job | {"engines": ["ray"], "owners": each} for each in (1, job["n_workers"])]
    with progress() as bar:
        task = bar.add_task("exchanges", total=len(jobs), note="")
        for job in jobs:
            made["rows"] += _measure(job)
            save(made)
            bar.advance(task)
    about["load after"] = os.getloadavg()[0]
    return made


def _measure(job: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each engine: they take turns in the same processes."""
    n, gbit, owners, rows = job["n_workers"], job["gbit"], job.get("owners", 1), []
    n_hosts = n + (job["engines"] != ["sharded"])  # the centre of a star does not train here
    with slow_hosts(n_hosts, gbit) if gbit else nullcontext([LOOPBACK] * n_hosts) as hosts:
        said = (_run_ray if job["engines"] == ["ray"] else _run)(hosts, job)
    shape, kind = (1, said["n_subnet"]), cast(Wire, job["wire"])
    both = wire.down_bytes(kind, shape) + wire.up_bytes(kind, shape)
    for engine in job["engines"]:
        is_sharded, link = engine == "sharded", statistics.median(said["link"][engine])
        formula = busiest(
            "sharded" if is_sharded else "ray", n, both, state=said["state"], owners=owners
        )
        row = {key: job[key] for key in ("where", "n_workers", "megabytes")}
        row["engine"] = engine if engine != "ray" else f"ray, {owners} owners"
        # of the busiest link, by the formula, and as its interface counted them, with headers: in a
        # star one way after the other, else both at once
        row |= {"seconds": said["seconds"][engine], "n_bytes": formula, "n_counted": None}
        if gbit:
            row["n_counted"] = int(link / 2 if is_sharded or owners > 1 else link)
        rows.append(row)
    return rows


def _run(hosts: list[NetworkHost], job: dict[str, Any]) -> dict[str, Any]:
    """A process on every host, as torchrun starts them; what the first one says last."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    pipes: dict[str, Any] = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = []
    with ExitStack() as stack:
        for rank, host in enumerate(hosts):
            env = {"GLOO_SOCKET_IFNAME": host.interface, "TORCH_CPP_LOG_LEVEL": "ERROR"}
            if job["engines"] != ["ray"]:
                env |= {"RANK": str(rank), "WORLD_SIZE": str(len(hosts)), "OMP_NUM_THREADS": "1"}
                env |= {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": port}
            command = [*host.prefix, sys.executable, "-m", "twistlm.lab.bench.peer"]
            command.append(json.dumps(job | {"interface": host.interface}))
            started.append(subprocess.Popen(command, env=os.environ | env, **pipes))
            stack.callback(started[-1].kill)
        said = [process.communicate(timeout=LONGEST) for process in started]
    for process, (_, errors) in zip(started, said, strict=True):
        if process.returncode:
            raise OSError(f"a process of the bench failed: {errors.strip().splitlines()[-1:]}")
    return json.loads(said[0][0].splitlines()[-1])


def _run_ray(hosts: list[NetworkHost], job: dict[str, Any]) -> dict[str, Any]:
    """A driver on the first host and a raylet on each other one; on loopback Ray starts itself."""
    # it would kill where memory is short
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    if not job["gbit"]:
        return _run(hosts[:1], job | {"address": ""})
    head, nodes = f"{hosts[0].address}:{RAY_PORT}", []
    n_bytes = max(80_000_000, int(3e6 * job["megabytes"] * (2 + job["n_workers"])))
    try:
        for i, host in enumerate(hosts):
            role = f"--join {head}" if i else f"--head --port {RAY_PORT}"
            more = f"--num-cpus {int(i > 0)} --object-store-memory={n_bytes}"
            more += f" --temp-dir={tempfile.mkdtemp('tw')}"
            more += "" if i else " --include-dashboard=false"
            node = f"-m twistlm node {role} --host {host.address} -- {more}"
            command, log = [*host.prefix, sys.executable, *node.split()], subprocess.DEVNULL
            nodes.append(subprocess.Popen(command, stdout=log, stderr=log))
            if i == 0:
                _wait_for(host, RAY_PORT)
        return _run(hosts[:1], job | {"address": head})
    finally:
        for process in reversed(nodes):
            process.terminate()
        for process in nodes:
            process.wait()


def _wait_for(host: NetworkHost, port: int) -> None:
    """Until something listens there."""
    knock = f"import socket; socket.create_connection(('{host.address}', {port}), 1)"
    command, until = [*host.prefix, sys.executable, "-c", knock], time.monotonic() + 60
    while subprocess.run(command, capture_output=True).returncode:
        if time.monotonic() > until:
            raise OSError(f"no Ray head at {host.address}:{port}")
        time.sleep(0.2)


def table(made: dict[str, Any]) -> Table:
    heads = ["where", "engine", "S", "MB a subnet", "seconds"]
    heads += ["busiest link, MB", "counted", "MB/s"]
    result = terminal.table("one exchange of all workers, nothing trained", *heads, words=2)
    for row in made["rows"]:
        n_bytes, median = row["n_bytes"], statistics.median(row["seconds"])
        counted = "" if row["n_counted"] is None else f"{row['n_counted'] / n_bytes - 1:+.1%}"
        first = (row["where"], row["engine"], str(row["n_workers"]), f"{row['megabytes']:g}")
        speed = f"{n_bytes / median / 1e6:,.0f}"
        result.add_row(*first, f"{median:.2f}", f"{n_bytes / 1e6:,.0f}", counted, speed)
    return result


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
def slow_hosts(n: int, gbit: float) -> Iterator[list[NetworkHost]]:
    """n hosts whose links carry `gbit` Gbit/s each way; they are gone afterwards."""
    bridge = f"tw{os.getpid()}"
    names = [f"{bridge}n{i}" for i in range(n)]
    subnet = f"10.213.{os.getpid() % 256}"
    # both ends: a link is as slow inwards as outwards
    limit = f"root tbf rate {gbit}gbit burst 256kb latency 100ms"
    commands = [f"ip link add {bridge} type bridge", f"ip link set {bridge} up"]
    for i, name in enumerate(names):
        commands += [
            f"ip netns add {name}",
            f"ip link add {name} type veth peer name eth0 netns {name}",
            f"ip link set {name} master {bridge} up",
            f"ip -n {name} addr add {subnet}.{i + 1}/24 dev eth0",
            f"ip -n {name} link set eth0 up",
            f"ip -n {name} link set lo up",
            f"tc -n {name} qdisc add dev eth0 {limit}",
            f"tc qdisc add dev {name} {limit}",
        ]
    try:
        for command in commands:
            done = subprocess.run(command.split(), capture_output=True, text=True)
            if done.returncode:
                raise OSError(f"{command}: {done.stderr.strip() or done.returncode}")
        yield [
            NetworkHost(("ip", "netns", "exec", name), f"{subnet}.{i + 1}", "eth0")
            for i, name in enumerate(names)
        ]
    finally:
        # the link first: that of a dying namespace lingers, and so would its name
        for name in names:
            subprocess.run(["ip", "link", "del", name], capture_output=True)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)
