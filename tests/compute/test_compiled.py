"""What is compiled equals what is not: AdamW's formula against torch's, and layers with gates."""

from __future__ import annotations

import json
import os

import pytest
import torch
from conftest import tiny
from torch._inductor.runtime import cache_dir_utils

from twistlm.compute import graphs, optimizer
from twistlm.compute.optimizer import AdamW, adamw_
from twistlm.config import TrainConfig
from twistlm.model.layout import Layout
from twistlm.training import rounds

CFG = TrainConfig(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)

# torch's compiler uses parts of torch that are deprecated
COMPILES = pytest.mark.filterwarnings("ignore::DeprecationWarning")

WAYS = {
    "dropout": {"method": "dropout"},
    "measured": {"scale": "measured"},  # another scale in every layer and round
    "sequences": {},  # a mask for every sequence
}
BLOCKS = {"sequences": {"masks": "sequence", "mask_attn": [1, 2], "mask_ffn": [2, 1]}}
# which graph a layer takes is decided before code is made for it, and that takes a minute in C++
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.chaos)]


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adamw_equals_torch(decay):
    generator = torch.Generator().manual_seed(0)
    weights, m, v = (torch.randn(50, dtype=torch.float64, generator=generator) for _ in range(3))
    m.zero_(), v.zero_()
    param = torch.nn.Parameter(weights.clone())
    stock = torch.optim.AdamW([param], lr=1e-2, betas=CFG.betas, eps=CFG.eps, weight_decay=decay)
    lr, count = torch.tensor(1e-2, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for _ in range(5):
        grad = torch.randn(50, dtype=torch.float64, generator=generator)
        param.grad = 0.5 * grad
        stock.step()
        count += 1
        half, fixed = torch.tensor(0.5, dtype=torch.float64), {"betas": CFG.betas, "eps": CFG.eps}
        adamw_(weights, m, v, grad, weights, lr, count, half, decay=decay, **fixed)
        torch.testing.assert_close(weights, param.detach(), rtol=1e-12, atol=1e-14)


def flat_seat(fast: bool, clip: float) -> tuple[AdamW, torch.Tensor, torch.Tensor]:
    """Ten decayed numbers and six plain ones, with a rounded copy."""
    layout = Layout({"w": (2, 5), "b": (6,)}, 0, ((0, 10),), ((10, 16),))
    generator = torch.Generator().manual_seed(1)
    buffer = torch.zeros(3, 16)
    buffer[0] = torch.randn(16, generator=generator)
    grad = torch.randn(16, generator=generator)
    work = buffer[0].bfloat16()
    cfg = TrainConfig(betas=(0.9, 0.95), weight_decay=0.5, clip=clip)
    return AdamW(buffer, grad, work, layout, cfg, fast), buffer, work


@COMPILES
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.chaos)]
)
def test_both_kinds_of_step_agree_and_round_the_copy(clip, backend, monkeypatch):
    """As torch traces it; making C++ of it takes long and is left to `make chaos`."""
    monkeypatch.setattr(optimizer, "compiled", lambda f: torch.compile(f, backend=backend))
    results = []
    for fast in (True, False):
        adam, buffer, work = flat_seat(fast, clip)
        grad = adam.grad.clone()
        adam.start_(0)
        for step in range(3):
            adam.grad.copy_(grad * (step + 1))
            adam.set_(0.1 / (step + 1))
            adam.step_()
        assert torch.equal(work, buffer[0].bfloat16())
        assert float(adam.count) == 3
        results.append(buffer.clone())
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@COMPILES
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_layers_have_their_gates(way, backend, tokens, tmp_path, monkeypatch):
    """A shared layer and a masked one have the same shapes, and must not share a graph."""
    losses, n_compiled, compile_ = {}, 0, torch.nn.Module.compile

    def counted(self, **options):
        nonlocal n_compiled
        n_compiled += 1
        compile_(self, **(options if backend == "inductor" else {"backend": backend}))

    monkeypatch.setattr(torch.nn.Module, "compile", counted)
    for compile in ("false", "true"):
        out = tmp_path / compile
        train = {"rounds": 3, "interval": 2, "compile": compile, "precision": "float64"}
        train |= WAYS[way]
        rounds.train(tiny(tokens, out, train=train, blocks=BLOCKS.get(way, {})), quiet=True)
        rows = (out / "metrics.jsonl").read_text().splitlines()
        losses[compile] = [json.loads(row)["loss"] for row in rows]
    assert n_compiled >= 3  # each layer, in every seat
    assert losses["true"] == pytest.approx(losses["false"], rel=1e-9)


@pytest.mark.parametrize("given", [None, "the default", "mine"])
def test_a_compile_cache_belongs_to_one_kind_of_cpu(given, monkeypatch):
    """torch 2.13 would run another machine's vector code; what a user set stays."""
    default = cache_dir_utils.default_cache_dir()
    if given is None:
        monkeypatch.delenv(graphs.CACHE, raising=False)
    else:  # torch writes its default there as soon as it compiles
        monkeypatch.setenv(graphs.CACHE, default if given == "the default" else given)
    chosen = []
    for capability in ("AVX2", "AVX512", "NO AVX"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda c=capability: c)
        with monkeypatch.context() as patch:
            patch.setattr(os, "environ", os.environ.copy())
            graphs.compiled(torch.sin)
            chosen.append(os.environ[graphs.CACHE])
    assert len(set(chosen)) == (1 if given == "mine" else 3)
    assert default not in chosen
