"""Compiled training is eager training: every way that puts gates into a model."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import tiny

from twistlm.training import rounds

WAYS = {
    "dropout": {"method": "dropout"},  # with inductor's C++
    "measured": {
        "scale": "measured"
    },  # another scale in every layer and round; graphs as torch traced them
}


# torch's compiler uses parts of torch that are deprecated
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("way", WAYS)
def test_compiled_layers_have_their_gates(way, tokens, tmp_path, monkeypatch):
    """A shared layer and a masked one have the same shapes, and must not share a graph."""
    losses, n_compiled, compile_ = {}, 0, torch.nn.Module.compile

    def counted(self, **options):
        nonlocal n_compiled
        n_compiled += 1
        # which graph a layer takes is decided before code is made for it, which takes half a minute
        compile_(self, **(options if way == "dropout" else {"backend": "aot_eager"}))

    monkeypatch.setattr(torch.nn.Module, "compile", counted)
    for compile in ("false", "true"):
        out = tmp_path / compile
        train = {"rounds": 3, "interval": 2, "compile": compile, **WAYS[way]}
        rounds.train(tiny(tokens, out, train=train), quiet=True)
        rows = (out / "metrics.jsonl").read_text().splitlines()
        losses[compile] = [json.loads(row)["loss"] for row in rows]
    assert n_compiled >= 3  # each layer, in every seat
    assert losses["true"] == pytest.approx(losses["false"], rel=1e-6)
