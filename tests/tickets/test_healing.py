"""Healing: a ticket trained for itself, against a loop by hand, and through a stop."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from commands import in_process
from conftest import batch_of, make_tokens, tiny
from transformers import AutoModelForCausalLM

from twistlm.data.stream import Batches
from twistlm.data.token_file import open_tokens
from twistlm.system.signals import Ended
from twistlm.tickets import deploy, extract, healing
from twistlm.tickets.parent import open_parent
from twistlm.tickets.requests import HealRequest, TicketRequest
from twistlm.training import rounds

STEPS = ("train.interval=2", "train.batch=3", "train.lr=1e-2", "train.clip=0")
STEPS += ("train.weight_decay=0",)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A trained parent, a ticket of it with other widths in every layer, and its tokens."""
    folder = tmp_path_factory.mktemp("heal")
    make_tokens(folder / "tokens", 1600)
    make_tokens(folder / "valid", 320, seed=1)
    train = {"rounds": 2, "method": "dense"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # the run names its tokens as they are seen here, and here alone
        cfg = tiny("tokens", folder / "run", data={"valid": "valid"}, train=train)
        rounds.train(cfg, quiet=True)
    parent = open_parent(folder / "run", "cpu")
    ratio = "attn=2/4,ffn=2/4,ffn.2=3/4,attn.1=1/4"
    request = TicketRequest(ratio=ratio, tokens=64)
    extract.make_ticket(parent, request, quiet=True).save(folder / "ticket")
    return folder


def heal(home: Path, out: Path, *overrides: str, **more) -> None:
    request = HealRequest(**{"ticket": home / "ticket", "out": out, "tokens": 6 * 3 * 16, **more})
    healing.heal(request, ("run.device=cpu", *STEPS, *overrides), quiet=True)


def by_hand(home: Path) -> dict[str, torch.Tensor]:
    """Six AdamW steps on the same batches, Hugging Face's logits, a teacher, float64."""
    model = deploy.load_ticket(home / "ticket").double()
    last = sorted((home / "run/checkpoints").iterdir())[-1]
    teacher = AutoModelForCausalLM.from_pretrained(last).eval().double()
    batches = Batches(open_tokens(str(home / "tokens")), 16, 3, 0)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(6):
        ids = batch_of(batches, 1, 0, step)
        logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
        with torch.no_grad():
            probs = teacher(input_ids=ids).logits[:, :-1].flatten(0, 1).softmax(-1)
        kl = (probs * (probs.log() - logits.log_softmax(-1))).sum(-1).mean()
        loss = 0.7 * F.cross_entropy(logits, ids[:, 1:].flatten()) + 0.3 * kl
        for group in adam.param_groups:  # cosine to a tenth, over all steps
            group["lr"] = 1e-2 * (0.1 + 0.9 * (1 + math.cos(math.pi * step / 6)) / 2)
        adam.zero_grad()
        loss.backward()
        adam.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def test_healing_is_distillation_by_hand(home, tmp_path):
    """In float64: a key's bias has no gradient, and Adam makes steps of what float32 rounds off."""
    exact = ("train.distil=0.3", "train.precision=float64")
    heal(home, tmp_path / "out", *exact)
    healed, start = (
        {name: param.detach() for name, param in deploy.load_ticket(path).named_parameters()}
        for path in (tmp_path / "out", home / "ticket")
    )
    for name, want in by_hand(home).items():
        moved = float((want - start[name]).norm())
        assert moved > 0
        assert float((healed[name] - want).norm()) < 1e-5 * moved, name


def test_a_ticket_of_a_gguf_file_in_a_package(home, tmp_path):
    """Its parent is no path that could be looked for, and its teacher without more words."""
    source = "gguf:package/folder/model.gguf"
    texts = {"data": str(home / "tokens"), "valid": str(home / "valid")}
    request = HealRequest(ticket=home / "ticket", out=tmp_path / "out", tokens="288", **texts)
    made = healing.settings(request, deploy.load_ticket(home / "ticket"), source, STEPS, None)
    assert made.train.teacher == source
    assert (made.train.rounds, made.train.warmup) == (3, 0)  # 288 tokens: 2 steps of 3 x 16 each
    # keys win, as in every command, and what follows of the rounds is of those that are trained
    for own, warmup in (((), 4), (("train.warmup=5",), 5)):
        own = [*STEPS, "train.rounds=40", *own]
        made = healing.settings(request, deploy.load_ticket(home / "ticket"), source, own, None)
        assert (made.train.rounds, made.train.warmup, made.run.save_every) == (40, warmup, 4)


def test_a_healed_ticket_is_a_ticket_with_its_history(home, tmp_path, monkeypatch, capsys):
    """The command, twice: the ticket's own record names the teacher and the text."""
    words = ("--tokens", "288", "--device", "cpu", *STEPS)
    args = (str(home / "ticket"), "-o", str(tmp_path / "out"), *words)
    code, said, err = in_process(monkeypatch, capsys, "heal", *args)
    assert (code, err, "taught by" in said) == (0, "", True)
    old, model = deploy.load_ticket(home / "ticket"), deploy.load_ticket(tmp_path / "out")
    told = json.loads((tmp_path / "out/ticket.json").read_text())
    (healed,) = told["healed"]
    assert healed["n_tokens"] == 6 * 3 * 16
    assert healed["teacher"] == told["parent"]["source"]
    assert "perplexity" not in told  # those of the weights before
    ids = open_tokens(str(home / "valid")).sequences(list(range(20)), 16)
    for each, name in ((old, "before"), (model, "after")):
        with torch.no_grad():
            want = math.exp(each(input_ids=ids, labels=ids).loss)
        assert healed["perplexity"][name] == pytest.approx(want, rel=1e-4)
    assert not (tmp_path / "out.healing").exists()
    (tmp_path / "out/notes.txt").write_text("of this ticket alone")
    args = (str(tmp_path / "out"), "-o", str(tmp_path / "twice"), *words, "--teacher", "none")
    assert in_process(monkeypatch, capsys, "heal", *args)[0] == 0
    twice = json.loads((tmp_path / "twice/ticket.json").read_text())
    assert [(each["data"], each["teacher"]) for each in twice["healed"]] == [
        (str(home / "tokens"), told["parent"]["source"]),
        (str(home / "tokens"), "none"),
    ]
    assert not (tmp_path / "twice/notes.txt").exists()
    assert set(twice["files"]) == set(told["files"])


def test_perplexities_are_of_the_rounded_ticket(home, tmp_path):
    request = TicketRequest(ratio="2/4", tokens=64, dtype="bfloat16")
    extract.make_ticket(open_parent(home / "run", "cpu"), request, quiet=True).save(tmp_path / "t")
    heal(home, tmp_path / "out", ticket=tmp_path / "t")
    (healed,) = json.loads((tmp_path / "out/ticket.json").read_text())["healed"]
    ids = open_tokens(str(home / "valid")).sequences(list(range(20)), 16)
    for name, folder in {"before": "t", "after": "out"}.items():
        model = deploy.load_ticket(tmp_path / folder)
        assert model.dtype == torch.bfloat16
        with torch.no_grad():
            loss = F.cross_entropy(
                model(ids).logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()
            )
        assert healed["perplexity"][name] == pytest.approx(math.exp(loss), rel=1e-5), name


def test_a_stopped_one_goes_on_to_the_same_weights(home, tmp_path, monkeypatch):
    heal(home, tmp_path / "whole")
    train = rounds.train

    def stops(cfg, **options):
        train(cfg, is_late=lambda: True, **options)
        raise Ended("stopped by SIGTERM", 143)

    with monkeypatch.context() as patch:
        patch.setattr(rounds, "train", stops)
        with pytest.raises(Ended):
            heal(home, tmp_path / "cut")
    assert not (tmp_path / "cut").exists()
    with pytest.raises(ValueError, match=r"train\.teacher was .* and is now 'none'"):
        heal(home, tmp_path / "cut", teacher="none")
    heal(home, tmp_path / "cut")
    one, other = (deploy.load_ticket(tmp_path / name) for name in ("whole", "cut"))
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
