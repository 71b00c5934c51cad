"""Files that version 0.1 wrote (commit 80de057, before the rooms) are read as they were."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from twistlm.data.token_file import open_tokens
from twistlm.tickets import deploy, score
from twistlm.tickets.parent import open_parent
from twistlm.tickets.score import ScoreRequest
from twistlm.training import checkpoint, rounds

FILES = Path(__file__).parent / "fixtures/before_rooms.zip"
# What that commit printed, with a tiny GPT-2, carried moments, outer momentum and a measured scale; where a
# subnet is in it, with the bias of its output projections left alone, as the gates do now. Then it was
# 361.01389, 361.35856; 5.84851, 5.61049; 211.80745, 212.22237.
TOKENS, FULL, HALF, WORST = 3648, 361.67711106680815, 361.4246931447369, 361.9547104585102
RESUMED = {
    "losses": [5.849076271057129, 5.616579691569011],
    "full": 211.80414668140043,
    "half": 212.59282076988697,
}


@pytest.fixture
def old(tmp_path, monkeypatch) -> Path:
    """A copy in the working directory: the run's config names its tokens relative to it."""
    with zipfile.ZipFile(FILES) as archive:
        archive.extractall(tmp_path)
    monkeypatch.chdir(tmp_path / "before_rooms")
    return tmp_path / "before_rooms"


def test_a_token_file(old):
    tokens = open_tokens("tokens")
    assert tokens.meta.n_tokens // 32 * 32 == TOKENS
    assert len(tokens.tokens) == tokens.meta.n_tokens
    assert int(tokens.tokens.max()) == tokens.meta.max_id


def test_a_checkpoint_is_evaluated(old):
    found = score.score_parent(
        open_parent("run", "cpu"), ScoreRequest(ratios=("2/4",), n=3), "old", quiet=True
    )
    (subnets,) = found.subnets
    assert found.full == pytest.approx(FULL, rel=1e-5)
    assert subnets.mean == pytest.approx(HALF, rel=1e-5)
    assert subnets.worst == pytest.approx(WORST, rel=1e-5)


def test_a_checkpoint_is_resumed(old):
    """Moments, outer momentum, leases, counts and rho all go into the next losses."""
    cfg = checkpoint.open_("run").config
    cfg = replace(cfg, train=replace(cfg.train, rounds=4))
    rounds.train(cfg, resume=True, quiet=True)
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2, 3, 4]
    assert [row["loss"] for row in rows[2:]] == pytest.approx(RESUMED["losses"], rel=1e-5)
    assert rows[3]["eval"]["full"] == pytest.approx(RESUMED["full"], rel=1e-5)
    assert rows[3]["eval"]["2/4"]["mean"] == pytest.approx(RESUMED["half"], rel=1e-5)


def test_a_ticket_loads_and_is_what_extract_cuts_today(old):
    """The same blocks of the same parent, folded: equal to the file of then."""
    ticket = deploy.load_ticket(old / "ticket")
    blueprint = json.loads((old / "ticket/ticket.json").read_text())["blueprint"]
    kept = {name: tuple(blocks) for name, blocks in blueprint.items()}
    parent = open_parent("run", "cpu")
    today = deploy.extract(parent, kept)
    with torch.no_grad():  # then the activation scale multiplied output biases, too
        for group in parent.block_map.groups:
            today.get_parameter(group.out[1]).mul_(
                parent.scales(parent.block_map.widths(kept))[group.name]
            )
    ids = torch.arange(64).view(2, 32)
    with torch.no_grad():
        torch.testing.assert_close(ticket(ids).logits, today(ids).logits, rtol=0, atol=1e-6)
