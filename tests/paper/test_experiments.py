"""Experiments: all end to end in `smoke`, points that resume, measurements by hand."""

import itertools
import json
import math
import re
import runpy
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import metrics
from commands import check_refusal
from conftest import make_tokens, tiny
from families_table import tiny_model
from safetensors.torch import load_file

from paper import NAMES
from paper.experiments import EXPERIMENTS, _scale, run, shifts, subnets
from paper.lab import Lab, summary
from paper.report import report
from paper.scales import DENSE, PARENTS, SCALES, START, TWIST, TWIST_FRESH, WAYS, Recipe
from twistlm import config
from twistlm.compute.perplexity import Text
from twistlm.config import BlocksConfig
from twistlm.data.token_file import open_tokens
from twistlm.lab.points import Points
from twistlm.model import families
from twistlm.model.blocks import widths_of_ratio
from twistlm.model.generator import draws
from twistlm.model.subnet import block_outputs
from twistlm.tickets.parent import open_parent
from twistlm.tickets.ticket_scale import TicketScales
from twistlm.training import checkpoint, rounds

ROOT = Path(__file__).parents[2]
SHORT = ("train.rounds=2", "train.interval=2", "model.config.n_layer=2")
TINY = replace(
    SCALES["smoke"],
    changes=(*SCALES["smoke"].changes, *SHORT),
    start=("train.rounds=3",),
    tokens=128,
)
FEW = replace(  # two of three settings, with fewer subnets
    TINY,
    settings=("both", "attn"),
    n_stability=3,
    stability_tokens=128,
    stability=(4,),
    n_subnets=2,
    nodes=((4, 1),),
    widths=(3, 12),
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Lab:
    """A lab whose parents several tests use: each is trained once."""
    folder = tmp_path_factory.mktemp("shared")
    stem = make_tokens(folder / "tokens", vocab=512)
    return Lab(folder / "lab", "smoke", TINY, [f"data.train={stem}", f"data.valid={stem}"])


@pytest.fixture
def lab(shared, tmp_path: Path) -> Lab:
    return Lab(tmp_path / "lab", "smoke", TINY, shared.overrides)


def test_every_experiment_end_to_end_and_its_tables(shared, tmp_path, monkeypatch):
    """All of `smoke`, from tokens to tables and figures; a second call measures nothing."""
    monkeypatch.setitem(SCALES, "smoke", FEW)
    monkeypatch.setattr("paper.lab.forget", lambda device: None)  # takes longer than they
    monkeypatch.setattr("twistlm.tickets.ticket_scale.N_DRAWS", 1)
    monkeypatch.setattr("twistlm.lab.bench.train.REPEATS", 1)
    # zeros and whole blocks: tests/baselines has all ways to prune
    monkeypatch.setattr("paper.experiments.COMPARED", ("sparsegpt", "block:mask-fisher"))
    folder, data = tmp_path / "lab", shared.overrides
    for recipe in (START, *PARENTS):
        shared.trained(recipe)
    shutil.copytree(shared.folder, folder)  # a lab can move
    run(["all"], "smoke", folder, data)
    made = Points(folder).all()
    assert {point["config"]["experiment"] for point in made} == set(NAMES) == set(EXPERIMENTS)
    assert not re.search("NaN|Infinity", json.dumps(made))
    stamps = {path: path.stat().st_mtime_ns for path in folder.rglob("*.*")}
    run(["all"], "smoke", folder, data)
    assert stamps == {path: path.stat().st_mtime_ns for path in folder.rglob("*.*")}
    text = report([folder], tmp_path / "report")
    assert text == (tmp_path / "report/tables.md").read_text()
    assert set(NAMES) - {"table1"} <= set(re.findall(r"^## (\S+)$", text, re.MULTILINE))
    shown = set(re.findall(r"\]\((lab-\S+\.png)\)", text))
    assert shown == {path.name for path in (tmp_path / "report").glob("*.png")}
    assert {"lab-table1-both.png", "lab-recipe.png"} < shown


def test_the_command_says_what_is_wrong(tmp_path, monkeypatch, capsys):
    """One sentence and exit code 2; without a name every experiment is listed."""

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["paper", *words])
        monkeypatch.delitem(sys.modules, "paper.__main__", raising=False)
        with pytest.raises(SystemExit) as stop:
            runpy.run_module("paper", run_name="__main__")
        return int(stop.value.code or 0), *capsys.readouterr()

    assert [line.split()[0] for line in call()[1].splitlines()] == list(NAMES)
    check_refusal(*call("report", str(tmp_path)), ("holds nothing to report",))
    for asked, said in (
        ({"names": ["tabel1"]}, "experiment 'tabel1': use parents,"),
        ({"only": ["ffm"]}, r"--only 'ffm': scale smoke has both; attn; ffn; seed 1; rate 1; data"),
    ):
        with pytest.raises(ValueError, match=said):
            run(**{"names": ["table2"], "scale": "smoke", "out": Path("unused"), **asked})


def test_parents_start_from_the_same_weights_and_see_the_same_tokens(shared):
    start = load_file(Path(shared.trained(START)) / "model.safetensors")
    for recipe in PARENTS:
        out = Path(shared.trained(recipe)).parents[1]
        described = json.loads((out / "run.json").read_text())["config"]
        begun = load_file(Path(described["model"]["weights"]) / "model.safetensors")
        assert all(torch.equal(begun[key], start[key]) for key in start)
        made = shared.points.find(shared.about_training(recipe))["result"]
        assert made["tokens"] == 2 * 2 * 4 * 64  # rounds, steps, workers, tokens


def test_a_point_is_what_a_plain_evaluation_gives(shared):
    stable = subnets(shared, "stability", TWIST, "ffn", 4, n=3, tokens=128)
    point = shared.points.measure(*stable)
    opened = open_parent(shared.trained(TWIST), "cpu", ["blocks.setting=ffn"])
    text = Text(open_tokens(shared.base.data.valid), 64, 128)
    behind = replace(text, first=2, max_tokens=8 * 64)
    tickets = list(draws(opened.block_map, widths_of_ratio(opened.block_map, "4/12"), seed=0, n=6))
    # the scale is chosen on other tickets and other text
    scale, tried = TicketScales(opened, text, behind).best(tickets[3:])
    chosen = TicketScales(opened, text, behind).evaluator(scale)
    want = [chosen.subnet_perplexity(ticket) for ticket in tickets[:3]]
    assert point["result"]["values"] == pytest.approx(want, rel=1e-6)
    assert point["result"]["treatment"]["tried"] == pytest.approx(tried["tried"], rel=1e-6)


def test_a_training_that_was_stopped_goes_on(lab):
    cfg, stops = config.override(lab.config(START), [f"run.out={lab.out(START)}"]), [False, True]
    last = rounds.train(cfg, is_late=lambda: stops.pop(0), quiet=True)
    assert last == lab.out(START) / "checkpoints/round-000002"
    assert not lab.points.file.exists()
    assert Path(lab.trained(START)).name == "round-000003"
    (made,) = lab.points.all()
    assert made["config"] == lab.about_training(START)
    assert made["result"]["tokens"] == 3 * 2 * 4 * 64  # rounds, steps, workers, tokens
    assert [row["round"] for row in metrics(lab.out(START))] == [1, 2, 3]


def test_names_follow_from_what_matters(tmp_path, lab):
    """A start that is given is named by its weights, wherever they lie."""
    for name, content in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(content)
    a, b, c, hotter, saved = (
        Lab(tmp_path / "lab", "smoke", TINY, f"model.weights={tmp_path}/{words}".split())
        for words in ("a", "b", "c", "a train.lr=1e-2", "a run.save_every=1")
    )
    for recipe in (DENSE, TWIST_FRESH):
        assert a.hash_of(recipe) == b.hash_of(recipe) == saved.hash_of(recipe)
        assert len({each.hash_of(recipe) for each in (a, c, hotter)}) == 3
    longer = Lab(lab.folder, "smoke", replace(TINY, start=("train.rounds=4",)), lab.overrides)
    assert lab.hash_of(DENSE) != longer.hash_of(DENSE)
    every = [*PARENTS, *(Recipe("twist", k) for k in (3, 12)), Recipe("twist", setting="attn")]
    assert len({lab.hash_of(recipe) for recipe in every}) == len(every)


def place(about: dict) -> tuple:
    return about["way"], about["rate"], about["seed"]


@pytest.mark.parametrize(
    ("scale", "file", "least"),
    [("gpu", "gpu-recipe", 22), ("gpu-60m", "gpu-60m", 5), ("gpu", "gpu-small", 10)],
)
def test_what_was_measured_is_found_again(scale, file, least, tmp_path):
    """Points of the recipe in paper/points answer to today's ways; older ones name no scale."""
    lab = Lab(tmp_path, scale, SCALES[scale], ["model.weights=runs/start"])
    told = (ROOT / f"paper/points/{file}.jsonl").read_text().splitlines()
    asked = [point.config for point in EXPERIMENTS["recipe"](lab)]
    for name, way in WAYS.items():  # a chosen rate must not be one that has fewer seeds
        mine = [place(about)[1:] for about in asked if about["way"] == name]
        rates = [rate * lab.base.train.lr for rate in way.rates]
        assert mine in ([], [(rate, seed) for seed in (1, 2, 3) for rate in rates])
    ours = {place(about): about | {"start": ""} for about in asked}
    found = [about for line in told if place(about := json.loads(line)["config"]) in ours]
    assert len(found) >= least
    for about in found:
        expected = ours[place(about)]
        assert {"treatment": expected["treatment"], **about, "start": ""} == expected


def test_one_rate_of_a_way_alone(tmp_path):
    scale = _scale("gpu-60m", ["TwIST", "rate 2", "seed 2"])
    found = EXPERIMENTS["recipe"](Lab(tmp_path, "gpu-60m", scale, ["model.weights=x"]))
    assert [place(p.config) for p in found] == [("TwIST", 1.5e-3, 2)]


def test_a_way_that_trains_the_whole_model_first(lab):
    """By hand: 82 rounds of 15 steps and 102 of 6 are 123 of 15, but for half a round.

    On a tiny model the teacher is the model after the dense part, the rest goes on with the
    sequences behind it, and bytes are those of both parts.
    """
    name = "TwIST, whole first after 2/3 dense"
    way, scale = WAYS[name], SCALES["gpu-60m"]
    t = Lab(lab.folder, "gpu-60m", scale, ["model.weights=x"]).base.train
    assert {"train.rounds=82", "train.method=dense"} < set(way.before(scale, t))
    assert {"train.rounds=102", "train.interval=6"} < set(way.changes(scale, t, 1))
    scale = replace(TINY, ways=("data parallel", name), table1=(6,))
    small = Lab(lab.folder, "smoke", scale, lab.overrides)
    dense, both = (point.measure() for point in EXPERIMENTS["recipe"](small))
    assert both["tokens"] == dense["tokens"] == 2 * 2 * 4 * 64  # rounds x steps x workers x batch 1
    tried = dense["test"]["6"]["treatment"]  # the best scale, by text that is not reported
    assert tried["chosen"] == min(tried["tried"], key=tried["tried"].__getitem__)
    assert tried["first_window"] * 64 >= TINY.tokens
    cfg, alone = small.base, []
    source, base = small.trained(START), cfg.train
    for part in (way.before(scale, base), way.changes(scale, base, 1)):
        own = [f"model.weights={source}", "run.seed=1", f"run.out={lab.folder}/alone{len(alone)}"]
        source = small.train(config.override(cfg, [*part, *own]), first=8 * len(alone))
        alone.append(summary(Path(own[2][8:])))
    assert checkpoint.open_(source).leases.next == 8 + 2 * 4
    assert both["links"] == alone[1]["bytes"] * 3 / 4 + alone[0]["bytes"]  # of four ranks
    assert (
        both["bytes"]
        == sum(each["bytes"] for each in alone)
        == alone[1]["bytes"] + dense["bytes"] / 2
    )
    assert both["loss"] == alone[1]["loss"]  # the same sequences after the same start
    assert not list(small.folder.glob("ways/*"))


def test_every_scale_makes_legal_configs(tmp_path):
    for name, scale in SCALES.items():
        lab = Lab(tmp_path, name, scale)
        for recipe in (*PARENTS, Recipe("twist", 3), Recipe("twist", 12)):
            assert 1 <= lab.config(recipe).blocks.k_attn[0] <= scale.n_attn
        if scale.start is not None:
            assert lab.config(START).run.seed != lab.config(DENSE).run.seed


def test_shift_against_all_subsets():
    model, found = tiny_model("gpt2").double(), {}
    block_map = families.partition(model, BlocksConfig(n_ffn=4, shared_first=0, shared_last=0))
    torch.manual_seed(0)
    ids = torch.randint(0, 60, (2, 8))
    with torch.no_grad(), block_outputs(model, block_map, lambda g, s: found.update({g.name: s})):
        model(input_ids=ids)
    for row in shifts(model, block_map, ids, 40):
        shares, k = found[row["group"]], row["k"]
        whole, some = shares.sum(1), list(itertools.combinations(range(shares.shape[1]), k))
        parts = [shares[:, list(kept)].sum(1) for kept in some]
        squares = [float(part.square().sum() / whole.square().sum()) for part in parts]
        norms = [float(part.norm(dim=1).mean() / whole.norm(dim=1).mean()) for part in parts]
        assert row["exact"] ** 2 == pytest.approx(sum(squares) / len(some), rel=1e-5)
        assert row["measured"] == pytest.approx(sum(norms) / len(some), rel=0.1)
        assert row["paper"] == pytest.approx(math.sqrt(k / 4))


def test_tensorboard_gets_every_round(tmp_path, tokens):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rounds.train(tiny(tokens, tmp_path / "run", run={"eval_every": 2}), quiet=True)
    seen = EventAccumulator(str(tmp_path / "run/tensorboard"))
    seen.Reload()
    losses = [row["loss"] for row in metrics(tmp_path / "run")]
    assert [e.step for e in seen.Scalars("train/loss")] == [1, 2, 3, 4]
    assert [e.value for e in seen.Scalars("train/loss")] == pytest.approx(losses)
    assert [e.step for e in seen.Scalars("perplexity/2/4")] == [2, 4]
