"""The hub: rounds over sessions are the local run, bit for bit."""

from __future__ import annotations

import pytest
from conftest import make_tokens
from processes import FILES, Nursery, Scene

from twistlm import rounds

TRAIN = {"rounds": 4, "interval": 2, "outer": "nesterov(0.7, 0.6)", "schedule": "cosine"}


@pytest.fixture(scope="session")
def nursery():
    made = Nursery()
    yield made
    made.close()


@pytest.fixture
def scene(nursery, tmp_path):
    """`scene(train={...})`: a hub and workers in a folder; none of them outlives the test."""
    tokens = make_tokens(tmp_path / "tokens")
    yield lambda **sections: Scene(nursery, tmp_path, tokens, **sections)
    nursery.end_children()


def test_hub_is_the_local_run_bit_for_bit(scene, tmp_path):
    """Carried moments, outer Nesterov, measured scale, balanced deal: three processes and one."""
    here = scene(train=TRAIN | {"scale": "measured"}, blocks={"deal": "balanced", "k_attn": [2, 3]})
    hub = here.hub()
    workers = [here.worker(name) for name in "abc"]
    assert hub.wait() == 0, hub.text
    assert [worker.wait(10) for worker in workers] == [0, 0, 0]
    local = rounds.train(here.config(tmp_path / "local", run={"variant": "local"}), quiet=True)
    for name in FILES:
        assert (local / name).read_bytes() == (here.last() / name).read_bytes(), name
    assert [row["places"] for row in here.events("round")] == [[0, 1, 2]] * 4
