"""What is compiled equals what is not: AdamW's formula against torch's, and layers with gates."""

import os

import pytest
import torch
from checkpoints import metrics
from conftest import tiny
from torch._inductor.runtime import cache_dir_utils

from twistlm.compute import graphs, optimizer
from twistlm.compute.optimizer import AdamW
from twistlm.config import TrainConfig
from twistlm.model.layout import Layout
from twistlm.training import rounds

# torch's compiler uses parts of torch that are deprecated
COMPILES = pytest.mark.filterwarnings("ignore::DeprecationWarning")

# which graph a layer takes is decided before code is made for it, and that takes a minute in C++
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.chaos)]


@COMPILES
@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("backend", BACKENDS)
def test_both_kinds_of_step_are_torchs_adamw_and_round_the_copy(clip, backend, monkeypatch):
    """Ten decayed numbers and six plain ones, with a rounded copy."""
    monkeypatch.setattr(optimizer, "compiled", lambda f: torch.compile(f, backend=backend))
    layout = Layout({"w": (2, 5), "b": (6,)}, 0, ((0, 10),), ((10, 16),))
    cfg = TrainConfig(betas=(0.9, 0.95), weight_decay=0.5, clip=clip)
    start, grad = torch.randn(2, 16, generator=torch.Generator().manual_seed(1))
    w, b = (torch.nn.Parameter(part.clone()) for part in start.split([10, 6]))
    groups = [{"params": [w], "weight_decay": 0.5}, {"params": [b], "weight_decay": 0.0}]
    stock = torch.optim.AdamW(groups, betas=cfg.betas, eps=cfg.eps)
    for step in range(3):
        w.grad, b.grad = (grad * (step + 1)).split([10, 6])
        if clip:
            torch.nn.utils.clip_grad_norm_([w, b], clip)
        for group in stock.param_groups:
            group["lr"] = 0.1 / (step + 1)
        stock.step()
    for fast in (True, False):
        buffer = torch.zeros(3, 16)
        buffer[0] = start
        adam = AdamW(buffer, torch.zeros(16), start.bfloat16(), layout, cfg, fast)
        adam.start_(0)
        for step in range(3):
            adam.grad.copy_(grad * (step + 1))
            adam.set_(0.1 / (step + 1))
            adam.step_()
        torch.testing.assert_close(buffer[0], torch.cat([w, b]).detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(adam.work, buffer[0].bfloat16())


@COMPILES
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_layers_have_their_gates(backend, tokens, tmp_path, monkeypatch):
    """A shared layer and a masked one have the same shapes, and must not share a graph.

    Layers that are computed again have them then, too.
    """
    losses, n_compiled, compile_ = {}, 0, torch.nn.Module.compile

    def counted(self, **options):
        nonlocal n_compiled
        n_compiled += 1
        compile_(self, **(options if backend == "inductor" else {"backend": backend}))

    monkeypatch.setattr(torch.nn.Module, "compile", counted)
    monkeypatch.setattr(optimizer, "compiled", lambda f: torch.compile(f, backend=backend))
    for compile, again in (("false", False), ("true", False), ("true", True), ("false", True)):
        out = tmp_path / f"{compile}{again}"
        train = {"rounds": 2, "interval": 2, "compile": compile, "precision": "float64"}
        train |= {"recompute": again}
        train |= {"scale": "measured"}  # another scale in every layer and round
        blocks = {"masks": "sequence", "mask_attn": [1, 2], "mask_ffn": [2, 1]}
        blocks |= {"k_attn": 4, "k_ffn": 4}  # a worker holds all blocks, so shapes are the same
        rounds.train(tiny(tokens, out, train=train, blocks=blocks), quiet=True)
        losses[compile, again] = [row["loss"] for row in metrics(out)]
    assert n_compiled >= 3  # each layer, in every seat
    for found in losses.values():
        assert found == pytest.approx(losses["false", False], rel=1e-9)


@COMPILES
def test_a_compile_cache_belongs_to_one_kind_of_cpu(monkeypatch):
    """torch 2.13 would run another machine's vector code; what a user set stays."""
    default = cache_dir_utils.default_cache_dir()
    for given, n_chosen in ((default, 3), ("mine", 1)):  # torch writes its default there
        chosen = set()
        for capability in ("AVX2", "AVX512", "NO AVX"):
            monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda c=capability: c)
            with monkeypatch.context() as patch:
                patch.setattr(os, "environ", os.environ | {graphs.CACHE: given})
                graphs.compiled(torch.sin)
                chosen.add(os.environ[graphs.CACHE])
        assert len(chosen - {default}) == n_chosen
