"""`lab draft`: the parent's own text, and counts of a loop by hand."""

import json
from pathlib import Path

import pytest
import torch
from conftest import make_tokens
from families_table import save_random, tiny_model
from torch import Tensor
from typer.testing import CliRunner

from twistlm import cli
from twistlm.lab import speculate
from twistlm.lab.speculate import generate
from twistlm.tickets import deploy
from twistlm.tickets.parent import open_parent
from twistlm.tickets.runnable import open_runnable

FFN = ("blocks.n_ffn=4", "blocks.shared_first=1", "blocks.shared_last=1", "blocks.setting=ffn")
DRAFTED = ("gpt2", "gemma3_text")
PROMPTS = [torch.tensor([5, 1, 9]), torch.tensor([60, 2, 2, 7, 31, 8]), torch.tensor([0])]


@pytest.fixture(scope="module")
def drafts(tmp_path_factory) -> Path:
    """Parents, and for each a ticket of 3/4 of one layer's blocks and one of all blocks."""
    folder = tmp_path_factory.mktemp("drafts")
    for name in DRAFTED:
        tiny_model(name).save_pretrained(folder / name)
        parent = open_parent(folder / name, "cpu", FFN)
        save_random(parent, folder / f"{name}-ticket", 3, seed=1)
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


@pytest.mark.parametrize("name", DRAFTED)
def test_text_and_counts_are_those_of_a_loop_by_hand(drafts, name):
    """Sliding windows too: a cache cropped wrongly would change text or counts."""
    pair = [open_runnable(drafts / each, "cpu") for each in (name, f"{name}-ticket")]
    made = speculate.draft(*pair, PROMPTS, max_new_tokens=17, n_draft=4)
    for prompt, row in zip(PROMPTS, made["rows"], strict=True):
        ids, n_passes, n_proposed = by_hand(pair[0].model, pair[1].model, prompt, 17, 4)
        assert generate(pair[0], prompt, 17, assistant_model=pair[1].model).tolist() == ids
        assert row["same"]
        assert (row["n_plain"], row["n_new"], row["n_parent"]) == (17, 17, n_passes)
        assert (row["n_proposed"], row["n_accepted"]) == (n_proposed, 17 - n_passes)
    assert 0 < made["acceptance"] < 1  # or no cache was ever cropped
    whole = open_runnable(drafts / f"{name}-all", "cpu")  # the parent as its own draft
    sure = speculate.draft(pair[0], whole, PROMPTS, max_new_tokens=18, n_draft=5)
    assert (sure["acceptance"], sure["tokens_per_pass"]) == (1, 6)  # 5 and its own


def test_a_last_token_needs_no_draft(drafts):
    """One token is the parent's own: nothing is proposed, and no share of it accepted."""
    pair = [open_runnable(drafts / each, "cpu") for each in ("gpt2", "gpt2-ticket")]
    made = speculate.draft(*pair, PROMPTS, max_new_tokens=1, n_draft=4)
    assert [(row["n_new"], row["n_parent"], row["n_proposed"]) for row in made["rows"]] == [
        (1, 1, 0)
    ] * len(PROMPTS)
    assert (made["acceptance"], made["tokens_per_pass"]) == (0, 1)


def test_the_command(drafts, tmp_path):
    words = f"lab draft {drafts}/gpt2 {drafts}/gpt2-ticket --data {drafts}/tokens --n 99"
    words += " --prompt-tokens 25 --draft-tokens 3 --max-new-tokens 9"  # 8 windows
    words += f" --json {tmp_path}/d.json"
    done = CliRunner().invoke(cli.app, words.split(), env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "d.json").read_text())
    assert (len(record["rows"]), record["n_draft"], record["rows"][0]["n_prompt"]) == (8, 3, 25)
    assert "identical to the parent's own in 8 of 8" in " ".join(done.stdout.split())
