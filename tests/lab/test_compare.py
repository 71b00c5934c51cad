"""Every cell of a comparison against models on disk and plain Hugging Face; stops and resumes."""

from __future__ import annotations

import csv
import itertools
import json
import math
import multiprocessing
import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import check_refusal, in_process
from conftest import make_tokens, tiny, write_words
from families_table import tiny_model
from transformers import AutoModelForCausalLM

from twistlm import cli
from twistlm.baselines.request import PruneRequest
from twistlm.baselines.write import write
from twistlm.compute.perplexity import Text
from twistlm.data import token_file
from twistlm.lab.compare import cells, measure, table
from twistlm.lab.points import name_of
from twistlm.model import generator
from twistlm.model.blocks import widths_of_ratio
from twistlm.tickets import deploy
from twistlm.tickets.healing import heal
from twistlm.tickets.parent import Parent, open_parent
from twistlm.tickets.requests import HealRequest
from twistlm.tickets.ticket_scale import N_DRAWS, TicketScales, choice_text
from twistlm.training import rounds

SEQ_LEN, N_TOKENS = 16, 96
LABELS = {"dense": "dense", "dropout": "dropout", "twist": "TwIST"}
PARENTS = "--parent-dense dense --parent-dropout dropout --parent-twist twist "
POINTS = Path("table/points.jsonl")


def trained(name: str, tokens: str = "tokens", **sections: dict) -> None:
    """A parent that was trained for a round."""
    train = {"rounds": 1} | sections.pop("train", {})
    rounds.train(tiny(tokens, Path(name), train=train, **sections), quiet=True)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A parent of each kind, one TwIST parent that was cut in attention alone, and token files."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # all paths are relative: copies are complete
        make_tokens(Path("tokens"), 1200)
        for name in LABELS:
            trained(name, train={"method": name})
        trained("attn", blocks={"setting": "attn"})
    return folder


@pytest.fixture
def here(home, tmp_path, monkeypatch) -> Path:
    shutil.copytree(home, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def small(text: str) -> list[str]:
    """A command of few numbers, at two sizes unless it names its own; '' is written as none."""
    args = ["" if word == "none" else word for word in text.split()]
    few = f"--n 3 --tokens {N_TOKENS} --calibration-sequences 6 --device cpu -o table".split()
    return [*few, *([] if "--ratios" in args else ["--ratios", "3/4,2/4"]), *args]


@pytest.fixture
def refused(monkeypatch, capsys):
    """Run a command that is refused; returns code, output and errors."""
    return lambda text: in_process(monkeypatch, capsys, "lab", "compare", *small(text))


@pytest.fixture
def run(refused):
    """Run a command that ends well; returns what it printed."""

    def run(text: str) -> str:
        code, out, err = refused(text)
        assert code == 0, err
        return out

    return run


def rows(folder: str = "table") -> dict[tuple[str, ...], dict[str, str]]:
    """The CSV by (setting, ratio, parent, method, repair)."""
    with Path(folder, "compare.csv").open() as file:
        lines = list(csv.DictReader(file))
    keys = ("setting", "ratio", "parent", "method", "repair")
    return {tuple(line[key] for key in keys): line for line in lines}


def state() -> dict[str, str]:
    """The lines of the finished cells, by the names of their configs."""
    lines = POINTS.read_text().splitlines()
    found = {name_of(json.loads(line)["config"]): line for line in lines}
    assert len(found) == len(lines)  # nothing was measured twice
    return found


def points() -> list[dict]:
    return [json.loads(line) for line in state().values()]


@torch.no_grad()
def perplexity(model, tokens: str = "tokens") -> float:
    """Hugging Face's logits over the first windows of the token file."""
    ids = token_file.open_tokens(tokens).sequences(list(range(N_TOKENS // SEQ_LEN)), SEQ_LEN)
    logp = model(input_ids=ids, use_cache=False).logits[:, :-1].double().log_softmax(-1)
    return math.exp(-float(logp.gather(2, ids[:, 1:, None]).mean()))


def opened(name: str, setting: str) -> Parent:
    return open_parent(name, "cpu", [f"blocks.setting={setting}"])


def scales_of(parent: Parent) -> TicketScales:
    """Scales of tickets, compared on the text behind the reported one."""
    text = Text(token_file.open_tokens("tokens"), SEQ_LEN, N_TOKENS)
    tried = TicketScales(parent, text, choice_text(text, parent.cfg.data))
    assert tried.choice.first == text.n_sequences
    return tried


def scaled(parent: Parent, scale: str) -> Parent:
    """The parent with the scale that the table names."""
    tried = scales_of(parent)
    return tried.parent_with(next(t for t in tried.candidates() if str(t) == scale))


def check_pruned(row: dict, parent: Parent, method: str, repair: str = "", tokens="tokens", **how):
    """A row is what `lab prune` writes, by Hugging Face's forward pass; returns its record."""
    is_ticket = ":" in method
    parent = scaled(parent, row["scale"]) if is_ticket else parent
    request = PruneRequest(method=method, n=6, repair=repair or None, **how)
    made = write(parent, Path("out"), request, quiet=True)
    load = deploy.load_ticket if is_ticket else AutoModelForCausalLM.from_pretrained
    want = perplexity(load(Path("out")), tokens)
    assert float(row["perplexity"]) == pytest.approx(want, rel=1e-5), (method, repair)
    assert int(row["bytes"]) == Path("out/model.safetensors").stat().st_size
    shutil.rmtree("out")
    return made


def test_every_cell_is_what_the_commands_write(here, monkeypatch, run):
    """Tickets and pruned models through their folders, and Hugging Face's own forward pass."""
    methods = "sparsegpt,magnitude,block:fisher"
    clock = SimpleNamespace(perf_counter=itertools.count(1.0).__next__)  # a second at every look
    monkeypatch.setattr(measure, "time", clock)
    out = run(f"{PARENTS} --settings attn,both --methods {methods} --repair lstsq --ratios 2/4")
    found = rows()
    n_tickets, n_methods = 3 * 2 * 2, 2 * (2 + 2)  # parents, settings, repaired or not
    assert len(found) == 3 + n_tickets + n_methods
    for kind, label in LABELS.items():
        folder = next(Path(kind, "checkpoints").iterdir())
        whole = found["", "", label, "whole", ""]
        want = perplexity(AutoModelForCausalLM.from_pretrained(folder))
        assert float(whole["perplexity"]) == pytest.approx(want, rel=1e-5)
        assert int(whole["bytes"]) == (folder / "model.safetensors").stat().st_size
        assert (whole["calibration_tokens"], whole["speedup"]) == ("0", "1.0")
        row = found["attn", "2/4", label, "random", ""]
        parent = scaled(opened(kind, "attn"), row["scale"])
        widths = widths_of_ratio(parent.block_map, "2/4")
        values = []
        for draw in range(3):
            blueprint = generator.for_deployment(parent.block_map, widths, seed=0, draw=draw)
            deploy.save_ticket(parent, blueprint, Path("ticket"))
            values.append(perplexity(deploy.load_ticket(Path("ticket"))))
        assert float(row["perplexity"]) == pytest.approx(statistics.mean(values), rel=1e-5)
        assert float(row["sd"]) == pytest.approx(statistics.stdev(values), rel=1e-2)
        assert int(row["bytes"]) == Path("ticket/model.safetensors").stat().st_size
        assert (row["n"], row["calibration_tokens"]) == ("3", "0")
        assert float(row["seconds"]) == pytest.approx(1)  # of one ticket
    for setting, method in itertools.product(("attn", "both"), methods.split(",")):
        for repair in ("", "lstsq") if ":" in method else ("",):
            row = found[setting, "2/4", "dense", method, repair]
            check_pruned(row, opened("dense", setting), method, repair, ratio="2/4")
            read = repair or method != "magnitude"
            assert int(row["calibration_tokens"]) == (6 * SEQ_LEN if read else 0)
            # whole blocks: to score them, to choose them and to build the ticket
            assert float(row["seconds"]) == (3 if ":" in method else 1)
            assert row["sd"] == ""
    # a ticket's speed depends on its shapes alone; zeros are measured once
    speeds: dict[tuple, set[str]] = {}
    for key, row in found.items():
        if key[0]:
            assert float(row["speedup"]) > 0
            size = key[:2] if ":" in key[3] or key[3] == "random" else ()
            speeds.setdefault(size, set()).add(row["speedup"])
    assert {len(values) for values in speeds.values()} == {1}
    assert len(set.union(*speeds.values())) == 2 + 1
    made = points()
    for result in (p["result"] for p in made if p["config"]["what"] in ("decode", "zeros")):
        slow, fast = (result[name]["fastest_decode_ms"] for name in ("parent", "pruned"))
        assert result["speedup"] == slow / fast
    # the scale of random tickets is chosen on others, which are drawn after them
    parent = opened("twist", "attn")
    widths = widths_of_ratio(parent.block_map, "2/4")
    others = [
        generator.for_deployment(parent.block_map, widths, seed=0, draw=3 + i)
        for i in range(N_DRAWS)
    ]
    mean = float(found["attn", "2/4", "TwIST", "random", ""]["perplexity"])
    (said,) = (p["result"]["treatment"] for p in made if p["result"].get("mean") == mean)
    assert scales_of(parent).best(others)[1]["tried"] == pytest.approx(said["tried"], rel=1e-5)
    record = json.loads(Path("table/compare.json").read_text())
    assert len(record["rows"]) == len(found)
    assert set(record["parents"]) == set(LABELS.values())
    assert record["versions"]
    text = Path("table/compare.md").read_text()
    keys = ("both", "2/4", "TwIST", "random", ""), ("attn", "2/4", "dense", "sparsegpt", "")
    for shown in (f"{float(found[key]['perplexity']):.2f}" for key in keys):
        assert shown in text
        assert shown in out
    # nothing but the table and its cells
    assert sorted(os.listdir("table")) == [*sorted(table.FILES), "points.jsonl"]


def whats(lines: Iterable[str]) -> list[str]:
    return [json.loads(line)["config"]["what"] for line in lines]


def test_what_is_measured_once_is_never_measured_again(here, run):
    asked = "--parent-dense dense --parent-twist {} --settings both --methods wanda,block:taylor "
    run(asked.format("twist"))
    before, table = state(), rows()
    assert whats(before.values()).count("scores taylor") == 1  # two ratios share it
    # another place on disk, a smaller grid, another order: nothing runs
    Path("twist").rename("elsewhere")
    asked = asked.format("elsewhere")
    run(asked)
    assert (state(), rows()) == (before, table)
    run(f"{asked} --ratios 0.5 --methods wanda")
    assert state() == before
    assert {key[1] for key in rows()} == {"", "0.5"}
    old = table["both", "2/4", "dense", "wanda", ""]
    assert rows()["both", "0.5", "dense", "wanda", ""] == old | {"ratio": "0.5"}
    # one cell that is gone comes back as it was, but for its times
    gone = next(name for name, line in before.items() if whats([line]) == ["random"])
    POINTS.write_text("".join(f"{line}\n" for name, line in before.items() if name != gone))
    run(asked)
    after = state()
    assert {name for name in after if after[name] != before[name]} == {gone}
    old, new = (json.loads(each[gone]) for each in (before, after))
    assert old["config"] == new["config"]
    assert old["result"]["values"] == new["result"]["values"]
    # other numbers belong to other points: seed, n, tokens, scale
    for more in ("--seed 1", "--n 2", "--tokens 48", "train.scale=none"):
        known = set(state())
        run(f"{asked} --ratios 2/4 {more}")
        assert "random" in whats(line for name, line in state().items() if name not in known), more
        assert {name: value for name, value in state().items() if name in after} == after


def command(args: list[str]) -> None:
    """`twistlm lab compare` in a forked process, which has imported everything already."""
    # a shell's background jobs ignore Ctrl-C, and so would this child of one
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["twistlm", "lab", "compare", *args]
    with open("stderr", "w") as sys.stderr, open(os.devnull, "w") as sys.stdout:
        cli.main()


def stop_when(there, text: str) -> str:
    """Start a comparison, press Ctrl-C as soon as `there()`, and return its errors."""
    process = multiprocessing.get_context("fork").Process(target=command, args=(small(text),))
    process.start()
    while not there():
        assert process.is_alive(), Path("stderr").read_text()
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGINT)
    process.join(60)
    err = Path("stderr").read_text()
    assert process.exitcode == 130, err
    return err


def test_an_interrupted_comparison_goes_on(here, run):
    asked = f"{PARENTS} --settings ffn --methods magnitude --n 9"
    err = stop_when(lambda: POINTS.is_file() and POINTS.read_text().count("\n") > 2, asked)
    assert "interrupted; the same command goes on where it stopped" in err
    assert POINTS.read_text().endswith("\n")  # no half-written cell
    before = state()
    filled = [row for row in rows().values() if row["perplexity"]]
    assert 3 <= len(filled) < len(rows())  # the table shows what is there
    run(asked)
    after = state()
    assert {name: after[name] for name in before} == before
    assert all(row["perplexity"] for row in rows().values())


def test_parents_show_tickets_where_their_training_cut(here, run):
    run(
        "--parent-dense dense --parent-twist twist --parent-twist attn --settings attn,ffn "
        "--methods magnitude --on dense,twist --ratios 2/4"
    )
    names = {"magnitude (dense)", "magnitude (TwIST twist)", "magnitude (TwIST attn)"}
    assert {key[3] for key in rows()} == {"whole", "random", *names}
    random = {(key[2], key[0]) for key in rows() if key[3] == "random"}
    both = {(label, s) for label in ("dense", "TwIST twist") for s in ("attn", "ffn")}
    assert random == both | {("TwIST attn", "attn")}


def test_single_weights_need_no_whole_blocks(here, run):
    """1/3 of the weights can stay where no third of 4 blocks can."""
    make_tokens(Path("long"), 1000)
    tiny_model("llama").save_pretrained("llama")
    cut = "data.seq_len=16 blocks.n_ffn=4 blocks.shared_first=0 blocks.shared_last=0"
    run(
        "--parent-dense llama --settings both --ratios 1/3 --methods magnitude,sparsegpt --n 0 "
        f"--data long --calibration long {cut}"
    )
    assert {key[3] for key in rows()} == {"whole", "magnitude", "sparsegpt"}
    row = rows()["both", "1/3", "dense", "magnitude", ""]
    parent = open_parent("llama", "cpu", cut.split())
    made = check_pruned(row, parent, "magnitude", tokens="long", sparsity="2/3")
    assert made["n_zeros"] > 0


@pytest.mark.parametrize(
    ("ratio", "setting", "wanted"),
    [
        ("6/12", "both", ("6/12", "1/2", 1 / 2)),
        ("attn=2/3,ffn=6/12", "both", ("attn=2/3,ffn=6/12", "attn=2/3,ffn=1/2", 7 / 12)),
        ("ffn=6/12,attn=2/3", "both", ("ffn=6/12,attn=2/3", "attn=2/3,ffn=1/2", 7 / 12)),
        ("attn=1/3,ffn=4/12", "both", ("attn=1/3,ffn=4/12", "1/3", 1 / 3)),
        ("attn=2/3,ffn=6/12", "ffn", ("6/12", "1/2", 1 / 2)),
        ("attn=1,ffn=6/12,ffn.2=1", "ffn", ("ffn=6/12,ffn.2=1", "ffn=1/2,ffn.2=1", 1 / 2)),
        ("attn=1,ffn=6/12,ffn.2=1", "attn", ("1", "1", 1)),
        ("ffn=6/12,ffn.2=0.5", "ffn", ("ffn=6/12,ffn.2=0.5", "1/2", 1 / 2)),
    ],
)
def test_a_ratio_in_a_setting(ratio, setting, wanted):
    """What it says there, its one name among all ways to write it, and how large it is."""
    mine = cells.in_setting(ratio, setting)
    assert (mine, cells.exact(mine), float(cells.mean_share(mine))) == pytest.approx(wanted)


UNEVEN = (
    "data.seq_len=16 data.train=tokens data.valid=tokens blocks.n_ffn=12 "
    "blocks.shared_first=1 blocks.shared_last=0"
)
HALF, QUARTER = "attn=2/3,ffn=6/12", "attn=1/3,ffn=3/12"


def grouped() -> str:
    """3 groups of heads, 12 chunks of neurons, and no run behind it: the command says the rest."""
    tiny_model("llama-gqa").save_pretrained("llama")
    return f"--parent-dense llama {UNEVEN} "


def test_ratios_by_kind_are_those_of_the_other_commands(here, monkeypatch, capsys, run):
    parent = grouped()
    asked = f"{parent} --ratios {HALF} --ratios {QUARTER} --methods sparsegpt,block:magnitude "
    out = run(f"{asked} --settings both")
    found = rows()
    assert {key[1] for key in found} == {"", HALF, QUARTER}
    assert "| attn=1/3 ffn=3/12 |" in Path("table/compare.md").read_text()
    assert "at attn=1/3 ffn=3/12" in out.replace("\n", " ")  # the smaller one
    for ratio in (HALF, QUARTER):
        row = found["both", ratio, "dense", "random", ""]
        scale = {"no scale": "none", "sqrt(N/K)": "sqrt", "N/K": "linear"}[row["scale"]]
        words = f"eval llama {UNEVEN} train.scale={scale} --ratio {ratio} --n 3 --device cpu"
        words += f" --tokens {N_TOKENS} --json eval.json"
        code, _, err = in_process(monkeypatch, capsys, *words.split())
        assert code == 0, err
        (said,) = json.loads(Path("eval.json").read_text())["subnets"]
        assert float(row["perplexity"]) == pytest.approx(said["mean"], rel=1e-6)
        assert float(row["sd"]) == pytest.approx(said["sd"], rel=1e-3)
        for method in ("sparsegpt", "block:magnitude"):
            row, llama = found["both", ratio, "dense", method, ""], UNEVEN.split()
            made = check_pruned(row, open_parent("llama", "cpu", llama), method, ratio=ratio)
            if method == "sparsegpt":  # each kind has its own sparsity
                k, n = (2, 6) if ratio == HALF else (1, 3)
                assert set(made["sparsity"].values()) == {(3 - k) / 3, (12 - n) / 12}
    # a setting sees its own kind: two sizes of `both` may be one there, and have its plain name
    before, few = state(), "--n 0 --methods magnitude --settings attn"
    run(f"{asked} --ratios attn=2/3,ffn=3/12 {few}")
    assert {key[1] for key in rows()} == {"", "2/3", "1/3"}
    alone, known = rows()["attn", "1/3", "dense", "magnitude", ""], state()
    assert before.items() < known.items()
    run(f"{parent} {few} --ratios 4/12,0.5")
    assert rows()["attn", "4/12", "dense", "magnitude", ""] == alone | {"ratio": "4/12"}
    added = {name: line for name, line in state().items() if name not in known}
    assert [json.loads(line)["config"]["ratio"] for line in added.values()] == ["1/2"]


def test_a_stopped_healing_goes_on_to_the_same_numbers(here, run):
    """A model that no run trained teaches; two ratios are one size of attention."""
    asked = (
        f"{grouped()} --ratios {HALF} --ratios attn=2/3,ffn=3/12 --methods none --n 0 --heal 600 "
        "train.batch=1 train.n_workers=1 --settings attn"
    )
    run(asked)
    want = rows()
    healed = {p["config"]["what"]: p for p in points() if "tokens" in p["config"]}
    assert set(healed) == {"block:mask-fisher + heal", "from scratch"}
    for what, point in healed.items():
        record, config = point["result"]["healed"], point["config"]
        assert (config["ratio"], config["tokens"], config["train"]["batch"]) == ("2/3", 600, 1)
        assert record["n_tokens"] == 640  # whole rounds of 10 sequences of 16 tokens
        assert record["teacher"] == ("none" if what == "from scratch" else "llama")
    shutil.rmtree("table")

    def metrics() -> list[Path]:
        """Of trainings that are not finished."""
        return list(Path("table/healing").glob("*/*/metrics.jsonl"))

    # after a round of four
    err = stop_when(lambda: any(path.read_text() for path in metrics()), asked)
    assert "stopped by SIGINT after round" in err
    (path,) = metrics()
    lines = path.read_text()
    assert 1 <= lines.count("\n") < 4
    path.write_text(lines.replace('"n_tokens": 160', '"n_tokens": 161', 1))  # a mark of this round
    run(asked)
    made = [point["result"].get("healed") for point in points()]
    assert [record["n_tokens"] for record in made if record] == [641, 640]  # not trained anew
    for key, row in rows().items():
        assert row["perplexity"] == want[key]["perplexity"], key


def words(here: Path) -> None:
    """Two parents with tokenizers behind their tokens: the same words, numbered otherwise."""
    names = [f"w{i}" for i in range(64)]
    for name, vocabulary in (("one", names), ("two", names[::-1])):
        write_words(name, vocabulary, 1200)
        trained(f"run-{name}", name)


def shaped(**config: int):
    """Prepares a parent of another shape."""

    def prepare(here: Path) -> None:
        model = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_head": 4, "n_layer": 3}
        make_tokens(Path("wide"), 1200, vocab=70)
        trained(
            "odd", "wide" if "vocab_size" in config else "tokens", model={"config": model | config}
        )

    return prepare


def llama(here: Path, name: str = "llama") -> None:
    tiny_model(name).save_pretrained("odd")


def nan(here: Path) -> None:
    model = tiny_model("gpt2")
    with torch.no_grad():
        model.get_parameter("transformer.h.1.mlp.c_fc.weight")[0, 0] = float("nan")
    model.save_pretrained("odd")


def ticket(here: Path) -> None:
    parent = opened("twist", "both")
    deploy.save_ticket(parent, parent.block_map.full(), here / "odd")


ONE = "--parent-dense dense "
TWO = ONE + "--parent-twist odd "
CUT = "data.seq_len=16 blocks.n_ffn=4 blocks.shared_first=1 blocks.shared_last=0 "
ODD = f"--parent-dense odd {CUT} "
TEXT = "--data tokens --calibration tokens "
UNLIKE = "odd cannot be compared with dense"
BAD = {  # case -> (what is prepared, command, parts of the sentence)
    "no parent": (None, "", ("give at least one of --parent-dense, --parent-dropout and",)),
    "no such parent": (None, "--parent-dense ./nowhere", ("./nowhere",)),
    "ticket": (
        ticket,
        "--parent-twist odd --methods none",
        ("odd is a ticket", "give the parent"),
    ),
    "method": (
        None,
        "--parent-twist dense --methods none",
        ("--parent-twist dense was trained with train.method = dense", "--parent-dense"),
    ),
    "vocabulary": (shaped(vocab_size=70), TWO, (UNLIKE, "a vocabulary of 70, not 64")),
    "tokenizer": (
        words,
        "--parent-twist run-one --parent-twist run-two --methods none",
        ("run-two cannot be compared with run-one", "its tokenizer has sha256"),
    ),
    "shape": (shaped(n_layer=4), TWO, (UNLIKE, "h.3.", "None")),
    "family": (llama, TWO + CUT, (UNLIKE, "it is a llama, not gpt2")),
    "blocks": (
        lambda here: trained("odd", blocks={"n_ffn": 8, "k_ffn": 4}),
        TWO,
        (UNLIKE, "blocks.n_ffn = 8, not 4", "give blocks.n_ffn="),
    ),
    "seq_len": (
        lambda here: trained("odd", data={"seq_len": 8}),
        TWO,
        (UNLIKE, "data.seq_len = 8, not 16"),
    ),
    "ratio": (
        None,
        ONE + "--ratios 2/4,1/3",
        ("ratio '1/3' is no whole number of attn blocks", "1/4, 2/4, 3/4, 4/4"),
    ),
    "no ratio": (None, ONE + "--ratios half", ("--ratios 'half' is not a fraction",)),
    "large ratio": (None, ONE + "--ratios 5/4", ("--ratios '5/4': it must lie in (0, 1]",)),
    "ratios": (None, ONE + "--ratios ,", ("--ratios names no ratio",)),
    "kinds and a list": (
        None,
        ONE + "--ratios 2/4,attn=2/4,ffn=1/4",
        ("--ratios '2/4,attn=2/4,ffn=1/4': '2/4' is out of place", "in their own --ratios"),
    ),
    "one kind": (
        None,
        ONE + "--ratios attn=1/4",
        ("--ratios 'attn=1/4' says nothing about ffn, which --settings ffn cuts",),
    ),
    "layer that is not cut": (
        None,
        ONE + "--ratios ffn=1/3,ffn.0=1 --settings ffn --methods wanda --n 0",
        ("--ratios ffn=1/3,ffn.0=1: ratio", "'ffn.0' names nothing", "added as ffn.1=1"),
    ),
    "uneven": (
        lambda here: llama(here, "llama-gqa"),
        ODD + TEXT + "--settings both",
        ("no whole number of attn blocks; legal: 1/3, 2/3, 3/3", "each kind can have its own"),
    ),
    "settings": (None, ONE + "--settings none", ("--settings names none of attn, ffn, both",)),
    "methods": (None, ONE + "--methods wands", ("'wands': use some of sparsegpt",)),
    "on": (None, ONE + "--on twist", ("--on 'twist'", "give --parent-twist")),
    "heal": (
        None,
        "--parent-twist twist --on twist --heal 1k",
        ("--heal prunes and trains a data-parallel parent: give --parent-dense",),
    ),
    "nothing": (None, ONE + "--methods none --n 0", ("nothing to compare in --settings",)),
    "common": (
        lambda here: trained("odd", blocks={"k_attn": 3, "common_attn": [3], "common_ffn": [1]}),
        "--parent-twist odd --methods none --settings both blocks.common_ffn=[0,1,2]",
        ("no room for the 3 common ffn blocks",),
    ),
    "repair": (None, ONE + "--repair ridge", ("--repair 'ridge': use some of bias, rescale",)),
    "repair family": (
        llama,
        ODD + TEXT + "--repair bias",
        ("--repair bias: no output projection of this llama has a bias",),
    ),
    "no calibration": (
        llama,
        ODD + "--data tokens",
        ("odd has no tokens to calibrate on: give --calibration STEM",),
    ),
    "no text": (
        llama,
        ODD + "--calibration tokens",
        ("odd has no tokens of its own: give --data STEM",),
    ),
    "short": (
        None,
        ONE + "--calibration-sequences 99",
        ("tokens is too short for --calibration-sequences 99: it has 75 sequences",),
    ),
    "folder": (None, ONE + "-o dense", ("--out dense exists and is no comparison",)),
    "nan": (nan, ODD + TEXT, ("odd has no perplexity: its logits are not finite",)),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence(here, refused, case):
    prepare, text, parts = BAD[case]
    if prepare is not None:
        prepare(here)
    before = sorted(here.rglob("*"))
    check_refusal(*refused(text), parts)
    if case != "nan":  # refused before anything is written
        assert sorted(here.rglob("*")) == before


def test_a_run_is_compared_from_any_folder(here, monkeypatch, capsys, run):
    """Its tokens, of validation and, to choose a scale, of training, are found above the run."""
    (here / "elsewhere").mkdir()
    # with --tokens 0 none are left behind the reported ones
    asked = "--parent-twist ../twist --settings both --ratios 2/4 --methods none --n 2 --tokens 0"
    found = []
    for folder in ("elsewhere", "twist"):
        monkeypatch.chdir(here / folder)
        run(asked)
        found.append(rows()["both", "2/4", "TwIST", "random", ""]["perplexity"])
        drop = "lab drop ../twist --nodes 2 --device cpu"
        code, out, err = in_process(monkeypatch, capsys, *drop.split())
        assert code == 0, err
        assert "scale" in out
    assert found[0] == found[1]


def test_each_parent_keeps_its_own_common_blocks(here, run):
    """Dense has none, TwIST has two: they are compared, and tickets of TwIST keep them."""
    trained("c", blocks={"k_attn": 3, "common_attn": [3], "common_ffn": [1]})
    asked = "--parent-dense dense --parent-twist c --settings both --methods none --n 2"
    run(asked)
    with_c = rows()["both", "2/4", "TwIST", "random", ""]
    cut = opened("c", "both").block_map
    widths, values = widths_of_ratio(cut, "2/4"), []
    parent = scaled(opened("c", "both"), with_c["scale"])
    for draw in range(2):
        blueprint = generator.for_deployment(cut, widths, seed=0, draw=draw)
        assert all(3 in k if "attn" in name else 1 in k for name, k in blueprint.items())
        values.append(perplexity(deploy.cut_ticket(parent, blueprint)))
    assert float(with_c["perplexity"]) == pytest.approx(sum(values) / 2, rel=1e-5)
    record = json.loads(Path("table/compare.json").read_text())
    assert record["parents"]["TwIST"]["common_attn"] == [3]
    # by rank the same numbers name other blocks: nothing is taken from the cells above
    run(f"{asked} blocks.common_by=rank")
    assert rows()["both", "2/4", "TwIST", "random", ""]["perplexity"] != with_c["perplexity"]


def check_healed(row: dict, ticket: str, like: Parent, **more: str) -> dict:
    """A row is its ticket, healed by the command's own function; returns the record."""
    same = {"tokens": 576, "data": "tokens", "valid": "tokens", "device": "cpu", "like": like.cfg}
    request = HealRequest(ticket=Path(ticket), out=Path("out"), **same, **more)
    record = heal(request, quiet=True)["healed"][-1]
    want = perplexity(deploy.load_ticket("out"))
    assert float(row["perplexity"]) == pytest.approx(want, rel=1e-4)
    assert float(row["speedup"]) > 0
    assert int(row["bytes"]) == Path("out/model.safetensors").stat().st_size
    return record


def test_each_size_trained_for_itself(here, run):
    """Two sizes share the tokens: score, prune, heal by the commands; and from scratch."""
    run(ONE + "--settings both --methods none --n 0 --heal 1152")
    found = rows()
    names = "block:mask-fisher + heal", "from scratch"
    assert tuple(sorted(key[3] for key in found if key[1] == "2/4")) == names
    healed, scratch = (found["both", "2/4", "dense", name, ""] for name in names)
    parent = scaled(opened("dense", "both"), healed["scale"])
    request = PruneRequest(method="block:mask-fisher", ratio="2/4", n=6)
    write(parent, Path("pruned"), request, quiet=True)
    n_tokens = check_healed(healed, "pruned", parent)["n_tokens"]
    assert n_tokens >= 576
    assert int(healed["calibration_tokens"]) == n_tokens + 6 * SEQ_LEN  # scores read some, too
    assert int(scratch["calibration_tokens"]) == n_tokens
    assert float(scratch["perplexity"]) < 64  # it learned something
    assert healed["bytes"] == scratch["bytes"]
    assert not Path("table/healing").exists()


def test_a_parent_with_an_order_shows_its_nested_tickets(here, run):
    """The ticket that the order in the checkpoint names, cut by hand; others have no such row."""
    blocks = {"masks": "sequence", "mask_attn": [4, 2], "mask_ffn": [4, 2], "nested": 0.5}
    trained("o", blocks=blocks | {"k_attn": 4, "k_ffn": 4})
    asked = "--parent-dense dense --parent-twist o --settings both --methods none "
    assert "TwIST, nested" in run(asked)
    found = {key[1:4]: row for key, row in rows().items() if key[3] == "nested"}
    assert set(found) == {("3/4", "TwIST", "nested"), ("2/4", "TwIST", "nested")}
    order = json.loads(next(Path("o/checkpoints").glob("*/checkpoint.json")).read_text())["order"]

    def kept(k: int) -> dict[str, tuple[int, ...]]:
        return {name: tuple(sorted(ranked[:k])) for name, ranked in order.items()}

    for (ratio, *_), row in found.items():
        parent = scaled(opened("o", "both"), row["scale"])
        want = perplexity(deploy.cut_ticket(parent, kept(int(ratio[0]))))
        assert float(row["perplexity"]) == pytest.approx(want, rel=1e-5)
    # each of them healed, as the data-parallel parent was trained and with it as teacher
    run(f"{asked} --n 0 --heal 1152")
    row = rows()["both", "2/4", "TwIST", "nested + heal", ""]
    deploy.save_ticket(scaled(opened("o", "both"), row["scale"]), kept(2), Path("nested"))
    check_healed(row, "nested", opened("dense", "both"), teacher="dense")
