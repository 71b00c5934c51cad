"""A user's mistake is one sentence, exit code 2 and nothing half-written; --help is instant."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from commands import as_process, check_refusal, in_process, snapshot, toml
from conftest import VOCAB, tiny_table, write_words
from transformers import GPT2Config, GPT2LMHeadModel

from twistlm import cli, config
from twistlm.data.token_file import open_tokens
from twistlm.model import families, generator, huggingface
from twistlm.model.central import create
from twistlm.system.device import out_of_memory
from twistlm.tickets import deploy
from twistlm.tickets import parent as parents
from twistlm.training import checkpoint, rounds
from twistlm.training.engines.local import Local
from twistlm.training.teacher import write_cache

N_ROUNDS = 3
FIRST, LAST = "checkpoints/round-000001", f"checkpoints/round-{N_ROUNDS:06d}"


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Token files, a config and one finished run, made once and copied for every case."""
    folder = tmp_path_factory.mktemp("home")
    names = [f"w{i}" for i in range(VOCAB)]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # all paths are relative: the copies are complete
        write_words("tokens", names, 1600)
        write_words("other", names[::-1], 800)  # the same size, another meaning
        write_words("wide", [f"w{i}" for i in range(VOCAB + 6)], 800)
        write_words("short", names, 10)
        table = tiny_table("tokens", Path("run"), train={"rounds": N_ROUNDS}, run={"keep": 9})
        toml(folder / "c.toml", table)
        rounds.train(config.load("c.toml"), quiet=True)
    return folder


@pytest.fixture
def here(home, tmp_path, monkeypatch) -> Path:
    """A copy of everything, and the working directory of the command."""
    shutil.copytree(home, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---------------------------------------------------------------- damages


def truncate(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0b100
    path.write_bytes(data)


def damage_all(here: Path) -> None:
    paths = sorted((here / "run/checkpoints").iterdir())
    flip_bit(paths[0] / "model.safetensors")
    truncate(paths[1] / "moments.safetensors")
    truncate(paths[2] / "checkpoint.json")
    assert len(paths) == 3


def put_weights_of(**attributes: int) -> Callable[[Path], None]:
    """The newest checkpoint with weights of another model and hashes that agree."""

    def change(here: Path) -> None:
        saved = checkpoint.verify(here / LAST_RUN)
        cfg = saved.config
        other = replace(cfg.model, config=cfg.model.config | attributes)
        model = huggingface.load(other, seed=0)
        block_map = families.partition(model, cfg.blocks)
        central = create(
            huggingface.state(model),
            huggingface.shapes(model),
            block_map,
            carry=True,
            outer=False,
            device=torch.device("cpu"),
        )
        checkpoint.save(
            here / "run/checkpoints",
            central,
            checkpoint.progress_of(saved, block_map),
            cfg,
            checkpoint.template(saved),
            None,
            keep=9,
        )

    return change


LAST_RUN = f"run/{LAST}"


def make_ticket(here: Path) -> None:
    parent = parents.open_parent(here / "run", "cpu")
    widths = {group.name: 2 for group in parent.block_map.groups}
    blueprint = generator.for_deployment(parent.block_map, widths, seed=0)
    deploy.save_ticket(parent, blueprint, here / "ticket")


def save_gpt2(folder: Path, **attributes: int) -> None:
    small = {"n_embd": 16, "n_head": 4, "n_layer": 1, "n_positions": 16}
    GPT2LMHeadModel(GPT2Config(**small | attributes)).save_pretrained(folder)


@dataclass(frozen=True)
class Case:
    """One row of the contract: what is typed, and what the sentence must hold."""

    args: tuple[str, ...]
    parts: tuple[str, ...]
    prepare: Callable[[Path], object] = field(default=lambda here: None)
    process: bool = False  # through a real `python -m twistlm`


def train(*overrides: str, parts: tuple[str, ...], **kwargs) -> Case:
    """A training run into a fresh folder."""
    return Case(("train", "c.toml", "run.out=fresh", *overrides), parts, **kwargs)


def resume(*overrides: str, parts: tuple[str, ...], **kwargs) -> Case:
    return Case(("train", "c.toml", *overrides, "--resume"), parts, **kwargs)


def evaluate(*options: str, parts: tuple[str, ...], path: str = "run", **kwargs) -> Case:
    return Case(
        ("eval", path, "--n", "1", "--device", "cpu", "--ratio", "2/4", *options), parts, **kwargs
    )


def extract(*options: str, parts: tuple[str, ...], path: str = "run", **kwargs) -> Case:
    """A ticket into a fresh folder; 3 layers of 4 heads and 4 FFN blocks, the first shared."""
    return Case(("extract", path, "-o", "made/t", "--device", "cpu", *options), parts, **kwargs)


def write_plain_model(here: Path) -> None:
    """A Hugging Face folder: it has no tokens of its own."""
    huggingface.load(config.load(str(here / "c.toml")).model, 0).save_pretrained(here / "plain")


PLAIN = ("blocks.n_ffn=4", "blocks.shared_first=1", "blocks.shared_last=0")


def tokenize(
    source: str, content: bytes | None, parts: tuple[str, ...], *more: str, **kwargs
) -> Case:
    def write(here: Path) -> None:
        if content is not None:
            (here / source).write_bytes(content)

    args = ("prepare", source, "-o", "made/new", "--tokenizer", "tokens.tokenizer.json", *more)
    return Case(args, parts, write, **kwargs)


def teach(*options: str, parts: tuple[str, ...], prepare=write_plain_model) -> Case:
    """A teacher's cache beside tokens that are there."""
    args = ("prepare", "-o", "tokens", "--teacher", "plain", "--seq-len", "16", "--device", "cpu")
    return Case((*args, *options), parts, prepare)


def write_plain_cache(here: Path) -> None:
    write_plain_model(here)
    write_cache(open_tokens("tokens"), "plain", 4, 8, "cpu", quiet=True)


def heal(tokens: str, *more: str, parts: tuple[str, ...]) -> Case:
    return Case(("heal", "ticket", "-o", "made/t", "--tokens", tokens, *more), parts, make_ticket)


TOO_LONG = ("data.seq_len = 17", "16 positions")
CASES = {
    # the config
    "unknown key": train("train.lrr=1", parts=("train.lrr", "did you mean train.lr?", "Legal keys",
        "interval"), process=True),
    "unknown section": train("trian.lr=1", parts=("trian", "train")),
    "wrong type": train("train.rounds=many", parts=("train.rounds", "'many'", "int")),
    "wrong word": train("train.schedule=linear", parts=("train.schedule", "'linear'", "'cosine'")),
    "malformed override": train("train.lr", parts=("'train.lr'", "section.key=value")),
    "negative": train("train.lr=-1", parts=("train.lr = -1",)),
    "unknown preset": Case(("train", "papper"), ("'papper'", "demo", "paper")),
    "broken TOML": Case(("train", "b.toml"), ("b.toml", "line 1"),
        lambda here: (here / "b.toml").write_text("lr = = 3")),
    "bad outer": train("train.outer=nesterov(2)", parts=("train.outer", "'nesterov(2)'",
        "nesterov(lr, momentum)")),
    "negative seed": train("run.seed=-1", parts=("run.seed", "-1")),
    "negative eps": train("train.eps=-1", parts=("train.eps", "-1")),
    "endless epochs": train("train.rounds=0", "train.epochs=inf", parts=("train.epochs", "inf")),
    # blocks
    "K too small": train("blocks.k_attn=1", parts=("blocks.k_attn = 1", "N = 4", "S = 3", "2..4"),
        process=True),
    "K too big": train("blocks.k_ffn=5", parts=("blocks.k_ffn = 5", "2..4")),
    "one K of several": train("blocks.k_ffn=[3, 1]", parts=("blocks.k_ffn = 1", "2..4")),
    "no K": train("blocks.k_attn=[]", parts=("blocks.k_attn", "1..4")),
    "K per worker": train("blocks.k_attn=[2, 3]", "blocks.k_ffn=[2, 3, 4]", "blocks.widths=worker",
        parts=("blocks.k_attn = [2, 3]", "3")),
    "common too high": train("blocks.common_attn=[4]", parts=("blocks.common_attn = [4]", "0..3")),
    "n_ffn does not divide": train("blocks.n_ffn=5", parts=("blocks.n_ffn", "5", "64",
        "1, 2, 4, 8, 16, 32, 64")),
    "all layers shared": train("blocks.shared_first=3", parts=("blocks.shared_first = 3", "0..2")),
    # the model
    "unknown model type": train("model.type=gpt7", parts=("model.type", "'gpt7'")),
    "unknown attribute": train("model.config.n_layers=2", parts=("model.config.n_layers", "gpt2")),
    "attribute of wrong type": train("model.config.n_layer=two", parts=("model.config", "n_layer",
        "'two'")),
    "heads do not divide": train("model.config.n_head=5", parts=("model.config", "16", "5")),
    "no heads": train("model.config.n_head=0", parts=("model.config",)),
    "no layers": train("model.config.n_layer=0", parts=("layers",)),
    "negative vocabulary": train("model.config.vocab_size=-1", parts=("model.config", "-1")),
    "unknown activation": train("model.config.activation_function=swosh", parts=("model.config",
        "swosh")),
    "weights of a ticket": train("model.weights=ticket", parts=("'ticket'", "twistlm heal"),
        prepare=make_ticket, process=True),
    "no such weights": train("model.weights=nobody/nothing", parts=("model.weights",
        "'nobody/nothing'")),
    # the data
    "no token file": train("data.train=nowhere", parts=("nowhere.bin", "twistlm prepare")),
    "unknown corpus": train("data.valid=builtin:x", parts=("data.valid", "'builtin:x'",
        "builtin:python-docs")),
    "shorter than one sequence": train("data.train=short", parts=("short", "10 tokens",
        "data.seq_len = 16")),
    "short validation": train("data.valid=short", parts=("short", "10 tokens",
        "data.seq_len = 16")),
    "longer than the model's positions": train("data.seq_len=32", parts=("data.seq_len", "32",
        "16")),
    "ids beyond the vocabulary": train("data.train=wide", "data.valid=wide", parts=("wide", "69",
        "64", "tokenizer does not match")),
    "validation of another tokenizer": train("data.valid=other", parts=("other",
        "another tokenizer")),
    "truncated tokens": train(parts=("tokens.bin", "1600 bytes", "1600 tokens of 2"),
        prepare=lambda here: truncate(here / "tokens.bin")),
    # a teacher's cache
    "no cache": train("train.teacher=cache", parts=("tokens.teacher.bin",
        "twistlm prepare -o tokens --teacher")),
    "cache of other windows": train("train.teacher=cache", parts=("tokens.teacher.json",
        "sequences of 8 tokens", "data.seq_len is 16"), prepare=write_plain_cache),
    "nothing to prepare": Case(("prepare", "-o", "tokens"), ("nothing to prepare", "--teacher")),
    "cache of no tokens": Case(("prepare", "-o", "nowhere", "--teacher", "plain"), ("nowhere.bin",
        "twistlm prepare")),
    "too many likeliest": teach("--top", "65", parts=("--top 65", "1..64")),
    "no likeliest": teach("--top", "0", parts=("--top 0", "1..64")),
    "teacher's windows too long": teach("--seq-len", "17", parts=("--seq-len 17", "2..16")),
    "teacher of another tokenizer": teach(parts=("--teacher plain",
        "its tokenizer is not that of tokens"), prepare=lambda here: (write_plain_model(here),
        shutil.copy(here / "other.tokenizer.json", here / "plain/tokenizer.json"))),
    "teacher whose tokenizer is none": teach(parts=("--teacher plain",
        "plain/tokenizer.json is not a tokenizer.json"),
        prepare=lambda here: (write_plain_model(here),
        (here / "plain/tokenizer.json").write_text("{}"))),
    "teacher of fewer tokens": teach("-o", "wide", parts=("wide", "69", "64",
        "tokenizer does not match")),
    "no such teacher": teach("--teacher", "no/such/folder", parts=("--teacher 'no/such/folder'",)),
    # the run
    "no rounds": train("train.rounds=0", "train.epochs=0", parts=("train.rounds = 0",
        "train.epochs = 0", "100")),
    "too few epochs": train("train.rounds=0", "train.epochs=0.1", parts=("train.epochs = 0.1",
        "100")),
    "hybrid without torchrun": train("run.variant=hybrid", parts=("run.variant = 'hybrid'",
        "torchrun --nproc-per-node 3")),
    "true without torchrun": train('run.variant="true"', parts=("run.variant = 'true'",
        "torchrun --nproc-per-node 4")),
    "unknown device": train("run.device=tpu", parts=("run.device = 'tpu'", "auto, cpu, cuda")),
    "absent device": train("run.device=cuda:99", parts=("run.device = 'cuda:99'", "CUDA devices")),
    "bad eval ratio": train("run.eval_ratios=5/12", parts=("run.eval_ratios: ", "'5/12'",
        "1/4, 2/4, 3/4, 4/4")),
    "no teacher's name": train("train.teacher=", parts=("train.teacher = ''", "'none'")),
    "no weights' name": train("model.weights=", parts=("model.weights = ''", "'random'")),
    "out below a file": train("run.out=c.toml/run", parts=("c.toml",)),
    "out holds a run": Case(("train", "c.toml"), ("run.out = 'run'", "--resume", "another folder"),
        process=True),
    # resuming
    "resume another model": resume("model.config.n_embd=32", parts=("cannot resume",
        "model.config", "'n_embd': 16", "'n_embd': 32")),
    "resume other moments": resume("train.moments=reset", parts=("cannot resume",
        "train.moments was 'carry'", "'reset'")),
    "resume other data": resume("data.train=other", parts=("cannot resume", "data.train",
        "'other'")),
    "resume other test data": resume("data.valid=other", parts=("cannot resume", "data.valid")),
    "resume another length": resume("data.seq_len=8", parts=("cannot resume",
        "data.seq_len was 16", "8")),
    "resume another method": resume("train.method=dense", parts=("cannot resume",
        "train.method was 'twist'")),
    "resume an outer optimizer": resume("train.outer=nesterov(0.7, 0.6)", parts=("cannot resume",
        "train.outer was 'none'")),
    "resume fewer rounds": resume("train.rounds=1", parts=("train.rounds", "1", "3")),
    "resume another seed": resume("run.seed=5", parts=("cannot resume", "run.seed was 0", "5")),
    "resume, all damaged": resume(parts=("run/checkpoints", "round-000003", "checkpoint.json"),
        prepare=damage_all),
    "start from a run that is all damaged": train("model.weights=run",
        parts=("run holds no valid checkpoint", "round-000003"), prepare=damage_all),
    "resume below a file": resume("run.out=c.toml/run", parts=("c.toml",)),
    # evaluating
    "no run": evaluate(path="nowhere", parts=("nowhere", "no valid checkpoint")),
    "a folder that is no run": evaluate(path="empty", parts=("empty", "no valid checkpoint"),
        prepare=lambda here: (here / "empty").mkdir()),
    "flipped bit": evaluate(path=LAST_RUN, parts=(LAST_RUN, "damaged", "model.safetensors"),
        process=True, prepare=lambda here: flip_bit(here / LAST_RUN / "model.safetensors")),
    "truncated weights": evaluate(path=LAST_RUN, parts=(LAST_RUN, "damaged", "model.safetensors"),
        prepare=lambda here: truncate(here / LAST_RUN / "model.safetensors")),
    "truncated manifest": evaluate(path=LAST_RUN, parts=(LAST_RUN, "checkpoint.json"),
        prepare=lambda here: truncate(here / LAST_RUN / "checkpoint.json")),
    "missing moments": evaluate(path=LAST_RUN, parts=(LAST_RUN, "moments.safetensors is missing"),
        prepare=lambda here: (here / LAST_RUN / "moments.safetensors").unlink()),
    "all damaged": evaluate(parts=("run", "no valid checkpoint", "round-000003"),
        prepare=damage_all),
    "weights of another shape": evaluate(path=LAST_RUN, parts=(LAST_RUN, "transformer.wte.weight",
        "(64, 32)"), prepare=put_weights_of(n_embd=32)),
    "weights of more layers": evaluate(path=LAST_RUN, parts=(LAST_RUN, "transformer.h.3"),
        prepare=put_weights_of(n_layer=4)),
    "bad ratio": evaluate("--ratio", "5/12", parts=("'5/12'", "1/4, 2/4, 3/4, 4/4")),
    "no ratio": evaluate("--ratio", "half", parts=("'half'", "6/12")),
    "ratio of nothing": evaluate("--ratio", "0/4", parts=("'0/4'", "1/4, 2/4, 3/4, 4/4")),
    "ratio of one kind": evaluate("--ratio", "attn=2/4", parts=("'attn=2/4'", "ffn")),
    "ratio of an unknown kind": evaluate("--ratio", "mlp=2/4", parts=("'mlp=2/4'", "attn", "ffn")),
    "ratio half named": evaluate("--ratio", "attn=2/4,3/4", parts=("'attn=2/4,3/4'",
        "attn=2/3,ffn=6/12")),
    "data of another tokenizer": evaluate("--data", "other", parts=("other", "another tokenizer")),
    "data beyond the vocabulary": evaluate("--data", "wide", parts=("wide", "69", "64")),
    "data too short": evaluate("--data", "short", parts=("short", "10 tokens", "16")),
    "no data": evaluate("--data", "nowhere", parts=("nowhere.bin", "twistlm prepare")),
    "eval on an unknown device": evaluate("--device", "tpu", parts=("device", "'tpu'",
        "auto, cpu, cuda")),
    "json below a file": evaluate("--json", "c.toml/scores.json", parts=("c.toml/scores.json",)),
    "no ratio for a ticket": Case(("eval", "ticket", "--ratio", "2/4"), ("ticket", "cut already"),
        make_ticket),
    "a ticket has no tokens": Case(("eval", "ticket"), ("ticket", "--data"),
        lambda here: (make_ticket(here), shutil.rmtree(here / "run"))),
    "a ticket and another tokenizer": Case(("eval", "ticket", "--data", "other"), ("other",
        "another tokenizer"), make_ticket),
    "a ticket and ids beyond its vocabulary": Case(("eval", "ticket", "--data", "wide"), ("wide",
        "69", "64"), make_ticket),
    "eval beyond the model's positions": evaluate("data.seq_len=17", parts=TOO_LONG),
    "certify beyond the model's positions": Case(("eval", "run", "--certify", "data.seq_len=17"),
        TOO_LONG),
    "drop beyond the model's positions": Case(("lab", "drop", "run", "data.seq_len=17"), TOO_LONG),
    "compare beyond the model's positions": Case(("lab", "compare", "--parent-twist", "run", "-o",
        "made", "--methods", "", "data.seq_len=17"), TOO_LONG),
    "eval a ticket beyond its positions": Case(("eval", "ticket", "--data", "tokens",
        "data.seq_len=17"), TOO_LONG, make_ticket),
    # healing
    "heal beyond the ticket's positions": heal("1k", "data.seq_len=17", parts=TOO_LONG),
    "heal on no tokens": heal("0", parts=("--tokens 0", "at least one")),
    "heal with an unknown teacher": heal("1k", "--teacher", "nowhere",
        parts=("train.teacher = 'nowhere'", "could not be loaded")),
    # extracting
    "extract from nowhere": extract("--ratio", "2/4", path="nowhere", parts=("nowhere",
        "no valid checkpoint")),
    "extract from a file": extract("--ratio", "2/4", path="c.toml", parts=("c.toml",
        "no valid checkpoint")),
    "extract from a ticket": extract("--ratio", "2/4", path="ticket", parts=("ticket",
        "cut already"), prepare=make_ticket),
    "extract from a damaged checkpoint": extract("--ratio", "2/4", path=LAST_RUN,
        parts=("model.safetensors", "sha256"),
        prepare=lambda here: flip_bit(here / LAST_RUN / "model.safetensors")),
    "no budget": extract(parts=("give --ratio, --params, --size, --latency or --memory",),
        process=True),
    "malformed parameters": extract("--params", "85Q", parts=("--params '85Q'", "85M",
        "units: k, m, b, g")),
    "malformed size": extract("--size", "60 apples", parts=("--size '60 apples'", "60MB")),
    "latency without unit": extract("--latency", "12", parts=("--latency '12'",
        "units: us, ms, s")),
    "ratio that is none": extract("--ratio", "5/12", parts=("'5/12'", "1/4, 2/4, 3/4, 4/4")),
    "ratio of a shared layer": extract("--ratio", "attn=1,ffn=1,ffn.0=1/4", parts=("'ffn.0'",
        "layer that is cut")),
    "too few parameters": extract("--params", "1k", parts=("--params 1k is impossible",
        "6,376 parameters"), process=True),
    "too few bytes": extract("--size", "1kB", parts=("--size 1kB is impossible", "bytes")),
    "too few milliseconds": extract("--latency", "1us", parts=("--latency 1us is impossible",
        " ms")),
    "unknown pick": extract("--ratio", "2/4", "--pick", "luck", parts=("--pick 'luck'",
        "best-of:N", "mask-fisher")),
    "best of none": extract("--ratio", "2/4", "--pick", "best-of:0", parts=("--pick 'best-of:0'",)),
    "unknown importance": extract("--ratio", "2/4", "--pick", "importance:obd",
        parts=("'importance:obd'", "taylor")),
    "best-of without data": extract("--ratio", "2/4", "--pick", "best-of:3", *PLAIN, path="plain",
        parts=("plain", "give --data STEM"), prepare=write_plain_model),
    "importance without data": extract("--ratio", "2/4", "--pick", "importance", *PLAIN,
        path="plain", parts=("plain", "give --data STEM"), prepare=write_plain_model),
    "extract with data of another tokenizer": extract("--ratio", "2/4", "--data", "other",
        parts=("other", "another tokenizer")),
    "extract with no data": extract("--ratio", "2/4", "--data", "nowhere", parts=("nowhere.bin",
        "twistlm prepare")),
    "unknown dtype": extract("--ratio", "2/4", "--dtype", "int3", parts=("--dtype 'int3'",
        "bfloat16")),
    "unknown override": extract("--ratio", "2/4", "blocks.nffn=3", parts=("blocks.nffn", "n_ffn")),
    "over a run": extract("--ratio", "2/4", "-o", "run", parts=("run", "is no ticket"),
        process=True),
    "over a file": extract("--ratio", "2/4", "-o", "c.toml", parts=("c.toml", "is no ticket")),
    "ticket below a file": extract("--ratio", "2/4", "-o", "c.toml/t", parts=("c.toml",)),
    # certifying
    "too few draws": Case(("eval", "run", "--certify", "--ratio", "2/4", "--n", "89", "-o",
        "made"), ("n = 89", "at least 90"), process=True),
    "certify all tickets": Case(("eval", "run", "--certify", "--coverage", "1"), ("coverage = 1.0",
        "between 0 and 1")),
    "certify a bad ratio": Case(("eval", "run", "--certify", "--ratio", "5/12"), ("'5/12'",
        "1/4, 2/4, 3/4, 4/4")),
    "certify a ticket": Case(("eval", "ticket", "--certify"), ("ticket", "cut already"),
        make_ticket),
    # losing nodes
    "more nodes than blocks": Case(("lab", "drop", "run", "--nodes", "5"), ("--nodes 5",
        "4 attn blocks")),
    "nobody is left": Case(("lab", "drop", "run", "--nodes", "3", "--lose", "3"), ("--lose 3",
        "--nodes 3")),
    "drop nothing": Case(("lab", "drop", "blocks.n_ffn=4"), ("at least one parent",)),
    "drop with a bad override": Case(("lab", "drop", "run", "blocks.n_fn=4"), ("blocks.n_fn",
        "blocks.n_ffn")),
    # writing
    "generate from nowhere": Case(("generate", "nowhere", "--prompt", "w1"), ("nowhere",
        "could not be loaded")),
    "generate after too long a prompt": Case(("generate", "run", "--prompt", "w1 " * 16),
        ("16 positions", "takes 16", "0 tokens fit")),
    "generate too much": Case(("generate", "run", "--prompt", "w1 w2", "--max-new-tokens", "15"),
        ("16 positions", "takes 2", "14 tokens fit", "--max-new-tokens 15"), process=True),
    "generate from nothing": Case(("generate", "run", "--prompt", ""), ("prompt is empty",)),
    "generate without a tokenizer": Case(("generate", LAST_RUN, "--prompt", "w1"),
        ("tokenizer.json",), put_weights_of(n_embd=16)),
    "draft from nothing": Case(("lab", "draft", "run", "ticket"), ("--prompt", "--data"),
        make_ticket),
    "draft for another vocabulary": Case(("lab", "draft", "run", "wide-model", "--data", "tokens"),
        ("wide-model", "70", "64"), lambda here: save_gpt2(here / "wide-model", vocab_size=70)),
    # bench
    "bench in an unknown runtime": Case(("lab", "bench", "deploy", "run", "--runtime", "tpu"),
        ("--runtime tpu", "torch")),
    "bench of too long a prompt": Case(("lab", "bench", "deploy", "run", "--ratio", "2/4",
        "--prefill", "9", "--decode", "8"), ("--prefill 9", "16 positions", "1..8")),
    "bench of too long a text": Case(("lab", "bench", "deploy", "run", "--ratio", "2/4"),
        ("--decode 32", "16 positions")),
    "bench into a folder that exists": Case(("lab", "bench", "deploy", "run", "--ratio", "2/4",
        "-o", "run"), ("--out run", "exists")),
    "bench of a size that is none": Case(("lab", "bench", "train", "c.toml", "--sizes", "5/12"),
        ("'5/12'", "1/4, 2/4, 3/4, 4/4")),
    # many machines
    "a head among Ray's workers": Case(("node", "--head", "--port", "10050"), ("--port 10050",
        "10002 to 19999")),
    "join half an address": Case(("node", "--join", "here"), ("--join 'here'", "host:port")),
    # preparing
    "empty text": tokenize("a.txt", b"", ("a.txt", "empty"), process=True),
    "binary text": tokenize("a.txt", bytes(range(256)) * 9, ("a.txt", "UTF-8"), process=True),
    "NUL bytes": tokenize("a.txt", b"words\0words", ("a.txt", "binary")),
    "no such text": tokenize("a.txt", None, ("a.txt", "no such file")),
    "unknown kind of text": tokenize("a.pdf", b"%PDF", ("a.pdf", ".txt", ".jsonl", ".parquet")),
    "bad JSON line": tokenize("a.jsonl", b'{"text": "a"}\n{oops\n', ("a.jsonl, line 2",)),
    "no parquet": tokenize("a.parquet", b"no parquet", ("a.parquet", "not a Parquet")),
    "no such eos": tokenize("a.txt", b"w1", ("--eos", "'<end>'"), "--eos", "<end>"),
    "no such tokenizer": tokenize("a.txt", b"w1", ("gone.json",), "--tokenizer", "gone.json"),
    "token file below a file": tokenize("a.txt", b"w1", ("c.toml",), "-o", "c.toml/new",
        process=True),
    # planning
    "plan with a bad K": Case(("plan", "demo", "blocks.k_attn=2"), ("blocks.k_attn = 2", "3..12")),
    "plan without tokens": Case(("plan", "wiki-gpt2"), ("data/wiki/train.bin", "twistlm prepare")),
    "plan of an unknown type": Case(("plan", "demo", "model.type=gpt7"), ("model.type", "'gpt7'")),
    "plan without heads": Case(("plan", "demo", "model.config.n_head=0"), ("model.config",)),
    "plan below a file": Case(("plan", "demo", "--json", "c.toml/plan.json"),
        ("c.toml/plan.json",)),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.process])
def test_mistake(here, monkeypatch, capsys, name):
    case = CASES[name]
    case.prepare(here)
    before = snapshot(here)
    check_refusal(*in_process(monkeypatch, capsys, *case.args), case.parts)
    without_empty_folders = {k: v for k, v in snapshot(here).items() if k != "made"}
    assert without_empty_folders == before


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.process])
def test_mistake_in_a_process_of_its_own(here, preloaded, name):
    """The same contract where nothing of pytest is around: our imports, warnings, exit code."""
    case = CASES[name]
    case.prepare(here)
    before = snapshot(here)
    check_refusal(*preloaded.start(*case.args, cwd=here).communicate(60), case.parts)
    assert {k: v for k, v in snapshot(here).items() if k != "made"} == before


@pytest.mark.parametrize("command", ["eval run", "demo", "lab compare -o made"])
def test_more_draws_than_anyone_waits_for(command, monkeypatch, capsys):
    """Refused by the option itself, before anything is read."""
    args = [*command.split(), "--n", str(10**12)]
    code, out, err = in_process(monkeypatch, capsys, *args)
    assert code == 2
    assert "'--n': Input should be less than or equal to 1000000" in out + err


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (("train", "demo", "train.lrr=1"), ("train.lrr", "did you mean train.lr?", "Legal keys")),
        (("plan", "papper"), ("'papper'", "demo", "paper")),
        (("lab", "bench", "train", "demo", "train.lr=-1"), ("train.lr = -1",)),
        (("export", "nowhere", "--to", "pdf", "-o", "x"), ("--to pdf", "gguf or onnx")),
    ],
)
def test_mistakes_that_need_no_torch_are_told_before_it_is_imported(tmp_path, args, parts):
    """Importing torch takes seconds, and in these processes it cannot be imported at all."""
    check_refusal(*as_process(*args, cwd=tmp_path, without_torch=True), parts)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["train", "prepare"])
def test_no_write_permission(here, monkeypatch, capsys, command):
    locked = here / "locked"
    locked.mkdir(mode=0o500)
    if os.access(locked, os.W_OK):
        pytest.skip("root writes where it likes")
    case = {
        "train": train("run.out=locked/run", parts=("locked",)),
        "prepare": tokenize("a.txt", b"w1 w2", ("locked",), "-o", "locked/new"),
    }[command]
    case.prepare(here)
    before = snapshot(here)
    check_refusal(*in_process(monkeypatch, capsys, *case.args), case.parts)
    assert snapshot(here) == before


# ---------------------------------------------------------------- damaged, but not lost


def test_resume_falls_back_and_says_so(here):
    """The newest checkpoint is refused by name, the one before it serves, the bits come out the
    same.
    """
    good = (here / LAST_RUN / "model.safetensors").read_bytes()
    flip_bit(here / LAST_RUN / "model.safetensors")
    code, out, err = as_process("train", "c.toml", "--resume", cwd=here)
    assert (code, err) == (0, "")
    assert re.search(r"skipped: .*round-000003 is damaged: model\.safetensors", out)
    assert re.search(r"resuming from .*round-000002", out)
    assert (here / LAST_RUN / "model.safetensors").read_bytes() == good
    lines = (here / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2, 3]


def test_a_run_folder_is_a_start_and_a_teacher(here, monkeypatch, capsys):
    """It stands for its newest checkpoint that verifies: the same bits as that checkpoint's own
    path.
    """
    flip_bit(here / LAST_RUN / "model.safetensors")
    made = []
    for i, start in enumerate(("run", "run/checkpoints/round-000002")):
        words = (f"model.weights={start}", f"train.teacher={start}", f"run.out=fresh{i}")
        args = ("train", "c.toml", *words, "train.rounds=1")
        code, _, err = in_process(monkeypatch, capsys, *args)
        assert (code, err) == (0, "")
        made.append((here / f"fresh{i}" / FIRST / "model.safetensors").read_bytes())
        assert checkpoint.open_(here / f"fresh{i}").config.model.weights.endswith("round-000002")
    assert made[0] == made[1]
    args = ("train", "c.toml", *words[:1], "run.out=plain", "train.rounds=1")
    assert in_process(monkeypatch, capsys, *args)[0] == 0  # the teacher was heard
    assert (here / "plain" / FIRST / "model.safetensors").read_bytes() != made[0]


def test_resume_with_other_blocks(here, monkeypatch, capsys):
    """Either it goes on with the new blocks, counted anew, or it says why not."""
    code, out, err = in_process(
        monkeypatch,
        capsys,
        "train",
        "c.toml",
        "--resume",
        "train.rounds=4",
        "blocks.n_ffn=8",
        "blocks.k_ffn=4",
    )
    if code:
        check_refusal(code, out, err, ("cannot resume", "blocks.n_ffn", "8"))
        return
    held = checkpoint.verify(here / "run/checkpoints/round-000004").manifest["held"]
    assert {len(counts) for name, counts in held.items() if name.endswith("ffn")} == {8}


def test_eval_of_a_run_with_a_damaged_newest_checkpoint_says_so(here, monkeypatch, capsys):
    """A number of round 2 must not pass for one of round 3: refuse, or name what was skipped."""
    flip_bit(here / LAST_RUN / "model.safetensors")
    _, out, err = in_process(monkeypatch, capsys, *evaluate(parts=()).args)
    assert "round-000003" in re.sub(r"\s", "", out + err)  # the console folds long lines


def no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def test_eval_tells_the_truth_about_a_good_run(here, monkeypatch, capsys):
    """The rows above fail for their own reason: with nothing wrong, the same commands work."""
    args = (*evaluate(parts=()).args, "--json", "scores.json")
    code, out, err = in_process(monkeypatch, capsys, *args)
    assert (code, err) == (0, "")
    assert "perplexity" in out
    # one subnet has no standard deviation: NaN would break every strict reader
    scores = json.loads((here / "scores.json").read_text(), parse_constant=no_constant)
    assert scores["round"] == N_ROUNDS
    code, out, err = in_process(
        monkeypatch, capsys, "train", "c.toml", "run.out=fresh", "train.rounds=1"
    )
    assert (code, err) == (0, "")
    assert (here / "fresh" / FIRST / "model.safetensors").is_file()
    case = tokenize("a.txt", b"w1 w2 w63", ())
    case.prepare(here)
    code, out, err = in_process(monkeypatch, capsys, *case.args)
    assert (code, err) == (0, "")
    assert (here / "made/new.bin").read_bytes() == bytes([1, 0, 2, 0, 63, 0])


@pytest.mark.parametrize("name", ["odd[red]name", "odd[/red]name", "/".join(["long" * 20] * 3)])
def test_paths_are_printed_as_they_are(here, monkeypatch, capsys, name):
    """A path is data: no markup in it, and on one line, or it cannot be copied into the next
    command.
    """
    code, out, err = in_process(
        monkeypatch, capsys, "train", "c.toml", f"run.out={name}", "train.rounds=1"
    )
    assert (code, err) == (0, "")
    assert f"{name}/{FIRST}" in out
    assert (here / name / FIRST).is_dir()


def test_tokenizer_of_a_gguf_file(here, monkeypatch, capsys):
    """The help offers gguf:FILE; a missing file (or library) is told as that, not as a hub name."""
    case = tokenize("a.txt", b"w1", ("gguf:gone.gguf",), "--tokenizer", "gguf:gone.gguf")
    case.prepare(here)
    code, out, err = in_process(monkeypatch, capsys, *case.args)
    check_refusal(code, out, err, case.parts)
    assert "no such file" in err or "[gguf]" in err


# ---------------------------------------------------------------- other ways to end


def test_a_loss_that_explodes_is_no_user_error(here, monkeypatch, capsys):
    """Exit code 1, one sentence that names the knobs, and no checkpoint of garbage."""
    code, out, err = in_process(
        monkeypatch, capsys, "train", "c.toml", "run.out=fresh", "train.lr=1e30", "train.clip=0"
    )
    assert code == 1
    assert err.startswith("error: ")
    assert len(err.strip().splitlines()) == 1
    assert "train.lr = 1e+30" in err
    assert "train.clip" in err
    assert "Traceback" not in out + err
    assert not list((here / "fresh").glob("checkpoints/*"))


def test_no_memory_left(here, monkeypatch, capsys):
    """One sentence that says how much was missing and what makes it less; a GPU's error is told
    apart.
    """

    def fill(*args, **kwargs):
        return torch.empty(1 << 60, dtype=torch.uint8)  # no machine has it

    monkeypatch.setattr(Local, "round", fill)
    code, out, err = in_process(monkeypatch, capsys, "train", "c.toml", "run.out=fresh")
    assert (code, len(err.strip().splitlines())) == (1, 1)
    assert err.startswith(f"error: this machine has no memory left for {1 << 60} bytes: lower ")
    assert all(part in err for part in ("train.batch", "twistlm plan", "--resume"))
    assert "Traceback" not in out + err
    told = "CUDA out of memory. Tried to allocate 3.07 GiB. GPU 0 has a total capacity of 139 GiB"
    assert out_of_memory(torch.OutOfMemoryError(told)).startswith(
        "the GPU has no memory left for 3.07 GiB"
    )
    assert not out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


def test_ctrl_c(here, monkeypatch, capsys):
    """Says how to go on, with the shell's own exit code for it."""

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(Local, "round", stop)
    code, out, err = in_process(monkeypatch, capsys, "train", "c.toml", "run.out=fresh")
    assert "--resume" in err
    assert code == 130
    assert "Traceback" not in out + err


# ---------------------------------------------------------------- help


def names(app) -> list[str]:
    """`train`, `bench deploy`, ...: every command, those of groups too."""
    own = [command.name or command.callback.__name__ for command in app.registered_commands]
    groups = app.registered_groups
    return own + [f"{g.name} {name}" for g in groups for name in names(g.typer_instance)]


COMMANDS = names(cli.app)

HELP = """
import contextlib, io, sys
from twistlm import cli
for args in ([], *(name.split() for name in sys.argv[1:])):
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        try:
            cli.app([*args, "--help"])
        except SystemExit as stop:
            assert not stop.code, (args, stop.code)
    shown = text.getvalue()
    assert "Usage" in shown, args
    assert not args or f"twistlm {' '.join(args)}" in shown.split("Example")[1], args
heavy = {"torch", "transformers", "numpy", "tokenizers", "pyarrow"} & set(sys.modules)
assert not heavy, heavy
print("fine")
"""


def test_help_is_light_and_has_examples():
    """Every command's help ends with examples of that command, and none of them imports torch."""
    assert {"train", "eval", "prepare", "plan", "demo", "extract", "lab bench deploy"} <= set(
        COMMANDS
    )
    env = os.environ | {"COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-c", HELP, *COMMANDS], env=env, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


def test_help_of_the_command_itself(tmp_path):
    code, out, err = as_process("--help", cwd=tmp_path)
    assert (code, err) == (0, "")
    assert all(name.split()[0] in out for name in COMMANDS)
    code, out, err = as_process("train", "--help", cwd=tmp_path)
    assert (code, err) == (0, "")
    assert "--resume" in out
    assert "twistlm train demo" in out


def test_a_run_is_known_from_any_folder(here, tmp_path_factory, monkeypatch, capsys):
    """Its tokens lie beside it, and its own config goes on; a preset's would be another model."""
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    code, out, err = in_process(
        monkeypatch, capsys, "eval", str(here / "run"), "--ratio", "2/4", "--n", "1"
    )
    assert (code, err) == (0, "")
    assert "perplexity on" in out
    shutil.rmtree(here / LAST_RUN)
    code, out, err = in_process(monkeypatch, capsys, "train", str(here / "run"), "--resume")
    assert (code, err) == (0, "")
    assert (here / LAST_RUN).is_dir()
    code, _, err = in_process(
        monkeypatch, capsys, "train", "demo", "--resume", f"run.out={here / 'run'}"
    )
    assert code == 2
    assert f"twistlm train {here / 'run'} --resume" in err
    (here / "tokens.bin").unlink()
    code, _, err = in_process(monkeypatch, capsys, "eval", str(here / "run"), "--ratio", "2/4")
    assert code == 2
    assert "give --data STEM" in err
