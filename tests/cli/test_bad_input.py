"""A user's mistake is one sentence, exit code 2 and nothing half-written; --help is instant."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import as_process, check_refusal, in_process, snapshot, toml
from conftest import VOCAB, tiny_table, write_words
from transformers import GPT2Config, GPT2LMHeadModel

import twistlm
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
FIRST, LAST = "checkpoints/round-000001", f"run/checkpoints/round-{N_ROUNDS:06d}"
TEXTS = {
    "a.txt": b"w1 w2 w63",
    "empty.txt": b"",
    "binary.txt": bytes(range(256)) * 9,
    "nul.txt": b"words\0words",
    "a.pdf": b"%PDF",
    "a.jsonl": b'{"text": "a"}\n{oops\n',
    "a.parquet": b"no parquet",
    "b.toml": b"lr = = 3",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Texts, tokens, a finished run, a ticket of it and two models, copied for every case."""
    folder = tmp_path_factory.mktemp("home")
    names = [f"w{i}" for i in range(VOCAB)]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # all paths are relative: the copies are complete
        write_words("tokens", names, 1600)
        write_words("other", names[::-1], 800)  # the same size, another meaning
        write_words("wide", [f"w{i}" for i in range(VOCAB + 6)], 800)
        write_words("short", names, 10)
        for name, content in TEXTS.items():
            Path(name).write_bytes(content)
        Path("empty").mkdir()
        table = tiny_table("tokens", Path("run"), train={"rounds": N_ROUNDS}, run={"keep": 9})
        cfg = config.load(toml(folder / "c.toml", table))
        rounds.train(cfg, quiet=True)
        parent = parents.open_parent(Path("run"), "cpu")
        widths = {group.name: 2 for group in parent.block_map.groups}
        blueprint = generator.for_deployment(parent.block_map, widths, seed=0)
        deploy.save_ticket(parent, blueprint, Path("ticket"))
        huggingface.load(cfg.model, 0).save_pretrained("plain")
        wide = GPT2Config(n_embd=16, n_head=4, n_layer=1, n_positions=16, vocab_size=VOCAB + 6)
        GPT2LMHeadModel(wide).save_pretrained("wide-model")
    return folder


@pytest.fixture
def here(home, tmp_path, monkeypatch) -> Path:
    """A copy of everything, and the working directory of the command."""
    shutil.copytree(home, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def call(here, monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    return lambda *words: in_process(monkeypatch, capsys, *words)


# ---------------------------------------------------------------- damages


def truncate(name: str) -> None:
    data = Path(name).read_bytes()
    Path(name).write_bytes(data[: len(data) // 2])


def flip_bit(name: str) -> None:
    data = bytearray(Path(name).read_bytes())
    data[len(data) // 2] ^= 0b100
    Path(name).write_bytes(data)


def damage_all() -> None:
    flip_bit("run/checkpoints/round-000001/model.safetensors")
    truncate("run/checkpoints/round-000002/moments.safetensors")
    truncate(f"{LAST}/checkpoint.json")


def put_weights_of(**attributes: int) -> None:
    """The newest checkpoint with weights of another model and hashes that agree."""
    saved = checkpoint.verify(Path(LAST))
    cfg = saved.config
    model = huggingface.load(replace(cfg.model, config=cfg.model.config | attributes), seed=0)
    block_map = families.partition(model, cfg.blocks)
    state, shapes = huggingface.state(model), huggingface.shapes(model)
    kind = {"carry": True, "outer": False, "device": torch.device("cpu")}
    central = create(state, shapes, block_map, **kind)
    progress, template = checkpoint.progress_of(saved, block_map), checkpoint.template(saved)
    checkpoint.save(Path("run/checkpoints"), central, progress, cfg, template, None, keep=9)


BEFORE: dict[str, Callable[[], object]] = {
    "cut tokens": lambda: truncate("tokens.bin"),
    "cache": lambda: write_cache(open_tokens("tokens"), "plain", 4, 8, "cpu", quiet=True),
    "other words": lambda: shutil.copy("other.tokenizer.json", "plain/tokenizer.json"),
    "no words": lambda: Path("plain/tokenizer.json").write_text("{}"),
    "all damaged": damage_all,
    "flipped bit": lambda: flip_bit(f"{LAST}/model.safetensors"),
    "cut weights": lambda: truncate(f"{LAST}/model.safetensors"),
    "cut manifest": lambda: truncate(f"{LAST}/checkpoint.json"),
    "no moments": lambda: Path(LAST, "moments.safetensors").unlink(),
    "other shape": lambda: put_weights_of(n_embd=32),
    "more layers": lambda: put_weights_of(n_layer=4),
    "no tokenizer": lambda: put_weights_of(),
    "no run": lambda: shutil.rmtree("run"),
}
COMMANDS = {  # the first word of a row; others are typed as they stand
    "train": "train c.toml run.out=fresh",
    "resume": "train c.toml --resume",
    "eval": "eval --n 1 --device cpu --ratio 2/4",
    "extract": "extract -o made/t --device cpu",
    "prepare": "prepare -o made/new --tokenizer tokens.tokenizer.json",
    "teach": "prepare -o tokens --teacher plain --seq-len 16 --device cpu",
    "heal": "heal ticket -o made/t",
    "twistlm": "",
}
WORDS = {
    "LAST": LAST,
    "PLAIN": "blocks.n_ffn=4 blocks.shared_first=1 blocks.shared_last=0",
    "PROMPT": "w1 " * 16,
}
# [what happens before] command -> parts of the sentence that refuses it
MISTAKES = """
# the config
train train.lrr=1 -> train.lrr | did you mean train.lr? | Legal keys | interval
train trian.lr=1 -> unknown key trian | did you mean train?
train train.rounds=many -> train.rounds | 'many' | int
train train.schedule=linear -> train.schedule | 'linear' | 'cosine'
train train.lr -> 'train.lr' | section.key=value
train train.lr=-1 -> train.lr = -1
twistlm train papper -> 'papper' | demo | paper
twistlm train b.toml -> b.toml | line 1
train 'train.outer=nesterov(2)' -> train.outer | 'nesterov(2)' | nesterov(lr, momentum)
train run.seed=-1 -> run.seed | -1
train train.eps=-1 -> train.eps | -1
train train.rounds=0 train.epochs=inf -> train.epochs | inf
# blocks
train blocks.k_attn=1 -> blocks.k_attn = 1 | N = 4 | S = 3 | 2..4
train blocks.k_ffn=5 -> blocks.k_ffn = 5 | 2..4
train blocks.k_ffn=[3,1] -> blocks.k_ffn = 1 | 2..4
train blocks.k_attn=[] -> blocks.k_attn | 1..4
train blocks.k_attn=[2,3] blocks.k_ffn=[2,3,4] blocks.widths=worker -> blocks.k_attn = [2, 3] | 3
train blocks.common_attn=[4] -> blocks.common_attn = [4] | 0..3
train blocks.n_ffn=5 -> blocks.n_ffn | 5 | 64 | 1, 2, 4, 8, 16, 32, 64
train blocks.shared_first=3 -> blocks.shared_first = 3 | 0..2
# the model
train model.type=gpt7 -> model.type | 'gpt7'
train model.config.n_layers=2 -> model.config.n_layers | gpt2
train model.config.n_layer=two -> model.config | n_layer | 'two'
train model.config.n_head=5 -> model.config | 16 | 5
train model.config.n_head=0 -> model.config
train model.config.n_layer=0 -> layers
train model.config.vocab_size=-1 -> model.config | -1
train model.config.activation_function=swosh -> model.config | swosh
train model.weights=ticket -> 'ticket' | twistlm heal
train model.weights=nobody/nothing -> model.weights | 'nobody/nothing'
# the data
train data.train=nowhere -> nowhere.bin | twistlm prepare
train data.valid=builtin:x -> data.valid | 'builtin:x' | builtin:python-docs
train data.train=short -> short | 10 tokens | data.seq_len = 16
train data.valid=short -> short | 10 tokens | data.seq_len = 16
train data.seq_len=32 -> data.seq_len | 32 | 16
train data.train=wide data.valid=wide -> wide | 69 | 64 | tokenizer does not match
train data.valid=other -> other | another tokenizer
[cut tokens] train -> tokens.bin | 1600 bytes | 1600 tokens of 2
# a teacher's cache
train train.teacher=cache -> tokens.teacher.bin | twistlm prepare -o tokens --teacher
[cache] train train.teacher=cache -> teacher.json | sequences of 8 tokens | data.seq_len is 16
twistlm prepare -o tokens -> nothing to prepare | --teacher
twistlm prepare -o nowhere --teacher plain -> nowhere.bin | twistlm prepare
teach --top 65 -> --top 65 | 1..64
teach --top 0 -> --top 0 | 1..64
teach --seq-len 17 -> --seq-len 17 | 2..16
[other words] teach -> --teacher plain | its tokenizer is not that of tokens
[no words] teach -> --teacher plain | plain/tokenizer.json is not a tokenizer.json
teach -o wide -> wide | 69 | 64 | tokenizer does not match
teach --teacher no/such/folder -> --teacher 'no/such/folder'
# the run
train train.rounds=0 train.epochs=0 -> train.rounds = 0 | train.epochs = 0 | 100
train train.rounds=0 train.epochs=0.1 -> train.epochs = 0.1 | 100
train run.variant=hybrid -> run.variant = 'hybrid' | torchrun --nproc-per-node 3
train run.variant=true -> run.variant = 'true' | torchrun --nproc-per-node 4
train run.device=tpu -> run.device = 'tpu' | auto, cpu, cuda
train run.device=cuda:99 -> run.device = 'cuda:99' | CUDA devices
train run.eval_ratios=5/12 -> run.eval_ratios: | '5/12' | 1/4, 2/4, 3/4, 4/4
train train.teacher= -> train.teacher = '' | 'none'
train model.weights= -> model.weights = '' | 'random'
train run.out=c.toml/run -> c.toml
twistlm train c.toml -> run.out = 'run' | --resume | another folder
# resuming
resume model.config.n_embd=32 -> cannot resume | model.config | 'n_embd': 16 | 'n_embd': 32
resume train.moments=reset -> cannot resume | train.moments was 'carry' | 'reset'
resume data.train=other -> cannot resume | data.train | 'other'
resume data.valid=other -> cannot resume | data.valid
resume data.seq_len=8 -> cannot resume | data.seq_len was 16 | 8
resume train.method=dense -> cannot resume | train.method was 'twist'
resume 'train.outer=nesterov(0.7, 0.6)' -> cannot resume | train.outer was 'none'
resume train.rounds=1 -> train.rounds | 1 | 3
resume run.seed=5 -> cannot resume | run.seed was 0 | 5
[all damaged] resume -> run/checkpoints | round-000003 | checkpoint.json
[all damaged] train model.weights=run -> run holds no valid checkpoint | round-000003
resume run.out=c.toml/run -> c.toml
# evaluating
eval nowhere -> nowhere | no valid checkpoint
eval empty -> empty | no valid checkpoint
[flipped bit] eval LAST -> LAST | damaged | model.safetensors
[cut weights] eval LAST -> LAST | damaged | model.safetensors
[cut manifest] eval LAST -> LAST | checkpoint.json
[no moments] eval LAST -> LAST | moments.safetensors is missing
[all damaged] eval run -> run | no valid checkpoint | round-000003
[other shape] eval LAST -> LAST | transformer.wte.weight | (64, 32)
[more layers] eval LAST -> LAST | transformer.h.3
eval run --ratio 5/12 -> '5/12' | 1/4, 2/4, 3/4, 4/4
eval run --ratio half -> 'half' | 6/12
eval run --ratio 0/4 -> '0/4' | 1/4, 2/4, 3/4, 4/4
eval run --ratio attn=2/4 -> 'attn=2/4' | ffn
eval run --ratio mlp=2/4 -> 'mlp=2/4' | attn | ffn
eval run --ratio attn=2/4,3/4 -> 'attn=2/4,3/4' | attn=2/3,ffn=6/12
eval run --data other -> other | another tokenizer
eval run --data wide -> wide | 69 | 64
eval run --data short -> short | 10 tokens | 16
eval run --data nowhere -> nowhere.bin | twistlm prepare
eval run --device tpu -> device | 'tpu' | auto, cpu, cuda
eval run --json c.toml/scores.json -> c.toml/scores.json
twistlm eval ticket --ratio 2/4 -> ticket | cut already
[no run] twistlm eval ticket -> ticket | --data
twistlm eval ticket --data other -> other | another tokenizer
twistlm eval ticket --data wide -> wide | 69 | 64
eval run data.seq_len=17 -> data.seq_len = 17 | 16 positions
twistlm eval run --certify data.seq_len=17 -> data.seq_len = 17 | 16 positions
twistlm lab drop run data.seq_len=17 -> data.seq_len = 17 | 16 positions
twistlm lab compare --parent-twist run -o made --methods '' data.seq_len=17 -> seq_len = 17 | 16
twistlm eval ticket --data tokens data.seq_len=17 -> data.seq_len = 17 | 16 positions
# healing
heal --tokens 1k data.seq_len=17 -> data.seq_len = 17 | 16 positions
heal --tokens 0 -> --tokens 0 | at least one
heal --tokens 1k --teacher nowhere -> train.teacher = 'nowhere' | could not be loaded
# extracting
extract nowhere --ratio 2/4 -> nowhere | no valid checkpoint
extract c.toml --ratio 2/4 -> c.toml | no valid checkpoint
extract ticket --ratio 2/4 -> ticket | cut already
[flipped bit] extract LAST --ratio 2/4 -> model.safetensors | sha256
extract run -> give --ratio, --params, --size, --latency or --memory
extract run --params 85Q -> --params '85Q' | 85M | units: k, m, b, g
extract run --size '60 apples' -> --size '60 apples' | 60MB
extract run --latency 12 -> --latency '12' | units: us, ms, s
extract run --ratio 5/12 -> '5/12' | 1/4, 2/4, 3/4, 4/4
extract run --ratio attn=1,ffn=1,ffn.0=1/4 -> 'ffn.0' | layer that is cut
extract run --params 1k -> --params 1k is impossible | 6,376 parameters
extract run --size 1kB -> --size 1kB is impossible | bytes
extract run --latency 1us -> --latency 1us is impossible | ms
extract run --ratio 2/4 --pick luck -> --pick 'luck' | best-of:N | mask-fisher
extract run --ratio 2/4 --pick best-of:0 -> --pick 'best-of:0'
extract run --ratio 2/4 --pick importance:obd -> 'importance:obd' | taylor
extract plain --ratio 2/4 --pick best-of:3 PLAIN -> plain | give --data STEM
extract plain --ratio 2/4 --pick importance PLAIN -> plain | give --data STEM
extract run --ratio 2/4 --data other -> other | another tokenizer
extract run --ratio 2/4 --data nowhere -> nowhere.bin | twistlm prepare
extract run --ratio 2/4 --dtype int3 -> --dtype 'int3' | bfloat16
extract run --ratio 2/4 blocks.nffn=3 -> blocks.nffn | n_ffn
extract run --ratio 2/4 -o run -> run | is no ticket
extract run --ratio 2/4 -o c.toml -> c.toml | is no ticket
extract run --ratio 2/4 -o c.toml/t -> c.toml
# certifying
twistlm eval run --certify --ratio 2/4 --n 89 -o made -> n = 89 | at least 90
twistlm eval run --certify --coverage 1 -> coverage = 1.0 | between 0 and 1
twistlm eval run --certify --ratio 5/12 -> '5/12' | 1/4, 2/4, 3/4, 4/4
twistlm eval ticket --certify -> ticket | cut already
# losing nodes
twistlm lab drop run --nodes 5 -> --nodes 5 | 4 attn blocks
twistlm lab drop run --nodes 3 --lose 3 -> --lose 3 | --nodes 3
twistlm lab drop blocks.n_ffn=4 -> at least one parent
twistlm lab drop run blocks.n_fn=4 -> blocks.n_fn | blocks.n_ffn
# writing
twistlm generate nowhere --prompt w1 -> nowhere | could not be loaded
twistlm generate run --prompt 'PROMPT' -> 16 positions | takes 16 | 0 tokens fit
twistlm generate run --prompt 'w1 w2' --max-new-tokens 15 -> 16 positions | takes 2 | 14 tokens fit
twistlm generate run --prompt '' -> prompt is empty
[no tokenizer] twistlm generate LAST --prompt w1 -> tokenizer.json
twistlm lab draft run ticket -> --prompt | --data
twistlm lab draft run wide-model --data tokens -> wide-model | 70 | 64
# bench
twistlm lab bench deploy run --runtime tpu -> --runtime tpu | torch
twistlm lab bench deploy run --ratio 2/4 --prefill 9 --decode 8 -> --prefill 9 | 16 positions | 1..8
twistlm lab bench deploy run --ratio 2/4 -> --decode 32 | 16 positions
twistlm lab bench deploy run --ratio 2/4 -o run -> --out run | exists
twistlm lab bench train c.toml --sizes 5/12 -> '5/12' | 1/4, 2/4, 3/4, 4/4
# many machines
twistlm node --head --port 10050 -> --port 10050 | 10002 to 19999
twistlm node --join here -> --join 'here' | host:port
# preparing
prepare empty.txt -> empty.txt | empty
prepare binary.txt -> binary.txt | UTF-8
prepare nul.txt -> nul.txt | binary
prepare gone.txt -> gone.txt | no such file
prepare a.pdf -> a.pdf | .txt | .jsonl | .parquet
prepare a.jsonl -> a.jsonl, line 2
prepare a.parquet -> a.parquet | not a Parquet
prepare a.txt --eos '<end>' -> --eos | '<end>'
prepare a.txt --tokenizer gone.json -> gone.json
prepare a.txt --tokenizer gguf:gone.gguf -> gguf:gone.gguf | no such file
prepare a.txt -o c.toml/new -> c.toml
# planning
twistlm plan demo blocks.k_attn=2 -> blocks.k_attn = 2 | 3..12
twistlm plan wiki-gpt2 -> data/wiki/train.bin | twistlm prepare
twistlm plan demo model.type=gpt7 -> model.type | 'gpt7'
twistlm plan demo model.config.n_head=0 -> model.config
twistlm plan demo --json c.toml/plan.json -> c.toml/plan.json
"""
ROWS = [row for row in MISTAKES.splitlines() if row and not row.startswith("# ")]


def typed(row: str) -> tuple[list[str], list[str]]:
    """Do what comes before; the words of the command, and the parts of the sentence."""
    for word, meaning in WORDS.items():
        row = row.replace(word, meaning)
    command, _, parts = row.partition(" -> ")
    if command.startswith("["):
        before, _, command = command[1:].partition("] ")
        BEFORE[before]()
    first, *rest = shlex.split(command)
    return [*COMMANDS[first].split(), *rest], [part.strip() for part in parts.split(" | ")]


@pytest.mark.parametrize("row", ROWS)
def test_mistake(here, call, row):
    words, parts = typed(row)
    before = snapshot(here)
    check_refusal(*call(*words), parts)
    assert {k: v for k, v in snapshot(here).items() if k != "made"} == before


def test_a_ticket_is_no_start_where_its_classes_are_registered(here, call):
    twistlm.register()
    words, parts = typed("train model.weights=ticket -> 'ticket' | twistlm heal")
    check_refusal(*call(*words), parts)


def test_mistakes_in_processes_of_their_own(here, tmp_path_factory):
    """Where nothing of pytest is around: our imports, warnings, exit code. What needs no torch is
    told before it is imported, which takes seconds; in these processes it cannot be imported.
    """
    words, parts = typed("train model.weights=ticket -> 'ticket' | twistlm heal")
    check_refusal(*as_process(*words, cwd=here), parts)
    empty = tmp_path_factory.mktemp("empty")
    for row in (
        "twistlm train demo train.lrr=1 -> train.lrr | did you mean train.lr? | Legal keys",
        "twistlm plan papper -> 'papper' | demo | paper",
        "twistlm lab bench train demo train.lr=-1 -> train.lr = -1",
        "twistlm export nowhere --to pdf -o x -> --to pdf | gguf or onnx",
    ):
        words, parts = typed(row)
        check_refusal(*as_process(*words, cwd=empty, without_torch=True), parts)
    assert not list(empty.iterdir())


@pytest.mark.parametrize("command", ["eval run", "demo", "lab compare -o made"])
def test_more_draws_than_anyone_waits_for(command, call):
    """Refused by the option itself, before anything is read."""
    code, out, err = call(*command.split(), "--n", str(10**12))
    assert code == 2
    assert "'--n': Input should be less than or equal to 1000000" in out + err


def test_no_write_permission(here, call):
    (here / "locked").mkdir(mode=0o500)
    if os.access(here / "locked", os.W_OK):
        pytest.skip("root writes where it likes")
    before = snapshot(here)
    for row in ("train run.out=locked/run -> locked", "prepare a.txt -o locked/new -> locked"):
        words, parts = typed(row)
        check_refusal(*call(*words), parts)
    assert snapshot(here) == before


# ---------------------------------------------------------------- nothing wrong, or not lost


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_serves(here, call):
    """To eval, to resume with the same bits, and as the start and teacher of another run."""
    good = (here / LAST / "model.safetensors").read_bytes()
    flip_bit(f"{LAST}/model.safetensors")
    _, out, err = call("eval", "run", "--n", "1", "--ratio", "2/4")
    assert "round-000003" in re.sub(r"\s", "", out + err)  # the console folds long lines
    made = {}
    for out, words in {
        "run": "model.weights=run train.teacher=run",
        "path": "model.weights=run/checkpoints/round-000002 train.teacher=run",
        "alone": "model.weights=run",
    }.items():
        words = f"train c.toml train.rounds=1 run.out=fresh/{out} {words}"
        assert call(*words.split())[::2] == (0, "")
        made[out] = (here / "fresh" / out / FIRST / "model.safetensors").read_bytes()
        weights = checkpoint.open_(here / "fresh" / out).config.model.weights
        assert weights.endswith("round-000002")
    assert made["run"] == made["path"] != made["alone"]  # the teacher was heard
    code, out, err = call("train", "c.toml", "--resume")
    assert (code, err) == (0, "")
    assert re.search(r"skipped: .*round-000003 is damaged: model\.safetensors", out)
    assert re.search(r"resuming from .*round-000002", out)
    assert (here / LAST / "model.safetensors").read_bytes() == good
    lines = (here / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2, 3]


def no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def test_with_nothing_wrong_the_same_commands_work(here, call):
    code, out, err = call(*typed("eval run --json scores.json -> ")[0])
    assert (code, err) == (0, "")
    assert "perplexity" in out
    # one subnet has no standard deviation: NaN would break every strict reader
    scores = json.loads((here / "scores.json").read_text(), parse_constant=no_constant)
    assert scores["round"] == N_ROUNDS
    assert call(*typed("prepare a.txt -> ")[0])[::2] == (0, "")
    assert (here / "made/new.bin").read_bytes() == bytes([1, 0, 2, 0, 63, 0])
    assert "100 sequences of 16 tokens" in call(*typed("teach --top 4 -> ")[0])[1]
    # blocks may change between rounds: they are counted anew
    words = ["train", "c.toml", "--resume", "train.rounds=4", "blocks.n_ffn=8", "blocks.k_ffn=4"]
    assert call(*words)[::2] == (0, "")
    held = checkpoint.verify(here / "run/checkpoints/round-000004").manifest["held"]
    assert {len(counts) for name, counts in held.items() if name.endswith("ffn")} == {8}


@pytest.mark.parametrize("name", ["odd[red]name", "odd[/red]name", "/".join(["long" * 20] * 3)])
def test_paths_are_printed_as_they_are(here, call, name):
    """A path is data: no markup, and on one line, to be copied into the next command."""
    code, out, err = call("train", "c.toml", f"run.out={name}", "train.rounds=1")
    assert (code, err) == (0, "")
    assert f"{name}/{FIRST}" in out
    assert (here / name / FIRST).is_dir()


def test_a_run_is_known_from_any_folder(here, call, tmp_path_factory, monkeypatch):
    """Its tokens lie beside it, and its own config goes on; a preset's would be another model."""
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    run = str(here / "run")
    code, out, err = call("eval", run, "--ratio", "2/4", "--n", "1")
    assert (code, err) == (0, "")
    assert "perplexity on" in out
    shutil.rmtree(here / LAST)
    assert call("train", run, "--resume")[::2] == (0, "")
    assert (here / LAST).is_dir()
    resumed = call("train", "demo", "--resume", f"run.out={run}")
    check_refusal(*resumed, (f"twistlm train {run} --resume",))
    (here / "tokens.bin").unlink()
    check_refusal(*call("eval", run, "--ratio", "2/4"), ("give --data STEM",))


# ---------------------------------------------------------------- other ways to end


def test_a_loss_that_explodes_is_no_user_error(here, call):
    """Exit code 1, one sentence that names the knobs, and no checkpoint of garbage."""
    code, out, err = call(*typed("train train.lr=1e30 train.clip=0 -> ")[0])
    assert (code, len(err.strip().splitlines())) == (1, 1)
    assert all(part in err for part in ("error: ", "train.lr = 1e+30", "train.clip"))
    assert "Traceback" not in out + err
    assert not list((here / "fresh").glob("checkpoints/*"))


def test_no_memory_left_and_ctrl_c(call, monkeypatch):
    """How much was missing and what makes it less, by a GPU's error, too; how to go on."""

    def fill(*args, **kwargs):
        return torch.empty(1 << 60, dtype=torch.uint8)  # no machine has it

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(Local, "round", fill)
    code, out, err = call("train", "c.toml", "run.out=fresh")
    assert (code, len(err.strip().splitlines())) == (1, 1)
    assert err.startswith(f"error: this machine has no memory left for {1 << 60} bytes: lower ")
    assert all(part in err for part in ("train.batch", "twistlm plan", "--resume"))
    assert "Traceback" not in out + err
    told = "CUDA out of memory. Tried to allocate 3.07 GiB. GPU 0 has a total capacity of 139 GiB"
    told = out_of_memory(torch.OutOfMemoryError(told))
    assert told.startswith("the GPU has no memory left for 3.07 GiB")
    assert not out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    monkeypatch.setattr(Local, "round", stop)
    code, out, err = call("train", "c.toml", "run.out=other")
    assert code == 130
    assert "--resume" in err
    assert "Traceback" not in out + err


# ---------------------------------------------------------------- help


def names(app) -> list[str]:
    """`train`, `lab bench deploy`, ...: every command, those of groups too."""
    own = [command.name or command.callback.__name__ for command in app.registered_commands]
    groups = app.registered_groups
    return own + [f"{g.name} {name}" for g in groups for name in names(g.typer_instance)]


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
    assert args or all(name.split()[0] in shown for name in sys.argv[1:])
heavy = {"torch", "transformers", "numpy", "tokenizers", "pyarrow"} & set(sys.modules)
assert not heavy, heavy
print("fine")
"""


def test_help_is_light_and_has_examples():
    """Every command's help ends with examples of that command, and none of them imports torch."""
    found = names(cli.app)
    assert {"train", "eval", "prepare", "plan", "demo", "lab bench deploy"} <= set(found)
    done = subprocess.run(
        [sys.executable, "-c", HELP, *found],
        env=os.environ | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr
