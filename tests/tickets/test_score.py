"""`eval` of a ticket and of a plain Hugging Face folder, against Hugging Face's own loss."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import VOCAB, make_tokens, tiny
from families_table import tiny_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from twistlm import cli
from twistlm.compute.perplexity import Text, perplexity
from twistlm.data.token_file import open_tokens
from twistlm.model import generator
from twistlm.model.blocks import Blueprint
from twistlm.tickets import deploy, extract, score
from twistlm.tickets.extract import logit_difference
from twistlm.tickets.parent import open_parent
from twistlm.tickets.requests import TicketRequest
from twistlm.tickets.score import text_of
from twistlm.tickets.ticket_scale import (
    N_DRAWS,
    TicketScale,
    TicketScales,
    choice_text,
    random_tickets,
    score_tickets,
)
from twistlm.training import rounds

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


def test_a_ticket_knows_the_text_of_its_parent(tmp_path, monkeypatch):
    """Without --data: the run's validation tokens, in its windows, found from any folder."""
    make_tokens(tmp_path / "tokens", 400)
    make_tokens(tmp_path / "valid", 200, seed=1)
    monkeypatch.chdir(tmp_path)
    cfg = tiny("tokens", tmp_path / "run", data={"valid": "valid", "seq_len": 8})
    rounds.train(replace(cfg, train=replace(cfg.train, rounds=1)), quiet=True)
    (ticket,) = [
        made
        for _, made in extract.write_tickets(
            tmp_path / "run", tmp_path / "ticket", TicketRequest(ratio="2/4", tokens=0), "cpu"
        )
    ]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "valid.json").read_text()
    for scores in (score.score_ticket(tmp_path / "ticket", device="cpu"), ticket.evaluate()):
        assert scores.n_tokens == 200
        assert scores.full == pytest.approx(ticket.proof["perplexity"]["ticket"], rel=1e-6)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(ValueError, match=r"no tokens of its own.*: give --data STEM"):
        score.score_ticket(tmp_path / "ticket", device="cpu")


def test_windows_of_a_text(home):
    """Whole windows within so many tokens, at least one, and none beyond the file."""
    file = open_tokens(str(home / "tokens"))  # 200 tokens: 12 windows of 16
    asked = {(0, 0): 12, (100, 0): 6, (5, 0): 1, (0, 9): 3, (160, 9): 3, (32, 9): 2}
    for (n_tokens, first), n in asked.items():
        assert Text(file, 16, n_tokens, first=first).n_sequences == n, (n_tokens, first)
    ids = torch.from_numpy(file.tokens[9 * 16 : 12 * 16].astype(np.int64)).view(3, 16)
    model = tiny_model("gpt2")
    with torch.no_grad():
        want = math.exp(model(input_ids=ids, labels=ids).loss)
    assert perplexity(model, Text(file, 16, batch=2, first=9)) == pytest.approx(want, rel=1e-5)


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
    args = ("--ratio", "2/4", "--ratio", "4/4", "--n", "2", "data.seq_len=20", *CUT)
    record, shown = evaluate(home, "model", *args)
    assert record["full"] == pytest.approx(
        hf_perplexity(tiny_model("gpt2"), home, 20, 200), rel=1e-5
    )
    assert record["subnets"][0]["n"] == 2
    assert record["subnets"][1]["mean"] == pytest.approx(record["full"])  # all blocks
    assert "2 random subnets" in shown
    only_ffn, _ = evaluate(home, "model", *args, "blocks.setting=ffn")
    assert only_ffn["subnets"][0]["n_params"] > record["subnets"][0]["n_params"]


# ---------------------------------------------------------------- treatments


def tried(name: str, folder: Path) -> TicketScales:
    """An unevenly trained model by its family's name; 4 windows are reported, the next 8 choose."""
    torch.manual_seed(1)
    model = tiny_model(name)
    for param in model.parameters():
        param.data += 0.05 * torch.randn_like(param)
    model.save_pretrained(folder / "model")
    make_tokens(folder / "text", 20 * 16)
    parent = open_parent(folder / "model", "cpu", [*CUT, "data.seq_len=16"])
    text = text_of(parent, str(folder / "text"), 64)
    return TicketScales(parent, text, choice_text(text, parent.cfg.data))


@torch.no_grad()
def by_hand(
    made: TicketScales, treatment: TicketScale, kept: Blueprint, rows=range(4, 12)
) -> float:
    """Hugging Face's model: rows of absent blocks are 0, biases hold their means.

    Scales and means are measured on windows 4 to 11 (the choice), the perplexity on `rows`.
    """
    ids = made.choice.file.sequences(list(range(4, 12)), 16)
    whole = AutoModelForCausalLM.from_pretrained(made.parent.source).eval()
    pruned = AutoModelForCausalLM.from_pretrained(made.parent.source).eval()
    fed: dict[str, torch.Tensor] = {}
    names = {g.name: g.out[0].removesuffix(".weight") for g in made.parent.block_map.groups}
    for name, module in names.items():
        whole.get_submodule(module).register_forward_pre_hook(
            lambda _, args, name=name: fed.__setitem__(name, args[0].flatten(0, -2).double())
        )
    whole(input_ids=ids)
    for name, module in names.items():
        layer: Any = pruned.get_submodule(module)
        conv = not isinstance(layer, torch.nn.Linear)
        weight = (layer.weight if conv else layer.weight.T).double().reshape(4, -1, 32)  # [block]
        x = fed[name].reshape(len(fed[name]), 4, -1)
        shares = torch.einsum("tbi,bio->tbo", x, weight)
        k = len(kept[name])
        scale = {"none": 1.0, "sqrt": math.sqrt(4 / k), "inverse": 4 / k}.get(treatment.scale)
        if scale is None:
            rho = shares.sum(1).square().sum() / shares.square().sum()
            p, p2 = k / 4, k * (k - 1) / 12
            scale = float(1 / torch.sqrt((p - p2) / rho + p2))
        mask = torch.zeros(4, 1, 1).double()
        mask[list(kept[name])] = scale
        new = (weight * mask).flatten(0, 1).float()
        layer.weight.copy_(new if conv else new.T)
        if treatment.means:
            lost = shares.mean(0).sum(0) - (shares.mean(0) * mask[:, 0]).sum(0)
            layer.bias += lost.float()
    ids = made.choice.file.sequences(list(rows), 16)
    logp = pruned(input_ids=ids).logits[:, :-1].double().log_softmax(-1)
    return math.exp(-float(logp.gather(2, ids[:, 1:, None]).mean()))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_best_treatment_is_the_best_by_hand(name, tmp_path):
    """All perplexities that the choice was made by, and what a ticket with it then is."""
    made = tried(name, tmp_path)
    groups = made.parent.block_map.groups
    kept = {g.name: (0, 3) if g.kind == "attn" else (1, 2, 3) for g in groups}
    assert len(made.candidates()) == (6 if name == "gpt2" else 3)  # llama has no output biases
    chosen, said = made.best([kept])
    want = {str(t): by_hand(made, t, kept) for t in made.candidates()}
    assert len({round(value, 3) for value in want.values()}) == len(want)  # each does something
    assert said["tried"] == pytest.approx(want, rel=1e-4)
    assert str(chosen) == said["chosen"] == min(want, key=want.__getitem__)
    assert (said["first_window"], said["n_tokens"]) == (4, 128)  # none of the reported text
    ticket = deploy.cut_ticket(made.parent_with(chosen), kept)
    ready = made.evaluator(chosen, made.choice)
    assert ready.subnet_perplexity(kept) == pytest.approx(want[str(chosen)], rel=1e-4)
    assert perplexity(ticket, made.choice) == pytest.approx(want[str(chosen)], rel=1e-4)
    assert logit_difference(made.parent_with(chosen), kept, ticket) < 1e-4


def test_scored_tickets_are_those_by_hand(tmp_path):
    """The scale of the held-out draws on other text, and every perplexity on the reported."""
    made = tried("gpt2", tmp_path)
    block_map = made.parent.block_map
    widths = {group.name: 2 if group.kind == "attn" else 3 for group in block_map.groups}
    tickets, held_out = random_tickets(block_map, widths, n=2, seed=5)
    assert [*tickets, *held_out] == [
        generator.for_deployment(block_map, widths, seed=5, draw=i) for i in range(2 + N_DRAWS)
    ]
    scored = score_tickets(made, tickets, held_out)
    losses = {
        str(scale): math.fsum(math.log(by_hand(made, scale, each)) for each in held_out)
        for scale in made.candidates()
    }
    want = {name: math.exp(loss / N_DRAWS) for name, loss in losses.items()}
    record = scored.record
    assert record["tried"] == pytest.approx(want, rel=1e-4)
    assert record["chosen"] == str(scored.scale) == min(want, key=want.__getitem__)
    values = [by_hand(made, scored.scale, each, rows=range(4)) for each in tickets]
    stored = scored.to_dict()
    assert stored["values"] == pytest.approx(values, rel=1e-4)
    assert stored["mean"] == pytest.approx(sum(values) / 2, rel=1e-4)
    assert stored["treatment"] == record
    assert set(record) == {"chosen", "tried", "text", "first_window", "n_tokens"}
    # the nested ticket, or any other single one: its scale is chosen on itself, on the other text
    alone = score_tickets(made, tickets[:1])
    assert alone.record == made.best(tickets[:1])[1]
    repaired = score_tickets(
        made, tickets, held_out, measure=lambda scale, each: tickets.index(each)
    )
    assert (repaired.record, repaired.values) == (record, (0, 1))


def test_without_other_text_the_parents_own_scale_stays(tmp_path):
    made = tried("gpt2", tmp_path)
    text = replace(made.reported, max_tokens=0)  # all of it is reported
    assert choice_text(text, made.parent.cfg.data) is None
    data = replace(made.parent.cfg.data, train=str(tmp_path / "text"))
    assert choice_text(text, data).file.stem == str(tmp_path / "text")
    alone = TicketScales(made.parent, text, None)
    chosen, said = alone.best([made.parent.block_map.full()])
    assert (chosen, said["tried"]) == (TicketScale("sqrt"), {})
