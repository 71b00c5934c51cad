"""Files that version 0.1 wrote (commit 80de057, before the rooms) are read as they were."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from twistlm.data.token_file import open_tokens
from twistlm.tickets import deploy
from twistlm.tickets.parent import open_parent
from twistlm.tickets.score import ScoreRequest, score_parent
from twistlm.training import checkpoint, rounds

FILES = Path(__file__).parent / "fixtures/before_rooms.zip"
# what that commit printed, with a tiny GPT-2, carried moments, outer momentum and a measured scale
TOKENS, FULL, HALF, WORST = 3648, 361.67711106680815, 361.0138856524343, 361.35855545283005
RESUMED = {
    "losses": [5.848505020141602, 5.610487620035808],
    "full": 211.80745122828398,
    "half": 212.22236873468137,
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
    request = ScoreRequest(ratios=("2/4",), n=3)
    found = score_parent(open_parent("run", "cpu"), request, "run", quiet=True)
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
    today = deploy.extract(open_parent("run", "cpu"), kept)
    ids = torch.arange(64).view(2, 32)
    with torch.no_grad():
        torch.testing.assert_close(ticket(ids).logits, today(ids).logits, rtol=0, atol=1e-6)
