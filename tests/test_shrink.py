"""From a model and text to tickets in one command, which goes on where it was stopped."""

import json
import math
import os
import random
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ENV, check_refusal, in_process
from conftest import VOCAB, word_level
from transformers import AutoConfig, AutoModelForCausalLM

import twistlm
from twistlm import config, shrinking
from twistlm.data.builtin import train_bpe
from twistlm.data.token_file import open_tokens
from twistlm.export import gguf as gguf_export
from twistlm.system.files import file_sha256
from twistlm.tickets.requests import ShrinkRequest

WORDS = [f"w{i}" for i in range(VOCAB)]
SHAPE = {"vocab_size": VOCAB, "num_hidden_layers": 2, "max_position_embeddings": 16}
SHAPE |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 24, "intermediate_size": 96, "num_attention_heads": 6,
              "num_key_value_heads": 3},
    "qwen2": {"hidden_size": 28, "intermediate_size": 76, "num_attention_heads": 14,
              "num_key_value_heads": 2},
}  # fmt: skip
# parameters, and what the sizes become: kv groups of two heads, or seven pairs of query heads
WHOLE = {"llama": 20_472, "qwen2": 20_148}
SIZES = {
    "llama": {"params-16k": "attn=2/3,ffn=9/12", "params-13k": "attn=2/3,ffn=6/12"},
    "qwen2": {"params-16k": "attn=5/7,ffn=14/19", "params-13k": "attn=4/7,ffn=10/19"},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Two small random models with their tokenizers, and text."""
    home = tmp_path_factory.mktemp("home")
    for name, shape in MODELS.items():
        torch.manual_seed(0)
        cfg = AutoConfig.for_model(name, **SHAPE, **shape)
        AutoModelForCausalLM.from_config(cfg).save_pretrained(home / name)
        word_level(WORDS).save(str(home / name / "tokenizer.json"))
    rng = random.Random(0)
    (home / "code").mkdir()
    for i in range(9):
        (home / f"code/{i}.py").write_text(" ".join(rng.choices(WORDS[:9], k=300)))
    (home / "notes.md").write_text(" ".join(rng.choices(WORDS, k=2000)))
    return home


@pytest.fixture(scope="module")
def made(home) -> dict[str, list[Any]]:
    """Both models shrunk: what is read once has a teacher beside it, what is read twice a cache."""
    rows = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        for name, tokens in {"llama": "2k", "qwen2": "8k"}.items():
            texts = ["code/:0.7", "notes.md:0.3"]
            own = "run.device=cpu", "run.threads=1"
            rows[name] = twistlm.shrink(
                name, texts, *own, out=f"out-{name}", to=["16k", "13k"], tokens=tokens
            )
    return rows


@pytest.mark.parametrize("name", MODELS)
def test_tickets_are_plain_models_of_the_sizes_asked_for(home, made, name):
    """Their perplexity, by transformers' own loss on the held-out tokens."""
    given, trained, *tickets = made[name]
    assert given.n_params == trained.n_params == WHOLE[name]
    out = home / f"out-{name}"
    assert json.loads((out / "shrink.json").read_text())["sizes"] == SIZES[name]
    cfg = config.load(str(out / "train.toml"))
    assert cfg.train.teacher == {"llama": "start", "qwen2": "cache"}[name]
    assert cfg.run.eval_ratios == tuple(SIZES[name].values())
    valid = open_tokens(str(out / "text/valid"))
    ids = torch.from_numpy(valid.tokens[: len(valid.tokens) // 16 * 16].astype("int64"))
    assert [row.name for row in tickets] == list(SIZES[name])
    for row in (given, *tickets):
        assert row.n_params <= {"params-16k": 16_000, "params-13k": 13_000}.get(row.name, 1e9)
        model = AutoModelForCausalLM.from_pretrained(home / row.folder, dtype=torch.float64)
        assert model.num_parameters() == row.n_params
        with torch.no_grad():
            loss = model(input_ids=ids.view(-1, 16), labels=ids.view(-1, 16)).loss
        assert row.perplexity == pytest.approx(math.exp(loss), rel=1e-4)
        assert type(model).__name__.lower().startswith(name)


def test_the_teacher_can_be_chosen(home, monkeypatch):
    """Like every key: refused is what the model cannot have, not what a default one could not."""
    monkeypatch.chdir(home)
    asked = {"model": "llama", "out": Path("own"), "text": ("notes.md",)}
    request = ShrinkRequest(**asked, to=("16k",), tokens="8k")
    own = replace(request, overrides=("train.teacher=start", "run.device=cpu"))
    chosen = [shrinking.check(each).config_for(n_text=1, n_tokens=8) for each in (request, own)]
    assert [cfg.train.teacher for cfg in chosen] == ["cache", "start"]


def test_a_request_that_was_refused_late_may_be_corrected(home, monkeypatch):
    """With other text, too: none of the first request's tokens stay."""
    monkeypatch.chdir(home)
    rows = [{"body": " ".join(WORDS[i:] * 20)} for i in range(20)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shrink = partial(twistlm.shrink, "llama", to="16k", tokens="1k", column="body")
    with pytest.raises(ValueError, match="no column 'text'"):
        shrink(["notes.md", "rows.jsonl"], "run.device=cpu", out="late", column="text")
    for out in ("late", "fresh"):
        shrink(["rows.jsonl", "notes.md"], "run.device=cpu", out=out)
    late, fresh = (file_sha256(Path(out, "text/train.bin")) for out in ("late", "fresh"))
    assert late == fresh


def test_the_same_call_goes_on_and_another_is_refused(home, made, monkeypatch, capsys):
    """Without a ticket and the last checkpoint, both come back with the same bits."""
    monkeypatch.chdir(home)
    out = Path("out-llama")
    weights = [out / name / "model.safetensors" for name in SIZES["llama"]]
    before = [file_sha256(path) for path in weights]
    shutil.rmtree(sorted(out.glob("parent/checkpoints/round-*"))[-1])
    for name in SIZES["llama"]:
        shutil.rmtree(out / name)
    words = "shrink llama --text code/:0.7 --text notes.md:0.3 --to 16k --to 13k -o out-llama"
    words += " run.device=cpu run.threads=1"
    texts = ({"context": "w1 w2", "continuation": text} for text in (" w3", " w3"))
    asked = [{"doc_id": 0, "label": 0, "request": text} for text in texts]  # the first is right
    Path("ask.jsonl").write_text("".join(json.dumps(each) + "\n" for each in asked))
    own = ("--tokens", "2k", "--tasks", "ask.jsonl")
    code, printed, err = in_process(monkeypatch, capsys, *words.split(), *own)
    assert code == 0, err
    (head,) = (line for line in printed.splitlines() if "perplexity" in line and "acc" in line)
    assert head.index("perplexity") < head.index("ask acc") < head.index("ms per token")
    found = json.loads((out / "tasks.json").read_text())["models"]
    assert [each["name"] for each in found] == ["llama", "parent", *SIZES["llama"]]
    assert {each["tasks"]["ask"]["acc"]["value"] for each in found} == {1.0}
    assert [file_sha256(path) for path in weights] == before
    assert all(name in printed for name in ("trained", "params-16k", "ms per token"))
    refused = in_process(monkeypatch, capsys, *words.split(), "--tokens", "3k")
    check_refusal(*refused, ("tokens = '2k', not '3k'", "twistlm extract out-llama/parent"))
    code, printed, _ = in_process(monkeypatch, capsys, "train", "out-llama/train.toml", "--resume")
    assert (code, "is finished" in printed) == (0, True)


def test_train_takes_a_model_and_text(home, tmp_path, monkeypatch):
    """By name and a file, in memory and strings, or by the config that was chosen: one result."""
    monkeypatch.chdir(tmp_path)
    how, rounds = {"train.rounds": 2, "run": {"device": "cpu", "threads": 1}}, []
    text, llama = home / "notes.md", home / "llama"
    named = twistlm.train(llama, text, how, "run.out=named", on_round=rounds.append)
    assert [row["round"] for row in rounds] == [1, 2]
    cfg = config.load("named/train.toml")
    assert (cfg.blocks.mask_attn, cfg.train.teacher) == ((3, 3, 2, 2, 1, 1, 1, 1), "start")
    assert cfg.blocks.mask_ffn == (12, 12, 8, 6, 4, 4, 3, 3)
    model = AutoModelForCausalLM.from_pretrained(llama)
    how |= {"run.out": "held"}
    model.name_or_path = ""
    with pytest.raises(ValueError, match="a model in memory needs its tokenizer"):
        twistlm.train(model, iter([text.read_text()]), how)
    held = twistlm.train(model, iter([text.read_text()]), how, tokenizer=word_level(WORDS))
    chosen = twistlm.train("named/train.toml", "run.out=chosen")
    sums = {file_sha256(path / "model.safetensors") for path in (named, held, chosen)}
    assert len(sums) == 1
    with pytest.raises(ValueError, match="'held' already holds a run: say resume=True"):
        twistlm.train(model, iter(["other"]), how)
    longer = how | {"train.rounds": 3}
    assert twistlm.train(model, iter(["other"]), longer, resume=True).name == "round-000003"
    with pytest.raises(ValueError, match="demo is a config, which names its own text"):
        twistlm.train("demo", "notes.md")


def test_a_file_without_a_tokenizer(home, monkeypatch):
    """A GGUF file, its tokenizer elsewhere: tasks at the end, and files of the types asked for.

    With no rate it is trained to itself, and both are rounded alike before they are measured.
    """
    monkeypatch.chdir(home)
    torch.manual_seed(0)
    shape = SHAPE | {"vocab_size": 320, "max_position_embeddings": 64} | MODELS["llama"]
    cfg = AutoConfig.for_model("llama", **shape)
    model = AutoModelForCausalLM.from_config(cfg).eval()
    gguf_export.export(model, Path("bytes.gguf"), "f32")
    text = Path("notes.md").read_text()
    train_bpe([text], 320).save("bytes.json")
    Path("one.jsonl").write_text(
        json.dumps({"doc_id": 0, "request": {"context": "w1", "continuation": " w2"}})
    )
    own = "run.device=cpu", "run.threads=1", "train.lr=1e-30", "blocks.sort=false"
    how: dict[str, Any] = {"out": "bytes", "to": "25k", "tokens": "1k", "tokenizer": "bytes.json"}
    how["dtype"] = "bfloat16"
    shrink = partial(twistlm.shrink, "bytes.gguf", "notes.md", *own, **how)
    rows = shrink(gguf="f16", tasks="one.jsonl")
    assert [row.tasks.keys() for row in rows] == [{"one greedy", "one bits per byte"}] * 3
    assert rows[0].perplexity == pytest.approx(rows[1].perplexity, rel=1e-7)
    (file,) = Path("bytes").glob("*.gguf")
    before, types = file_sha256(file), {}
    for name in ("f16", "q8_0", "q8_0"):
        shrink(gguf=name)
        types[file_sha256(file)] = name
    assert types == {before: "f16", file_sha256(file): "q8_0"}
    assert json.loads(Path(f"{file}.json").read_text())["type"] == "q8_0"
    last = sorted(Path("bytes/parent/checkpoints").iterdir())[-1]
    shutil.rmtree(last)
    with pytest.raises(ValueError, match=r"^gguf q9: GGUF is written as q8_0"):
        shrink(gguf="q9")
    assert not last.exists()  # it was refused before any training


def test_no_room_is_told_before_anything_is_read(home, monkeypatch, capsys):
    """A machine with one page of memory, then a disk with one free byte."""
    monkeypatch.chdir(home)
    words = ["shrink", "llama", "--text", "notes.md", "--to", "16k", "-o", "none", "run.device=cpu"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "sysconf", lambda name: 4096 if name == "SC_PAGE_SIZE" else 1)
        check_refusal(*in_process(patch, capsys, *words), ("this machine has 4.1 kB", "memory"))
    with monkeypatch.context() as patch:
        usage = shutil.disk_usage(home)
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1))
        check_refusal(*in_process(patch, capsys, *words), ("of disk, and 1 byte", "--out none"))
    assert not Path("none").exists()


@pytest.mark.chaos  # dozens of processes import torch: minutes
@pytest.mark.parametrize("name", MODELS)
def test_ten_kills(home, name, tmp_path):
    """Whenever it is killed, the same command ends with the tickets of a run that never was."""
    how: dict[str, Any] = {"cwd": home, "env": ENV, "stdout": subprocess.DEVNULL}

    def begin(out: Path) -> subprocess.Popen:
        words = f"shrink {name} --text code/:0.7 --text notes.md:0.3 --to 16k --to 13k"
        words += f" --tokens 60k -o {out} run.threads=1 run.device=cpu run.save_every=2"
        return subprocess.Popen([sys.executable, "-m", "twistlm", *words.split()], **how)

    def tickets(out: Path) -> list[str]:
        return [file_sha256(out / size / "model.safetensors") for size in SIZES[name]]

    seconds = []
    for _ in range(2):  # the whole command; then what is left of it when all is there
        began = time.monotonic()
        assert begin(tmp_path / "never").wait() == 0
        seconds.append(time.monotonic() - began)
    whole, start = seconds
    rng, out, n_kills, stages = random.Random(name), tmp_path / "killed", 0, set()
    while n_kills < 10:
        process = begin(out)
        try:
            process.wait(start * rng.random() + (whole - start) / 4 * rng.random())
            assert process.returncode == 0
            assert tickets(out) == tickets(tmp_path / "never")
            shutil.rmtree(out)  # done before the tenth: once more from the beginning
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            n_kills += 1
            stages.add(tuple(sorted(path.name for path in out.glob("*"))))
    assert begin(out).wait() == 0
    assert tickets(out) == tickets(tmp_path / "never")
    print(f"{whole:.0f} s, {start:.0f} s when all is there; killed with {stages}")
