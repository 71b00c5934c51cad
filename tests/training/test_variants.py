"""masked = true = hybrid = local: one loop, four seatings, the same central weights and moments."""

from __future__ import annotations

from pathlib import Path

import pytest
import ranks
from checkpoints import FILES, FLOAT64_TRAIN, distance
from commands import toml, torchrun
from conftest import make_tokens, tiny, tiny_table

from twistlm.training import rounds


@pytest.fixture(scope="module")
def local(tmp_path_factory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("local")
    tokens = make_tokens(folder / "tokens")
    return rounds.train(tiny(tokens, folder / "run", train=FLOAT64_TRAIN), quiet=True), tokens


def test_local_masked_equals_local_physical(local, tmp_path):
    reference, tokens = local
    cfg = tiny(tokens, tmp_path / "run", train=FLOAT64_TRAIN, run={"seat": "masked"})
    assert distance(reference, rounds.train(cfg, quiet=True)) < 1e-10


@pytest.mark.parametrize(("variant", "n_ranks"), [("masked", 3), ("true", 4)])
def test_ranks_equal_local(local, tmp_path, variant, n_ranks):
    reference, tokens = local
    table = tiny_table(tokens, tmp_path / "run", train=FLOAT64_TRAIN, run={"variant": variant})
    ranks.finish(ranks.start(n_ranks, tmp_path, ranks.train, table), tmp_path)
    assert distance(reference, tmp_path / "run/checkpoints/round-000004") < 1e-10


def test_the_command_under_torchrun_equals_local(local, tmp_path):
    """The one test that starts torchrun itself: its store and its environment, with the command's own imports."""
    reference, tokens = local
    table = tiny_table(tokens, tmp_path / "run", train=FLOAT64_TRAIN, run={"variant": "hybrid"})
    torchrun(3, "train", toml(tmp_path / "config.toml", table))
    assert distance(reference, tmp_path / "run/checkpoints/round-000004") < 1e-10


def test_data_parallel_ranks_equal_local(tmp_path):
    """The control too is one loop: summed gradients of three ranks are those of one joint batch."""
    tokens = make_tokens(tmp_path / "tokens")
    train = FLOAT64_TRAIN | {"method": "dense", "outer": "none"}
    reference = rounds.train(tiny(tokens, tmp_path / "local", train=train), quiet=True)
    table = tiny_table(tokens, tmp_path / "run", train=train, run={"variant": "hybrid"})
    ranks.finish(ranks.start(3, tmp_path, ranks.train, table), tmp_path)
    made = tmp_path / "run/checkpoints/round-000004"
    assert distance(reference, made, FILES[:2]) < 1e-10
