"""Files: old ones are read, no damage is silent, and nothing read or written does harm."""

from __future__ import annotations

import ast
import io
import json
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import families_table
import gguf
import numpy as np
import pytest
import torch
from checkpoints import damages, random_central, random_progress
from commands import check_refusal, in_process
from conftest import make_tokens, tiny, word_level
from rich.console import Console
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import twistlm
from paper.report import report
from twistlm import config
from twistlm.cli import app
from twistlm.data.prepare import prepare
from twistlm.data.token_file import open_tokens, verify_tokens
from twistlm.lab.compare.table import to_markdown
from twistlm.lab.points import read_training
from twistlm.model import huggingface
from twistlm.model.tokenizer import load_tokenizer
from twistlm.system import files, manifest, terminal
from twistlm.tickets import deploy, score
from twistlm.tickets.parent import open_parent
from twistlm.tickets.requests import ScoreRequest
from twistlm.tickets.runnable import verify
from twistlm.training import checkpoint, rounds
from twistlm.transport.protocol import reason_to_reject

# ---------------------------------------------------------------- files of version 0.1


FILES = Path(__file__).parent / "fixtures/before_rooms.zip"
# what commit 80de057 printed, with the gates leaving output biases alone, as they do now
TOKENS, FULL, HALF, WORST = 3648, 361.67711106680815, 361.4246931447369, 361.9547104585102
LOSSES = [5.849076271057129, 5.616579691569011]  # of two more rounds, then
RESUMED_FULL, RESUMED_HALF = 211.80414668140043, 212.59282076988697


@pytest.fixture
def old(tmp_path, monkeypatch) -> Path:
    """A copy in the working directory: the run's config names its tokens relative to it."""
    with zipfile.ZipFile(FILES) as archive:
        archive.extractall(tmp_path)
    monkeypatch.chdir(tmp_path / "before_rooms")
    return tmp_path / "before_rooms"


def test_an_old_token_file_and_an_old_checkpoint_are_evaluated(old):
    tokens = open_tokens("tokens")
    assert tokens.meta.n_tokens // 32 * 32 == TOKENS
    assert len(tokens.tokens) == tokens.meta.n_tokens
    assert int(tokens.tokens.max()) == tokens.meta.max_id
    request = ScoreRequest(ratios=("2/4",), n=3)
    found = score.score_parent(open_parent("run", "cpu"), request, "old", quiet=True)
    (subnets,) = found.subnets
    wanted = pytest.approx((FULL, HALF, WORST), rel=1e-5)
    assert (found.full, subnets.mean, subnets.worst) == wanted


def test_an_old_checkpoint_is_resumed(old):
    """Moments, outer momentum, leases, counts and rho all go into the next losses."""
    cfg = checkpoint.open_("run").config
    cfg = replace(cfg, train=replace(cfg.train, rounds=4))
    rounds.train(cfg, resume=True, quiet=True)
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2, 3, 4]
    assert [row["loss"] for row in rows[2:]] == pytest.approx(LOSSES, rel=1e-5)
    assert rows[3]["eval"]["full"] == pytest.approx(RESUMED_FULL, rel=1e-5)
    assert rows[3]["eval"]["2/4"]["mean"] == pytest.approx(RESUMED_HALF, rel=1e-5)


def test_an_old_ticket_loads_and_is_what_extract_cuts_today(old):
    """The same blocks of the same parent, folded: equal to the file of then."""
    ticket = deploy.load_ticket(old / "ticket")
    blueprint = json.loads((old / "ticket/ticket.json").read_text())["blueprint"]
    kept = {name: tuple(blocks) for name, blocks in blueprint.items()}
    parent = open_parent("run", "cpu")
    today = deploy.cut_ticket(parent, kept)
    with torch.no_grad():  # then the activation scale multiplied output biases, too
        for group in parent.block_map.groups:
            today.get_parameter(group.out[1]).mul_(
                parent.scales(parent.block_map.widths(kept))[group.name]
            )
    ids = torch.arange(64).view(2, 32)
    with torch.no_grad():
        torch.testing.assert_close(ticket(ids).logits, today(ids).logits, rtol=0, atol=1e-6)


# ------------------------- 200 random damages each; of checkpoints: training/test_checkpoint.py


N = 200


@pytest.fixture(scope="module")
def token_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "t.txt").write_text(" ".join(f"w{i % 40}" for i in range(3000)))
    words = word_level([f"w{i}" for i in range(40)])
    prepare([str(folder / "t.txt")], folder / "made/t", words, quiet=True)
    return folder / "made"


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A Hugging Face folder, and a ticket of it with all files that a ticket can have."""
    folder = tmp_path_factory.mktemp("home")
    parent, blueprint = families_table.open_parent("gpt2", "head", folder / "parent")
    words = word_level([f"w{i}" for i in range(parent.template.config.vocab_size)])
    words.save(str(folder / "tokenizer.json"))
    object.__setattr__(parent, "tokenizer", folder / "tokenizer.json")
    deploy.save_ticket(parent, blueprint, folder / "ticket", {"note": 1})
    return folder


def missed(whole: Path, copy: Path, use, only: str | None = None) -> list[str]:
    """Damages after which `use(copy)` neither raises a ValueError nor says a word."""
    shutil.copytree(whole, copy)
    use(copy)
    passed = []
    for told, file, data in damages(copy, N, only):
        good = file.read_bytes()
        file.write_bytes(data)
        try:
            heard = use(copy)
        except ValueError as error:
            heard = str(error)
        if str(copy) not in (heard or ""):  # a sentence names the file
            passed.append(told)
        file.write_bytes(good)
    use(copy)
    return passed


@pytest.mark.parametrize("only", [None, "t.json"])
def test_no_damage_to_a_token_file_is_silent(tmp_path, token_folder, only):
    def use(folder: Path) -> None:
        open_tokens(str(folder / "t")).sequences([0], 8)

    assert missed(token_folder, tmp_path / "copy", use, only) == []


@pytest.mark.parametrize("only", [None, "ticket.json"])
def test_no_damage_to_a_ticket_is_silent(tmp_path, capsys, home, only):
    """A card that was changed is said and loads: people edit cards. Everything else is refused."""

    def use(folder: Path) -> str:
        capsys.readouterr()
        deploy.verify_ticket(folder)  # what load_ticket asks before it loads
        return capsys.readouterr().out

    assert missed(home / "ticket", tmp_path / "copy", use, only) == []


def test_load_ticket_asks_for_the_hash_and_a_ticket_without_one_still_loads(tmp_path, home):
    """One bit of one weight: shapes, counts and widths are as they were."""
    copy = tmp_path / "copy"
    shutil.copytree(home / "ticket", copy)
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-5] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged: .*sha256"):
        deploy.load_ticket(copy)
    record = json.loads((copy / "ticket.json").read_text())
    old = {k: v for k, v in record.items() if k not in ("files", "sha256")}
    (copy / "ticket.json").write_text(json.dumps(old, indent=1) + "\n")
    assert deploy.load_ticket(copy) is not None
    assert "nothing vouches" in verify(str(copy))[0]


@pytest.mark.parametrize("kind", ["checkpoint", "ticket"])
def test_no_damage_to_what_a_run_starts_from_is_silent(tmp_path, kind):
    """model.weights and train.teacher: both are Hugging Face folders, and verified as such."""
    if kind == "ticket":
        parent, _ = families_table.open_parent("llama", "head", tmp_path / "parent")
        deploy.save_ticket(parent, parent.block_map.full(), tmp_path / "whole")
        type_ = "llama"
    else:
        cfg = tiny(make_tokens(tmp_path / "tokens"), tmp_path / "run")
        model, type_ = huggingface.load(cfg.model, 0), "gpt2"
        central, progress = random_central(model, cfg), random_progress(model, cfg)
        saved = checkpoint.save(tmp_path / "c", central, progress, cfg, model, None, keep=1)
        shutil.copytree(saved, tmp_path / "whole")

    def use(folder: Path) -> None:
        cfg = config.from_dict({"model": {"type": type_, "weights": str(folder)}})
        huggingface.load(checkpoint.resolved(cfg).model, 0)

    (tmp_path / "whole/README.md").unlink(missing_ok=True)  # a card may be edited, or go
    assert missed(tmp_path / "whole", tmp_path / "copy", use) == []
    record = tmp_path / "copy" / f"{kind}.json"
    record.write_bytes((tmp_path / "copy/config.json").read_bytes())
    with pytest.raises(ValueError, match=rf"{kind}\.json is damaged: it vouches for no files"):
        use(tmp_path / "copy")
    if kind == "checkpoint":  # gone, its folder's name still says what it was
        (saved / "checkpoint.json").unlink()
        for read in (use, open_parent):
            with pytest.raises(ValueError, match=r"no valid checkpoint.*no checkpoint\.json"):
                read(saved)


def test_weights_that_a_folder_lacks_are_not_made_up(tmp_path, home):
    """transformers would fill them with random numbers, and say so where nobody reads it."""
    shutil.copytree(home / "parent", tmp_path / "folder")
    path = tmp_path / "folder/model.safetensors"
    whole = load_file(path)
    name = next(name for name in whole if "mlp" in name)
    for broken, what in (
        ({n: t for n, t in whole.items() if n != name}, f"no weights for {name}"),
        (whole | {name: torch.zeros(3)}, f"no weights for {name}"),
        (None, "header"),
    ):
        save_file(broken, path, {"format": "pt"}) if broken else path.write_bytes(b"\xff" * 99_999)
        with pytest.raises(ValueError, match=f"folder could not be loaded: .*{what}"):
            huggingface.from_folder_or_hub(str(tmp_path / "folder"))


def test_a_large_file_is_hashed_in_the_background(tmp_path, monkeypatch):
    """A small one is refused when it is opened, a large one as soon as the damage is known."""
    stem = make_tokens(tmp_path / "large")
    good = Path(f"{stem}.bin").read_bytes()
    data = bytearray(good)
    data[700] ^= 1  # a legal id becomes another legal id
    Path(f"{stem}.bin").write_bytes(data)
    with pytest.raises(ValueError, match=r"large\.bin is damaged"):
        open_tokens(stem)
    monkeypatch.setattr(manifest, "AT_ONCE", 100)
    file, until = open_tokens(stem), time.monotonic() + 10

    def use_on() -> None:
        while time.monotonic() < until:
            file.sequences([0, 1], 16)

    with pytest.raises(ValueError, match=r"large\.bin is damaged"):
        use_on()
    with pytest.raises(ValueError, match=r"large\.bin is damaged: it does not match"):
        verify_tokens(stem)  # waits for the hash
    Path(f"{stem}.bin").write_bytes(good)
    assert "1 files match" in verify_tokens(stem)  # the file is read anew


def test_dtypes_come_from_a_short_list(tmp_path):
    stem = make_tokens(tmp_path / "t")
    for dtype in ("O", "int64", "<u2", 16, None):
        change(Path(f"{stem}.json"), dtype=dtype)
        with pytest.raises(ValueError, match="legal are uint16 and uint32"):
            open_tokens(stem)


def test_verify_names_what_is_damaged(tmp_path, monkeypatch, capsys, token_folder, home):
    """The command: whole files of every kind are told, each damage is named, and the code is 2."""
    run = tmp_path / "run"
    rounds.train(tiny(make_tokens(tmp_path / "walk"), run, train={"rounds": 1}), quiet=True)
    shutil.copytree(token_folder, tmp_path / "tokens")
    shutil.copytree(home / "ticket", tmp_path / "ticket")
    kinds = [str(tmp_path / "tokens/t"), str(tmp_path / "ticket"), str(run)]

    code, out, _ = in_process(monkeypatch, capsys, "verify", *kinds)
    assert code == 0
    assert [out.count(word) for word in ("token file", "ticket /", "checkpoint /")] == [1, 1, 1]
    ids = np.fromfile(tmp_path / "tokens/t.bin", "<u2")
    ids[0] ^= 1
    ids.tofile(tmp_path / "tokens/t.bin")
    with (run / "checkpoints/round-000001/model.safetensors").open("ab") as file:
        file.write(b"x")
    code, out, err = in_process(monkeypatch, capsys, "verify", *kinds)
    assert code == 2
    assert "ticket /" in out
    assert "t.bin is damaged" in err
    assert "model.safetensors" in err
    nothing = in_process(monkeypatch, capsys, "verify", str(tmp_path))
    check_refusal(*nothing, ("nothing to verify",))


# ---------------------------------------------------------------- what could do harm


PACKAGE = Path(twistlm.__file__).parent


@pytest.fixture
def room():
    """At most 3 GB beyond what the process has: code that would take 10 GB fails."""
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
    """Every Auto class is told so: left alone, it asks, and a piped `y` answers."""
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


def test_a_piped_y_answers_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\ny\n"))
    auto = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}
    Path("config.json").write_text(json.dumps({"model_type": "nosuch", "auto_map": auto}))
    Path("evil.py").write_text(EVIL)
    said = in_process(monkeypatch, capsys, "generate", ".", "--prompt", "hi")
    check_refusal(*said, ("runs no code from a model's folder",))
    assert not Path("ran").exists()


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
    """A folder, ticket and checkpoint whose hashes somebody updated: refused by their headers."""
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
    promise = "and its config promises|has shape|cannot be loaded as a ticket"
    for read in (
        lambda: huggingface.from_folder_or_hub(str(tmp_path / "folder")),
        lambda: checkpoint.template(checkpoint.verify(saved)),  # by shape, tensor by tensor
        lambda: deploy.load_ticket(tmp_path / "ticket"),
    ):
        with pytest.raises(ValueError, match=promise):
            read()


@pytest.mark.parametrize(
    "config_", [{"n_embd": 1 << 20, "n_head": 16}, {"n_layer": 10**9}, {"n_embd": 1 << 40}]
)
def test_a_model_that_no_machine_holds(room, config_):
    cfg = config.from_dict({"model": {"type": "gpt2", "config": config_}})
    with pytest.raises(
        ValueError, match=r"GB of memory|legal are at most 10,000|does not make a gpt2"
    ):
        huggingface.load(cfg.model, 0)


NESTED = "[" * 100_000


def test_absurd_json_is_one_sentence(tmp_path, home):
    stem = make_tokens(tmp_path / "t")
    shutil.copytree(home / "ticket", tmp_path / "ticket")
    (tmp_path / "round-000001").mkdir()
    (tmp_path / "run").mkdir()
    readers = {
        "t.json": lambda: open_tokens(stem),
        "ticket/ticket.json": lambda: deploy.read_ticket(tmp_path / "ticket"),
        "round-000001/checkpoint.json": lambda: checkpoint.verify(tmp_path / "round-000001"),
        "run/run.json": lambda: read_training(tmp_path / "run"),
    }
    for text in (NESTED, '{"n_tokens": ' + "9" * 400 + "}", '{"a": 1e400}'):
        for path, read in readers.items():
            (tmp_path / path).write_text(text)
            with pytest.raises(ValueError, match=r"nested too deeply|no number of ours"):
                read()


def test_absurd_text_and_configs(tmp_path, home):
    (tmp_path / "t.jsonl").write_text(NESTED + "\n")
    with pytest.raises(ValueError, match=r"t\.jsonl, line 1"):
        prepare([str(tmp_path / "t.jsonl")], tmp_path / "t", word_level(["a"]), quiet=True)
    (tmp_path / "c.toml").write_text(f"[train]\nlr = {NESTED}")
    for source, override, said in (
        (str(tmp_path / "c.toml"), [], "nested too deeply"),
        ("demo", [f"train.lr={NESTED}"], "nested too deeply"),
        ("demo", [f"run.seed={'9' * 400}"], "400 digits"),
    ):
        with pytest.raises(ValueError, match=said):
            config.load(source, override)
    for name in ("../secret", "/etc/passwd"):
        record = manifest.sealed({"files": {name: {"bytes": 1, "sha256": "0"}}})
        (tmp_path / "record.json").write_text(manifest.written(record))
        with pytest.raises(ValueError, match="is no file of its folder"):
            manifest.vouched(tmp_path / "record.json", record)
    with pytest.raises(ValueError, match="to be written is no JSON of ours"):  # nor is it written
        manifest.written({"seed": 10**30})
    for command in ("extract", "eval", "lab prune", "lab compare"):
        done = CliRunner().invoke(app, [*command.split(), "x", "--seed", "9" * 30])
        assert (done.exit_code, "--seed" in done.output) == (2, True), command
    folder = tmp_path / "folder"
    for values in (None, {"n_layer": "x"}, {"n_layer": -1}, {"dtype": "float1"}, {"n_head": []}):
        shutil.copytree(home / "parent", folder, dirs_exist_ok=True)
        change(folder / "config.json", **values or {})
        if values is None:
            (folder / "config.json").write_text(NESTED)
        with pytest.raises(ValueError, match="folder could not be loaded: "):
            huggingface.from_folder_or_hub(str(folder))


def test_a_loss_of_1e308_is_not_believed(tmp_path):
    """Neither from a worker nor from a metrics file, where a sum of two overflows."""
    cfg = config.from_dict({}).train
    sent = torch.ones(1, 4)
    assert reason_to_reject(cfg, sent.clone(), sent, 11.0 * cfg.interval) is None
    for loss in (1e308, -1.0, float("nan")):
        assert "loss" in reason_to_reject(cfg, sent.clone(), sent, loss)
    for text, said in {
        '{"round": 1, "loss": 1e308}\n': r"metrics\.jsonl, round 1: a loss of 1e\+308",
        '[1]\n{"round": 2, "loss": "low"}\n': r"metrics\.jsonl, round 2: a loss of 'low'",
        '{"round": 3, "loss": 1.0, "n_tokens": Infinity}\n': r"round 3: inf tokens",
    }.items():
        (tmp_path / "metrics.jsonl").write_text(text)
        with pytest.raises(ValueError, match=said):
            read_training(tmp_path)


# ---------------------------------------------------------------- writing


def test_extract_leaves_foreign_files_alone(tmp_path, home):
    parent, blueprint = families_table.open_parent("gpt2", "head", tmp_path / "parent")
    target = tmp_path / "ticket"
    deploy.save_ticket(parent, blueprint, target)
    (target / "notes").mkdir()
    (target / "notes/mine.txt").write_text("keep me")
    (target / "empty").mkdir()
    links = {"to a folder": home, "to nothing": Path("nowhere")}
    for name, leads in links.items():
        (target / name).symlink_to(leads)
    deploy.save_ticket(parent, parent.block_map.full(), target)
    assert deploy.load_ticket(target).num_parameters() == parent.central.layout.n_params
    record = deploy.read_ticket(target)
    old = {key: value for key, value in record.items() if key not in ("files", "sha256")}
    (target / "ticket.json").write_text(json.dumps(old))  # of before manifests: known by name
    deploy.save_ticket(parent, blueprint, target)
    assert (target / "notes/mine.txt").read_text() == "keep me"
    assert (target / "empty").is_dir()
    assert {name: (target / name).readlink() for name in links} == links
    assert "notes/mine.txt" not in deploy.read_ticket(target)["files"]  # nobody vouches for it


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
    gone = re.search(r"-(\d+)-", next(tmp_path.glob(".draft-*")).name)[1]
    # another machine's is not ours to judge, and process 1 lives, whoever's it is
    kept = {f".draft-elsewhere-{gone}-x", f".draft-{socket.gethostname()}-1-x"}
    for name in kept:
        (tmp_path / name).mkdir()
    files.whole_file(tmp_path / "next.json", "{}")
    assert {path.name for path in tmp_path.glob(".draft-*")} == kept
    assert (target / "old").read_text() == "old"


def test_what_is_replaced_is_replaced_at_once_and_never_a_file_of_the_user(tmp_path):
    for name in ("t/mine", "page"):
        files.whole_file(tmp_path / name, "old")
    with (tmp_path / "page").open() as reader:
        files.whole_file(tmp_path / "page", "new")
        assert (reader.read(), (tmp_path / "page").read_text()) == ("old", "new")
    with (
        pytest.raises(ValueError, match=r"t/mine is not ours and would be replaced"),
        files.whole_folder(tmp_path / "t", keep=[Path("mine")]) as draft,
    ):
        (draft / "mine").write_text("new")
    assert (tmp_path / "t/mine").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page", "t"]


def test_a_full_disk_names_the_path(tmp_path, home):
    """File by file: what cannot be written is said with the name that the user gave."""
    parent, blueprint = families_table.open_parent("gpt2", "head", tmp_path / "parent")
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

NAME = "a$\\frac$ <script>alert(1)</script> \x1b]0;title\x07\x1b[2J\x9b2J"
CODES = {"\x1b", "\x9b"}  # ESC [ is also one character


def test_names_are_text_wherever_they_are_printed(tmp_path, monkeypatch, capsys):
    """On a page, a card and in a table, where a name may hold backticks and bars; on a terminal."""
    run = tmp_path / NAME
    run.mkdir(parents=True)
    row = {"round": 1, "loss": 2.0, "n_tokens": 10, "seconds": 1.0, "bytes_down": 1, "bytes_up": 1}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (run / "run.json").write_text(json.dumps({"config": {}, "command": "x ``` <b>"}))
    text = report([run], tmp_path / "report")
    assert "<script>alert" not in text
    assert "```` x ``` <b> ````" in text  # code, whatever it holds
    name = "a`<i>`|" + NAME.replace("</script>", "")
    monkeypatch.setattr(sys, "argv", ["twistlm", "extract", name])
    parent, blueprint = families_table.open_parent("gpt2", "head", tmp_path / name)
    deploy.save_ticket(parent, blueprint, tmp_path / "ticket", {"note": name})
    card = (tmp_path / "ticket/README.md").read_text()
    for text in (card, to_markdown([("parent", "perplexity"), (name, "3.0")])):
        assert not CODES & set(text)
        outside = re.sub(r"(`+) .*? \1", "", text)  # code spans
        assert not re.search("<script>|<i>", outside)
    assert "`` twistlm extract 'a`<i>`|" in card  # the command as it was
    row = next(line for line in card.splitlines() if line.startswith("| note"))
    assert len(re.findall(r"(?<!\\)\|", row)) == 4
    console = terminal._Console(file=io.StringIO(), force_terminal=False)
    table = terminal.table(NAME, NAME)
    table.add_row(NAME)
    console.print(NAME, table)
    bar, seen = terminal.progress(True), Console(file=io.StringIO(), width=300)
    bar.add_task(NAME, total=1, note=NAME)
    seen.print(bar.get_renderable())
    _, _, err = in_process(monkeypatch, capsys, "eval", f"./{NAME}x/y")
    for text in (console.file.getvalue(), seen.file.getvalue(), err):
        assert not CODES & set(text)
        assert "alert(1)" in text


def test_long_work_says_in_a_log_how_far_it_is(monkeypatch, capsys):
    """Without a terminal a line for each task, once for a finished one; none of silent ranks."""
    monkeypatch.setattr(terminal, "EVERY", 0.0)
    with terminal.progress() as bar:
        tasks = [bar.add_task(name, total=2, note="3.2\x1b[2J") for name in ("one", "two")]
        bar.update(tasks[0], completed=2)
        bar.update(tasks[0], completed=2)
        bar.update(tasks[1], completed=1)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(",")[0] for line in lines] == [
        "one 2/2",
        "two 0/2",
        "two 0/2",
        "two 1/2",
    ]
    assert all(line.endswith(", 3.2[2J") for line in lines)
    with terminal.progress(quiet=True) as bar:
        bar.advance(bar.add_task("dense rounds", total=4, note=""))
    assert capsys.readouterr().err == ""
