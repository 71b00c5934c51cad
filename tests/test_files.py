"""Files: old ones are read, no damage is silent, and nothing read or written does harm."""

import io
import json
import os
import re
import resource
import shutil
import signal
import socket
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import families_table
import gguf
import numpy as np
import pytest
import ranks
import torch
from checkpoints import damages, metrics, random_central, random_progress
from commands import change, check_refusal, in_process, limited, reseal
from conftest import tiny, word_level
from safetensors.torch import load_file, save

from paper.report import report
from twistlm import config
from twistlm.data.prepare import prepare
from twistlm.data.token_file import open_tokens
from twistlm.lab.points import Points
from twistlm.model import huggingface
from twistlm.system import files, manifest, terminal
from twistlm.system.device import out_of_memory
from twistlm.tickets import deploy, score
from twistlm.tickets.parent import open_parent
from twistlm.tickets.requests import ScoreRequest
from twistlm.training import checkpoint, rounds
from twistlm.training.checkpoint import snapshot

PLENTY = 300  # seconds: machines of tests are busy
OLD = Path(__file__).parent / "fixtures/before_rooms.zip"
# what commit 80de057 printed, with the gates leaving output biases alone, as they do now
TOKENS, SCORES = 3648, (361.67711106680815, 361.4246931447369, 361.9547104585102)
LOSSES = [5.849076271057129, 5.616579691569011]  # of two more rounds, then
RESUMED_FULL, RESUMED_HALF = 211.80414668140043, 212.59282076988697


def test_files_of_version_0_1(tmp_path, monkeypatch):
    """They are evaluated, cut to the same ticket and resumed: moments, outer momentum, leases,
    counts and rho all go into the next losses.
    """
    with zipfile.ZipFile(OLD) as archive:
        archive.extractall(tmp_path)
    monkeypatch.chdir(tmp_path / "before_rooms")  # the run's config names its tokens from here
    assert len(open_tokens("tokens").tokens) // 32 * 32 == TOKENS
    parent = open_parent("run", "cpu")
    found = score.score_parent(parent, ScoreRequest(ratios=("2/4",), n=3), "old", quiet=True)
    scores = (found.full, found.subnets[0].mean, max(found.subnets[0].values))
    assert scores == pytest.approx(SCORES, rel=1e-5)

    ticket = deploy.load_ticket(Path("ticket"))
    blueprint = json.loads(Path("ticket/ticket.json").read_text())["blueprint"]
    kept = {name: tuple(blocks) for name, blocks in blueprint.items()}
    today, ids = deploy.cut_ticket(parent, kept), torch.arange(64).view(2, 32)
    scales = parent.scales(parent.block_map.widths(kept))
    with torch.no_grad():  # then the activation scale multiplied output biases, too
        for group in parent.block_map.groups:
            today.get_parameter(group.out[1]).mul_(scales[group.name])
        torch.testing.assert_close(ticket(ids).logits, today(ids).logits, rtol=0, atol=1e-6)

    cfg = checkpoint.open_("run").config
    rounds.train(replace(cfg, train=replace(cfg.train, rounds=4)), resume=True, quiet=True)
    rows = metrics(Path("run"))
    assert [row["round"] for row in rows] == [1, 2, 3, 4]
    assert [row["loss"] for row in rows[2:]] == pytest.approx(LOSSES, rel=1e-5)
    assert rows[3]["eval"]["full"] == pytest.approx(RESUMED_FULL, rel=1e-5)
    assert rows[3]["eval"]["2/4"]["mean"] == pytest.approx(RESUMED_HALF, rel=1e-5)


# ----------------------------------- damage; of checkpoints that are resumed: test_checkpoint.py


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A token file, a Hugging Face folder, tickets of it and a checkpoint, to be copied."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "t.txt").write_text(" ".join(f"w{i % 40}" for i in range(3000)))
    words = word_level([f"w{i}" for i in range(40)])
    prepare([str(folder / "t.txt")], folder / "tokens/t", words, quiet=True)
    parent, blueprint = families_table.open_parent("gpt2", "head", folder / "parent")
    words = word_level([f"w{i}" for i in range(parent.template.config.vocab_size)])
    words.save(str(folder / "tokenizer.json"))
    parent = replace(parent, tokenizer=folder / "tokenizer.json")
    deploy.save_ticket(parent, blueprint, folder / "ticket", {"note": 1})
    deploy.save_ticket(parent, parent.block_map.full(), folder / "start")
    (folder / "start/README.md").unlink()  # a card may be edited, or go
    cfg = tiny(str(folder / "tokens/t"), folder / "run")
    model = huggingface.load(cfg.model, 0)
    now, progress = snapshot(random_central(model, cfg)), random_progress(model, cfg)
    saved = checkpoint.save(folder, now, progress, cfg, model, None, keep=1)
    saved.rename(folder / "checkpoint")
    return folder


@pytest.fixture
def copies(whole, tmp_path) -> Path:
    return shutil.copytree(whole, tmp_path / "copies")


def begin(folder: Path) -> None:
    """What a run does with model.weights and train.teacher."""
    cfg = config.from_dict({"model": {"type": "gpt2", "weights": str(folder)}})
    huggingface.load(checkpoint.resolved(cfg).model, 0)


READERS = {  # a folder of `whole`: its record, and what reads it
    "tokens": ("t.json", lambda folder: open_tokens(str(folder / "t")).sequences([0], 8)),
    "ticket": ("ticket.json", deploy.load_ticket),
    "start": ("ticket.json", begin),
    "checkpoint": ("checkpoint.json", begin),
}


@pytest.mark.parametrize("name", READERS)
def test_no_damage_is_silent(copies, capsys, name):
    """200 random ones; a changed card is said and loads: people edit cards."""
    (record, read), folder = READERS[name], copies / name
    read(folder)
    for told, file, data in (*damages(folder, 100), *damages(folder, 100, record)):
        good = file.read_bytes()
        file.write_bytes(data)
        capsys.readouterr()
        try:
            read(folder)
            heard = capsys.readouterr().out
        except ValueError as error:
            heard = str(error)
        assert str(folder) in heard, told
        file.write_bytes(good)
    read(folder)


def test_records_that_vouch_for_nothing(copies):
    for name in ("start", "checkpoint"):
        record = READERS[name][0]
        shutil.copy(copies / name / "config.json", copies / name / record)
        with pytest.raises(ValueError, match=rf"{record} is damaged: it vouches for no files"):
            begin(copies / name)
    (copies / "checkpoint/checkpoint.json").unlink()
    named = (copies / "checkpoint").rename(copies / "round-000017")  # which says what it was
    for read in (begin, open_parent):
        with pytest.raises(ValueError, match=r"no valid checkpoint.*no checkpoint\.json"):
            read(named)
    before_manifests(copies / "ticket")
    assert deploy.load_ticket(copies / "ticket") is not None
    assert "nothing vouches" in deploy.verify(str(copies / "ticket"))[0]


def before_manifests(ticket: Path) -> None:
    record = deploy.read_ticket(ticket)
    old = {key: value for key, value in record.items() if key not in ("files", "sha256")}
    (ticket / "ticket.json").write_text(json.dumps(old))


def test_a_broken_hugging_face_folder(copies):
    """transformers would fill what it lacks with random numbers, and say so where nobody reads."""
    file, about = copies / "parent/model.safetensors", copies / "parent/config.json"
    good, text, weights = file.read_bytes(), about.read_text(), load_file(file)
    name = next(name for name in weights if "mlp" in name)
    rest = {n: t for n, t in weights.items() if n != name}
    wrong = (save(each, {"format": "pt"}) for each in (rest, rest | {name: torch.zeros(3)}))
    for data, config_, what in (
        *((each, text, f"no weights for {name}") for each in wrong),
        (b"\xff" * 99_999, text, "header"),
        (good, text.replace('"n_layer": ', '"n_layer": -'), ""),
        (good, NESTED, ""),
    ):
        file.write_bytes(data)
        about.write_text(config_)
        with pytest.raises(ValueError, match=f"parent could not be loaded: .*{what}"):
            huggingface.pretrained(str(copies / "parent"))


def test_verify_names_what_is_damaged(copies, monkeypatch, capsys):
    """The command: whole files of every kind are told, each damage is named, and the code is 2."""
    (copies / "run/checkpoints").mkdir(parents=True)
    saved = (copies / "checkpoint").rename(copies / "run/checkpoints/round-000017")
    kinds = [str(copies / name) for name in ("tokens/t", "ticket", "run")]
    code, out, _ = in_process(monkeypatch, capsys, "verify", *kinds)
    assert code == 0
    assert [out.count(word) for word in ("token file", "ticket /", "checkpoint /")] == [1, 1, 1]
    for path in (copies / "tokens/t.bin", saved / "model.safetensors"):
        data = path.read_bytes()
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    code, out, err = in_process(monkeypatch, capsys, "verify", *kinds)
    assert (code, out.count("ticket /")) == (2, 1)
    assert all(f"{name} is damaged" in err for name in ("t.bin", "model.safetensors"))
    nothing = in_process(monkeypatch, capsys, "verify", str(copies))
    check_refusal(*nothing, ("nothing to verify",))


NESTED = "[" * 100_000


def memory(n_bytes: int):
    """At most so much beyond what the process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return limited(resource.RLIMIT_AS, pages * resource.getpagesize() + n_bytes)


@pytest.fixture
def room():
    """Code that would take 10 GB fails."""
    with memory(3 << 30):
        yield


def seal(folder: Path, record: str) -> None:
    """What a hand does that edits a folder and updates its hashes."""
    table = json.loads((folder / record).read_text())
    described = manifest.describe_files({name: folder / name for name in table["files"]})
    if record == checkpoint.MANIFEST:
        described = {name: each["sha256"] for name, each in described.items()}
    reseal(folder / record, files=described)


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
def test_a_config_that_promises_more_than_the_weights_hold(copies, room, key, value):
    """A folder, ticket and checkpoint whose hashes somebody updated: refused by their headers."""
    saved, ticket = copies / "checkpoint", copies / "ticket"
    for folder in (copies / "parent", saved, ticket):
        change(folder / "config.json", **{key: value})
    seal(saved, checkpoint.MANIFEST)
    seal(ticket, deploy.TICKET)
    promise = "its config promises"
    for read in (
        lambda: huggingface.pretrained(str(copies / "parent")),
        lambda: checkpoint.template(checkpoint.verify(saved)),  # by shape, tensor by tensor
        lambda: deploy.load_ticket(ticket),
    ):
        with pytest.raises(ValueError, match=promise):
            read()


@pytest.mark.parametrize("config_", [{"n_embd": 1 << 20, "n_head": 16}, {"n_layer": 10**9}])
def test_a_model_that_no_machine_holds(room, config_):
    cfg = config.from_dict({"model": {"type": "gpt2", "config": config_}})
    with pytest.raises(
        ValueError, match=r"GB of memory|legal are at most 10,000|does not make a gpt2"
    ):
        huggingface.load(cfg.model, 0)


def load_without_memory(said: Path) -> None:
    """In a process of its own: whether each error of a model too large was told as such."""
    size = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_head": 4}
    small, large = (
        config.from_dict({"model": {"config": size | {"n_layer": n}}}).model for n in (1, 9999)
    )
    huggingface.load(small, 0)  # what is imported on the way is there
    for megabytes in (4, 8):
        found = None
        try:
            with memory(megabytes << 20):
                huggingface.load(large, 0)
        except Exception as error:
            found = error
        with said.open("a") as file:
            file.write(f"{found is not None and bool(out_of_memory(found))}\n")


def test_too_little_memory_is_told_as_such(tmp_path):
    """Not as a mistake in the config: modules of 9,999 layers take more than is left.

    Memory may end in Python, in C++ or in Python's own C, each with an error of its own.
    """
    process = ranks.SERVER.Process(target=load_without_memory, args=(tmp_path / "said",))
    process.start()
    process.join(PLENTY)
    assert process.exitcode == 0
    assert (tmp_path / "said").read_text().split() == ["True", "True"]


def test_absurd_json_is_one_sentence(copies):
    (copies / "t.jsonl").write_text(NESTED + "\n")
    (copies / "c.toml").write_text(f"[train]\nlr = {NESTED}")
    stem, words = str(copies / "tokens/t"), word_level(["a"])
    record = manifest.sealed({"files": {"../secret": {"bytes": 1, "sha256": "0"}}})
    (copies / "record.json").write_text(manifest.written(record))
    change(copies / "tokens/t.json", n_tokens=10**400)
    for name in ("ticket/ticket.json", "checkpoint/checkpoint.json"):
        (copies / name).write_text(NESTED)
    for said, read in {
        "n_tokens is 10": lambda: open_tokens(stem),
        r"ticket\.json .*recursion": lambda: deploy.read_ticket(copies / "ticket"),
        r"checkpoint\.json .*recursion": lambda: checkpoint.verify(copies / "checkpoint"),
        r"t\.jsonl, line 1": lambda: prepare([str(copies / "t.jsonl")], copies / "new", words),
        "recursion": lambda: config.load(str(copies / "c.toml")),
        "nested too deeply": lambda: config.load("demo", [f"train.lr={NESTED}"]),
        "400 digits": lambda: config.load("demo", [f"run.seed={'9' * 400}"]),
        "no file of its folder": lambda: manifest.vouched(copies / "record.json", record),
    }.items():
        with pytest.raises(ValueError, match=said):
            read()


def test_extract_leaves_foreign_files_alone(tmp_path):
    parent, blueprint = families_table.open_parent("gpt2", "head", tmp_path / "parent")
    target, links = tmp_path / "ticket", {"to a folder": tmp_path, "to nothing": Path("nowhere")}
    deploy.save_ticket(parent, blueprint, target)
    (target / "notes").mkdir()
    (target / "notes/mine.txt").write_text("keep me")
    (target / "empty").mkdir()
    for name, leads in links.items():
        (target / name).symlink_to(leads)
    deploy.save_ticket(parent, parent.block_map.full(), target)
    assert deploy.load_ticket(target).num_parameters() == parent.central.layout.n_params
    before_manifests(target)  # its files are known by name
    deploy.save_ticket(parent, blueprint, target)
    assert (target / "notes/mine.txt").read_text() == "keep me"
    assert (target / "empty").is_dir()
    assert {name: (target / name).readlink() for name in links} == links
    assert "notes/mine.txt" not in deploy.read_ticket(target)["files"]  # nobody vouches for it


def write_and_die(target: Path, when: str) -> None:
    """In a process of its own: killed while it fills a folder, or between its two renames."""
    rename = os.rename

    def dying(a: Path, b: Path) -> None:
        rename(a, b)
        if when == "between":
            os.kill(os.getpid(), signal.SIGKILL)

    os.rename = dying
    with files.whole_folder(target) as draft:
        (draft / "half").write_text("x")
        if when == "filling":
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("when", ["filling", "between"])
def test_what_a_killed_process_leaves_is_cleaned_and_nothing_is_lost(tmp_path, when):
    target = tmp_path / "t"
    with files.whole_folder(target) as draft:
        (draft / "old").write_text("old")
    process = ranks.SERVER.Process(target=write_and_die, args=(target, when))
    process.start()
    process.join(PLENTY)
    assert process.exitcode == -signal.SIGKILL
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


def test_a_full_disk_names_the_path(tmp_path):
    """File by file: what cannot be written is said with the name that the user gave."""
    parent, blueprint = families_table.open_parent("gpt2", "head", tmp_path / "parent")
    (tmp_path / "t.txt").write_text("a b " * 10_000)
    words = word_level(["a", "b"])
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with limited(resource.RLIMIT_FSIZE, 2048):
        for name, write in {
            "ticket": lambda path: deploy.save_ticket(parent, blueprint, path),
            "page.html": lambda path: files.whole_file(path, "x" * 9999),
            "tokens.bin": lambda path: prepare([str(tmp_path / "t.txt")], path, words, quiet=True),
        }.items():
            with pytest.raises(OSError, match="could not be written") as caught:
                write(tmp_path / "out" / name)
            assert caught.value.filename == str(tmp_path / "out" / name)
    assert not list((tmp_path / "out").iterdir())


NAME = "a$\\frac$ <script>alert(1)</script> \x1b]0;title\x07\x1b[2J\x9b2J"
CODES = {"\x1b", "\x9b"}  # ESC [ is also one character


def test_names_are_text_wherever_they_are_printed(tmp_path, monkeypatch, capsys):
    """On a page, a card and in a table, where a name may hold backticks and bars; on a terminal."""
    about = {"experiment": "parents", "scale": "gpu", "parent": NAME, "setting": "both"}
    made = {"tokens": 10, "seconds": 1.0, "loss": 2.0, "bytes": 1}
    Points(tmp_path / NAME).measure(about, lambda: made)
    text = report([tmp_path / NAME], tmp_path / "report")
    assert "<script>alert" not in text
    name = "a`<i>`|" + NAME.replace("</script>", "")
    monkeypatch.setattr(sys, "argv", ["twistlm", "extract", name])
    parent, blueprint = families_table.open_parent("gpt2", "head", tmp_path / name)
    deploy.save_ticket(parent, blueprint, tmp_path / "ticket", {"method": name})
    card = (tmp_path / "ticket/README.md").read_text()
    for text in (card, terminal.markdown_table([("parent", "perplexity"), (name, "3.0")])):
        assert not CODES & set(text)
        outside = re.sub(r"(`+) .*? \1", "", text)  # code spans
        assert not re.search("<script>|<i>", outside)
    assert "`` twistlm extract 'a`<i>`|" in card  # the command as it was
    row = next(line for line in card.splitlines() if line.startswith("| method"))
    assert len(re.findall(r"(?<!\\)\|", row)) == 4
    console = terminal._Console(file=io.StringIO(), force_terminal=False, width=300)
    table, bar = terminal.table(NAME, NAME), terminal.progress(True)
    table.add_row(NAME)
    bar.add_task(NAME, total=1, note=NAME)
    console.print(NAME, table, bar.get_renderable())
    _, _, err = in_process(monkeypatch, capsys, "eval", f"./{NAME}x/y")
    for text, n in ((console.file.getvalue(), 6), (err, 1)):
        assert not CODES & set(text)
        assert text.count("alert(1)") >= n


def test_long_work_says_in_a_log_how_far_it_is(monkeypatch, capsys):
    """Without a terminal a line for each task, once for a finished one; none of silent ranks."""
    monkeypatch.setattr(terminal, "EVERY", 0.0)
    with terminal.progress() as bar:
        tasks = [bar.add_task(name, total=2, note="3.2\x1b[2J") for name in ("one", "two")]
        bar.update(tasks[0], completed=2)
        bar.update(tasks[1], completed=1)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(",")[0] for line in lines] == ["one 2/2", "two 0/2", "two 1/2"]
    assert all(line.endswith(", 3.2[2J") for line in lines)
    with terminal.progress(quiet=True) as bar:
        bar.advance(bar.add_task("dense rounds", total=4, note=""))
    assert capsys.readouterr().err == ""
