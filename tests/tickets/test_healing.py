"""Healing: a ticket trained for itself, against a loop by hand, and through a stop."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from commands import in_process
from conftest import make_tokens, tiny
from transformers import AutoModelForCausalLM

from twistlm import config
from twistlm.data.stream import Batches
from twistlm.data.token_file import open_tokens
from twistlm.model import generator
from twistlm.model.blocks import widths_of_ratio
from twistlm.system import manifest
from twistlm.tickets import deploy, healing
from twistlm.tickets.parent import open_parent
from twistlm.tickets.requests import HealRequest
from twistlm.training import rounds

STEPS = (
    "train.interval=2",
    "train.batch=3",
    "train.lr=1e-2",
    "train.clip=0",
    "train.weight_decay=0",
)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A trained parent, a ticket of it with other widths in every layer, and its tokens."""
    folder = tmp_path_factory.mktemp("heal")
    make_tokens(folder / "tokens", 1600)
    make_tokens(folder / "valid", 320, seed=1)
    cfg = tiny(str(folder / "tokens"), folder / "run", train={"rounds": 2, "method": "dense"})
    rounds.train(config.override(cfg, [f"data.valid={folder / 'valid'}"]), quiet=True)
    parent = open_parent(folder / "run", "cpu")
    widths = widths_of_ratio(parent.block_map, "attn=2/4,ffn=2/4,ffn.2=3/4,attn.1=1/4")
    kept = generator.for_deployment(parent.block_map, widths, seed=0)
    notes = {"perplexity": {"ticket": 1.0}, "max_logit_difference": 0.0, "dtype": "float32"}
    deploy.save_ticket(parent, kept, folder / "ticket", notes)
    return folder


def ask(home: Path, out: Path, *overrides: str, **more) -> HealRequest:
    return HealRequest(
        ticket=home / "ticket", out=out, device="cpu", overrides=(*STEPS, *overrides),
        **{"tokens": 6 * 3 * 16, **more},
    )  # fmt: skip


def by_hand(home: Path, distil: float) -> dict[str, torch.Tensor]:
    """Six AdamW steps on the same batches, Hugging Face's logits, a teacher, float64."""
    model = deploy.load_ticket(home / "ticket").double()
    found = next((home / "run/checkpoints").iterdir())
    teacher = (
        AutoModelForCausalLM.from_pretrained(sorted(found.parent.iterdir())[-1]).eval().double()
    )
    batches = Batches(open_tokens(str(home / "tokens")), 16, 1, 3, 0)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(6):
        ids = batches(0, step)
        logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
        with torch.no_grad():
            probs = teacher(input_ids=ids).logits[:, :-1].flatten(0, 1).softmax(-1)
        kl = (probs * (probs.log() - logits.log_softmax(-1))).sum(-1).mean()
        loss = (1 - distil) * F.cross_entropy(logits, ids[:, 1:].flatten()) + distil * kl
        for group in adam.param_groups:  # cosine to a tenth, over all steps
            group["lr"] = 1e-2 * (0.1 + 0.9 * (1 + math.cos(math.pi * step / 6)) / 2)
        adam.zero_grad()
        loss.backward()
        adam.step()
    return {name: param.detach() for name, param in model.named_parameters()}


@pytest.mark.parametrize("distil", [0.9, 0.3])
def test_healing_is_distillation_by_hand(home, tmp_path, distil):
    """In float64: a key's bias has no gradient, and Adam makes steps of what float32 rounds off."""
    exact = (f"train.distil={distil}", "train.precision=float64")
    healing.heal(ask(home, tmp_path / "out", *exact), quiet=True)
    healed, start = (
        {name: param.detach() for name, param in deploy.load_ticket(path).named_parameters()}
        for path in (tmp_path / "out", home / "ticket")
    )
    for name, want in by_hand(home, distil).items():
        moved = float((want - start[name]).norm())
        assert moved > 0
        assert float((healed[name] - want).norm()) < 1e-5 * moved, name


def test_a_healed_ticket_is_a_ticket_with_its_history(home, tmp_path):
    said: list[str] = []
    record = healing.heal(ask(home, tmp_path / "out"), quiet=True, note=said.append)
    assert said == ["round 1/3", "round 2/3", "round 3/3"]
    model = deploy.load_ticket(tmp_path / "out")  # seal, files and widths are checked
    assert not manifest.check_folder(tmp_path / "out", "ticket.json")
    old = deploy.load_ticket(home / "ticket")
    assert {n: p.shape for n, p in model.named_parameters()} == {
        n: p.shape for n, p in old.named_parameters()
    }
    told = json.loads((tmp_path / "out/ticket.json").read_text())
    assert told == record
    (healed,) = told["healed"]
    assert healed["n_tokens"] == 6 * 3 * 16
    assert healed["teacher"].startswith(str(home / "run"))
    assert "perplexity" not in told  # those of the weights before
    ids = open_tokens(str(home / "valid")).sequences(list(range(20)), 16)
    for each, name in ((old, "before"), (model, "after")):
        with torch.no_grad():
            want = math.exp(each(input_ids=ids, labels=ids).loss)
        assert healed["perplexity"][name] == pytest.approx(want, rel=1e-4)
    card = (tmp_path / "out/README.md").read_text()
    assert "## Healing" in card
    assert f"{healed['perplexity']['after']:.2f} after" in card
    assert "| perplexity" not in card
    assert not (tmp_path / "out.healing").exists()
    (tmp_path / "out/notes.txt").write_text("of this ticket alone")
    again = ask(home, tmp_path / "twice", teacher="none", data=str(home / "tokens"))
    twice = healing.heal(HealRequest(**{**again.__dict__, "ticket": tmp_path / "out"}), quiet=True)
    assert [each["teacher"] == "none" for each in twice["healed"]] == [False, True]
    assert not (tmp_path / "twice/notes.txt").exists()
    assert set(twice["files"]) == set(told["files"])


def test_a_stopped_one_goes_on_to_the_same_weights(home, tmp_path, monkeypatch):
    healing.heal(ask(home, tmp_path / "whole"), quiet=True)
    request = ask(home, tmp_path / "cut")
    train = rounds.train

    def stops(cfg, **options):
        return train(cfg, is_late=lambda: True, **options)

    with monkeypatch.context() as patch:
        patch.setattr(rounds, "train", stops)
        with pytest.raises(ValueError, match="stopped after round 1: call it again"):
            healing.heal(request, quiet=True)
    assert not (tmp_path / "cut").exists()
    with pytest.raises(ValueError, match=r"healed with train\.lr = 0.01, not 0.02"):
        healing.heal(ask(home, tmp_path / "cut", "train.lr=0.02"), quiet=True)
    healing.heal(request, quiet=True)
    one, other = (deploy.load_ticket(tmp_path / name) for name in ("whole", "cut"))
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_bad_requests_are_one_sentence(home, tmp_path, monkeypatch, capsys):
    ticket = tmp_path / "lost"
    shutil.copytree(home / "ticket", ticket)
    record = json.loads((ticket / "ticket.json").read_text())
    record["parent"] = "runs/gone/away"
    (ticket / "ticket.json").write_text(manifest.written(manifest.sealed(record)))
    cases = {
        "no amount such as 20M": (str(home / "ticket"), "--tokens", "many"),
        "is the ticket to heal": (
            str(home / "ticket"),
            "--tokens",
            "1k",
            "-o",
            str(home / "ticket"),
        ),
        "give --teacher RUN or MODEL": (str(ticket), "--tokens", "1k"),
        "starts as itself": (str(ticket), "--tokens", "1k", "--teacher", "start"),
        "give --data STEM": (str(ticket), "--tokens", "1k", "--teacher", "none"),
        "is no ticket": (str(home / "run"), "--tokens", "1k"),
    }
    for words, args in cases.items():
        out = () if "-o" in args else ("-o", str(tmp_path / "out"))
        code, _, err = in_process(monkeypatch, capsys, "heal", *args, *out, "--device", "cpu")
        assert (code, words in " ".join(err.split())) == (2, True), (words, err)
    assert not (tmp_path / "out").exists()


def test_what_extract_writes_heals_with_its_parent(home, tmp_path, monkeypatch, capsys):
    """Both commands, one after the other: the ticket's own record names the teacher."""
    words = ("-o", str(tmp_path / "t"), "--ratio", "2/4", "--device", "cpu", "--tokens", "64")
    code, _, err = in_process(monkeypatch, capsys, "extract", str(home / "run"), *words)
    assert (code, err) == (0, "")
    words = ("-o", str(tmp_path / "h"), "--tokens", "96", "--device", "cpu", *STEPS)
    code, said, err = in_process(monkeypatch, capsys, "heal", str(tmp_path / "t"), *words)
    assert (code, err) == (0, "")
    told = json.loads((tmp_path / "h/ticket.json").read_text())
    assert told["healed"][0]["teacher"] == told["parent"]["source"]
    assert told["parent"]["source"].startswith(str(home / "run"))
    assert "taught by" in said
    words = ("-o", str(tmp_path / "n"), "--tokens", "96", "--device", "cpu", "--teacher", "none")
    code, said, err = in_process(monkeypatch, capsys, "heal", str(tmp_path / "t"), *words, *STEPS)
    assert (code, err) == (0, "")
    alone = json.loads((tmp_path / "n/ticket.json").read_text())["healed"][0]
    assert alone["data"] == told["healed"][0]["data"]  # the text of its parent's run
    assert (alone["teacher"], alone["distil"]) == ("none", 0.0)


def test_the_tokens_of_a_run_are_found_from_any_folder(home, tmp_path, monkeypatch):
    """The run names them as they were seen where it was started."""
    monkeypatch.chdir(home)
    rounds.train(tiny("tokens", home / "near/run", train={"rounds": 1}), quiet=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    asked = ask(home, tmp_path / "near", teacher=str(home / "near/run"))
    assert healing.heal(asked, quiet=True)["healed"][-1]["data"] == str(home / "tokens")
