"""`eval` of a ticket and of a plain Hugging Face folder, against Hugging Face's own loss."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import VOCAB, make_tokens
from families_table import tiny_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from typer.testing import CliRunner

from twistlm import cli
from twistlm.data.token_file import open_tokens
from twistlm.model import generator
from twistlm.tickets import deploy, score
from twistlm.tickets.parent import open_parent

CUT = ["blocks.n_ffn=4", "blocks.shared_first=0", "blocks.shared_last=0"]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    tiny_model("gpt2").save_pretrained(folder / "model")
    parent = open_parent(folder / "model", "cpu", CUT)
    widths = {group.name: 2 for group in parent.block_map.groups}
    blueprint = generator.for_deployment(parent.block_map, widths, seed=0)
    deploy.save_ticket(parent, blueprint, folder / "ticket")
    make_tokens(folder / "tokens", 200)
    return folder


def evaluate(home: Path, name: str, *args: str) -> tuple[dict, str]:
    out = home / f"{name}.json"
    fixed = ["--data", str(home / "tokens"), "--device", "cpu", "--json", str(out)]
    done = CliRunner().invoke(cli.app, ["eval", str(home / name), *fixed, *args])
    assert done.exit_code == 0, done.exception
    return json.loads(out.read_text()), done.stdout


def hf_perplexity(model, home: Path, seq_len: int, n: int) -> float:
    ids = torch.from_numpy(np.fromfile(home / "tokens.bin", "<u2")[:n].astype(np.int64))
    with torch.no_grad():
        return math.exp(model(input_ids=ids.view(-1, seq_len), labels=ids.view(-1, seq_len)).loss)


def test_a_ticket(home):
    """All of its 40 positions by default: 200 tokens are 5 windows."""
    record, shown = evaluate(home, "ticket")
    ticket = deploy.load_ticket(home / "ticket")
    assert record["full"] == pytest.approx(hf_perplexity(ticket, home, 40, 200), rel=1e-5)
    assert record["n_params"] == sum(p.numel() for p in ticket.parameters())
    assert record["subnets"] == []
    assert "random subnets" not in shown
    record, _ = evaluate(home, "ticket", "--tokens", "64", "data.seq_len=16")
    assert record["full"] == pytest.approx(hf_perplexity(ticket, home, 16, 64), rel=1e-5)
    assert record["n_tokens"] == 64


def test_a_ticket_and_the_tokenizer_of_its_parent(home, tmp_path):
    """transformers rewrites tokenizer.json: it is still the one that made the tokens."""
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.save(str(home / "tokens.tokenizer.json"))
    words.save(str(tmp_path / "tokenizer.json"))
    parent = open_parent(home / "model", "cpu", CUT)
    parent = replace(parent, tokenizer=tmp_path / "tokenizer.json")
    deploy.save_ticket(parent, parent.block_map.full(), home / "with-words")
    written = (home / "with-words/tokenizer.json").read_text()
    assert json.loads(written) != json.loads(words.to_str())
    record, _ = evaluate(home, "with-words")
    assert record["full"] == pytest.approx(
        hf_perplexity(tiny_model("gpt2"), home, 40, 200), rel=1e-5
    )
    words.pre_tokenizer = Whitespace()  # the same words, found otherwise
    words.save(str(home / "tokens.tokenizer.json"))
    with pytest.raises(ValueError, match="another tokenizer"):
        score.check_same_tokenizer(
            open_tokens(str(home / "tokens")), home / "with-words/tokenizer.json"
        )
    (home / "tokens.tokenizer.json").unlink()


def test_a_hugging_face_folder(home):
    args = ("--ratio", "2/4", "--n", "2", "data.seq_len=20", *CUT)
    record, shown = evaluate(home, "model", *args)
    assert record["full"] == pytest.approx(
        hf_perplexity(tiny_model("gpt2"), home, 20, 200), rel=1e-5
    )
    assert record["subnets"][0]["n"] == 2
    assert "2 random subnets" in shown
    only_ffn, _ = evaluate(home, "model", *args, "blocks.setting=ffn")
    assert only_ffn["subnets"][0]["n_params"] > record["subnets"][0]["n_params"]
