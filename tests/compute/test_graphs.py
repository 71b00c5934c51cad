"""Compiled training is eager training: every way that puts gates into a model (inductor's C++ on a CPU)."""

from __future__ import annotations

import json

import pytest
from conftest import tiny

from twistlm.training import rounds

WAYS = {
    "dropout": {"method": "dropout"},
    "measured": {"scale": "measured"},  # another scale in every layer and round
}


# torch's compiler uses parts of torch that are deprecated
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("way", WAYS)
def test_compiled_layers_have_their_gates(way, tokens, tmp_path):
    """A shared layer and a masked one have the same shapes, and must not share a graph."""
    losses = {}
    for compile in ("false", "true"):
        out = tmp_path / compile
        train = {"rounds": 3, "interval": 2, "compile": compile, **WAYS[way]}
        rounds.train(tiny(tokens, out, train=train), quiet=True)
        rows = (out / "metrics.jsonl").read_text().splitlines()
        losses[compile] = [json.loads(row)["loss"] for row in rows]
    assert losses["true"] == pytest.approx(losses["false"], rel=1e-6)
