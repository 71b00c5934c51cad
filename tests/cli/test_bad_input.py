"""A user's mistake is one sentence, exit code 2 and nothing half-written."""

import json
import re
import shlex
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import as_process, check_refusal, in_process, reseal, snapshot, toml
from conftest import VOCAB, tiny_table, word_level, write_words
from families_table import save_random
from safetensors.torch import save_file
from tokenizers import Regex
from tokenizers.normalizers import Replace, Sequence
from tokenizers.pre_tokenizers import Split
from transformers import BloomConfig, BloomForCausalLM, GPT2Config, GPT2LMHeadModel

import twistlm
from twistlm import config
from twistlm.data.token_file import open_tokens
from twistlm.model import huggingface
from twistlm.system.device import out_of_memory
from twistlm.system.files import file_sha256
from twistlm.tickets import parent as parents
from twistlm.training import checkpoint, rounds
from twistlm.training.engines.local import Local
from twistlm.training.teacher import write_cache

N_ROUNDS = 3
LAST = f"run/checkpoints/round-{N_ROUNDS:06d}"
# attention is divided by a layer's number
MASKED = "blocks.masks=step blocks.mask_attn=2 blocks.mask_ffn=2"
NUMBERED = "model.config.scale_attn_by_inverse_layer_idx=true MASKED"
TASK = b'{"doc_id": 0, "request": {"context": "w1", "continuation": " w2"}}\n'
TEXTS = {
    "a.txt": b"w1 w2 w63",
    "empty.txt": b"",
    "binary.txt": bytes(range(256)) * 9,
    "nul.txt": b"words\0words",
    "a.pdf": b"%PDF",
    "mine.json": b'{"a": "user\'s"}',
    "mine2.bin": b"a user's",
    "mine3.tokenizer.json": word_level(["w1", "w2", "w63"]).to_str().encode(),
    "mine4.bin": b"a user's",
    "mine4.tokenizer.json": b"a user's",
    "a.jsonl": b'{"text": "a"}\n{oops\n',
    "half.jsonl": b'{"text": "a \\ud800 b"}\n',  # half of a surrogate pair
    "aaa.txt": b"a" * 40 + b"b",
    "tasks.jsonl": TASK,
    "part.jsonl": TASK + b'{"doc_id": 1}\n',
    "label.jsonl": 2 * TASK.replace(b"0,", b'5, "label": 2,'),
    "nothing.jsonl": TASK + TASK.replace(b"0,", b'1, "label": 0,').replace(b" w2", b""),
    "none.jsonl": b"",
    "damaged.jsonl.gz": b"x",
    # a key whose value is an array of 2^60 numbers, of which there is none
    "huge.gguf": struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 4, 1 << 60),
    "a.parquet": b"no parquet",
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
        table = tiny_table("tokens", Path("run"), train={"rounds": N_ROUNDS}, run={"keep": 9})
        cfg = config.load(toml(folder / "c.toml", table))
        rounds.train(cfg, quiet=True)
        parent = parents.open_parent(Path("run"), "cpu")
        save_random(parent, Path("ticket"), 2)
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


def flip_bit(name: str) -> None:
    data = bytearray(Path(name).read_bytes())
    data[len(data) // 2] ^= 0b100
    Path(name).write_bytes(data)


def damage_all() -> None:
    for path in Path("run/checkpoints").iterdir():
        flip_bit(f"{path}/model.safetensors")


def forge(**values: object) -> None:
    """The newest checkpoint's record with other values and a hash that agrees."""
    reseal(Path(LAST, "checkpoint.json"), **values)


def forge_moments() -> None:
    save_file({"m/x": torch.zeros(2)}, f"{LAST}/moments.safetensors")
    files = json.loads(Path(LAST, "checkpoint.json").read_text())["files"]
    sha256 = file_sha256(Path(LAST, "moments.safetensors"))
    forge(files=files | {"moments.safetensors": sha256})


def write_tokenizer(**parts: object) -> None:
    """A tokenizer of words that does more than it should."""
    made = word_level(["a", "b"])
    for name, part in parts.items():
        setattr(made, name, part)
    made.save("evil.json")


def shards(name: str) -> None:
    Path("plain/model.safetensors").rename("plain/x.safetensors")
    index = {"metadata": {}, "weight_map": {"transformer.wte.weight": name}}
    Path("plain/model.safetensors.index.json").write_text(json.dumps(index))


TEN_FOLD = Sequence([Replace("a", "a" * 10)] * 9)
BEFORE: dict[str, Callable[[], object]] = {
    "cache": lambda: write_cache(open_tokens("tokens"), "plain", 4, 8, "cpu", quiet=True),
    "cache, then other tokens": lambda: (
        BEFORE["cache"](),
        write_words("tokens", [f"w{i}" for i in range(VOCAB)], 1200),
    ),
    "other words": lambda: shutil.copy("other.tokenizer.json", "plain/tokenizer.json"),
    "no words": lambda: Path("plain/tokenizer.json").write_text("{}"),
    "all damaged": damage_all,
    "flipped bit": lambda: flip_bit(f"{LAST}/model.safetensors"),
    "no run": lambda: shutil.rmtree("run"),
    "forged leases": lambda: forge(leases={"next": 3, "returned": [7]}),
    "forged rho": lambda: forge(rho={"x": "y"}),
    "forged config": lambda: forge(config=[]),
    "forged round": lambda: forge(round="one"),
    "forged moments": forge_moments,
    "evil regex": lambda: write_tokenizer(pre_tokenizer=Split(Regex("(a+)+$"), "isolated")),
    "ten-fold": lambda: write_tokenizer(normalizer=TEN_FOLD),
    "bloom": lambda: BloomForCausalLM(
        BloomConfig(n_layer=1, n_head=2, hidden_size=16)
    ).save_pretrained("plain"),
    "far shards": lambda: shards("../plain/x.safetensors"),
}
COMMANDS = {  # the first word of a row; others are typed as they stand
    "train": "train c.toml run.out=fresh",
    "resume": "train c.toml --resume",
    "eval": "eval --n 1 --device cpu --ratio 2/4",
    "extract": "extract -o made/t --device cpu",
    "shrink": "shrink plain -o made/s --tokenizer tokens.tokenizer.json",
    "prepare": "prepare -o made/new --tokenizer tokens.tokenizer.json",
    "teach": "prepare -o tokens --teacher plain --seq-len 16 --device cpu",
    "heal": "heal ticket -o made/t",
    "bench": "lab bench train c.toml",
    "prune": "lab prune plain -o made/t --device cpu blocks.n_ffn=4 blocks.shared_last=0",
    "twistlm": "",
}
# [what happens before] command -> parts of the sentence that refuses it
MISTAKES = """
# the config
train train.lrr=1 -> train.lrr | did you mean train.lr? | Legal keys | interval
twistlm train papper -> 'papper' | demo | paper
# blocks
train blocks.k_attn=1 -> blocks.k_attn = 1 | N = 4 | S = 3 | 2..4
train blocks.k_attn=[] -> blocks.k_attn | 1..4
train blocks.k_attn=[2,3] blocks.k_ffn=[2,3,4] blocks.widths=worker -> blocks.k_attn = [2, 3] | 3
train blocks.k_attn=[2,1,0] blocks.widths=worker -> blocks.k_attn = 0 | 1..4
train blocks.k_attn=[1,1,1] blocks.k_ffn=[4,1,1] blocks.widths=worker -> at least 4 | is left out
train blocks.common_attn=[4] -> blocks.common_attn = [4] | 0..3
train blocks.n_ffn=5 -> blocks.n_ffn | 5 | 64 | 1, 2, 4, 8, 16, 32, 64
train blocks.shared_first=3 -> blocks.shared_first = 3 | 0..2
train NUMBERED blocks.mask_depth=1 -> no layer of this gpt2 can be left out | scales
train MASKED blocks.mask_ffn=5 -> blocks.mask_ffn = 5 | a mask keeps 1..4 ffn blocks
train MASKED blocks.mask_attn=[2,1] -> blocks.mask_attn = [2, 1] | blocks.mask_ffn = [2]
train MASKED blocks.mask_depth=[0,1] -> blocks.mask_depth = [0, 1] | give all as many
train MASKED blocks.mask_depth=3 -> blocks.mask_depth = 3 | a mask drops 0..2 of 2 layers
train MASKED blocks.mask_depth=1 blocks.setting=ffn -> mask_depth = 1 | blocks.setting = 'both'
train MASKED blocks.masks=round -> blocks.mask_attn | needs blocks.masks = 'step' or
train blocks.k_ffn=[4,2,3] blocks.widths=worker train.method=dropout -> blocks.widths = 'worker'
# the model
train model.type=gpt7 -> model.type | 'gpt7'
train model.config.n_layers=2 -> model.config.n_layers | gpt2
train model.config.n_head=5 -> model.config | 16 | 5
train model.config.n_layer=0 -> layers
train model.config.n_inner=0 -> model.config | n_inner = 0 | sizes must be at least 1
train model.config.n_head=0 -> model.config | n_head = 0 | sizes must be at least 1
train model.type=llama model.config={num_attention_heads=0} -> num_attention_heads = 0 | sizes must
train model.type=llama model.config={num_key_value_heads=0} -> num_key_value_heads = 0 | sizes must
train model.config.activation_function=swosh -> model.config | swosh
train model.weights=ticket -> 'ticket' | twistlm heal
train model.weights=nobody/nothing -> model.weights | 'nobody/nothing'
# the data
train data.train=nowhere -> nowhere.bin | twistlm prepare
train data.valid=builtin:x -> data.valid | 'builtin:x' | builtin:python-docs
train data.train=short -> short | 10 tokens | data.seq_len = 16
train data.seq_len=32 -> data.seq_len | 32 | 16
train data.train=wide data.valid=wide -> wide | 69 | 64 | tokenizer does not match
train data.valid=other -> other | another tokenizer
# a teacher
train train.teacher=start -> 'start' | model.weights = 'random'
[other words] train train.teacher=plain -> its tokenizer is not that of
train train.teacher=wide-model -> knows 70 tokens, the model 64
# a teacher's cache
train train.teacher=cache -> tokens.teacher.bin | twistlm prepare -o tokens --teacher
[cache] train train.teacher=cache -> teacher.json | sequences of 8 tokens | data.seq_len is 16
[cache, then other tokens] train train.teacher=cache data.seq_len=8 -> is for other tokens than
twistlm prepare -o tokens -> nothing to prepare | --teacher
teach --top 65 -> --top 65 | 1..64
teach --seq-len 17 -> --seq-len 17 | 2..16
teach --seq-len 1 -> --seq-len 1 | 2..16
[other words] teach -> --teacher plain | its tokenizer is not that of tokens
[no words] teach -> --teacher plain | plain/tokenizer.json is not a tokenizer.json
teach --teacher no/such/folder -> --teacher 'no/such/folder'
# the run
train train.rounds=0 train.epochs=0 -> train.rounds = 0 | train.epochs = 0 | 100
train run.variant=hybrid -> run.variant = 'hybrid' | torchrun --nproc-per-node 3
train run.variant=true -> run.variant = 'true' | torchrun --nproc-per-node 4
train run.device=tpu -> run.device = 'tpu' | auto, cpu, cuda
train run.device=cuda:99 -> run.device = 'cuda:99' | CUDA devices
train run.eval_ratios=5/12 -> run.eval_ratios: | '5/12' | 1/4, 2/4, 3/4, 4/4
train model.weights= -> model.weights = '' | 'random'
train run.out= -> run.out = '' | name a folder
[far shards] train model.weights=plain -> index.json names '../plain/x.safetensors'
train run.out=c.toml/run -> c.toml
twistlm train c.toml -> run.out = 'run' | --resume | another folder
# resuming
resume data.train=other -> cannot resume | data.train | 'other'
resume train.rounds=1 -> train.rounds | 1 | 3
resume run.seed=5 -> cannot resume | run.seed was 0 | 5
resume run.out=new -> new | no checkpoint to resume | --auto-resume
resume train.lr=1 -> finished after round 3 | train.lr = 1.0 | train.rounds
[all damaged] resume -> run/checkpoints | round-000003 | model.safetensors
[forged leases] resume -> checkpoint.json makes no sense | 3 sequences
[forged rho] eval LAST -> checkpoint.json makes no sense
[forged config] eval LAST -> checkpoint.json makes no sense
[forged round] eval LAST -> checkpoint.json cannot be read
[forged moments] resume -> moments.safetensors makes no sense
# evaluating
eval nowhere -> nowhere | no valid checkpoint
[flipped bit] eval LAST -> LAST | damaged | model.safetensors
eval run --ratio attn=2/4 -> 'attn=2/4' | ffn
eval run --ratio mlp=2/4 -> 'mlp=2/4' | attn | ffn
twistlm eval ticket --ratio 2/4 -> ticket | cut already
[no run] twistlm eval ticket -> ticket | --data
twistlm eval run --tokens 15 -> --tokens 15 | data.seq_len = 16 | 16 and more
twistlm eval ticket --tokens 15 --data tokens -> --tokens 15 | data.seq_len = 16 | 16 and more
twistlm eval ticket --data other -> other | another tokenizer
eval run data.seq_len=17 -> data.seq_len = 17 | 16 positions
# healing
heal --tokens 0 -> --tokens 0 | at least one
heal --tokens 1k --teacher nowhere -> train.teacher = 'nowhere' | could not be loaded
heal --tokens 1k -o ticket -> is the ticket to heal
twistlm heal run --tokens 1k -o made/t -> is no ticket
heal --tokens 1k --valid short -> short: 10 tokens are shorter than one sequence
heal --tokens 1k --valid other -> other was made with another tokenizer
[no run] heal --tokens 1k -> give --teacher RUN or MODEL
[no run] heal --tokens 1k --teacher start -> starts as itself
[no run] heal --tokens 1k --teacher none -> give --data STEM
# extracting
extract run --ratio attn=1,ffn=1,attn.1=0 -> layer 1
extract run --ratio 2/4 data.seq_len=17 -> data.seq_len = 17: the model has 16 positions
extract ticket --ratio 2/4 -> ticket | cut already
extract run -> give --ratio, --params, --size, --latency or --memory
extract run --params 85Q -> --params '85Q' | 85M | units: k, m, b, g
extract run --ratio attn=1,ffn=1,ffn.0=1/4 -> 'ffn.0' | layer that is cut
extract run --params 1k -> --params 1k is impossible | 5,484 parameters
extract run --ratio 2/4 --params 1k -> --params 1k is impossible
extract run --latency 1us -> --latency 1us is impossible | ms
extract run --ratio 2/4 --pick luck -> --pick 'luck' | best-of:N | mask-fisher
extract run --ratio 2/4 --pick importance:obd -> 'importance:obd' | taylor
extract plain --ratio 2/4 --pick best-of:3 blocks.n_ffn=4 blocks.shared_last=0 -> give --data STEM
extract run --ratio 2/4 --dtype int3 -> --dtype 'int3' | bfloat16
extract run --ratio 2/4 -o run -> run | is no ticket
extract run --ratio 2/4 -o a.txt/t -> a.txt/t cannot be written | a.txt is no folder
# certifying
twistlm eval run --certify --ratio 2/4 --n 89 -> n = 89 | at least 90
twistlm eval run --coverage 0.9 -> --coverage and --confidence | give --certify
twistlm eval run --certify --coverage 1 -> coverage = 1.0 | between 0 and 1
# tasks
twistlm eval run --tasks nowhere -> --tasks nowhere | no such file
twistlm eval run --tasks '' -> names no task
twistlm eval run --tasks ticket -> holds no .jsonl
twistlm eval run --tasks a.txt,a.txt -> a.txt, line 1, is no line of a task
twistlm eval run --tasks part.jsonl -> part.jsonl, line 2, is no line of a task
twistlm eval run --tasks damaged.jsonl.gz -> damaged.jsonl.gz | could not be read
twistlm eval run --tasks label.jsonl -> label = 2 of doc_id 5 is no number from 0 to 1
twistlm eval run --tasks none.jsonl -> holds no question
twistlm eval run --tasks nothing.jsonl -> nothing.jsonl, line 2: the continuation is empty
twistlm eval run --tasks a.jsonl -> a.jsonl, line 1, is no line of a task | continuation
twistlm eval ticket --ratio 2/4 --tasks tasks.jsonl -> ticket | cut already
twistlm eval plain --tasks tasks.jsonl -> plain can read no text
twistlm eval run ticket -> ticket | one model at a time
twistlm eval run --certify --tasks tasks.jsonl -> leave --tasks out
twistlm eval nope -> nope could not be loaded: there is no such folder
twistlm eval C:\\models\\x -> could not be loaded: there is no such folder
twistlm eval gguf:/x/nope.gguf -> gguf:/x/nope.gguf: no such file
twistlm eval run --json run -> run is a folder: --json takes the name of a file
twistlm eval run --tasks tasks.jsonl --n 3 -> --tasks bring their own text: leave --n
twistlm eval run --tasks tasks.jsonl --data tokens -> --tasks bring their own text: leave --n
twistlm eval blocks.n_ffn=4 -> at least one parent
# shrinking
shrink --text tokens.txt -> give --to, --size, --latency or --memory
shrink --to 9k -> give --text
shrink --text gone.txt --to 9k -> gone.txt: no such file
shrink --text a.txt:0 --to 9k -> greater than 0
shrink --text a.txt:nan --to 9k -> greater than 0
shrink --text a.txt:0.5 --text aaa.txt --to 9k -> every --text a weight
shrink --text gone.txt:0.5 --to 9k -> gone.txt: no such file
shrink --text a.txt --to 9k -> 2 tokens to train | too few | 160, a sequence of data.seq_len = 16
shrink --text a.txt --to 9k train.batch=8 -> at least 160, a sequence | for every step of a round
shrink --text tokens.txt --to 5k -> --to 5k is impossible | 5,608 parameters
shrink --text tokens.txt --to 12k -> --to 12k | the whole model of 11,152 parameters
shrink --text tokens.txt --to 9.3k --to 9.4k -> --to 9.3k and --to 9.4k | the same ticket, ffn=5/8
shrink --text tokens.txt --to 9k --tokens 1k --hours 1 -> --tokens or --hours
shrink --text tokens.txt --to 9k --tokens 0 -> --tokens 0: must be at least 1
shrink --text tokens.txt --to 9k --tokens '' -> --tokens '' | 20M
shrink --text '' --to 9k -> the name of a text is empty
shrink --text tokens.txt --to 9k data.seq_len=17 -> data.seq_len = 17: the model has 16 positions
shrink --text tokens.txt --to 9k blocks.mask_ffn=9 -> mask_ffn
twistlm shrink '' --text tokens.txt --to 9k -o made/s -> its name is empty
shrink --text tokens.txt --to 9k --tokens many -> --tokens 'many' | 20M
shrink --text tokens.txt --to 9k --tokenizer wide.tokenizer.json -> wide.tokenizer.json | plain | 64
[other words] shrink --text tokens.txt --to 9k -> tokens.tokenizer.json | not that of plain
twistlm shrink nowhere --text tokens.txt --to 9k --gguf q9 -o made/s -> --gguf q9 | q8_0
twistlm shrink nowhere --text tokens.txt --to 9Q -o made/s -> --to '9Q' | units: k, m, b, g
shrink --text tokens.txt --to 9k --gguf f16 -> tokens.tokenizer.json | has no name in llama.cpp
shrink --text tokens.txt --memory 9MB -> --memory and --context go together
shrink --text tokens.txt --to 9k -o run -> run is not empty
shrink --text tokens.txt --to 9k blocks.shared_first=1 -> blocks.shared_first=1
twistlm shrink plain --text tokens.txt --to 9k -o made/s -> no tokenizer at plain
twistlm shrink ticket --text tokens.txt --to 9k -o made/s -> ticket | twistlm heal
twistlm shrink nowhere --text tokens.txt --to 9k -o made/s -> nowhere could not be loaded
shrink --text tokens.txt --to 9k --tasks nowhere -> --tasks nowhere | no such file
[bloom] shrink --text tokens.txt --to 9k -> 'bloom' cannot be cut
# exporting
twistlm export nowhere --to gguf -o run -> --out run is a folder: name a file
twistlm export nowhere --to gguf -o a.txt -> --out a.txt exists and is no GGUF file
twistlm export nowhere --to gguf -o mine -> --out mine: mine.json exists and is not ours
twistlm export nowhere --to onnx -o run -> --out run exists and is no ONNX export
twistlm export nowhere --to gguf -o made/t --data gone -> gone.bin | twistlm prepare
twistlm export ticket --to gguf -o made/t --data builtin:x -> 'builtin:x' | builtin:python-docs
twistlm export ticket --to gguf -o made/t --data other -> other | another tokenizer
twistlm export ticket --to onnx -o made/t --prompt '' -> --prompt has 0 tokens | 1..14
# losing nodes
twistlm lab drop run --nodes 5 -> --nodes 5 | 4 attn blocks
twistlm lab drop run --nodes 3 --lose 3 -> --lose 3 | --nodes 3
twistlm lab drop blocks.n_ffn=4 -> at least one parent
# writing
twistlm generate nowhere --prompt w1 -> nowhere | could not be loaded
twistlm generate run --prompt 'w1 w2' --max-new-tokens 15 -> 16 positions | takes 2 | 14 tokens fit
twistlm generate run --prompt '' -> prompt is empty
twistlm generate plain --prompt w1 -> plain can read no text
twistlm generate run --prompt 'caf\udce9' -> '\\udce9' | surrogates not allowed
twistlm lab draft run ticket -> --prompt | --data
twistlm lab draft run wide-model --data tokens -> wide-model | 70 | 64
# bench
twistlm lab bench deploy run --runtime tpu -> --runtime tpu | torch
twistlm lab bench deploy run --ratio 2/4 --prefill 9 --decode 8 -> --prefill 9 | 16 positions | 1..8
bench --sizes 5/7 -> --sizes 5/7 with --settings both | attn blocks
bench --settings '' -> --settings names none of
bench --settings ffm -> --settings 'ffm': use some of
bench --sizes , -> --sizes names no ratio
bench --sizes 2/4,1/7 -> ratio '1/7' is no whole number
# pruning
prune --method wands --ratio 1/4 -> --method 'wands': use one of sparsegpt
prune --method magnitude --ratio 0 -> ratio '0': it must lie in (0, 1]
prune --method magnitude --ratio half -> ratio 'half' is not a fraction
prune --method block:random --ratio 1/3 -> ratio '1/3' is no whole number of attn blocks
prune --method wanda --ratio 1/4 -> no tokens to calibrate on: give --data
prune --method wanda --ratio 1/4 --data tokens -> tokens is too short for --n 128 | 100 sequences
prune --method wanda --ratio 1/4 --data tokens --n 2 data.seq_len=50 -> data.seq_len = 50 | 16
# many machines
twistlm node --head --port 10050 -> --port 10050 | 10002 to 19999
twistlm node --join here -> --join 'here' | host:port
twistlm node --join 127.0.0.1:1 --memory '8 apples' -> --memory '8 apples' | gb
twistlm node --join 127.0.0.1:1 --memory auto -> no GPU | --memory 8GB
twistlm node --join 127.0.0.1:1 --memory 8GB --k-ffn 3 -> --memory 8GB | --k-ffn
twistlm node --join 127.0.0.1:1 -> no Ray head answers at 127.0.0.1:1
twistlm node -> either --head or --join HOST:PORT
train run.variant=ray ray.address=ray://10.0.0.1:1 -> ray.address = 'ray://10.0.0.1:1' | host:port
train run.variant=ray ray.address=127.0.0.1:1 -> no Ray head answers at 127.0.0.1:1
# preparing
prepare empty.txt -> empty.txt | empty
prepare binary.txt -> binary.txt | UTF-8
prepare nul.txt -> nul.txt | binary
prepare gone.txt -> gone.txt | no such file
prepare a.pdf -> a.pdf | .txt | .jsonl | .parquet
prepare a.jsonl -> a.jsonl, line 2
prepare half.jsonl -> half.jsonl, line 1 | '\\ud800' | surrogates not allowed
prepare a.parquet -> a.parquet | not a Parquet
prepare a.txt --tokenizer gguf:huge.gguf -> huge.gguf could not be read as GGUF
[evil regex] prepare aaa.txt --tokenizer evil.json -> the tokenizer gave up | retry-limit
[ten-fold] prepare aaa.txt --tokenizer evil.json -> evil.json | 1,000,000,000 times | at most 32
prepare a.txt -o '' -> --out '.' names no file
prepare a.txt -o mine -> mine.json exists and is no part of a token file
prepare a.txt -o mine2 -> mine2.bin exists and is no part of a token file
prepare a.txt -o mine3 --tokenizer mine3.tokenizer.json -> mine3.tokenizer.json exists and is no
prepare a.txt -o mine4 -> mine4.tokenizer.json exists and is no part of a token file
prepare a.txt --eos '<end>' -> --eos | '<end>'
prepare a.txt --tokenizer gone.json -> gone.json
# planning
twistlm plan demo blocks.k_attn=2 -> blocks.k_attn = 2 | 3..12
twistlm plan paper data.train=gone data.planned_sequences=0 -> gone.bin | data.planned_sequences=N
twistlm plan paper --memory 1GB -> 1.0 GB of memory | takes 2.0 GB
twistlm plan wiki-gpt2 -> data/wiki/train.bin | twistlm prepare
twistlm train wiki-gpt2 -> model.weights=random train.method=dense | run.out=runs/wiki-start
"""
ROWS = [row for row in MISTAKES.splitlines() if row and not row.startswith("# ")]


def typed(row: str) -> tuple[list[str], list[str]]:
    """Do what comes before; the words of the command, and the parts of the sentence."""
    row = row.replace("LAST", LAST).replace("NUMBERED", NUMBERED).replace("MASKED", MASKED)
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
        "twistlm export nowhere --to pdf -o x -> --to pdf | gguf or onnx",
        "twistlm export nowhere --to onnx --type q8_0 -o x -> --type q8_0 | ONNX | f32, q8",
    ):
        words, parts = typed(row)
        check_refusal(*as_process(*words, cwd=empty, without_torch=True), parts)
    assert not list(empty.iterdir())


def test_more_draws_than_anyone_waits_for(call):
    """Refused by the option itself, before anything is read."""
    code, out, err = call("eval", "run", "--n", str(10**12))
    assert code == 2
    assert "'--n': Input should be less than or equal to 1000000" in out + err


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_serves(here, call):
    """To eval, to resume with the same bits, and as the start and teacher of another run."""
    good = (here / LAST / "model.safetensors").read_bytes()
    flip_bit(f"{LAST}/model.safetensors")
    _, out, err = call("eval", "run", "--n", "1", "--ratio", "2/4")
    assert "round-000003" in re.sub(r"\s", "", out + err)  # the console folds long lines
    made = []
    for teacher in ("run", "run/checkpoints/round-000002", "none"):
        words = f"model.weights=run train.teacher={teacher} run.out=fresh/{len(made)}"
        assert call("train", "c.toml", "train.rounds=1", *words.split())[::2] == (0, "")
        saved = checkpoint.open_(here / f"fresh/{len(made)}")
        assert saved.config.model.weights.endswith("round-000002")
        made.append((saved.path / "model.safetensors").read_bytes())
    assert made[0] == made[1] != made[2]  # the teacher was heard
    code, out, err = call("train", "c.toml", "--resume")
    assert (code, err) == (0, "")
    assert re.search(r"skipped: .*round-000003/model\.safetensors is damaged", out)
    assert (here / LAST / "model.safetensors").read_bytes() == good


def test_with_nothing_wrong_the_same_commands_work(here, call):
    code, out, err = call(*typed("eval run --json scores.json -> ")[0])
    assert (code, err) == (0, "")
    assert "perplexity" in out
    # one subnet has no standard deviation: NaN would break every strict reader
    scores = json.loads((here / "scores.json").read_text(), parse_constant=pytest.fail)
    assert scores["round"] == N_ROUNDS
    assert call(*typed("prepare a.txt -> ")[0])[::2] == (0, "")
    assert (here / "made/new.bin").read_bytes() == bytes([1, 0, 2, 0, 63, 0])
    assert "100 sequences of 16 tokens" in call(*typed("teach --top 4 -> ")[0])[1]
    # blocks may change between rounds
    words = ["train", "c.toml", "--resume", "train.rounds=4", "blocks.n_ffn=8", "blocks.k_ffn=4"]
    assert call(*words)[::2] == (0, "")
    record = checkpoint.verify(here / "run/checkpoints/round-000004").manifest
    assert record["config"]["blocks"]["n_ffn"] == 8


def test_paths_are_printed_as_they_are(here, call):
    """A path is data: no markup, and on one line, to be copied into the next command."""
    name = "/".join(["odd[/red]" + "long" * 20] * 3)
    code, out, err = call("train", "c.toml", f"run.out={name}", "train.rounds=1")
    assert (code, err) == (0, "")
    assert f"{name}/checkpoints/round-000001" in out
    assert (here / name / "checkpoints/round-000001").is_dir()


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
    told = out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.07 GiB."))
    assert told == "the GPU has no memory left for 3.07 GiB"
    assert not out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    monkeypatch.setattr(Local, "round", stop)
    code, out, err = call("train", "c.toml", "run.out=other")
    assert code == 130
    assert "--resume" in err
    assert "Traceback" not in out + err
