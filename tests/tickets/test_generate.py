"""`generate` writes what Hugging Face's own writes, from any folder."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from families_table import CUT, build, save_random
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from twistlm import cli
from twistlm import config as configs
from twistlm.data.builtin import train_bpe
from twistlm.tickets import deploy
from twistlm.tickets.parent import open_parent
from twistlm.tickets.runnable import generate_tokens, open_runnable, write_text
from twistlm.training import checkpoint
from twistlm.training.run import Progress

VOCAB = 300
PROMPT = "the café – naïve words"  # bytes that need more than one token


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """One model as a Hugging Face folder, a run and a ticket."""
    folder = tmp_path_factory.mktemp("home")
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 80, "n_inner": 48}
    none = {"bos_token_id": None, "eos_token_id": None}
    build("gpt2", {"vocab_size": VOCAB, **sizes, **none}).save_pretrained(folder / "model")
    train_bpe([PROMPT] * 4, VOCAB).save(str(folder / "model/tokenizer.json"))
    parent = open_parent(folder / "model", "cpu", CUT)
    where, start = folder / "run/checkpoints", Progress()
    about = (configs.Config(), parent.template, parent.tokenizer)
    checkpoint.save(where, checkpoint.snapshot(parent.central), start, *about, keep=1)
    save_random(parent, folder / "ticket", 3)
    return folder


def pieces(source: Path, **options) -> tuple[list[str], list[int]]:
    found: list[str] = []
    ids = write_text(open_runnable(source, "cpu"), PROMPT, emit=found.append, **options)
    return found, ids


@pytest.mark.parametrize("kind", ["model", "run", "ticket"])
def test_greedy_text_is_that_of_hugging_face(home, kind):
    """What has no complete bytes yet at the end is held back; the command prints just that."""
    tok = PreTrainedTokenizerFast(tokenizer_file=str(home / "model/tokenizer.json"))
    prompt = torch.tensor([tok(PROMPT)["input_ids"]])
    if kind == "ticket":
        model = deploy.load_ticket(home / "ticket")
    else:
        model = AutoModelForCausalLM.from_pretrained(home / "model")
    plain = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "pad_token_id": 0}
    want = model.generate(prompt, max_new_tokens=30, **plain)[0]
    found, ids = pieces(home / kind, max_new_tokens=30)
    assert ids == want.tolist()
    assert "".join(found).startswith(PROMPT)
    assert tok.decode(want, clean_up_tokenization_spaces=False).startswith("".join(found))
    assert len(found) > 5  # it streams
    args = ["generate", str(home / kind), "--prompt", PROMPT, "--max-new-tokens", "30"]
    done = CliRunner().invoke(cli.app, args)
    assert (done.exit_code, done.stdout) == (0, "".join(found) + "\n")


def test_draws_follow_from_the_seed(home):
    first, again, other = (
        pieces(home / "model", temperature=1.5, seed=seed, max_new_tokens=12)[1]
        for seed in (0, 0, 1)
    )
    assert first == again != other
    greedy = pieces(home / "model")[1]
    assert len(greedy) == 80  # what fits
    assert pieces(home / "model", top_k=1)[1] == greedy  # the likeliest of one
    assert pieces(home / "model", temperature=1e-3)[1] == greedy


@pytest.mark.parametrize("drawn", [{}, {"temperature": 1.0}])
@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_told(home, odd, drawn):
    model = AutoModelForCausalLM.from_pretrained(home / "model")
    model.get_input_embeddings().weight.data[5] = odd
    with pytest.raises(ValueError, match="writes nothing: its logits are not finite"):
        next(generate_tokens(model, [1, 5], **drawn))


def test_it_stops_at_the_end_of_text(home, tmp_path):
    ids = pieces(home / "model")[1]
    n_prompt = len(open_runnable(home / "model", "cpu").tokenizer().encode(PROMPT).ids)
    model = AutoModelForCausalLM.from_pretrained(home / "model")
    model.generation_config.eos_token_id = ids[n_prompt + 3]
    # an author's defaults: greedy means greedy
    model.generation_config.update(do_sample=True, temperature=5.0, repetition_penalty=9.0)
    model.save_pretrained(tmp_path)
    shutil.copyfile(home / "model/tokenizer.json", tmp_path / "tokenizer.json")
    first = ids.index(ids[n_prompt + 3], n_prompt)
    assert pieces(tmp_path)[1] == ids[: first + 1]
