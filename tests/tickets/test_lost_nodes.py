"""Losing nodes: the shards are tensor parallel's, and the survivors compute what they should."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_tokens
from families_table import N_NEURONS, TABLE, tiny_model

from twistlm.tickets import lost_nodes
from twistlm.tickets.parent import open_parent
from twistlm.tickets.ticket_scale import TicketScale, TicketScales

SEQ_LEN = 16
CUT = ("blocks.n_ffn=4", "blocks.shared_first=0", "blocks.shared_last=0", f"data.seq_len={SEQ_LEN}")


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    for name in ("gpt2", "llama", "llama-gqa"):
        tiny_model(name).save_pretrained(folder / name)
    make_tokens(folder / "tokens", 200)
    make_tokens(folder / "others", 300, seed=1)
    return folder


def reference(name: str, n_nodes: int, lost: tuple[int, ...], ids: torch.Tensor) -> float:
    """Hugging Face's own loss of the whole model, lost inputs zeroed and the rest scaled."""
    row, model = TABLE[name], tiny_model(name)
    inputs = {row.attn_out: row.n_query * row.head_dim, row.ffn_out: N_NEURONS}
    for layer, (out, size) in itertools.product(range(3), inputs.items()):
        module = model.get_submodule(f"{row.layers}.{layer}.{out}")
        shards = np.array_split(np.arange(4), n_nodes)  # 4 blocks of each kind
        dead = np.concatenate([np.array([], int), *(shards[node] for node in lost)])
        with torch.no_grad():
            weight = module.weight if row.transposed else module.weight.T  # [in, out]
            for block in dead.tolist():
                weight[block * size // 4 : (block + 1) * size // 4] = 0
            weight *= math.sqrt(4 / (4 - len(dead)))
    with torch.no_grad():
        return math.exp(model(input_ids=ids, labels=ids).loss)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize(("n_nodes", "n_lost"), [(4, 1), (4, 2), (3, 1), (2, 1)])
def test_perplexity_of_every_loss(home, name, n_nodes, n_lost, monkeypatch):
    """3 nodes share 4 blocks unevenly: 2, 1, 1."""
    monkeypatch.setattr(TicketScales, "candidates", lambda self: [TicketScale("sqrt")])
    opened = {name: open_parent(home / name, "cpu", CUT)}
    (made,) = lost_nodes.drop(
        opened, n_nodes, n_lost, data=str(home / "tokens"), tokens=64, quiet=True
    )
    ids = torch.from_numpy(np.fromfile(home / "tokens.bin", "<u2")[:64].astype(np.int64))
    rows = ids.view(-1, SEQ_LEN)
    assert list(made.losses) == list(itertools.combinations(range(n_nodes), n_lost))
    for lost, value in made.losses.items():
        assert value == pytest.approx(reference(name, n_nodes, lost, rows), rel=1e-4), lost
    assert made.full == pytest.approx(reference(name, n_nodes, (), rows), rel=1e-4)
    assert made.worst == max(made.losses.values())
    assert len(set(made.losses.values())) == math.comb(n_nodes, n_lost)


def test_parents_side_by_side(home):
    opened = {name: open_parent(home / name, "cpu", CUT) for name in ("gpt2", "llama")}
    made = lost_nodes.drop(opened, 2, 1, data=str(home / "tokens"), quiet=True)
    assert [row.name for row in made] == ["gpt2", "llama"]
    shown = lost_nodes.table(made, 2, 1)
    assert [column.header for column in shown.columns] == ["lost nodes", "gpt2", "llama"]
    assert shown.row_count == 1 + 2 + 2 + 1  # none, each, mean and worst, the scale
    record = json.loads(json.dumps(lost_nodes.record(made, 2, 1)))
    assert [loss["lost"] for loss in record["parents"][1]["losses"]] == [[0], [1]]
    assert record["parents"][1]["mean"] == pytest.approx(sum(made[1].losses.values()) / 2)
    assert {"command", "git", "versions", "device"} <= set(record)


@pytest.mark.parametrize(
    ("name", "n_nodes", "n_lost", "words"),
    [
        ("gpt2", 5, 1, "--nodes 5: .* 4 attn blocks"),
        ("gpt2", 4, 4, "--lose 4 of --nodes 4"),
        ("gpt2", 4, 0, "--lose 0"),
        ("llama-gqa", 4, 1, r"3 attn blocks .* at most 3"),  # and 4 FFN blocks: the fewest decide
        ("two", 4, 1, "different tokens"),  # each parent would take its own
    ],
)
def test_impossible_losses(home, name, n_nodes, n_lost, words):
    valid = {"two": ["tokens", "others"]}.get(name, ["tokens"])
    model = home / ("gpt2" if name == "two" else name)
    opened = {
        each: open_parent(model, "cpu", (*CUT, f"data.valid={home / each}")) for each in valid
    }
    with pytest.raises(ValueError, match=words):
        lost_nodes.drop(opened, n_nodes, n_lost, quiet=True)


def test_every_node_holds_the_common_blocks(home):
    """C = {1}: three blocks are left to spread, so losing one of three takes one, not 1."""
    common = ("blocks.common_attn=[1]", "blocks.common_ffn=[1]")
    parent = open_parent(home / "gpt2", "cpu", [*CUT, *common])
    for lost, gone in ((0, 0), (1, 2), (2, 3)):
        rest = lost_nodes.survivors(parent.block_map, 3, (lost,))
        assert set(rest.values()) == {tuple(block for block in range(4) if block != gone)}
    (made,) = lost_nodes.drop({"c": parent}, 3, 2, data=str(home / "tokens"), tokens=64, quiet=True)
    assert all(math.isfinite(value) for value in made.losses.values())
    with pytest.raises(ValueError, match=r"3 attn blocks that are not common.* at most 3 nodes"):
        lost_nodes.check(parent, 4, 1)
