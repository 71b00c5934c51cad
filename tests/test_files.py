"""Files and inputs that could do harm: foreign files, dead drafts, full disks, absurd sizes, names with codes."""

from __future__ import annotations

import ast
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from checkpoints import random_central, random_progress
from conftest import make_tokens, tiny, word_level
from rich.console import Console
from tiny_tickets import open_parent

import twistlm
from twistlm import config
from twistlm.cli import main
from twistlm.data.prepare import prepare
from twistlm.lab.points import read_training
from twistlm.lab.report.write import report
from twistlm.model import huggingface
from twistlm.model.tokenizer import load_tokenizer
from twistlm.system import files, manifest, terminal
from twistlm.tickets import deploy
from twistlm.training import checkpoint
from twistlm.transport.checks import suspicion

PACKAGE = Path(twistlm.__file__).parent


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A Hugging Face folder and a ticket of it."""
    folder = tmp_path_factory.mktemp("home")
    parent, blueprint = open_parent("gpt2", "head", folder / "parent")
    deploy.save_ticket(parent, blueprint, folder / "ticket")
    return folder


@pytest.fixture
def room():
    """At most 3 GB beyond what the process has: code that takes 10 GB fails instead of taking them."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + (3 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def change(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def seal(folder: Path, record: str) -> None:
    """What a hand does that edits a folder and updates its hashes."""
    table = json.loads((folder / record).read_text())
    described = manifest.describe_files({name: folder / name for name in table["files"]})
    if record == checkpoint.MANIFEST:
        described = {name: each["sha256"] for name, each in described.items()}
    (folder / record).write_text(manifest.written(manifest.sealed(table | {"files": described})))


# ---------------------------------------------------------------- code from folders


def test_no_call_into_transformers_may_run_code_from_a_folder():
    """Every Auto class is told trust_remote_code=False: left alone, it asks, and a piped `y` answers."""
    seen = 0
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            auto = called.startswith("Auto") and called.endswith(
                (".from_pretrained", ".from_config")
            )
            if auto or (called == "load" and "tickets/deploy" in str(path)):
                told = {k.arg: ast.unparse(k.value) for k in node.keywords}
                assert told.get("trust_remote_code") == "False", (path.name, node.lineno)
                seen += 1
    assert seen >= 10


EVIL = 'open("ran", "w")\nfrom transformers import GPT2Config as C, GPT2LMHeadModel as M\n'


@pytest.mark.parametrize("kind", ["model", "tokenizer"])
def test_a_piped_y_answers_nothing(tmp_path, home, kind):
    folder = tmp_path / "folder"
    if kind == "model":
        folder.mkdir()
        auto = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}
        (folder / "config.json").write_text(json.dumps({"model_type": "nosuch", "auto_map": auto}))
        args = ["generate", "folder", "--prompt", "hi"]
    else:
        shutil.copytree(home / "parent", folder)
        auto = {"tokenizer_class": "C", "auto_map": {"AutoTokenizer": [None, "evil.C"]}}
        (folder / "tokenizer_config.json").write_text(json.dumps(auto))
        cut = ["blocks.attn_by=head", "blocks.n_ffn=3", "blocks.shared_first=0"]
        args = ["extract", "folder", "-o", "t", "--ratio", "1/3", *cut, "blocks.shared_last=0"]
    (folder / "evil.py").write_text(EVIL)
    done = subprocess.run(
        [sys.executable, "-m", "twistlm", *args],
        cwd=tmp_path,
        input="y\ny\n",
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_MODULES_CACHE": str(tmp_path / "cache")},
    )
    assert not (tmp_path / "ran").exists(), done.stdout
    if kind == "model":
        assert done.returncode == 2
        assert "runs no code from a model's folder" in done.stderr


# ---------------------------------------------------------------- absurd sizes


def test_a_tokenizer_that_pads_to_any_length(tmp_path, room):
    words = word_level(["a", "b"])
    words.enable_padding(length=500_000_000)
    words.enable_truncation(1)
    words.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(str(tmp_path)).encode("a b a").ids == [0, 1, 0]


def test_a_gguf_without_sizes(tmp_path, room):
    """Its config is llama's default: 7 billion parameters. The file has 1,024 numbers."""
    writer = gguf.GGUFWriter(str(tmp_path / "bare.gguf"), "llama")
    writer.add_tensor("token_embd.weight", np.zeros((64, 16), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        ValueError, match=r"bare\.gguf holds 1,024 weights, and its config promises"
    ):
        huggingface.from_gguf(tmp_path / "bare.gguf")


@pytest.mark.parametrize(("key", "value"), [("n_embd", 49152), ("n_layer", 10**9)])
def test_a_config_that_promises_more_than_the_weights_hold(tmp_path, home, room, key, value):
    """A folder, a ticket and a checkpoint whose hashes somebody updated: refused by their headers."""
    cfg = tiny(make_tokens(tmp_path / "tokens"), tmp_path / "run")
    model = huggingface.load(cfg.model, 0)
    central, progress = random_central(model, cfg), random_progress(model, cfg)
    saved = checkpoint.save(tmp_path / "c", central, progress, cfg, model, None, keep=1)
    shutil.copytree(home / "parent", tmp_path / "folder")
    shutil.copytree(home / "ticket", tmp_path / "ticket")
    for folder, record in ((saved, checkpoint.MANIFEST), (tmp_path / "ticket", deploy.TICKET)):
        change(folder / "config.json", **{key: value})
        seal(folder, record)
    change(tmp_path / "folder/config.json", **{key: value})
    promise = "and its config promises|disagree"
    with pytest.raises(ValueError, match=promise):
        huggingface.from_folder_or_hub(str(tmp_path / "folder"))
    with pytest.raises(ValueError, match=promise):
        checkpoint.template(checkpoint.verify(saved))
    with pytest.raises(ValueError, match=f"{promise}|cannot be loaded as a ticket"):
        deploy.load_ticket(tmp_path / "ticket")


@pytest.mark.parametrize(
    "config_", [{"n_embd": 1 << 20, "n_head": 16}, {"n_layer": 10**9}, {"n_embd": 1 << 40}]
)
def test_a_model_that_no_machine_holds(room, config_):
    cfg = config.from_dict({"model": {"type": "gpt2", "config": config_}})
    with pytest.raises(
        ValueError, match=r"GB of weights|legal are at most 10,000|does not make a gpt2"
    ):
        huggingface.load(cfg.model, 0)


NESTED = "[" * 100_000
ABSURD = {"nested": NESTED, "digits": '{"n_tokens": ' + "9" * 400 + "}", "infinite": '{"a": 1e400}'}


@pytest.mark.parametrize("what", ABSURD)
def test_absurd_json_is_one_sentence(tmp_path, home, what):
    stem = make_tokens(tmp_path / "t")
    shutil.copytree(home / "ticket", tmp_path / "ticket")
    (tmp_path / "round-000001").mkdir()
    (tmp_path / "run").mkdir()
    for path in ("t.json", "ticket/ticket.json", "round-000001/checkpoint.json", "run/run.json"):
        (tmp_path / path).write_text(ABSURD[what])
    for read in (
        lambda: twistlm.data.token_file.open_tokens(stem),
        lambda: deploy.read_ticket(tmp_path / "ticket"),
        lambda: checkpoint.verify(tmp_path / "round-000001"),
        lambda: read_training(tmp_path / "run"),
    ):
        with pytest.raises(ValueError, match=r"nested too deeply|no number of ours"):
            read()


def test_absurd_text_and_configs(tmp_path):
    (tmp_path / "t.jsonl").write_text(NESTED + "\n")
    with pytest.raises(ValueError, match=r"t\.jsonl, line 1"):
        prepare([str(tmp_path / "t.jsonl")], tmp_path / "t", word_level(["a"]), quiet=True)
    (tmp_path / "c.toml").write_text(f"[train]\nlr = {NESTED}")
    for source, override in ((str(tmp_path / "c.toml"), []), ("demo", [f"train.lr={NESTED}"])):
        with pytest.raises(ValueError, match="nested too deeply"):
            config.load(source, override)
    with pytest.raises(ValueError, match="400 digits"):
        config.load("demo", [f"run.seed={'9' * 400}"])
    shutil.rmtree(tmp_path / "folder", ignore_errors=True)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/config.json").write_text(NESTED)
    with pytest.raises(ValueError, match="could not be loaded"):
        huggingface.from_folder_or_hub(str(tmp_path / "folder"))


def test_a_loss_of_1e308_is_not_believed(tmp_path):
    """Neither from a worker nor from a metrics file, where a sum of two overflows."""
    import torch

    cfg = config.from_dict({}).train
    sent = torch.ones(1, 4)
    assert suspicion(cfg, sent.clone(), sent, 11.0 * cfg.interval) is None
    for loss in (1e308, -1.0, float("nan")):
        assert "loss" in suspicion(cfg, sent.clone(), sent, loss)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text('{"round": 1, "loss": 1e308}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, round 1: a loss of 1e\+308"):
        read_training(tmp_path / "run")


# ---------------------------------------------------------------- writing


def test_extract_leaves_foreign_files_alone(tmp_path, home):
    parent, blueprint = open_parent("gpt2", "head", tmp_path / "parent")
    target = tmp_path / "ticket"
    deploy.save_ticket(parent, blueprint, target)
    (target / "notes").mkdir()
    (target / "notes/mine.txt").write_text("keep me")
    (target / "eval.json").write_text("{}")
    (target / "ticket.json").write_text((target / "ticket.json").read_text())
    full = parent.block_map.full()
    deploy.save_ticket(parent, full, target)
    assert (target / "notes/mine.txt").read_text() == "keep me"
    assert (target / "eval.json").exists()
    assert deploy.load_ticket(target).num_parameters() == parent.central.layout.n_params
    record = deploy.read_ticket(target)
    old = {key: value for key, value in record.items() if key not in ("files", "sha256")}
    (target / "ticket.json").write_text(json.dumps(old))  # of before manifests: known by name
    deploy.save_ticket(parent, blueprint, target)
    assert (target / "notes/mine.txt").read_text() == "keep me"
    assert set(deploy.read_ticket(target)["files"]) == set(record["files"])


KILLED = """
import os, signal, sys
from pathlib import Path
from twistlm.system import files
target, when = Path(sys.argv[1]), sys.argv[2]
rename = os.rename
def dying(a, b):
    rename(a, b)
    if when == "between":
        os.kill(os.getpid(), signal.SIGKILL)
os.rename = dying
with files.whole_folder(target) as draft:
    (draft / "half").write_text("x")
    if when == "filling":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("when", ["filling", "between"])
def test_what_a_killed_process_leaves_is_cleaned_and_nothing_is_lost(tmp_path, when):
    target = tmp_path / "t"
    with files.whole_folder(target) as draft:
        (draft / "old").write_text("old")
    done = subprocess.run([sys.executable, "-c", KILLED, str(target), when], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob(".draft-*"))) == 1
    (tmp_path / f".draft-elsewhere-{os.getpid()}-x").mkdir()  # another machine's: not ours to judge
    files.whole_file(tmp_path / "next.json", "{}")
    assert [path.name for path in tmp_path.glob(".draft-*")] == [
        f".draft-elsewhere-{os.getpid()}-x"
    ]
    assert (target / "old").read_text() == "old"


def test_a_full_disk_names_the_path(tmp_path, home):
    """File by file: what cannot be written is said with the name that the user gave."""
    parent, blueprint = open_parent("gpt2", "head", tmp_path / "parent")
    (tmp_path / "t.txt").write_text("a b " * 10_000)
    words = word_level(["a", "b"])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, before[1]))
    try:
        for name, write in {
            "ticket": lambda path: deploy.save_ticket(parent, blueprint, path),
            "page.html": lambda path: files.whole_file(path, "x" * 9999),
            "tokens.bin": lambda path: prepare([str(tmp_path / "t.txt")], path, words, quiet=True),
        }.items():
            with pytest.raises(OSError, match="could not be written") as caught:
                write(tmp_path / "out" / name)
            assert caught.value.filename == str(tmp_path / "out" / name)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list((tmp_path / "out").iterdir())


# ---------------------------------------------------------------- names and texts

NAME = "a$\\frac$ <script>alert(1)</script> \x1b]0;title\x07\x1b[2J"


def test_names_are_text_on_the_page_in_markdown_and_on_a_terminal(tmp_path, monkeypatch, capsys):
    run = tmp_path / NAME
    run.mkdir(parents=True)
    row = {"round": 1, "loss": 2.0, "n_tokens": 10, "seconds": 1.0, "bytes_down": 1, "bytes_up": 1}
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps(row | {"round": r}) + "\n" for r in (1, 2))
    )
    (run / "run.json").write_text(json.dumps({"config": {}, "command": "x ``` <b>"}))
    report([run], tmp_path / "page.html", tmp_path / "results.md")
    for page in ("page.html", "results.md"):
        text = (tmp_path / page).read_text()
        assert "<script>alert" not in text, page
    assert (tmp_path / "results.md").read_text().count("```") == 2
    console = terminal._Console(file=io.StringIO(), force_terminal=False)
    table = terminal.table(NAME, NAME)
    table.add_row(NAME)
    console.print(NAME, table)
    assert isinstance(console, Console)
    assert "\x1b" not in console.file.getvalue()
    assert "alert(1)" in console.file.getvalue()
    monkeypatch.setattr(sys, "argv", ["twistlm", "eval", f"./{NAME}x/y"])
    with pytest.raises(SystemExit):
        main()
    assert "\x1b" not in capsys.readouterr().err
