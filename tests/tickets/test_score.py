"""`eval`: perplexities against Hugging Face's own loss, scales, certificates."""

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import families_table
import pytest
import torch
from conftest import VOCAB, make_tokens, tiny, word_level
from families_table import CUT, fed, save_random, tiny_model
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import twistlm
from twistlm import cli
from twistlm.compute.perplexity import perplexity
from twistlm.model import generator
from twistlm.model.blocks import Blueprint
from twistlm.tickets import deploy, extract, score, ticket_scale
from twistlm.tickets.parent import open_parent
from twistlm.tickets.requests import ScoreRequest, TicketRequest
from twistlm.tickets.score import rank
from twistlm.tickets.text import text_of
from twistlm.tickets.ticket_scale import N_DRAWS, TicketScale, TicketScales, choice_text
from twistlm.training import rounds

CUT16 = [*CUT, "data.seq_len=16"]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    for name in ("gpt2", "llama"):
        tiny_model(name).save_pretrained(folder / name)
    parent = open_parent(folder / "gpt2", "cpu", CUT)
    save_random(parent, folder / "ticket", 2)
    make_tokens(folder / "tokens", 200)
    make_tokens(folder / "others", 300, seed=1)
    return folder


def evaluate(home: Path, name: str, *args: str) -> dict:
    out = home / f"{name}.json"
    fixed = ["--data", str(home / "tokens"), "--device", "cpu", "--json", str(out)]
    done = CliRunner().invoke(cli.app, ["eval", str(home / name), *fixed, *args])
    assert done.exit_code == 0, done.exception
    return json.loads(out.read_text())


def by_hugging_face(model, home: Path, seq_len: int, n: int, rel: float = 1e-5):
    want = families_table.perplexity(model, home / "tokens", seq_len, n)
    return pytest.approx(want, rel=rel)


def test_a_ticket_and_a_hugging_face_folder(home):
    """All of its 40 positions by default: 200 tokens are 5 windows."""
    record, ticket = evaluate(home, "ticket"), deploy.load_ticket(home / "ticket")
    assert record["full"] == by_hugging_face(ticket, home, 40, 200)
    assert record["n_params"] == sum(p.numel() for p in ticket.parameters())
    assert record["subnets"] == []
    args = ["eval", str(home / "ticket"), "--data", str(home / "tokens"), "--n", "5"]
    assert "--n 5: no --ratio, no random" in CliRunner().invoke(cli.app, args).stdout
    record = evaluate(home, "ticket", "--tokens", "64", "data.seq_len=16")
    assert record["full"] == by_hugging_face(ticket, home, 16, 64)
    args = ("--ratio", "2/4", "--ratio", "4/4", "--n", "2", "data.seq_len=20", *CUT)
    record = evaluate(home, "gpt2", *args)
    assert record["full"] == by_hugging_face(tiny_model("gpt2"), home, 20, 200)
    assert record["subnets"][0]["n"] == 2
    assert record["subnets"][1]["mean"] == pytest.approx(record["full"])  # all blocks
    record = evaluate(home, "gpt2", "data.seq_len=20")  # as it is: 12 divides no layer of it
    assert record["full"] == by_hugging_face(tiny_model("gpt2"), home, 20, 200)
    assert record["subnets"] == []


def test_a_run_and_its_ticket_know_their_text_and_sizes(tmp_path, monkeypatch):
    """The run's sizes and validation tokens, in its windows, from any folder; of a parent that is
    no run and has no 6/12, about half of its blocks.
    """
    make_tokens(tmp_path / "tokens", 400)
    make_tokens(tmp_path / "valid", 200, seed=1)
    monkeypatch.chdir(tmp_path)
    size = {"vocab_size": VOCAB, "n_positions": 16, "n_embd": 12, "n_head": 3, "n_layer": 2}
    more: dict[str, Any] = {"model": {"config": size}, "run": {"eval_ratios": ["1/3", "2/3"]}}
    more["blocks"] = {"n_ffn": 3, "k_attn": 2, "k_ffn": 2, "shared_first": 0}
    more["data"] = {"valid": "valid", "seq_len": 8}
    rounds.train(tiny("tokens", tmp_path / "run", train={"rounds": 1}, **more), quiet=True)
    request = TicketRequest(ratio="2/3", tokens=0)
    made = extract.write_tickets(tmp_path / "run", tmp_path / "ticket", request, "cpu")
    ((_, ticket),) = made
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    whole = score.score_whole(tmp_path / "ticket", ScoreRequest(), "cpu")
    again = ScoreRequest(data=str(tmp_path / "valid"))  # not in windows of all 16 positions
    for scores in (whole, ticket.evaluate(), score.score_whole(tmp_path / "ticket", again, "cpu")):
        assert (scores.n_tokens, scores.seq_len) == (200, 8)
        assert scores.full == pytest.approx(ticket.proof["perplexity"]["ticket"], rel=1e-6)
    with pytest.raises(ValueError, match=r"ratios: .*ticket is a ticket, which is cut already"):
        twistlm.evaluate(tmp_path / "ticket", "2/3")
    words = "eval ../run --n 1 --device cpu --json out.json"
    done = CliRunner().invoke(cli.app, words.split())
    assert done.exit_code == 0, done.exception
    record = json.loads(Path("out.json").read_text())
    assert [spread["ratio"] for spread in record["subnets"]] == ["1/3", "2/3"]
    parent = twistlm.open_parent("../run", device="cpu")
    for scores in (parent.evaluate(n=1), twistlm.evaluate("../run", device="cpu", n=1)):
        assert [spread.ratio for spread in scores.subnets] == ["1/3", "2/3"]
    certify = ["--certify", "--n", "3", "--coverage", "0.5", "--confidence", "0.5"]
    assert [spread["ratio"] for spread in evaluate(tmp_path, "run", *certify)["subnets"]] == ["1/3"]
    cut = {"blocks": {"n_ffn": 3, "shared_first": 0, "shared_last": 0}}
    plain = twistlm.open_parent(parent.template, cut, data=tmp_path / "tokens", device="cpu")
    (spread,) = plain.evaluate(n=1).subnets
    assert spread.ratio == "attn=2/3,ffn=2/3"


def test_a_ticket_and_the_tokenizer_of_its_parent(home, tmp_path):
    """transformers rewrites tokenizer.json: it is still the one that made the tokens."""
    words = word_level([f"w{i}" for i in range(VOCAB)])
    words.save(str(home / "tokens.tokenizer.json"))
    words.save(str(tmp_path / "tokenizer.json"))
    parent = open_parent(home / "gpt2", "cpu", CUT)
    parent = replace(parent, tokenizer=tmp_path / "tokenizer.json")
    deploy.save_ticket(parent, parent.block_map.full(), home / "with-words")
    written = (home / "with-words/tokenizer.json").read_text()
    assert json.loads(written) != json.loads(words.to_str())
    record = evaluate(home, "with-words")
    assert record["full"] == by_hugging_face(tiny_model("gpt2"), home, 40, 200)
    (home / "tokens.tokenizer.json").unlink()


def tried(name: str, folder: Path) -> TicketScales:
    """An unevenly trained model by its family's name; 4 windows are reported, the next 8 choose."""
    torch.manual_seed(1)
    model = tiny_model(name)
    for param in model.parameters():
        param.data += 0.05 * torch.randn_like(param)
    model.save_pretrained(folder / "model")
    make_tokens(folder / "text", 20 * 16)
    parent = open_parent(folder / "model", "cpu", CUT16)
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
    whole, pruned = (AutoModelForCausalLM.from_pretrained(made.parent.source) for _ in range(2))
    for group in made.parent.block_map.groups:
        name = group.out[0].removesuffix(".weight")
        layer: Any = pruned.get_submodule(name)
        (x,) = fed(whole, name, ids)
        conv = not isinstance(layer, torch.nn.Linear)
        weight = (layer.weight if conv else layer.weight.T).double().reshape(4, -1, 32)  # [block]
        shares = torch.einsum("tbi,bio->tbo", x.double().view(8 * 16, 4, -1), weight)
        k = len(kept[group.name])
        scale = {"none": 1.0, "sqrt": math.sqrt(4 / k), "inverse": 4 / k}.get(treatment.scale)
        if scale is None:
            rho = shares.sum(1).square().sum() / shares.square().sum()
            p, p2 = k / 4, k * (k - 1) / 12
            scale = float(1 / torch.sqrt((p - p2) / rho + p2))
        mask = torch.zeros(4, 1, 1).double()
        mask[list(kept[group.name])] = scale
        new = (weight * mask).flatten(0, 1).float()
        layer.weight.copy_(new if conv else new.T)
        if treatment.means:
            lost = shares.mean(0).sum(0) - (shares.mean(0) * mask[:, 0]).sum(0)
            layer.bias += lost.float()
    ids = made.choice.file.sequences(list(rows), 16)
    return math.exp(pruned(input_ids=ids, labels=ids).loss)


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
    assert perplexity(ticket, made.choice) == pytest.approx(want[str(chosen)], rel=1e-4)
    text = replace(made.ready.text, max_tokens=0)  # all of it is reported: none is left to choose
    alone = TicketScales(made.parent, text, choice_text(text, made.parent.cfg.data))
    chosen, said = alone.best([kept])
    assert (chosen, said["tried"]) == (TicketScale("sqrt"), {})


def test_scored_tickets_are_those_by_hand(tmp_path):
    """The scale of the held-out draws on other text, and every perplexity on the reported."""
    made = tried("gpt2", tmp_path)
    block_map = made.parent.block_map
    widths = {group.name: 2 if group.kind == "attn" else 3 for group in block_map.groups}
    tickets, held_out = ticket_scale.random_tickets(block_map, widths, n=2, seed=5)
    scored = ticket_scale.score_tickets(made, tickets, held_out)
    losses = {
        str(scale): math.fsum(math.log(by_hand(made, scale, each)) for each in held_out)
        for scale in made.candidates()
    }
    want = {name: math.exp(loss / N_DRAWS) for name, loss in losses.items()}
    assert scored["treatment"]["tried"] == pytest.approx(want, rel=1e-4)
    assert scored["treatment"]["chosen"] == min(want, key=want.__getitem__)
    best = min(made.candidates(), key=lambda scale: losses[str(scale)])
    values = [by_hand(made, best, each, rows=range(4)) for each in tickets]
    assert scored["values"] == pytest.approx(values, rel=1e-4)
    assert scored["mean"] == pytest.approx(sum(values) / 2, rel=1e-4)
    # the nested ticket, or any other single one: its scale is chosen on itself, on the other text
    assert ticket_scale.score_tickets(made, tickets[:1])["treatment"] == made.best(tickets[:1])[1]


def test_the_rank_is_the_least_that_keeps_its_promise():
    """Published sizes: 59 for 95/95, 90 for 95/99, 299 for 99/95, 22 for 90/90; and by definition:
    the r-th of n draws is below the quantile as often as fewer than r of n fall below it.
    """
    cases = {(0.95, 0.95): 59, (0.95, 0.99): 90, (0.99, 0.95): 299, (0.9, 0.9): 22}
    for shares, n in (cases | {(0.5, 0.75): 2}).items():  # 1 - 0.5 ** 2 is 0.75 to the last bit
        assert rank(n, *shares) == n
        with pytest.raises(ValueError, match=f"n must be at least {n}"):
            rank(n - 1, *shares)
    for n, p, confidence in ((40, 0.9, 0.95), (200, 0.95, 0.99), (1000, 0.5, 0.9)):
        mass = [math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(n + 1)]
        r = rank(n, p, confidence)
        assert math.fsum(mass[: r - 1]) < confidence <= math.fsum(mass[:r])


def test_values_are_those_of_extracted_tickets(home):
    """Against Hugging Face's own loss of the ticket, cut by another path."""
    parent = open_parent(home / "llama", "cpu", CUT16)
    words = "--certify --ratio 2/4 --n 12 --coverage 0.8 --confidence 0.9 --tokens 64"
    record = evaluate(home, "llama", *words.split(), *CUT16)
    made, spread = record["certificate"], record["subnets"][0]
    widths, values = dict.fromkeys(parent.block_map.full_widths(), 2), spread["values"]
    for draw, value in enumerate(values):
        blueprint = generator.for_deployment(parent.block_map, widths, seed=0, draw=draw)
        assert value == by_hugging_face(deploy.cut_ticket(parent, blueprint), home, 16, 64)
    assert len(set(values)) == 12
    assert made["bound"] == sorted(values)[made["rank"] - 1]
    assert spread["sd"] == pytest.approx(statistics.stdev(values))
    assert made["quantiles"]["50%"] == pytest.approx(statistics.median(values))
    # the share below the worst: its n-th power is 1 - confidence
    assert made["covered_by_worst"] ** 12 == pytest.approx(0.1)
    said = f"80% of tickets are at or below {made['bound']:.2f}, with 90% confidence"
    assert said in score.reading(made)
    parent.central.weights.fill_(math.nan)
    asked = ScoreRequest(ratios=("2/4",), n=1, data=str(home / "tokens"), tokens=64)
    text, ticket = text_of(parent, asked.data, 64), deploy.cut_ticket(parent, blueprint)
    with pytest.raises(ValueError, match="x has no perplexity: its logits are not finite"):
        score.score_parent(parent, asked, "x", quiet=True)
    with pytest.raises(ValueError, match="x has no perplexity: its logits are not finite"):
        score.score_model(ticket, text, "x")
