"""Drafts: the parent's own text, and counts that a hand-written loop gives too."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from conftest import make_tokens
from families_table import tiny_model
from torch import Tensor
from typer.testing import CliRunner

from twistlm import cli
from twistlm.model import generator
from twistlm.tickets import deploy, speculate
from twistlm.tickets.parent import open_parent
from twistlm.tickets.runnable import open_runnable

CUT = ("blocks.n_ffn=4", "blocks.shared_first=1", "blocks.shared_last=1", "blocks.setting=ffn")
FAMILIES = ("gpt2", "llama-gqa", "mistral", "gemma3_text")
PROMPTS = [torch.tensor([5, 1, 9]), torch.tensor([60, 2, 2, 7, 31, 8]), torch.tensor([0])]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Parents, and for each the ticket of 3/4 of one layer's blocks and the ticket of all blocks."""
    folder = tmp_path_factory.mktemp("home")
    for name in FAMILIES:
        tiny_model(name).save_pretrained(folder / name)
        parent = open_parent(folder / name, "cpu", CUT)
        cut = {group.name: 3 for group in parent.block_map.groups}
        blueprint = generator.for_deployment(parent.block_map, cut, seed=1)
        deploy.save_ticket(parent, blueprint, folder / f"{name}-ticket")
        deploy.save_ticket(parent, parent.block_map.full(), folder / f"{name}-all")
    make_tokens(folder / "tokens", 200)
    return folder


@cache
def drafts(home: Path, name: str, n_draft: int) -> speculate.Drafts:
    pair = (
        open_runnable(home / name, "cpu"),
        open_runnable(home / f"{name}-ticket", "cpu"),
    )
    return speculate.draft(*pair, PROMPTS, max_new_tokens=17, n_draft=n_draft, quiet=True)


def best(model, ids: list[int]) -> int:
    with torch.no_grad():
        return int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())


def by_hand(parent, ticket, prompt: Tensor, n_new: int, n_draft: int) -> tuple[list[int], int, int]:
    """Text, passes of the parent, proposals: no cache, no transformers, one token at a time."""
    ids, n_passes, n_proposed = prompt.tolist(), 0, 0
    goal = len(ids) + n_new
    while len(ids) < goal:
        proposed: list[int] = []
        for _ in range(min(n_draft, goal - len(ids) - 1)):
            proposed.append(best(ticket, ids + proposed))
        n_proposed += len(proposed)
        n_passes += 1
        for token in [*proposed, None]:
            ids.append(best(parent, ids))
            if ids[-1] != token:
                break
    return ids, n_passes, n_proposed


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("n_draft", [1, 4])
def test_text_and_counts_are_those_of_a_loop_by_hand(home, name, n_draft):
    """Sliding windows too (mistral, gemma3): a cache cropped wrongly would change text or counts."""
    parent = open_runnable(home / name, "cpu")
    ticket = open_runnable(home / f"{name}-ticket", "cpu")
    made = drafts(home, name, n_draft)
    for prompt, row in zip(PROMPTS, made.rows, strict=True):
        ids, n_passes, n_proposed = by_hand(parent.model, ticket.model, prompt, 17, n_draft)
        assert speculate._continue(parent, prompt, 17, ticket).tolist() == ids
        assert row.gap is None
        assert (row.n_plain, row.n_new, row.n_parent) == (17, 17, n_passes)
        assert row.n_proposed == n_proposed
        assert row.n_accepted == 17 - n_passes
        assert 0 <= row.n_accepted <= row.n_proposed
        assert row.plain_s > 0 < row.drafted_s
    assert made.acceptance == sum(r.n_accepted for r in made.rows) / sum(
        r.n_proposed for r in made.rows
    )


def test_the_cases_above_accept_some_and_not_all(home):
    """Otherwise no cache was ever cropped."""
    rates = [drafts(home, name, 4).acceptance for name in FAMILIES]
    assert all(0 < rate < 1 for rate in rates), rates


def test_the_parent_as_its_own_draft_is_always_right(home):
    pair = (
        open_runnable(home / "llama-gqa", "cpu"),
        open_runnable(home / "llama-gqa-all", "cpu"),
    )
    made = speculate.draft(*pair, PROMPTS, max_new_tokens=18, n_draft=5, quiet=True)
    assert made.acceptance == 1
    assert made.tokens_per_pass == 6  # 5 drafts and one of its own
    assert "identical to the parent's own in all 3 cases" in speculate.reading(made)


def test_a_text_that_parts_is_told_with_its_gap(home):
    """The place where two texts part, and the parent's two best logits there."""
    parent = open_runnable(home / "gpt2", "cpu")
    plain = speculate._continue(parent, PROMPTS[0], 8)
    other = plain.clone()
    other[6] = (plain[6] + 1) % 64
    with torch.no_grad():
        logits = parent.model(input_ids=plain[None, :6]).logits[0, -1].sort(descending=True).values
    assert speculate._gap(parent, plain, other) == pytest.approx(
        float(logits[0] - logits[1]), abs=1e-5
    )
    row = speculate.Draft(3, 8, 8, 4, 8, 1.0, 1.0, gap=2e-6)
    made = speculate.Drafts("p", "t", 2, (row,), {})
    assert "0 of 1 cases; 1 of the other 1 part at a tie" in speculate.reading(made)


def test_prompts_from_a_token_file(home):
    parent = open_runnable(home / "gpt2", "cpu")
    found = speculate.prompts(parent, [], str(home / "tokens"), 4, 20)
    assert [len(prompt) for prompt in found] == [20] * 4
    assert len({tuple(prompt.tolist()) for prompt in found}) == 4
    assert (
        len(speculate.prompts(parent, [], str(home / "tokens"), 99, 50)) == 4
    )  # as many as there are


def test_the_command(home, tmp_path):
    args = [
        "lab",
        "draft",
        str(home / "gpt2"),
        str(home / "gpt2-ticket"),
        "--data",
        str(home / "tokens"),
    ]
    more = [
        "--n",
        "2",
        "--max-new-tokens",
        "9",
        "--draft-tokens",
        "3",
        "--json",
        str(tmp_path / "d.json"),
    ]
    done = CliRunner().invoke(cli.app, [*args, *more])
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "d.json").read_text())
    assert len(record["rows"]) == 2
    assert record["n_draft"] == 3
    assert 0 <= record["acceptance"] <= 1
    assert {"command", "git", "versions", "device"} <= set(record["run"])
    assert "identical" in done.stdout
