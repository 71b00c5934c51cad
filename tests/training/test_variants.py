"""masked = true = hybrid = local: one loop, four seatings, the same central weights and moments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import make_tokens, tiny, tiny_table
from safetensors.torch import load_file

from twistlm.training import rounds

TRAIN = {
    "precision": "float64",
    "outer": "nesterov(0.7, 0.6)",
    "schedule": "cosine",
    "warmup": 4,
    "n_workers": 3,
    "rounds": 4,
}
FILES = ("model.safetensors", "moments.safetensors", "outer.safetensors")


def torchrun(n_ranks: int, *args: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(n_ranks)]
    command += [
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        "0",
        "--standalone",
        "-m",
        "twistlm",
        *args,
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr[-3000:]


def toml(path: Path, table: dict) -> str:
    lines = []
    for section, values in table.items():
        nested = {k: v for k, v in values.items() if isinstance(v, dict)}
        lines += [f"[{section}]"] + [
            f"{k} = {json.dumps(v)}" for k, v in values.items() if k not in nested
        ]
        for name, inner in nested.items():
            lines += [f"[{section}.{name}]"] + [f"{k} = {json.dumps(v)}" for k, v in inner.items()]
    path.write_text("\n".join(lines))
    return str(path)


def distance(a: Path, b: Path, files: tuple[str, ...] = FILES) -> float:
    """Largest difference of any central weight, moment or outer momentum between two checkpoints."""
    worst = 0.0
    for name in files:
        left, right = load_file(a / name), load_file(b / name)
        assert left.keys() == right.keys()
        assert all(t.dtype == torch.float64 for t in left.values())
        worst = max(worst, *(float((left[k] - right[k]).abs().max()) for k in left))
    return worst


@pytest.fixture(scope="module")
def local(tmp_path_factory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("local")
    tokens = make_tokens(folder / "tokens")
    return rounds.train(tiny(tokens, folder / "run", train=TRAIN), quiet=True), tokens


def test_local_masked_equals_local_physical(local, tmp_path):
    reference, tokens = local
    cfg = tiny(tokens, tmp_path / "run", train=TRAIN, run={"seat": "masked"})
    assert distance(reference, rounds.train(cfg, quiet=True)) < 1e-10


@pytest.mark.parametrize(("variant", "n_ranks"), [("masked", 3), ("true", 4), ("hybrid", 3)])
def test_ranks_equal_local(local, tmp_path, variant, n_ranks):
    reference, tokens = local
    table = tiny_table(tokens, tmp_path / "run", train=TRAIN, run={"variant": variant})
    torchrun(n_ranks, "train", toml(tmp_path / "config.toml", table))
    assert distance(reference, tmp_path / "run/checkpoints/round-000004") < 1e-10


def test_data_parallel_ranks_equal_local(tmp_path):
    """The control too is one loop: summed gradients of three ranks are those of one joint batch."""
    tokens = make_tokens(tmp_path / "tokens")
    train = TRAIN | {"method": "dense", "outer": "none"}
    reference = rounds.train(tiny(tokens, tmp_path / "local", train=train), quiet=True)
    table = tiny_table(tokens, tmp_path / "run", train=train, run={"variant": "hybrid"})
    torchrun(3, "train", toml(tmp_path / "config.toml", table))
    ranks = tmp_path / "run/checkpoints/round-000004"
    assert distance(reference, ranks, FILES[:2]) < 1e-10
