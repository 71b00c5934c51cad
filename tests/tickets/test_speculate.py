"""Drafts: the parent's own text, and counts that a hand-written loop gives too."""

from __future__ import annotations

import json
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
    """Parents, and for each a ticket of 3/4 of one layer's blocks and one of all blocks."""
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
    """Sliding windows too: a cache cropped wrongly would change text or counts."""
    pair = [open_runnable(home / each, "cpu") for each in (name, f"{name}-ticket")]
    made = speculate.draft(*pair, PROMPTS, max_new_tokens=17, n_draft=n_draft, quiet=True)
    for prompt, row in zip(PROMPTS, made.rows, strict=True):
        ids, n_passes, n_proposed = by_hand(pair[0].model, pair[1].model, prompt, 17, n_draft)
        assert speculate.generate(pair[0], prompt, 17, pair[1]).tolist() == ids
        assert row["same"]
        assert (row["n_plain"], row["n_new"], row["n_parent"]) == (17, 17, n_passes)
        assert (row["n_proposed"], row["n_accepted"]) == (n_proposed, 17 - n_passes)
        assert row["plain_s"] > 0 < row["drafted_s"]
    if n_draft == 4:
        assert 0 < made.acceptance < 1  # or no cache was ever cropped
        whole = open_runnable(home / f"{name}-all", "cpu")  # the parent as its own draft
        sure = speculate.draft(pair[0], whole, PROMPTS, max_new_tokens=18, n_draft=5, quiet=True)
        assert (sure.acceptance, sure.tokens_per_pass) == (1, 6)  # 5 drafts and one of its own


def test_the_command(home, tmp_path):
    args = ["lab", "draft", str(home / "gpt2"), str(home / "gpt2-ticket"), "--draft-tokens", "3"]
    text = ["--data", str(home / "tokens"), "--n", "99", "--prompt-tokens", "25"]  # 8 windows
    more = ["--max-new-tokens", "9", "--json", str(tmp_path / "d.json")]
    done = CliRunner().invoke(cli.app, [*args, *text, *more], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "d.json").read_text())
    assert (len(record["rows"]), record["n_draft"], record["rows"][0]["n_prompt"]) == (8, 3, 25)
    assert 0 <= record["acceptance"] <= 1
    assert {"command", "git", "versions", "device"} <= set(record["run"])
    assert "identical to the parent's own in 8 of 8" in " ".join(done.stdout.split())
