"""The comparison: every cell against models on disk and plain Hugging Face, and it goes on where it stopped."""

from __future__ import annotations

import csv
import io
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
from rich.console import Console
from transformers import AutoModelForCausalLM

from twistlm import cli
from twistlm.baselines.request import PruneRequest
from twistlm.baselines.write import write
from twistlm.compute.perplexity import Text
from twistlm.data import token_file
from twistlm.lab.compare import measure, ratios, table
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
KINDS = {"dense": "dense", "dropout": "dropout", "twist": "twist"}


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A parent of each kind, one TwIST parent that was cut in attention alone, and token files."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # all paths are relative: copies are complete
        make_tokens(Path("tokens"), 1200)
        for name, method in KINDS.items():
            train = {"rounds": 1, "method": method}
            rounds.train(tiny("tokens", Path(name), train=train), quiet=True)
        blocks = {"setting": "attn"}
        rounds.train(tiny("tokens", Path("attn"), train={"rounds": 1}, blocks=blocks), quiet=True)
    return folder


@pytest.fixture
def here(home, tmp_path, monkeypatch) -> Path:
    shutil.copytree(home, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


PARENTS = tuple(arg for kind in KINDS for arg in (f"--parent-{kind}", kind))
SMALL = (
    "--n",
    "3",
    "--tokens",
    str(N_TOKENS),
    "--calibration-sequences",
    "6",
    "--device",
    "cpu",
    "-o",
    "table",
)


def small(args: Iterable[str]) -> tuple[str, ...]:
    """A command of few numbers, at two sizes unless it names its own."""
    args = tuple(args)
    return (*SMALL, *(() if "--ratios" in args else ("--ratios", "3/4,2/4")), *args)


def run(monkeypatch, capsys, *args: str) -> str:
    code, out, err = in_process(monkeypatch, capsys, "lab", "compare", *small(args))
    assert code == 0, err
    return out


def rows(folder: str = "table") -> dict[tuple[str, ...], dict[str, str]]:
    """The CSV by (setting, ratio, parent, method, repair)."""
    with Path(folder, "compare.csv").open() as file:
        lines = list(csv.DictReader(file))
    keys = ("setting", "ratio", "parent", "method", "repair")
    return {tuple(line[key] for key in keys): line for line in lines}


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("by_kind", [False, True])
def test_no_number_loses_a_digit_in_a_narrow_terminal(width, by_kind):
    head = ("", "whole", "8/12", "6/12", "4/12", "3/12", "seconds", "tokens", "MB", "decode")
    if by_kind:  # a head breaks between the kinds, and nowhere else
        uneven = (
            "attn=2/3,ffn=8/12",
            "attn=2/3,ffn=6/12",
            "attn=1/3,ffn=4/12",
            "attn=1/3,ffn=3/12",
        )
        head = (*head[:2], *map(table.size_name, uneven), *head[6:])
    spreads = ("48.52 ± 2.41", "80.47 ± 12.22", "140.22 ± 20.40", "183.40 ± 25.33")
    random = ("structured dropout", "38.51", *spreads, "0.00234", "131,072", "497.8", "1.61x")
    console = Console(width=width, file=io.StringIO())
    console.print(table.to_rich([head, random], "both"))
    shown = console.file.getvalue().split()
    assert set(" ".join((*head, *random[1:])).split()) <= set(shown)


@torch.no_grad()
def perplexity(model) -> float:
    """Hugging Face's logits over the first windows of the token file."""
    ids = token_file.open_tokens("tokens").sequences(list(range(N_TOKENS // SEQ_LEN)), SEQ_LEN)
    logp = model(input_ids=ids, use_cache=False).logits[:, :-1].double().log_softmax(-1)
    return math.exp(-float(logp.gather(2, ids[:, 1:, None]).mean()))


def opened(name: str, setting: str) -> Parent:
    return open_parent(name, "cpu", [f"blocks.setting={setting}"])


def treatments(parent: Parent) -> TicketScales:
    """Ways to scale tickets, compared on the text behind the reported one."""
    text = Text(token_file.open_tokens("tokens"), SEQ_LEN, N_TOKENS)
    tried = TicketScales(parent, text, choice_text(text, parent.cfg.data))
    assert tried.choice.first == text.n_sequences
    return tried


def treated(parent: Parent, scale: str) -> Parent:
    """The parent with the scale that the table names."""
    tried = treatments(parent)
    return tried.parent_with(next(t for t in tried.candidates() if str(t) == scale))


def test_every_cell_is_what_the_commands_write(here, monkeypatch, capsys):
    """Tickets and pruned models through their folders, and Hugging Face's own forward pass."""
    methods = "sparsegpt,magnitude,block:fisher"
    clock = SimpleNamespace(perf_counter=itertools.count(1.0).__next__)  # a second at every look
    monkeypatch.setattr(measure, "time", clock)
    out = run(
        monkeypatch,
        capsys,
        *PARENTS,
        "--settings",
        "attn,both",
        "--methods",
        methods,
        "--repair",
        "lstsq",
        "--ratios",
        "2/4",
    )
    found = rows()
    n_tickets = 3 * 2 * 2  # parents, settings, repaired or not
    n_methods = 2 * (2 + 2)
    assert len(found) == 3 + n_tickets + n_methods
    for kind, label in (("dense", "dense"), ("dropout", "dropout"), ("twist", "TwIST")):
        folder = next(Path(kind, "checkpoints").iterdir())
        whole = found["", "", label, "whole", ""]
        want = perplexity(AutoModelForCausalLM.from_pretrained(folder))
        assert float(whole["perplexity"]) == pytest.approx(want, rel=1e-5)
        assert int(whole["bytes"]) == (folder / "model.safetensors").stat().st_size
        assert (whole["calibration_tokens"], whole["speedup"]) == ("0", "1.0")
        row = found["attn", "2/4", label, "random", ""]
        parent = treated(opened(kind, "attn"), row["scale"])
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
    for setting in ("attn", "both"):
        for method in methods.split(","):
            for repair in ("", "lstsq") if ":" in method else ("",):
                request = PruneRequest(method=method, ratio="2/4", n=6, repair=repair or None)
                parent, row = (
                    opened("dense", setting),
                    found[setting, "2/4", "dense", method, repair],
                )
                if ":" in method:
                    parent = treated(parent, row["scale"])
                write(parent, Path("out"), request, quiet=True)
                load = deploy.load_ticket if ":" in method else AutoModelForCausalLM.from_pretrained
                want = perplexity(load(Path("out")))
                assert float(row["perplexity"]) == pytest.approx(want, rel=1e-5), (method, repair)
                assert int(row["bytes"]) == Path("out/model.safetensors").stat().st_size
                read = repair or method != "magnitude"
                assert int(row["calibration_tokens"]) == (6 * SEQ_LEN if read else 0)
                # whole blocks: to score them, to choose them and to build the ticket
                assert float(row["seconds"]) == (3 if ":" in method else 1)
                assert row["sd"] == ""
                shutil.rmtree("out")
    # a ticket's speed depends on its shapes alone; zeros are measured once
    speeds: dict[tuple, set[str]] = {}
    for key, row in found.items():
        is_ticket = ":" in key[3] or key[3] == "random"
        if key[0]:
            assert float(row["speedup"]) > 0
            speeds.setdefault(key[:2] if is_ticket else (), set()).add(row["speedup"])
    assert {len(values) for values in speeds.values()} == {1}
    assert len(set.union(*speeds.values())) == 2 + 1
    made = [json.loads(line) for line in POINTS.read_text().splitlines()]
    for told in (p["result"] for p in made if p["config"]["what"] in ("decode", "zeros")):
        slow, fast = (told[name]["fastest_decode_ms"] for name in ("parent", "pruned"))
        assert told["speedup"] == slow / fast
    # the scale of random tickets is chosen on others, which are drawn after them
    tried = treatments(parent := opened("twist", "attn"))
    widths = widths_of_ratio(parent.block_map, "2/4")
    others = [
        generator.for_deployment(parent.block_map, widths, seed=0, draw=3 + i)
        for i in range(N_DRAWS)
    ]
    (told,) = (
        p["result"]["treatment"]
        for p in made
        if p["result"].get("mean")
        == float(found["attn", "2/4", "TwIST", "random", ""]["perplexity"])
    )
    assert tried.best(others)[1]["tried"] == pytest.approx(told["tried"], rel=1e-5)
    record = json.loads(Path("table/compare.json").read_text())
    assert len(record["rows"]) == len(found)
    assert set(record["parents"]) == {"dense", "dropout", "TwIST"}
    assert record["versions"]
    text = Path("table/compare.md").read_text()
    for row in (
        found["both", "2/4", "TwIST", "random", ""],
        found["attn", "2/4", "dense", "sparsegpt", ""],
    ):
        assert f"{float(row['perplexity']):.2f}" in text
        assert f"{float(row['perplexity']):.2f}" in out
    # nothing but the table and its cells
    assert sorted(os.listdir("table")) == [
        "compare.csv",
        "compare.json",
        "compare.md",
        "points.jsonl",
    ]


POINTS = Path("table/points.jsonl")


def state() -> dict[str, str]:
    """The lines of the finished cells, by the names of their configs."""
    lines = POINTS.read_text().splitlines()
    found = {name_of(json.loads(line)["config"]): line for line in lines}
    assert len(found) == len(lines)  # nothing was measured twice
    return found


def whats(lines: Iterable[str]) -> list[str]:
    return [json.loads(line)["config"]["what"] for line in lines]


def test_what_is_measured_once_is_never_measured_again(here, monkeypatch, capsys):
    args = (*PARENTS[:2], *PARENTS[4:], "--settings", "both", "--methods", "wanda,block:taylor")
    run(monkeypatch, capsys, *args)
    before, table = state(), rows()
    assert whats(before.values()).count("scores taylor") == 1  # two ratios share it
    # another place on disk, a smaller grid, another order: nothing runs
    Path("twist").rename("elsewhere")
    args = tuple("elsewhere" if arg == "twist" else arg for arg in args)
    run(monkeypatch, capsys, *args)
    assert state() == before
    assert rows() == table
    run(monkeypatch, capsys, *args, "--ratios", "0.5", "--methods", "wanda")
    assert state() == before
    assert {key[1] for key in rows()} == {"", "0.5"}
    assert rows()["both", "0.5", "dense", "wanda", ""] == table[
        "both", "2/4", "dense", "wanda", ""
    ] | {"ratio": "0.5"}
    # one cell that is gone comes back as it was, but for its times
    gone = next(name for name, line in before.items() if whats([line]) == ["random"])
    POINTS.write_text("".join(f"{line}\n" for name, line in before.items() if name != gone))
    run(monkeypatch, capsys, *args)
    after = state()
    assert {name for name in after if after[name] != before[name]} == {gone}
    old, new = (json.loads(each[gone]) for each in (before, after))
    assert old["config"] == new["config"]
    assert old["result"]["values"] == new["result"]["values"]
    # other numbers belong to other points: seed, n, tokens, calibration
    for more in (("--seed", "1"), ("--n", "2"), ("--tokens", "48"), ("train.scale=none",)):
        known = set(state())
        run(monkeypatch, capsys, *args, "--ratios", "2/4", *more)
        assert "random" in whats(line for name, line in state().items() if name not in known), more
        assert {name: value for name, value in state().items() if name in after} == after


def command(*args: str) -> None:
    """`twistlm compare` in a forked process, which has imported everything already."""
    # a shell's background jobs ignore Ctrl-C, and so would this child of one
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["twistlm", "lab", "compare", *args]
    with open("stderr", "w") as sys.stderr, open(os.devnull, "w") as sys.stdout:
        cli.main()


def test_an_interrupted_comparison_goes_on(here, monkeypatch, capsys):
    args = (*PARENTS, "--settings", "ffn", "--methods", "magnitude", "--n", "9")
    process = multiprocessing.get_context("fork").Process(target=command, args=small(args))
    process.start()
    while not POINTS.is_file() or POINTS.read_text().count("\n") < 3:
        assert process.is_alive(), Path("stderr").read_text()
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGINT)
    process.join(60)
    err = Path("stderr").read_text()
    assert process.exitcode == 130, err
    assert "interrupted; the same command goes on where it stopped" in err
    assert POINTS.read_text().endswith("\n")  # no half-written cell
    before = state()
    filled = [row for row in rows().values() if row["perplexity"]]
    assert 3 <= len(filled) < len(rows())  # the table shows what is there
    run(monkeypatch, capsys, *args)
    after = state()
    assert {name: after[name] for name in before} == before
    assert all(row["perplexity"] for row in rows().values())


def test_parents_show_tickets_where_their_training_cut(here, monkeypatch, capsys):
    run(
        monkeypatch,
        capsys,
        "--parent-dense",
        "dense",
        "--parent-twist",
        "twist",
        "--parent-twist",
        "attn",
        "--settings",
        "attn,ffn",
        "--methods",
        "magnitude",
        "--on",
        "dense,twist",
        "--ratios",
        "2/4",
    )
    names = {"magnitude (dense)", "magnitude (TwIST twist)", "magnitude (TwIST attn)"}
    assert {key[3] for key in rows()} == {"whole", "random", *names}
    random = {(key[2], key[0]) for key in rows() if key[3] == "random"}
    assert random == {
        ("dense", "attn"),
        ("dense", "ffn"),
        ("TwIST twist", "attn"),
        ("TwIST twist", "ffn"),
        ("TwIST attn", "attn"),
    }


def test_single_weights_need_no_whole_blocks(here, monkeypatch, capsys):
    """1/3 of the weights can stay where no third of 4 blocks can."""
    make_tokens(Path("long"), 1000)
    tiny_model("llama").save_pretrained("llama")
    cut = ("data.seq_len=16", "blocks.n_ffn=4", "blocks.shared_first=0", "blocks.shared_last=0")
    out = run(
        monkeypatch,
        capsys,
        "--parent-dense",
        "llama",
        "--settings",
        "both",
        "--ratios",
        "1/3",
        "--methods",
        "magnitude,sparsegpt",
        "--n",
        "0",
        "--data",
        "long",
        "--calibration",
        "long",
        *cut,
    )
    assert {key[3] for key in rows()} == {"whole", "magnitude", "sparsegpt"}
    assert "sparsegpt" in out
    parent = open_parent("llama", "cpu", cut)
    request = PruneRequest(method="magnitude", sparsity="2/3")
    made = write(parent, Path("out"), request, quiet=True)
    ids = token_file.open_tokens("long").sequences(list(range(N_TOKENS // SEQ_LEN)), SEQ_LEN)
    assert made["n_zeros"] > 0
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained("out")(input_ids=ids).logits[:, :-1]
    nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    row = rows()["both", "1/3", "dense", "magnitude", ""]
    assert float(row["perplexity"]) == pytest.approx(math.exp(float(nll)), rel=1e-4)


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
    mine = ratios.in_setting(ratio, setting)
    assert (mine, ratios.exact(mine), float(ratios.mean_share(mine))) == pytest.approx(wanted)


UNEVEN = ("data.seq_len=16", "data.train=tokens", "data.valid=tokens", "blocks.n_ffn=12",
          "blocks.shared_first=1", "blocks.shared_last=0")  # fmt: skip
HALF, QUARTER = "attn=2/3,ffn=6/12", "attn=1/3,ffn=3/12"


def grouped() -> None:
    """3 groups of heads, 12 chunks of neurons; no run behind it: text and blocks are told to the command."""
    tiny_model("llama-gqa").save_pretrained("llama")


def test_ratios_by_kind_are_those_of_the_other_commands(here, monkeypatch, capsys):
    grouped()
    asked = ("--parent-dense", "llama", *UNEVEN, "--ratios", HALF, "--ratios", QUARTER)
    asked += ("--methods", "sparsegpt,block:magnitude")
    out = run(monkeypatch, capsys, *asked, "--settings", "both")
    found = rows()
    assert {key[1] for key in found} == {"", HALF, QUARTER}
    assert "| attn=1/3 ffn=3/12 |" in Path("table/compare.md").read_text()
    assert "at attn=1/3 ffn=3/12" in out.replace("\n", " ")  # the smaller one
    for ratio in (HALF, QUARTER):
        row = found["both", ratio, "dense", "random", ""]
        scale = {"no scale": "none", "sqrt(N/K)": "sqrt", "N/K": "linear"}[row["scale"]]
        shown = in_process(
            monkeypatch, capsys, "eval", "llama", *UNEVEN, f"train.scale={scale}", "--ratio", ratio,
            "--n", "3", "--tokens", str(N_TOKENS), "--device", "cpu", "--json", "eval.json",
        )  # fmt: skip
        assert shown[0] == 0, shown[2]
        (told,) = json.loads(Path("eval.json").read_text())["subnets"]
        assert float(row["perplexity"]) == pytest.approx(told["mean"], rel=1e-6)
        assert float(row["sd"]) == pytest.approx(told["sd"], rel=1e-3)
        for method in ("sparsegpt", "block:magnitude"):
            row = found["both", ratio, "dense", method, ""]
            parent = open_parent("llama", "cpu", UNEVEN)
            if ":" in method:
                parent = treated(parent, row["scale"])
            request = PruneRequest(method=method, ratio=ratio, n=6)
            made = write(parent, Path("out"), request, quiet=True)
            load = deploy.load_ticket if ":" in method else AutoModelForCausalLM.from_pretrained
            want = perplexity(load(Path("out")))
            assert float(row["perplexity"]) == pytest.approx(want, rel=1e-5), (ratio, method)
            if method == "sparsegpt":  # each kind has its own sparsity
                k, n = (2, 6) if ratio == HALF else (1, 3)
                assert set(made["sparsity"].values()) == {(3 - k) / 3, (12 - n) / 12}
            shutil.rmtree("out")
    # a setting sees its own kind: two sizes of `both` may be one there, and have its plain name
    before = state()
    same = ("--ratios", "attn=2/3,ffn=3/12", "--n", "0", "--methods", "magnitude")
    run(monkeypatch, capsys, *asked, *same, "--settings", "attn")
    assert {key[1] for key in rows()} == {"", "2/3", "1/3"}
    alone = rows()["attn", "1/3", "dense", "magnitude", ""]
    known = state()
    assert before.items() < known.items()
    run(monkeypatch, capsys, *asked[:-6], *same[2:], "--settings", "attn", "--ratios", "4/12,0.5")
    assert rows()["attn", "4/12", "dense", "magnitude", ""] == alone | {"ratio": "4/12"}
    added = {name: line for name, line in state().items() if name not in known}
    assert [json.loads(line)["config"]["ratio"] for line in added.values()] == ["1/2"]


def test_a_stopped_healing_goes_on_to_the_same_numbers(here, monkeypatch, capsys):
    """A model that no run of ours has trained teaches; two ratios are one size of attention, with all tokens."""
    grouped()
    asked = ("--parent-dense", "llama", *UNEVEN, "--ratios", HALF, "--ratios", "attn=2/3,ffn=3/12",
             "--methods", "", "--n", "0", "--heal", "600", "train.batch=1", "train.n_workers=1",
             "--settings", "attn")  # fmt: skip
    run(monkeypatch, capsys, *asked)
    want = rows()
    made = [json.loads(line) for line in state().values()]
    healed = {p["config"]["what"]: p for p in made if "tokens" in p["config"]}
    assert set(healed) == {"block:mask-fisher + heal", "from scratch"}
    for what, point in healed.items():
        told, config = point["result"]["healed"], point["config"]
        assert (config["ratio"], config["tokens"], config["train"]["batch"]) == ("2/3", 600, 1)
        assert told["n_tokens"] == 640  # whole rounds of 10 sequences of 16 tokens
        assert told["teacher"] == ("none" if what == "from scratch" else "llama")
    shutil.rmtree("table")
    process = multiprocessing.get_context("fork").Process(target=command, args=small(asked))
    process.start()
    while not any(path.read_text() for path in _metrics()):  # a round of four
        assert process.is_alive(), Path("stderr").read_text()
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGINT)
    process.join(60)
    err = Path("stderr").read_text()
    assert process.exitcode == 130, err
    assert "stopped by SIGINT after round" in err
    (path,) = _metrics()
    lines = path.read_text()
    assert 1 <= lines.count("\n") < 4
    path.write_text(lines.replace('"n_tokens": 160', '"n_tokens": 161', 1))  # a mark of this round
    run(monkeypatch, capsys, *asked)
    made = [json.loads(line)["result"].get("healed") for line in state().values()]
    assert [told["n_tokens"] for told in made if told] == [641, 640]  # it was not trained anew
    for key, row in rows().items():
        assert row["perplexity"] == want[key]["perplexity"], key


def _metrics() -> list[Path]:
    """Of trainings that are not finished."""
    return list(Path("table/healing").glob("*/*/metrics.jsonl"))


def other_parent(here: Path, name: str, **sections: dict) -> None:
    train = {"rounds": 1} | sections.pop("train", {})
    tokens = sections.pop("tokens", "tokens")
    rounds.train(tiny(tokens, Path(name), train=train, **sections), quiet=True)


def words(here: Path) -> None:
    """Two parents with tokenizers behind their tokens: the same words, numbered otherwise."""
    names = [f"w{i}" for i in range(64)]
    for name, vocabulary in (("one", names), ("two", names[::-1])):
        write_words(name, vocabulary, 1200)
        other_parent(here, f"run-{name}", tokens=name)


def wide(here: Path) -> None:
    make_tokens(Path("wide"), 1200, vocab=70)
    model = {"vocab_size": 70, "n_positions": 16, "n_embd": 16, "n_head": 4, "n_layer": 3}
    other_parent(here, "odd", tokens="wide", model={"config": model})


def deep(here: Path) -> None:
    model = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_head": 4, "n_layer": 4}
    other_parent(here, "odd", model={"config": model})


def llama(here: Path) -> None:
    tiny_model("llama").save_pretrained("odd")


def nan(here: Path) -> None:
    model = tiny_model("gpt2")
    with torch.no_grad():
        model.get_parameter("transformer.h.1.mlp.c_fc.weight")[0, 0] = float("nan")
    model.save_pretrained("odd")


ONE = ("--parent-dense", "dense")
TWO = (*ONE, "--parent-twist", "odd")
CUT = ("data.seq_len=16", "blocks.n_ffn=4", "blocks.shared_first=1", "blocks.shared_last=0")
BAD = {
    "no parent": (None, (), ("give at least one of --parent-dense, --parent-dropout and",)),
    "no such parent": (None, ("--parent-dense", "./nowhere"), ("./nowhere",)),
    "ticket": (
        lambda here: deploy.save_ticket(
            p := opened("twist", "both"), p.block_map.full(), here / "odd"
        ),
        ("--parent-twist", "odd", "--methods", ""),
        ("odd is a ticket", "give the parent"),
    ),
    "method": (
        None,
        ("--parent-twist", "dense", "--methods", ""),
        ("--parent-twist dense was trained with train.method = dense", "--parent-dense"),
    ),
    "vocabulary": (wide, TWO, ("odd cannot be compared with dense", "a vocabulary of 70, not 64")),
    "tokenizer": (
        words,
        ("--parent-twist", "run-one", "--parent-twist", "run-two", "--methods", ""),
        ("run-two cannot be compared with run-one", "its tokenizer has sha256"),
    ),
    "shape": (deep, TWO, ("odd cannot be compared with dense", "h.3.", "None")),
    "family": (
        llama,
        (*TWO, *CUT),
        ("odd cannot be compared with dense", "it is a llama, not gpt2"),
    ),
    "blocks": (
        lambda here: other_parent(here, "odd", blocks={"n_ffn": 8, "k_ffn": 4}),
        TWO,
        ("odd cannot be compared", "blocks.n_ffn = 8, not 4", "give blocks.n_ffn="),
    ),
    "shared": (
        lambda here: other_parent(here, "odd", blocks={"shared_first": 0}),
        TWO,
        ("odd cannot be compared", "blocks.shared_first = 0, not 1"),
    ),
    "seq_len": (
        lambda here: other_parent(here, "odd", data={"seq_len": 8}),
        TWO,
        ("odd cannot be compared", "data.seq_len = 8, not 16"),
    ),
    "ratio": (
        None,
        (*ONE, "--ratios", "2/4,1/3"),
        ("ratio '1/3' is no whole number of attn blocks", "1/4, 2/4, 3/4, 4/4"),
    ),
    "no ratio": (None, (*ONE, "--ratios", "half"), ("--ratios 'half' is not a fraction",)),
    "large ratio": (None, (*ONE, "--ratios", "5/4"), ("--ratios '5/4': it must lie in (0, 1]",)),
    "ratios": (None, (*ONE, "--ratios", ","), ("--ratios names no ratio",)),
    "kinds and a list": (
        None,
        (*ONE, "--ratios", "2/4,attn=2/4,ffn=1/4"),
        ("--ratios '2/4,attn=2/4,ffn=1/4': '2/4' is out of place", "in their own --ratios"),
    ),
    "no kind": (None, (*ONE, "--ratios", "attn=1/4,mlp=1/4"), ("'mlp=1/4' is out of place",)),
    "no layer": (None, (*ONE, "--ratios", "attn=1/4,ffn=1/4,ffn.x=1"), ("'ffn.x=1' is out of",)),
    "kind twice": (None, (*ONE, "--ratios", "attn=1/4,ffn=1/4,attn=2/4"), ("'attn=2/4' is out",)),
    "one kind": (
        None,
        (*ONE, "--ratios", "attn=1/4"),
        ("--ratios 'attn=1/4' says nothing about ffn, which --settings ffn cuts",),
    ),
    "no share": (
        None,
        (*ONE, "--ratios", "attn=1/4,ffn=half"),
        ("--ratios 'half' is not a fraction",),
    ),
    "large share": (None, (*ONE, "--ratios", "attn=2,ffn=1"), ("--ratios '2': it must lie in",)),
    "ratio of a kind": (
        None,
        (*ONE, "--ratios", "attn=1/4,ffn=1/3", "--settings", "both"),
        ("--ratios attn=1/4,ffn=1/3: ratio '1/3' is no whole number of ffn blocks", "1/4, 2/4"),
    ),
    "layer that is not cut": (
        None,
        (
            *ONE,
            "--ratios",
            "ffn=1/3,ffn.0=1",
            "--settings",
            "ffn",
            "--methods",
            "wanda",
            "--n",
            "0",
        ),
        ("--ratios ffn=1/3,ffn.0=1: ratio", "'ffn.0' names nothing", "added as ffn.1=1"),
    ),
    "uneven": (
        lambda here: tiny_model("llama-gqa").save_pretrained("odd"),
        (
            "--parent-dense",
            "odd",
            *CUT,
            "--data",
            "tokens",
            "--calibration",
            "tokens",
            "--settings",
            "both",
        ),
        ("no whole number of attn blocks; legal: 1/3, 2/3, 3/3", "each kind can have its own"),
    ),
    "setting": (
        None,
        (*ONE, "--settings", "mlp"),
        ("--settings 'mlp': use some of attn, ffn, both",),
    ),
    "settings": (None, (*ONE, "--settings", ""), ("--settings names none of attn, ffn, both",)),
    "methods": (None, (*ONE, "--methods", "wands"), ("--methods 'wands': use some of sparsegpt",)),
    "random": (
        None,
        (*ONE, "--methods", "block:random"),
        ("--methods 'block:random': use some of",),
    ),
    "on": (None, (*ONE, "--on", "twist"), ("--on 'twist'", "give --parent-twist")),
    "no dense": (None, ("--parent-twist", "twist"), ("--on 'dense'", "give --parent-dense")),
    "nothing": (None, (*ONE, "--methods", "", "--n", "0"), ("nothing to compare in --settings",)),
    "nothing learnt": (
        None,
        ("--parent-twist", "attn", "--methods", "", "--settings", "ffn,both"),
        ("nothing to compare in --settings ffn,both",),
    ),
    "repair": (None, (*ONE, "--repair", "ridge"), ("--repair 'ridge': use some of bias, rescale",)),
    "repair family": (
        llama,
        (
            "--parent-dense",
            "odd",
            *CUT,
            "--repair",
            "bias",
            "--data",
            "tokens",
            "--calibration",
            "tokens",
        ),
        ("--repair bias: no output projection of this llama has a bias",),
    ),
    "no calibration": (
        llama,
        ("--parent-dense", "odd", *CUT, "--data", "tokens"),
        ("odd has no tokens to calibrate on: give --calibration STEM",),
    ),
    "no text": (
        llama,
        ("--parent-dense", "odd", *CUT, "--calibration", "tokens"),
        ("odd has no tokens of its own: give --data STEM",),
    ),
    "short": (
        None,
        (*ONE, "--calibration-sequences", "99"),
        ("tokens is too short for --calibration-sequences 99: it has 75 sequences",),
    ),
    "no file": (None, (*ONE, "--calibration", "missing"), ("no token file missing.bin",)),
    "folder": (None, (*ONE, "-o", "dense"), ("--out dense exists and is no comparison",)),
    "file": (None, (*ONE, "-o", "tokens.bin"), ("--out tokens.bin exists and is no comparison",)),
    "nan": (
        nan,
        ("--parent-dense", "odd", *CUT, "--data", "tokens", "--calibration", "tokens"),
        ("odd has no perplexity: its logits are not finite",),
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence(here, monkeypatch, capsys, case):
    prepare, args, parts = BAD[case]
    if prepare is not None:
        prepare(here)
    before = sorted(here.rglob("*"))
    code, out, err = in_process(monkeypatch, capsys, "lab", "compare", *small(args))
    check_refusal(code, out, err, parts)
    if case != "nan":  # refused before anything is written
        assert sorted(here.rglob("*")) == before


def test_a_folder_of_an_earlier_version_goes_on(here, monkeypatch, capsys):
    """A JSON file for every cell: all are found, and one that was cut short is refused by name."""
    args = (*ONE, "--methods", "magnitude", "--settings", "ffn", "--n", "0")
    run(monkeypatch, capsys, *args)
    table = rows()
    Path("table/points").mkdir()
    for name, line in state().items():
        Path("table/points", f"{name}.json").write_text(json.dumps(json.loads(line), indent=1))
    POINTS.unlink()
    run(monkeypatch, capsys, *args)
    assert not POINTS.exists()
    assert rows() == table
    path = next(Path("table/points").iterdir())
    path.write_bytes(path.read_bytes()[:100])
    code, out, err = in_process(monkeypatch, capsys, "lab", "compare", *small(args))
    check_refusal(code, out, err, (str(path), "is not a finished point: delete it"))


def test_a_file_of_points_goes_on(here, monkeypatch, capsys):
    """`-o FILE.jsonl`: the points are there, the table in FILE/."""
    args = (*ONE, "--methods", "magnitude", "--settings", "ffn", "--n", "0")
    run(monkeypatch, capsys, *args)
    POINTS.rename("kept.jsonl")
    before = Path("kept.jsonl").read_bytes()
    out = run(monkeypatch, capsys, *args, "-o", "kept.jsonl")
    assert Path("kept.jsonl").read_bytes() == before
    assert rows("kept") == rows()
    assert "kept/compare.csv" in out


def test_a_run_is_compared_from_any_folder(here, monkeypatch, capsys):
    """Its tokens, of validation and, for the choice of a scale, of training, are found above the run."""
    (here / "elsewhere").mkdir()
    asked = ("--parent-twist", "../twist", "--settings", "both", "--ratios", "2/4")
    many = ("--methods", "", "--n", "2", "--tokens", "0")  # none are left behind the reported ones
    said = []
    for folder in ("elsewhere", "twist"):
        monkeypatch.chdir(here / folder)
        run(monkeypatch, capsys, *asked, *many)
        said.append(rows()["both", "2/4", "TwIST", "random", ""]["perplexity"])
        code, out, err = in_process(
            monkeypatch, capsys, "lab", "drop", "../twist", "--nodes", "2", "--device", "cpu"
        )
        assert code == 0, err
        assert "scale" in out
    assert said[0] == said[1]


def test_each_parent_keeps_its_own_common_blocks(here, monkeypatch, capsys):
    """Dense has none, TwIST has two: they stand side by side, and tickets of TwIST keep them."""
    blocks = {"k_attn": 3, "common_attn": [3], "common_ffn": [1]}
    rounds.train(tiny("tokens", Path("c"), train={"rounds": 1}, blocks=blocks), quiet=True)
    asked = ("--settings", "both", "--methods", "", "--n", "2")
    run(monkeypatch, capsys, "--parent-dense", "dense", "--parent-twist", "c", *asked)
    with_c = rows()["both", "2/4", "TwIST", "random", ""]
    cut = opened("c", "both").block_map
    widths = widths_of_ratio(cut, "2/4")
    values = []
    for draw in range(2):
        blueprint = generator.for_deployment(cut, widths, seed=0, draw=draw)
        assert all(3 in k if "attn" in name else 1 in k for name, k in blueprint.items())
        parent = treated(opened("c", "both"), with_c["scale"])
        values.append(perplexity(deploy.cut_ticket(parent, blueprint)))
    assert float(with_c["perplexity"]) == pytest.approx(sum(values) / 2, rel=1e-5)
    record = json.loads(Path("table/compare.json").read_text())
    assert record["parents"]["TwIST"]["common_attn"] == [3]
    # by rank the same numbers name other blocks, of this parent none: nothing is taken from the cells above
    ranked = ("--parent-dense", "dense", "--parent-twist", "c", *asked, "blocks.common_by=rank")
    run(monkeypatch, capsys, *ranked)
    assert rows()["both", "2/4", "TwIST", "random", ""]["perplexity"] != with_c["perplexity"]
    code, _, err = in_process(
        monkeypatch, capsys, "lab", "compare", *small(("--parent-twist", "c", "--methods", "")),
        "--settings", "both", "blocks.common_ffn=[0,1,2]",
    )  # fmt: skip
    assert code == 2
    assert "no room for the 3 common ffn blocks" in err


def test_each_size_trained_for_itself(here, monkeypatch, capsys):
    """Two sizes share the tokens: score, prune, heal by the commands' own functions; and the shape from scratch."""
    asked = ("--settings", "both", "--methods", "", "--n", "0", "--heal", "1152")
    run(monkeypatch, capsys, "--parent-dense", "dense", *asked)
    found = rows()
    assert sorted(key[3] for key in found if key[1] == "2/4") == [
        "block:mask-fisher + heal", "from scratch",
    ]  # fmt: skip
    healed = found["both", "2/4", "dense", "block:mask-fisher + heal", ""]
    scratch = found["both", "2/4", "dense", "from scratch", ""]
    parent = treated(opened("dense", "both"), healed["scale"])
    request = PruneRequest(method="block:mask-fisher", ratio="2/4", n=6)
    write(parent, Path("pruned"), request, quiet=True)
    same = {"tokens": 576, "data": "tokens", "valid": "tokens", "device": "cpu", "like": parent.cfg}
    record = heal(HealRequest(ticket=Path("pruned"), out=Path("out"), **same), quiet=True)
    want = perplexity(deploy.load_ticket("out"))
    assert float(healed["perplexity"]) == pytest.approx(want, rel=1e-4)
    trained = record["healed"][-1]["n_tokens"]
    assert trained >= 576
    assert int(healed["calibration_tokens"]) == trained + 6 * SEQ_LEN  # scores read some, too
    assert int(scratch["calibration_tokens"]) == trained
    assert float(scratch["perplexity"]) < 64  # it learned something
    assert healed["bytes"] == scratch["bytes"]
    assert int(healed["bytes"]) == Path("out/model.safetensors").stat().st_size
    assert float(healed["speedup"]) > 0
    assert not Path("table/healing").exists()
    code, _, err = in_process(
        monkeypatch,
        capsys,
        "lab",
        "compare",
        *small(()),
        "--parent-twist",
        "twist",
        "--on",
        "twist",
        "--heal",
        "1k",
    )
    assert (code, "give --parent-dense" in err) == (2, True)


def test_a_parent_with_an_order_shows_its_nested_tickets(here, monkeypatch, capsys):
    """The row is the ticket that the order in the checkpoint names, cut by hand; others have no such row."""
    blocks = {"masks": "sequence", "mask_attn": [4, 2], "mask_ffn": [4, 2], "nested": 0.5}
    blocks |= {"k_attn": 4, "k_ffn": 4}
    rounds.train(tiny("tokens", Path("o"), train={"rounds": 1}, blocks=blocks), quiet=True)
    parents = ("--parent-dense", "dense", "--parent-twist", "o")
    out = run(monkeypatch, capsys, *parents, "--settings", "both", "--methods", "")
    assert "TwIST, nested" in out
    found = {key[1:4]: row for key, row in rows().items() if key[3] == "nested"}
    assert set(found) == {("3/4", "TwIST", "nested"), ("2/4", "TwIST", "nested")}
    order = json.loads(next(Path("o/checkpoints").glob("*/checkpoint.json")).read_text())["order"]
    for (ratio, *_), row in found.items():
        parent = treated(opened("o", "both"), row["scale"])
        kept = {name: tuple(sorted(ranked[: int(ratio[0])])) for name, ranked in order.items()}
        want = perplexity(deploy.cut_ticket(parent, kept))
        assert float(row["perplexity"]) == pytest.approx(want, rel=1e-5)
    # each of them healed, as the data-parallel parent was trained and with it as teacher
    asked = ("--settings", "both", "--methods", "", "--n", "0", "--heal", "1152")
    run(monkeypatch, capsys, *parents, *asked)
    row = rows()["both", "2/4", "TwIST", "nested + heal", ""]
    parent = treated(opened("o", "both"), row["scale"])
    kept = {name: tuple(sorted(ranked[:2])) for name, ranked in order.items()}
    deploy.save_ticket(parent, kept, Path("nested"))
    like = opened("dense", "both").cfg
    more = {"data": "tokens", "valid": "tokens", "device": "cpu", "like": like, "teacher": "dense"}
    heal(HealRequest(ticket=Path("nested"), out=Path("out"), tokens=576, **more), quiet=True)
    want = perplexity(deploy.load_ticket("out"))
    assert float(row["perplexity"]) == pytest.approx(want, rel=1e-4)
    assert float(row["speedup"]) > 0
    assert int(row["bytes"]) == Path("out/model.safetensors").stat().st_size
