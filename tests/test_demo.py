"""The first command, made small: every stage of it runs, and its artefacts hold together."""

import contextlib
import io
import json
import random
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import metrics
from commands import check_refusal, in_process
from tokenizers import Tokenizer

from twistlm import cli
from twistlm.data import builtin
from twistlm.data.token_file import open_tokens
from twistlm.demo import best_scaled
from twistlm.tickets import deploy
from twistlm.tickets.parent import open_parent
from twistlm.tickets.requests import ScoreRequest
from twistlm.tickets.score import score_parent
from twistlm.tickets.text import text_of

SMALL = ["train.rounds=3", "train.interval=2", "model.config.n_layer=2", "run.eval_tokens=640"]
ASKED = ScoreRequest(ratios=("9/12", "6/12", "4/12", "3/12"), n=3, tokens=640)


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> tuple[Path, str]:
    """The command in this process, on some of its text."""
    out, printed = tmp_path_factory.mktemp("demo") / "demo", io.StringIO()
    texts = sorted(builtin.topics.topics.values())
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", ["twistlm", "demo", "--out", str(out), "--n", "3", *SMALL])
        patch.setattr(builtin, "documents", lambda: texts)
        with pytest.raises(SystemExit) as stopped:
            cli.main()
    assert not stopped.value.code
    return out, printed.getvalue()


def test_it_says_what_it_does_and_both_parents_saw_the_same_tokens(demo):
    out, printed = demo
    for words in ("data parallel", "TwIST", *ASKED.ratios, "a ticket with 6/12 of the blocks"):
        assert words in printed, words
    for method in ("dense", "twist"):
        rows = metrics(out / method)
        assert [row["round"] for row in rows] == [1, 2, 3]
        assert sum(row["n_tokens"] for row in rows) == 3 * 2 * 4 * 64


def test_no_document_is_in_both_of_its_texts(demo, tmp_path, monkeypatch):
    """One in twenty of the shuffled documents validates, the others train; none is there twice."""
    out, _ = demo
    texts = sorted(builtin.topics.topics.values())
    random.Random(0).shuffle(texts)
    n_valid = len(texts) // 20
    for split, wanted in (("valid", texts[:n_valid]), ("train", texts[n_valid:])):
        file = open_tokens(str(out / "text" / split))
        tokenizer = Tokenizer.from_file(str(file.tokenizer_path))
        whole = tokenizer.decode(file.tokens.tolist(), skip_special_tokens=False)
        assert whole.split(builtin.EOS) == [*wanted, ""]
    long = "A docstring of more than forty characters, twice."
    for name, text in {"a.py": long, "b.py": long, "test/c.py": f"{long} Of a test."}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"def f():\n    {text!r}\n")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert builtin.documents() == sorted({*texts, long})


def test_tokens_are_looked_for_here_and_then_above_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there/run").mkdir(parents=True)
    for made, found in (("", "t"), ("there/t.bin", str(tmp_path / "there/t")), ("t.bin", "t")):
        (tmp_path / made).touch()
        assert builtin.resolve("t", "train", tmp_path / "there/run") == found


def test_the_scores_on_disk_are_those_of_eval_and_of_the_ticket(demo):
    """Folded, saved and loaded from disk, it gives the logits of the scaled subnet."""
    out, _ = demo
    rows = json.loads((out / "scores.json").read_text())
    assert [row["name"] for row in rows] == ["data parallel", "TwIST"]
    saved, data = rows[1], str(out / "text/valid")
    request = replace(ASKED, data=data)
    opened, scale = best_scaled(open_parent(out / "twist", "cpu"), request)
    again = score_parent(opened, request, "twist")
    assert scale == saved["scale"]
    assert again.full == pytest.approx(saved["full"], rel=1e-6)
    assert again.subnets[1].mean == pytest.approx(saved["subnets"][1]["mean"], rel=1e-6)

    ticket = deploy.load_ticket(out / "ticket")
    blueprint = json.loads((out / "ticket/ticket.json").read_text())["blueprint"]
    ready = opened.evaluator(text_of(opened, data, 640))
    subnet = ready.refill_({name: tuple(kept) for name, kept in blueprint.items()})
    ids = ready.text.file.sequences([0, 1], 64)
    with torch.no_grad():
        difference = (ticket(input_ids=ids).logits - subnet.model(input_ids=ids).logits).abs().max()
    assert difference < 1e-5
    nested = saved["nested"][1]  # of 6/12: the default pick where a parent has an order
    assert ready.subnet_perplexity(blueprint) == pytest.approx(nested, rel=1e-6)
    assert sum(p.numel() for p in ticket.parameters()) < opened.central.layout.n_params


def test_a_folder_that_is_not_the_demos_is_left_alone(tmp_path, monkeypatch, capsys):
    (tmp_path / "precious.txt").write_text("keep me")
    refused = in_process(monkeypatch, capsys, "demo", "--out", str(tmp_path))
    check_refusal(*refused, ("not made by the demo",))
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]
