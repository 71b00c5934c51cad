"""Checkpoints to compare, and a central model in the middle of a run to save."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from twistlm.data.stream import Leases
from twistlm.model import families, huggingface
from twistlm.model.central import Central, create
from twistlm.model.layout import cut_model
from twistlm.training.run import Progress

CPU = torch.device("cpu")
FLOAT64_TRAIN = {  # exact enough to compare engines: 1e-10
    "precision": "float64",
    "outer": "nesterov(0.7, 0.6)",
    "schedule": "cosine",
    "warmup": 4,
    "n_workers": 3,
    "rounds": 4,
}
FILES = ("model.safetensors", "moments.safetensors", "outer.safetensors")


def distance(a: Path, b: Path, files: tuple[str, ...] = FILES) -> float:
    """Largest difference of any central weight, moment or momentum between two checkpoints."""
    worst = 0.0
    for name in files:
        left, right = load_file(a / name), load_file(b / name)
        assert left.keys() == right.keys()
        assert all(t.dtype == torch.float64 for t in left.values())
        worst = max(worst, *(float((left[k] - right[k]).abs().max()) for k in left))
    return worst


def metrics(run: Path) -> list[dict]:
    """The lines of a run's metrics, so far; NaN is no JSON."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


def joined(path: Path, stem: str) -> dict[str, torch.Tensor]:
    """All tensors of a kind, from one file or from several owners'."""
    found = {}
    for file in path.glob(f"{stem.partition('.')[0]}*.safetensors"):
        more = load_file(file)
        assert not found.keys() & more.keys()
        found |= more
    return found


def same(a: Path, b: Path) -> None:
    """Two checkpoints hold the same bits: weights, and what there is of moments and momentum."""
    for name in FILES:
        left, right = joined(a, name), joined(b, name)
        assert left.keys() == right.keys(), name
        apart = [key for key in left if not torch.equal(left[key], right[key])]
        assert not apart, (name, apart)
    assert joined(a, FILES[0])


def random_central(model, cfg, *, carry: bool = True, outer: bool = True, seed: int = 0) -> Central:
    """A central model in the middle of a run: nothing in it is zero or equal to anything else."""
    segments = cut_model(model, cfg.blocks, CPU, model.dtype).segments
    central = create(segments, huggingface.state(model), carry=carry, outer=outer)
    rng = torch.Generator().manual_seed(seed)
    central.buffer.copy_(torch.randn(central.buffer.shape, generator=rng) * 0.1)
    if central.outer:
        central.velocity.copy_(torch.randn(central.velocity.shape, generator=rng))
    return central


def random_progress(model, cfg, seed: int = 0, round: int = 17) -> Progress:
    """The numbers that go with it."""
    picks = random.Random(seed)
    names = [group.name for group in families.partition(model, cfg.blocks).groups]
    return Progress(round, Leases(40, (3, 4)), {name: picks.random() / 3 for name in names})


def damages(path: Path, n: int, only: str | None = None):
    """n times (description, file, its damaged bytes)."""
    rng = random.Random(f"{only}/{n}")
    files = sorted(p for p in path.iterdir() if only is None or p.name == only)
    for i in range(n):
        file = rng.choice(files)
        data = bytearray(file.read_bytes())
        at = rng.randrange(len(data))
        kind = ("bit", "byte", "cut", "insert", "zeros")[i % 5]
        if kind == "bit":
            data[at] ^= 1 << rng.randrange(8)
        elif kind == "byte":
            data[at] = (data[at] + rng.randrange(1, 256)) % 256
        elif kind == "cut":
            del data[at:]
        elif kind == "insert":
            data.insert(at, rng.randrange(256))
        else:
            data[at : at + 8] = bytes(len(data[at : at + 8]))
            data = data if data != file.read_bytes() else data + b"\0"
        yield f"{i}: {kind} at {at} of {file.name}", file, bytes(data)
