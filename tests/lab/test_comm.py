"""bench comm on tiny subnets: every engine exchanges, and what it prints follows from what it measured."""

from __future__ import annotations

import json
import subprocess

import pytest
import ranks

from twistlm.lab.bench import comm, peer


def test_all_engines_exchange(tmp_path):
    """Four processes: a centre and three workers, or four shards."""
    job = {
        "megabytes": 0.5,
        "engines": ["bare", "star", "sharded"],
        "repeats": 2,
        "wire": "bf16",
        "interface": "lo",
    }
    ranks.finish(ranks.start(4, tmp_path, peer.main, job), tmp_path)
    said = json.loads(ranks.said(tmp_path, 0).splitlines()[-1])
    assert said["n_subnet"] * 4 == pytest.approx(0.5e6, rel=0.05)
    for engine in job["engines"]:
        assert len(said["seconds"][engine]) == 2
    # at least what the formula says has crossed the loopback (others may use it too), counted twice there
    for engine, n_values in (("bare", 4 + 4), ("star", 4 + 2)):
        assert min(said["link"][engine]) >= 2 * 3 * n_values * said["n_subnet"]


def test_ray_exchanges(ray_address, capfd):
    from twistlm.lab.bench import peer_ray

    job = {"megabytes": 0.5, "n_workers": 3, "repeats": 1, "wire": "int8", "interface": "lo"}
    peer_ray.main(job | {"address": ray_address})
    said = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert [len(said["seconds"][engine]) for engine in comm.ENGINES] == [1, 1]


def measured(where: str, engine: str, n: int, seconds: float) -> comm.Measured:
    return comm.Measured(where, engine, n, 1.0, (9.0, seconds, 0.1), 100, None)


def test_ratios_are_of_medians_in_the_same_place():
    rows = [
        measured("loopback", "bare", 4, 1.0),
        measured("loopback", "ray", 4, 0.5),
        measured("slow", "star", 4, 4.0),
        measured("slow", "sharded", 4, 1.0),
        measured("slow", "ray", 4, 5.0),
    ]
    made = comm.CommReport(tuple(rows), {}, {})
    assert list(made.ratios().values()) == [0.5, 1.25, 0.25]
    assert json.loads(json.dumps(made.to_dict()))["ratios"] == made.ratios()
    assert comm.table(made).row_count == 5


def test_slow_hosts_come_and_go():
    if why := comm.why_not():
        pytest.skip(why)
    with comm.slow_hosts(2, 1.0) as hosts:
        show = [*hosts[1].prefix, "tc", "qdisc", "show", "dev", "eth0"]
        assert "tbf" in subprocess.run(show, capture_output=True, text=True).stdout
        assert hosts[0].address != hosts[1].address
        there = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
        assert all(host.prefix[-1] in there for host in hosts)
    gone = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
    assert not any(host.prefix[-1] in gone for host in hosts)
