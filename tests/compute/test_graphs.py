"""Compiled training is eager training: every way that puts gates into a model."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import tiny

from twistlm.training import rounds

WAYS = {
    "dropout": {"method": "dropout"},
    "measured": {"scale": "measured"},  # another scale in every layer and round
    "sequences": {},  # a mask for every sequence
}
BLOCKS = {"sequences": {"masks": "sequence", "mask_attn": [1, 2], "mask_ffn": [2, 1]}}
# which graph a layer takes is decided before code is made for it, and that takes a minute in C++
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.chaos)]


# torch's compiler uses parts of torch that are deprecated
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
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
        train = {"rounds": 3, "interval": 2, "compile": compile, **WAYS[way]}
        rounds.train(tiny(tokens, out, train=train, blocks=BLOCKS.get(way, {})), quiet=True)
        rows = (out / "metrics.jsonl").read_text().splitlines()
        losses[compile] = [json.loads(row)["loss"] for row in rows]
    assert n_compiled >= 3  # each layer, in every seat
    assert losses["true"] == pytest.approx(losses["false"], rel=1e-6)
