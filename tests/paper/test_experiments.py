"""Experiments: all end to end in `smoke`, points that resume, measurements by hand."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import shutil
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import make_tokens, tiny
from families_table import TABLE, tiny_model
from safetensors.torch import load_file

from paper import NAMES
from paper.experiments import EXPERIMENTS, _scale, parents, pruned, run, subnets
from paper.lab import Lab, Point, TimeIsUp
from paper.recipe import Spent, train
from paper.report import report
from paper.scales import DENSE, PARENTS, SCALES, TWIST, TWIST_FRESH, Recipe
from paper.shift import shifts
from paper.ways import WAYS, changes, dense_changes
from twistlm import config
from twistlm.compute.perplexity import Evaluator, Text
from twistlm.config import BlocksConfig
from twistlm.data.builtin import place
from twistlm.data.stream import Leases
from twistlm.lab.points import Points, kept_trainings, place_of
from twistlm.model import families
from twistlm.model.blocks import widths_of_ratio
from twistlm.model.subnet import build, measure_means
from twistlm.system.files import InUse
from twistlm.tickets.parent import open_parent
from twistlm.training import engines, rounds

ROOT = Path(__file__).parents[2]
SHORT = ("train.rounds=2", "train.interval=2", "model.config.n_layer=2")
TINY = replace(
    SCALES["smoke"],
    changes=(*SCALES["smoke"].changes, *SHORT),
    start=("train.rounds=3",),
    tokens=128,
)
# every experiment of `smoke` and two of its three settings, with fewer subnets
FEW = replace(
    TINY,
    settings=("both", "attn"),
    n_stability=3,
    stability_tokens=128,
    stability=(4,),
    n_subnets=2,
    n_shift=2,
    nodes=((4, 1),),
    trained_on=(3, 12),
    evaluated_on=(3, 12),
)


def new_lab(folder: Path) -> Lab:
    stem = make_tokens(folder / "tokens", vocab=512)
    data = [f"data.train={stem}", f"data.valid={stem}"]
    return Lab(folder / "lab", "smoke", TINY, data, quiet=True)


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return new_lab(tmp_path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Lab:
    """A lab whose parents several tests use: each is trained once."""
    return new_lab(tmp_path_factory.mktemp("shared"))


def parent_point(lab: Lab, recipe: Recipe | None) -> Point:
    """What a parent's training cost."""
    (found,) = (p for p in parents(lab) if p.config == lab.about_training(recipe))
    return found


def all_in(path: Path) -> list[dict]:
    return Points(place_of(path)).all()


def test_every_experiment_end_to_end_and_its_tables(shared, tmp_path, monkeypatch):
    """All of `smoke`, from tokens to tables and figures; a second call measures nothing.

    Some parents are there already, others are trained on the way.
    """
    monkeypatch.setitem(SCALES, "smoke", FEW)
    monkeypatch.setattr("paper.lab._forget", lambda: None)  # takes longer than they
    folder, data = tmp_path / "lab", shared.overrides
    for recipe in (None, *PARENTS):
        shared.trained(recipe)
    shutil.copytree(shared.folder / "parents", folder / "parents")
    assert run(["all"], "smoke", folder, data)
    made = all_in(folder)
    assert {point["config"]["experiment"] for point in made} == set(NAMES) == set(EXPERIMENTS)
    for point in made:
        numbers = json.dumps(point["result"])
        assert "NaN" not in numbers
        assert "Infinity" not in numbers
    stamps = {path: path.stat().st_mtime_ns for path in folder.rglob("*.*")}
    assert run(["all"], "smoke", folder, data)
    assert stamps == {path: path.stat().st_mtime_ns for path in folder.rglob("*.*")}
    text = report([folder], tmp_path / "report")
    assert text == (tmp_path / "report/tables.md").read_text()
    assert set(NAMES) - {"table1"} <= set(re.findall(r"^## (\S+)$", text, re.MULTILINE))
    shown = re.findall(r"\]\((lab-\S+\.png)\)", text)
    assert sorted(shown) == sorted(path.name for path in (tmp_path / "report").glob("*.png"))
    assert {"lab-table1-both.png", "lab-stability-attn.png", "lab-recipe.png"} <= set(shown)
    assert "nested blocks of TwIST, fresh masks and teacher" in text


def test_the_command_says_what_is_wrong(tmp_path):
    """One sentence and exit code 2; `--list` and `--help` name every experiment and scale."""

    def call(*words: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "paper", *words]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)

    listed = call("--list")
    assert [line.split()[0] for line in listed.stdout.splitlines()] == list(NAMES)
    shown = call("--help").stdout
    assert all(word in shown for word in (*NAMES, *SCALES, "report", "Examples"))
    for words, said in (
        (("tabel1",), "experiment 'tabel1': use parents,"),
        (("report", str(tmp_path)), "holds nothing to report"),
    ):
        done = call(*words)
        assert done.returncode == 2
        assert said in done.stderr
        assert len(done.stderr.splitlines()) == 1
    for asked, said in (
        ({"scale": "huge"}, "--scale 'huge'"),
        ({"only": ["ffm"]}, r"--only 'ffm': scale smoke has both, attn, ffn, seed 1, rate 1, or "),
        # one name, whatever the scale has, and in an error as it was written
        (
            {"only": ["TwIST, whole first"]},
            "--only 'TwIST, whole first': scale smoke has .*; TwIST",
        ),
        ({"only": ["TwIST, whole last"]}, "--only 'TwIST, whole last': scale smoke has .*; TwIST"),
        ({"scale": "paper", "overrides": ["start.train.rounds=3"]}, "weights that are given"),
    ):
        with pytest.raises(ValueError, match=said):
            run(["memory"], **{"scale": "smoke", "out": Path("unused"), **asked})


def test_parents_start_from_the_same_weights_and_see_the_same_tokens(shared):
    lab = shared
    start = load_file(Path(lab.trained(None)) / "model.safetensors")
    results = {}
    for recipe in PARENTS:
        out = Path(lab.trained(recipe)).parents[1]
        described = json.loads((out / "run.json").read_text())["config"]
        begun = load_file(Path(described["model"]["weights"]) / "model.safetensors")
        assert all(torch.equal(begun[key], start[key]) for key in start)
        results[recipe] = lab.measure(parent_point(lab, recipe))["result"]
    n_tokens = 2 * 2 * 4 * 64  # rounds, steps, workers, tokens
    assert {r["tokens"] for r in results.values()} == {n_tokens}
    kept = {training.name: training for training in kept_trainings(lab.place.trainings)}
    assert set(kept) == {lab.out(recipe).name for recipe in (None, *PARENTS)}
    rows = [json.loads(row) for row in (out / "metrics.jsonl").read_text().splitlines()]
    assert kept[out.name].rows == rows
    assert kept[out.name].config["blocks"]["k_ffn"] == [12]


def test_a_point_is_what_a_plain_evaluation_gives(shared):
    lab = shared
    point = lab.measure(subnets(lab, "stability", TWIST, "ffn", 4, n=3, tokens=128))
    opened = open_parent(lab.trained(TWIST), "cpu", ["blocks.setting=ffn"])
    file = lab.scales(TWIST, "ffn").reported.file
    tried = point["result"]["treatment"]
    assert (tried["first_window"], tried["chosen"]) == (
        2,
        min(tried["tried"], key=tried["tried"].get),
    )
    modes = {"no scale": "none", "sqrt(N/K)": "sqrt", "measured": "measured"}
    mode, _, mean = tried["chosen"].partition(" + ")
    ids = file.sequences(list(range(2, 10)), 64)  # behind the two windows that are reported
    rho, means = measure_means(
        build(opened.template, opened.block_map, opened.central.layout, opened.central.weights), ids
    )
    ready = Evaluator(
        opened.template,
        opened.block_map,
        opened.central,
        Text(file, 64, 128),
        scale=modes[mode],
        rho=rho,
        means=means if mean else {},
    )
    want = ready.random_subnets("4/12", widths_of_ratio(opened.block_map, "4/12"), 3, 0)
    assert point["result"]["values"] == pytest.approx(want.values, rel=1e-6)
    assert point["result"]["n_params"] == want.n_params
    whole = lab.measure(subnets(lab, "stability", TWIST, "ffn", 12, n=3, tokens=128))["result"]
    assert whole["values"] == pytest.approx([ready.full_perplexity()], rel=1e-6)
    # what one experiment measures on does not reach another
    other = lab.measure(subnets(lab, "stability", TWIST, "ffn", 12, n=3, tokens=64))["result"]
    assert other["values"] != whole["values"]
    assert lab.scales(TWIST, "ffn") is lab.scales(TWIST, "ffn", 128)  # built once


def test_a_pruned_point_is_what_zeros_by_hand_give(shared):
    """Magnitude at 9 of 12: a quarter of every cut matrix and one weight more are 0.

    One weight of each matrix changes the perplexity by 3e-5 of itself: less must be left.
    """
    found = shared.measure(pruned(shared, "magnitude", "ffn", 9))["result"]
    opened = open_parent(shared.trained(DENSE), "cpu", ["blocks.setting=ffn"])
    model = build(opened.template, opened.block_map, opened.central.layout, opened.central.weights)
    for name, weight in model.model.named_parameters():
        if re.search(r"mlp\.c_\w+\.weight", name):
            limit = weight.detach().abs().flatten().kthvalue(weight.numel() // 4 + 1).values
            weight.data.masked_fill_(weight.abs() <= limit, 0)
    text = shared.scales(DENSE, "ffn").reported
    ids = text.file.sequences([0, 1], 64)
    with torch.no_grad():
        losses = [float(model.model(input_ids=i[None], labels=i[None]).loss) for i in ids]
    assert found["values"] == pytest.approx([math.exp(sum(losses) / 2)], rel=1e-6)


def test_the_clock_stops_cleanly_and_the_next_call_goes_on(lab):
    lab.deadline = -math.inf
    with pytest.raises(TimeIsUp):
        lab.measure(parent_point(lab, DENSE))
    assert not lab.points.file.exists()
    stops = iter([False, False, True])  # late after the start's second round
    lab.is_late = lambda: next(stops)  # type: ignore[method-assign]
    with pytest.raises(TimeIsUp):
        lab.trained(None)
    assert (lab.out(None) / "checkpoints/round-000002").is_dir()
    del lab.is_late  # type: ignore[attr-defined]
    lab.deadline = math.inf
    assert not lab.points.file.exists()
    assert Path(lab.trained(None)).name == "round-000003"
    (made,) = all_in(lab.folder)
    assert made["config"] == parent_point(lab, None).config
    assert made["result"]["tokens"] == 3 * 2 * 4 * 64  # rounds, steps, workers, tokens
    rows = (lab.out(None) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["round"] for row in rows] == [1, 2, 3]


def test_a_parent_that_another_process_trains_is_waited_for(lab, monkeypatch):
    monkeypatch.setattr("paper.lab.WAIT", 0.05)
    out = lab.out(None)
    hold = (
        "import pathlib, sys; from twistlm.system.files import alone\n"
        "with alone(pathlib.Path(sys.argv[1])): print('held', flush=True); input()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", hold, str(out)], **pipes) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(InUse, match="another process trains there"):
            rounds.train(config.override(lab.config(None), [f"run.out={out}"]), quiet=True)
        looks = iter([False, False, True])  # late at the third look
        monkeypatch.setattr(lab, "is_late", lambda: next(looks))
        with pytest.raises(TimeIsUp):
            lab.trained(None)
        monkeypatch.undo()
        killed = threading.Event()
        threading.Timer(1.5, lambda: (killed.set(), other.kill())).start()
        assert Path(lab.trained(None)).name == "round-000003"
        assert killed.is_set()
    rows = (out / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["round"] for row in rows] == [1, 2, 3]


def test_names_follow_from_what_matters(tmp_path, lab):
    """And a start that is given is named by its weights: the same elsewhere are the same start."""
    elsewhere = Lab(tmp_path / "other", "smoke", TINY, lab.overrides)
    hotter = Lab(lab.folder, "smoke", TINY, [*lab.overrides, "train.lr=1e-2"])
    longer = Lab(lab.folder, "smoke", TINY, [*lab.overrides, "start.train.rounds=4"])
    saved = Lab(lab.folder, "smoke", TINY, [*lab.overrides, "run.save_every=1"])
    for recipe in (None, DENSE, TWIST_FRESH):
        assert lab.hash_of(recipe) == elsewhere.hash_of(recipe) == saved.hash_of(recipe)
        assert len({x.hash_of(recipe) for x in (lab, hotter, longer)}) == 3
    every = [*PARENTS, *(Recipe("twist", (k,)) for k in (3, 12)), Recipe("twist", setting="attn")]
    assert (
        len({lab.hash_of(recipe) for recipe in every}) == len({r.slug for r in every}) == len(every)
    )

    for name, content in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(content)
    a, b, c = (
        Lab(tmp_path / "lab", "smoke", TINY, [f"model.weights={tmp_path / name}"]) for name in "abc"
    )
    for recipe in (None, DENSE):
        assert a.hash_of(recipe) == b.hash_of(recipe) != c.hash_of(recipe)
    assert a.trained(None) == str(tmp_path / "a")


@pytest.mark.parametrize(
    ("scale", "file", "least"), [("gpu", "gpu-recipe", 22), ("gpu-60m", "gpu-60m", 5)]
)
def test_what_was_measured_is_found_again(scale, file, least, tmp_path):
    """Points of the recipe in paper/points answer to today's ways; older ones name no scale."""
    lab = Lab(tmp_path, scale, SCALES[scale], ["model.weights=runs/start"])
    told = Path(__file__, f"../../../paper/points/{file}.jsonl").resolve().read_text().splitlines()
    known = [json.loads(line)["config"] for line in told]
    asked = [point.config for point in EXPERIMENTS["recipe"](lab)]

    def place(about: dict) -> tuple:
        return about["way"], about["rate"], about["seed"]

    for name, way in WAYS.items():  # a chosen rate must not be one that has fewer seeds
        mine = [place(about)[1:] for about in asked if about["way"] == name]
        rates = [rate * lab.base.train.lr for rate in way.rates]
        assert mine in ([], [(rate, seed) for seed in (1, 2, 3) for rate in rates])
    ours = {place(about): about | {"start": ""} for about in asked}
    found = [about for about in known if place(about) in ours]
    assert len(found) >= least
    for about in found:
        expected = ours[place(about)]
        assert {"treatment": expected["treatment"], **about, "start": ""} == expected


def test_a_point_names_its_text(tmp_path, monkeypatch):
    """By the bytes of the ids; the built-in text has a name as soon as it is made."""
    monkeypatch.chdir(tmp_path)
    about = itertools.count()
    stems = {"train": make_tokens(tmp_path / "a"), "valid": make_tokens(tmp_path / "b", 500)}

    def named(lab: Lab) -> dict[str, str]:
        return lab.points.measure({"n": next(about)}, lambda: {"y": 1.0})["run"]["text"]

    expected = {
        part: hashlib.sha256(Path(f"{stem}.bin").read_bytes()).hexdigest()
        for part, stem in stems.items()
    }
    assert expected["train"] != expected["valid"]
    builtin = Lab(tmp_path / "other", "smoke", TINY)
    assert named(builtin) == {}
    make_tokens(place("train"))  # the same ids as above
    make_tokens(place("valid"), 500)
    assert named(builtin) == expected


def test_one_rate_of_a_way_alone(tmp_path):
    """With every seed, or with one that is named."""
    for only, rate, seeds in (
        (["rate 1"], 2e-3, [1, 2, 3]),
        (["rate 2", "seed 2"], 1.5e-3, [2]),
    ):
        scale = _scale("gpu-60m", ["TwIST", *only])
        found = EXPERIMENTS["recipe"](Lab(tmp_path, "gpu-60m", scale, ["model.weights=x"]))
        asked = [(p.config["way"], p.config["rate"], p.config["seed"]) for p in found]
        assert asked == [("TwIST", rate, seed) for seed in seeds]


def test_a_way_that_trains_the_whole_model_first(lab):
    """By hand: 41 rounds of 15 steps and 205 of 6 are 123 of 15.

    On a tiny model the teacher is the model after the dense part, the rest goes on with the
    sequences behind it, and bytes are those of both parts.
    """
    way, scale = WAYS["TwIST, dense first"], SCALES["gpu-60m"]
    t = Lab(lab.folder, "gpu-60m", scale, ["model.weights=x"]).base.train
    assert {"train.rounds=41", "train.method=dense"} < set(dense_changes(scale, t, way))
    assert {"train.rounds=205", "train.interval=6"} < set(changes(scale, t, way, 4))
    assert not dense_changes(scale, t, WAYS["TwIST"])

    scale = replace(TINY, ways=("data parallel", "TwIST, dense first"), table1=(6,))
    small = Lab(lab.folder, "smoke", scale, lab.overrides, quiet=True)
    dense, both = (point.measure() for point in EXPERIMENTS["recipe"](small))
    assert both["tokens"] == dense["tokens"] == 2 * 2 * 4 * 64  # rounds x steps x workers x batch 1
    for text, other in itertools.product(
        (dense["test"], dense["choice"]), ("treatment", "nested_treatment")
    ):
        tried = text["6"][other]  # the control has the best scale, by text that is not reported
        assert tried["chosen"] == min(tried["tried"], key=tried["tried"].__getitem__)
        assert len(tried["tried"]) == 6
        assert tried["first_window"] * 64 >= TINY.tokens
    teachers = set(small.kept)
    first = [f"model.weights={small.trained(None)}", "run.seed=1", f"run.out={lab.folder}/alone"]
    cfg = config.override(small.base, [*dense_changes(scale, small.base.train, way), *first])
    after = rounds.train(cfg, resume=False, quiet=True)
    cfg = config.override(small.base, [f"model.weights={after}", f"run.out={lab.folder}/rest"])
    cfg = config.override(cfg, [*changes(scale, small.base.train, way, 4), "run.seed=1"])
    with closing(engines.join(cfg)) as cluster:
        _, progress, spent = train(small, cfg, cluster, Leases(8), Spent(tokens=100))
    assert teachers == {"", progress.teacher}  # the dense part has none
    assert progress.leases.next == 8 + 2 * 4
    assert spent.tokens == 100 + 2 * 4 * 64
    assert spent.links == spent.bytes * 3 / 4  # of four ranks, each has a quarter of it
    assert both["bytes"] == spent.bytes + dense["bytes"] / 2
    assert both["loss"] == spent.loss  # the same sequences after the same start


@pytest.mark.parametrize("name", list(SCALES))
def test_every_scale_makes_legal_configs(name, tmp_path):
    lab = Lab(tmp_path, name, SCALES[name])
    for recipe in (*PARENTS, Recipe("twist", (3,)), Recipe("twist", (12,))):
        cfg = lab.config(recipe)
        assert len(cfg.blocks.k_attn) == len(cfg.blocks.k_ffn) == len(recipe.widths)
        assert all(1 <= k <= SCALES[name].n_attn for k in cfg.blocks.k_attn)
        assert cfg.train.nesterov() is None
    fewer = SCALES[name].n_attn == 3  # as in the preset's own ratios
    assert SCALES[name].ratio(4) == ("attn=1/3,ffn=4/12" if fewer else "4/12")
    if SCALES[name].start is not None:
        assert lab.config(None).train.method == "dense"
        assert lab.config(None).run.seed != lab.config(DENSE).run.seed


def test_shift_against_the_modules_themselves():
    """All subsets of K blocks, by zeroing inputs of the output projection in float64."""
    row, model = TABLE["gpt2"], tiny_model("gpt2").double()
    block_map = families.partition(model, BlocksConfig(n_ffn=4, shared_first=0, shared_last=0))
    torch.manual_seed(0)
    ids = torch.randint(0, 60, (2, 8))
    found = {(r["group"], r["k"]): r for r in shifts(model, block_map, ids, 40)}
    group = next(g for g in block_map.groups if g.kind == "ffn" and g.layer == 1)
    module = model.get_submodule(f"{row.layers}.1.{row.ffn_out}")
    inputs = []
    handle = module.register_forward_pre_hook(lambda m, args: inputs.append(args[0].detach()))
    with torch.no_grad():
        model(input_ids=ids)
        handle.remove()
        bias = module(torch.zeros_like(inputs[0]))
        whole = (module(inputs[0]) - bias).flatten(0, 1)
        for k in (1, 2, 3):
            squares, norms = [], []
            for kept in itertools.combinations(range(4), k):
                size = inputs[0].shape[-1] // 4
                mask = torch.zeros(4, size, dtype=torch.float64)
                mask[list(kept)] = 1
                part = (module(inputs[0] * mask.flatten()) - bias).flatten(0, 1)
                squares.append(part.square().sum() / whole.square().sum())
                norms.append(part.norm(dim=1).mean() / whole.norm(dim=1).mean())
            made = found[group.name, k]
            assert made["exact"] ** 2 == pytest.approx(float(sum(squares) / len(squares)), rel=1e-5)
            assert min(norms) * 0.999 <= made["measured"] <= max(norms) * 1.001
            assert made["measured"] == pytest.approx(float(sum(norms) / len(norms)), rel=0.1)
            assert made["paper"] == pytest.approx(math.sqrt(k / 4))


def test_tensorboard_gets_every_round(tmp_path, tokens):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rounds.train(tiny(tokens, tmp_path / "run", run={"eval_every": 2}), quiet=True)
    seen = EventAccumulator(str(tmp_path / "run/tensorboard"))
    seen.Reload()
    rows = [json.loads(x) for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [e.step for e in seen.Scalars("train/loss")] == [1, 2, 3, 4]
    assert [e.value for e in seen.Scalars("train/loss")] == pytest.approx([r["loss"] for r in rows])
    assert [e.step for e in seen.Scalars("perplexity/2/4")] == [2, 4]
