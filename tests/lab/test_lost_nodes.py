"""`lab drop`: what is left of a parent when nodes die, against Hugging Face's own loss."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from conftest import make_tokens
from families_table import CUT, TABLE, perplexity, tiny_model
from families_table import by_hand as zeroed

from twistlm.lab import lost_nodes
from twistlm.tickets.parent import open_parent
from twistlm.tickets.ticket_scale import TicketScale, TicketScales

CUT16 = [*CUT, "data.seq_len=16"]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    for name in ("gpt2", "llama"):
        tiny_model(name).save_pretrained(folder / name)
    make_tokens(folder / "tokens", 200)
    make_tokens(folder / "others", 300, seed=1)
    return folder


def drop(home: Path, *args, **options):
    return lost_nodes.drop(*args, data=str(home / "tokens"), quiet=True, **options)


@pytest.mark.parametrize(("name", "n_nodes", "n_lost"), [("gpt2", 4, 2), ("llama", 3, 1)])
def test_perplexity_of_every_loss(home, name, n_nodes, n_lost, monkeypatch):
    """3 nodes share 4 blocks unevenly: 2, 1, 1."""
    monkeypatch.setattr(TicketScales, "candidates", lambda self: [TicketScale("sqrt")])
    opened = {each: open_parent(home / each, "cpu", CUT16) for each in (name, "gpt2")}
    made = drop(home, opened, n_nodes, n_lost, tokens=64)["parents"][0]
    losses = {row["lost"]: row["perplexity"] for row in made["losses"]}
    assert list(losses) == list(itertools.combinations(range(n_nodes), n_lost))
    shards = np.array_split(np.arange(4), n_nodes)  # 4 blocks of each kind
    for lost, value in {**losses, (): made["full"]}.items():
        alive = [int(b) for node in range(n_nodes) if node not in lost for b in shards[node]]
        kept = dict.fromkeys(itertools.product(range(3), ("attn", "ffn")), tuple(alive))
        model = zeroed(tiny_model(name), TABLE[name], "head", kept)
        assert value == pytest.approx(perplexity(model, home / "tokens", 16, 64), rel=1e-4), lost
    assert made["worst"] == max(losses.values())
    assert made["mean"] == pytest.approx(sum(losses.values()) / len(losses))


def test_every_node_holds_the_common_blocks(home):
    """C = {1}: three blocks are left to spread, so losing one of three takes one, not 1."""
    common = ("blocks.common_attn=[1]", "blocks.common_ffn=[1]")
    parent = open_parent(home / "gpt2", "cpu", [*CUT16, *common])
    for lost, gone in ((0, 0), (1, 2), (2, 3)):
        rest = lost_nodes.survivors(parent.block_map, 3, (lost,))
        assert set(rest.values()) == {tuple(block for block in range(4) if block != gone)}
    with pytest.raises(ValueError, match=r"3 attn blocks that are not common.* at most 3 nodes"):
        drop(home, {"c": parent}, 4, 1)
    texts = [(*CUT16, f"data.valid={home / each}") for each in ("tokens", "others")]
    opened = {str(text): open_parent(home / "gpt2", "cpu", text) for text in texts}
    with pytest.raises(ValueError, match="different tokens"):  # each would take its own
        lost_nodes.drop(opened, 4, 1, quiet=True)
