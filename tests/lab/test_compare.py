"""Every cell of a comparison against models on disk and plain Hugging Face; stops and resumes."""

import csv
import itertools
import json
import os
import re
import shutil
import signal
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import families_table
import pytest
import ranks
import torch
from commands import check_refusal, in_process
from conftest import THREADS, make_tokens, tiny, write_words
from families_table import tiny_model
from transformers import AutoModelForCausalLM

from twistlm import cli
from twistlm.baselines import PruneRequest
from twistlm.baselines.write import write
from twistlm.compute import speed
from twistlm.compute.perplexity import Text
from twistlm.data import token_file
from twistlm.lab.compare import table
from twistlm.lab.points import name_of
from twistlm.model import generator
from twistlm.model.blocks import widths_of_ratio
from twistlm.tickets import deploy
from twistlm.tickets.healing import heal
from twistlm.tickets.parent import Parent, open_parent
from twistlm.tickets.requests import HealRequest
from twistlm.tickets.ticket_scale import TicketScales, choice_text
from twistlm.training import rounds

SEQ_LEN, N_TOKENS = 16, 96
ONE = "--parent-dense dense "
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
def run(monkeypatch, capsys):
    """Run a command and return what it printed, or check that it is refused in these words."""

    def run(text: str, *refused: str) -> str:
        code, out, err = in_process(monkeypatch, capsys, "lab", "compare", *small(text))
        if refused:
            check_refusal(code, out, err, refused)
        else:
            assert code == 0, err
        return out

    return run


def rows(folder: str = "table") -> dict[tuple[str, ...], dict[str, str]]:
    """The CSV by (setting, ratio, parent, method)."""
    with Path(folder, "compare.csv").open() as file:
        lines = list(csv.DictReader(file))
    keys = ("setting", "ratio", "parent", "method")
    return {tuple(line[key] for key in keys): line for line in lines}


def state() -> dict[str, str]:
    """The lines of the finished cells, by the names of their configs."""
    lines = POINTS.read_text().splitlines()
    found = {name_of(json.loads(line)["config"]): line for line in lines}
    assert len(found) == len(lines)  # nothing was measured twice
    return found


def points() -> list[dict]:
    return [json.loads(line) for line in state().values()]


def perplexity(model) -> float:
    return families_table.perplexity(model, "tokens", SEQ_LEN, N_TOKENS)


def opened(name: str, setting: str) -> Parent:
    return open_parent(name, "cpu", [f"blocks.setting={setting}"])


def scaled(parent: Parent, scale: str) -> Parent:
    """The parent with the scale that the table names."""
    text = Text(token_file.open_tokens("tokens"), SEQ_LEN, N_TOKENS)
    tried = TicketScales(parent, text, choice_text(text, parent.cfg.data))
    return tried.parent_with(next(t for t in tried.candidates() if str(t) == scale))


def check_pruned(row: dict, parent: Parent, method: str, ratio: str) -> dict:
    """A row is what `lab prune` writes, by Hugging Face's forward pass; returns its record."""
    is_ticket = ":" in method
    parent = scaled(parent, row["scale"]) if is_ticket else parent
    request = PruneRequest(method=method, n=6, ratio=ratio)
    made = write(parent, Path("out"), request, quiet=True)
    load = deploy.load_ticket if is_ticket else AutoModelForCausalLM.from_pretrained
    want = perplexity(load(Path("out")))
    assert float(row["perplexity"]) == pytest.approx(want, rel=1e-5), method
    assert int(row["bytes"]) == Path("out/model.safetensors").stat().st_size
    shutil.rmtree("out")
    return made


def by_hand(parent: Parent, n: int) -> list[float]:
    """Perplexities of the first n random tickets of half the blocks, through their folders."""
    widths, values = widths_of_ratio(parent.block_map, "2/4"), []
    for draw in range(n):
        blueprint = generator.for_deployment(parent.block_map, widths, seed=0, draw=draw)
        deploy.save_ticket(parent, blueprint, Path("ticket"))
        values.append(perplexity(deploy.load_ticket(Path("ticket"))))
    return values


def test_every_cell_is_what_the_commands_write(here, monkeypatch, run):
    """Tickets and pruned models through their folders, and Hugging Face's own forward pass."""
    methods = "sparsegpt,magnitude,block:fisher"
    clock = SimpleNamespace(perf_counter=itertools.count(1.0).__next__)  # a second at every look
    monkeypatch.setattr(speed, "time", clock)
    out = run(f"{PARENTS} --settings attn,both --methods {methods} --ratios 2/4")
    found = rows()
    assert len(found) == 3 + 3 * 2 + 3 * 2  # whole ones; parents, then methods, in two settings
    for kind, label in LABELS.items():
        folder = next(Path(kind, "checkpoints").iterdir())
        whole = found["", "", label, "whole"]
        want = perplexity(AutoModelForCausalLM.from_pretrained(folder))
        assert float(whole["perplexity"]) == pytest.approx(want, rel=1e-5)
        assert int(whole["bytes"]) == (folder / "model.safetensors").stat().st_size
        row = found["attn", "2/4", label, "random"]
        values = by_hand(scaled(opened(kind, "attn"), row["scale"]), 3)
        assert float(row["perplexity"]) == pytest.approx(statistics.mean(values), rel=1e-5)
        assert float(row["sd"]) == pytest.approx(statistics.stdev(values), rel=1e-2)
        assert int(row["bytes"]) == Path("ticket/model.safetensors").stat().st_size
        assert (row["n"], row["calibration_tokens"], row["seconds"]) == ("3", "0", "0.0")
    for setting, method in itertools.product(("attn", "both"), methods.split(",")):
        row = found[setting, "2/4", "dense", method]
        check_pruned(row, opened("dense", setting), method, "2/4")
        n_read = 0 if method == "magnitude" else 6 * SEQ_LEN
        assert (int(row["calibration_tokens"]), float(row["seconds"])) == (n_read, 1)
    chosen = [p["result"]["treatment"] for p in points() if "treatment" in p["result"]]
    assert {each["first_window"] for each in chosen} == {N_TOKENS // SEQ_LEN}  # not the reported
    for text in (out, Path("table/compare.md").read_text()):
        assert f"{float(found['both', '2/4', 'TwIST', 'random']['perplexity']):.2f}" in text
    assert sorted(os.listdir("table")) == [*table.FILES, "points.jsonl"]


def test_what_is_measured_once_is_never_measured_again(here, run):
    asked = "--parent-dense dense --parent-twist {} --settings both --methods wanda,block:taylor "
    run(asked.format("twist"))
    before, table = state(), rows()
    # another place on disk, a smaller grid, another order: nothing runs
    Path("twist").rename("elsewhere")
    asked = asked.format("elsewhere")
    run(asked)
    assert (state(), rows()) == (before, table)
    run(f"{asked} --ratios 2/4 --methods wanda")
    assert state() == before
    assert {key[1] for key in rows()} == {"", "2/4"}
    # other numbers belong to other points: seed, n, tokens, scale
    for more in ("--seed 1", "--n 2", "--tokens 48", "train.scale=none"):
        known = set(state())
        run(f"{asked} --ratios 2/4 {more}")
        added = "".join(line for name, line in state().items() if name not in known)
        assert '"what": "random"' in added, more
        assert before.items() < state().items()


def command(folder: str, args: list[str]) -> None:
    """`twistlm lab compare` in a process of its own."""
    os.chdir(folder)
    torch.set_num_threads(THREADS)
    # a shell's background jobs ignore Ctrl-C, and so would this child of one
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["twistlm", "lab", "compare", *args]
    with open("stderr", "w") as sys.stderr, open(os.devnull, "w") as sys.stdout:
        cli.main()


def stop_when(there, text: str) -> str:
    """Start a comparison, press Ctrl-C as soon as `there()`, and return its errors."""
    # not a plain fork, whose child would lack the threads that its parent computes with
    process = ranks.SERVER.Process(target=command, args=(os.getcwd(), small(text)))
    process.start()
    while not there():
        assert process.is_alive(), Path("stderr").read_text()
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGINT)
    process.join(60)
    assert process.exitcode == 130, Path("stderr").read_text()
    return Path("stderr").read_text()


def test_parents_show_tickets_where_their_training_cut(here, run):
    run(
        "--parent-dense dense --parent-twist twist --parent-twist attn --settings attn,ffn "
        "--methods magnitude --ratios 2/4"
    )
    assert {key[2] for key in rows() if key[3] == "magnitude"} == {"dense"}
    random = {(key[2], key[0]) for key in rows() if key[3] == "random"}
    both = {(label, s) for label in ("dense", "TwIST twist") for s in ("attn", "ffn")}
    assert random == both | {("TwIST attn", "attn")}


UNEVEN = (
    "data.seq_len=16 data.train=tokens data.valid=tokens blocks.n_ffn=12 "
    "blocks.shared_first=1 blocks.shared_last=0"
)
HALF, QUARTER = "attn=2/3,ffn=6/12", "attn=1/3,ffn=3/12"


def grouped() -> str:
    """3 groups of heads, 12 chunks of neurons, and no run behind it: the command says the rest."""
    tiny_model("llama-gqa").save_pretrained("llama")
    return f"--parent-dense llama {UNEVEN} "


def test_ratios_by_kind_are_those_of_the_other_commands(here, run):
    parent = grouped()
    asked = f"{parent} --ratios {HALF} --ratios {QUARTER} --methods sparsegpt,block:magnitude "
    out = run(f"{asked} --settings both")
    found = rows()
    assert {key[1] for key in found} == {"", HALF, QUARTER}
    assert "at attn=1/3 ffn=3/12" in out.replace("\n", " ")  # the last one
    for ratio in (HALF, QUARTER):
        for method in ("sparsegpt", "block:magnitude"):
            row, llama = found["both", ratio, "dense", method], UNEVEN.split()
            made = check_pruned(row, open_parent("llama", "cpu", llama), method, ratio)
            if method == "sparsegpt":  # each kind has its own sparsity
                k, n = (2, 6) if ratio == HALF else (1, 3)
                assert set(made["sparsity"].values()) == {(3 - k) / 3, (12 - n) / 12}
    # half of the weights can stay, where 3 groups have no half
    run(f"{parent} --n 0 --methods magnitude --settings attn --ratios 4/12,0.5")
    assert {key[1] for key in rows()} == {"", "4/12", "0.5"}


def test_a_stopped_healing_goes_on_to_the_same_numbers(here, run):
    """A model that no run trained teaches."""
    asked = (
        f"{grouped()} --ratios 2/3 --methods none --n 0 --heal 600 "
        "train.batch=1 train.n_workers=1 --settings attn"
    )
    run(asked)
    want = rows()
    healed = {p["config"]["what"]: p for p in points() if "tokens" in p["config"]}
    assert set(healed) == {"block:mask-fisher + heal", "from scratch"}
    for what, point in healed.items():
        record = point["result"]["healed"]
        assert record["n_tokens"] == 640  # whole rounds of 10 sequences of 16 tokens
        assert record["teacher"] == ("none" if what == "from scratch" else "llama")
    shutil.rmtree("table")
    # after a round of four
    running = Path("table/healing"), "*/*/metrics.jsonl"
    err = stop_when(lambda: any(path.read_text() for path in Path.glob(*running)), asked)
    assert re.search("stopped by SIGINT after round.*; the same command goes on where it", err)
    assert [bool(row["perplexity"]) for row in rows().values()] == [True, False, False]
    (path,) = Path.glob(*running)
    lines = path.read_text()
    assert 1 <= lines.count("\n") < 4
    path.write_text(lines.replace('"n_tokens": 160', '"n_tokens": 161', 1))  # a mark of this round
    run(asked)
    made = [record["n_tokens"] for p in points() if (record := p["result"].get("healed"))]
    assert made == [641, 640]  # not trained anew
    for key, row in rows().items():
        assert row["perplexity"] == want[key]["perplexity"], key


def prepare_odd_ones() -> None:
    """Parents that are unlike the others, or broken."""
    model = tiny_model("llama")
    model.save_pretrained("llama")
    model.get_parameter("model.layers.1.mlp.up_proj.weight").data[0, 0] = float("nan")
    model.save_pretrained("nan")
    trained("eight", blocks={"n_ffn": 8, "k_ffn": 4})
    names = [f"w{i}" for i in range(64)]
    for name, vocabulary in (("one", names), ("two", names[::-1])):
        write_words(name, vocabulary, 1200)
        trained(f"run-{name}", name)


BAD = """
-> give at least one of --parent-dense, --parent-dropout and
--parent-twist dense --methods none -> --parent-twist dense was trained with train.method = dense
ONE --ratios 2/4,1/3 -> ratio '1/3' is no whole number of attn blocks | 1/4, 2/4, 3/4, 4/4
ONE --ratios half -> --ratios half: ratio 'half' is not a fraction
ONE --ratios 5/4 -> --ratios 5/4: ratio '5/4' is no whole number of attn blocks
ONE --ratios 1/0 --n 0 --methods magnitude -> ratio '1/0' is not a fraction
ONE --ratios , -> --ratios names no ratio
ONE --ratios 2/4,attn=2/4,ffn=1/4 -> '2/4' names nothing
ONE --settings none -> --settings names none of attn, ffn, both
ONE --methods wands -> 'wands': use some of sparsegpt
--parent-twist twist --methods wanda -> --methods prune a data-parallel parent | --parent-dense
ONE --methods none --heal 3 --ratios 1/4,2/4,3/4,4/4 -> --heal 3 | 4 sizes | at least 4
--parent-twist twist --methods none --heal 1k -> --heal prunes and trains | give --parent-dense
ONE --methods none --n 0 -> nothing to compare in --settings
ONE -o dense -> --out dense exists and is no comparison
--parent-twist run-one --parent-twist run-two --methods none -> its tokenizer has sha256
ONE --parent-twist llama CUT -> llama cannot be compared with dense | it is a llama, not gpt2
ONE --parent-twist eight -> blocks.n_ffn = 8, not 4 | give blocks.n_ffn=
--parent-dense nan --data tokens --calibration tokens CUT -> its logits are not finite
"""


def test_bad_input_is_one_sentence(here, run):
    prepare_odd_ones()
    for line in BAD.strip().splitlines():
        text, _, parts = line.partition("->")
        text = text.replace("ONE ", ONE).replace("CUT ", UNEVEN.replace("12", "4"))
        run(text, *(part.strip() for part in parts.split("|")))
        is_measured = "nan" in text  # all others are refused before anything is written
        assert Path("table").exists() == is_measured, line


def check_healed(row: dict, ticket: str, like: Parent, **more: str) -> None:
    """A row is its ticket, healed by the command's own function."""
    same = {"tokens": 576, "data": "tokens", "valid": "tokens"}
    request = HealRequest(ticket=Path(ticket), out=Path("out"), **same, **more)
    heal(request, ["run.device=cpu"], like=like.cfg, quiet=True)
    want = perplexity(deploy.load_ticket("out"))
    assert float(row["perplexity"]) == pytest.approx(want, rel=1e-4)
    assert int(row["bytes"]) == Path("out/model.safetensors").stat().st_size
    shutil.rmtree("out")


def test_nested_tickets_and_each_size_trained_for_itself(here, run):
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
    # two sizes share the tokens, taught by the data-parallel parent and trained as it was
    run(f"{asked} --n 0 --heal 1152")
    found, dense = {key[2:4]: row for key, row in rows().items() if key[1] == "2/4"}, "dense"
    row = found["TwIST", "nested + heal"]
    deploy.save_ticket(scaled(opened("o", "both"), row["scale"]), kept(2), Path("nested"))
    check_healed(row, "nested", opened(dense, "both"), teacher=dense)
    healed, scratch = found[dense, "block:mask-fisher + heal"], found[dense, "from scratch"]
    parent = scaled(opened(dense, "both"), healed["scale"])
    request = PruneRequest(method="block:mask-fisher", ratio="2/4", n=6)
    write(parent, Path("pruned"), request, quiet=True)
    check_healed(healed, "pruned", parent)
    n_tokens = int(scratch["calibration_tokens"])
    assert int(healed["calibration_tokens"]) == n_tokens + 6 * SEQ_LEN  # scores read some, too
    assert n_tokens >= 576
    assert float(scratch["perplexity"]) < 64  # it learned something
    assert healed["bytes"] == scratch["bytes"]
