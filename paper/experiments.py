"""The experiments of the paper: each a list of points, a point a config and its measurement."""

import random
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twistlm import config
from twistlm.baselines import COMPARED, STRUCTURED
from twistlm.compute.perplexity import summarize
from twistlm.compute.slopes import order_of
from twistlm.config import Setting
from twistlm.lab import lost_nodes
from twistlm.lab.bench.train import measure_worker
from twistlm.lab.compare.cells import NESTED, RANDOM, WHOLE
from twistlm.lab.points import name_of
from twistlm.model import families, huggingface
from twistlm.model.blocks import BlockGroup, BlockMap
from twistlm.model.huggingface import Model
from twistlm.model.masks import Order
from twistlm.model.subnet import activation_scale, block_outputs, rho_of
from twistlm.system.device import pick_device, to_device
from twistlm.system.terminal import console
from twistlm.tickets import importance
from twistlm.tickets.parent import Parent
from twistlm.tickets.text import open_text
from twistlm.tickets.ticket_scale import score_tickets
from twistlm.training.plan import make
from twistlm.training.startup import scored_sequences
from twistlm.transport.ranks import Cluster

from . import NAMES
from .lab import Lab, Point, Result, summary
from .scales import DENSE, PARENTS, SCALES, START, WAYS, N, Recipe, Scale, parents_of, trained_at

TRIED = "best of some on other text"  # in a point's config: its tickets' activation scale
SAMPLE = 5, 1  # random subnets behind a mean of the recipe, and the seed that draws them
N_SEQUENCES, N_SUBSETS = 4, 20  # text, and random blocks, that the activation shift is measured on
INIT = "init"  # random weights, before any training
SETTINGS: tuple[Setting, ...] = ("both", "attn", "ffn")


def parents(lab: Lab) -> list[Point]:
    """The start, TwIST and its controls in each setting, and TwIST at every size of Table 1."""
    recipes: list[Recipe] = [START] if lab.scale.start is not None else []
    for setting in lab.scale.settings:
        recipes += [*parents_of(setting), *(trained_at(k, setting) for k in lab.scale.table1)]

    def measure(recipe: Recipe) -> Result:
        lab.trained(recipe)
        return summary(lab.out(recipe))

    return [Point(lab.about_training(r), partial(measure, r)) for r in dict.fromkeys(recipes)]


# ---------------------------------------------------------------- perplexity of tickets


def sized(
    lab: Lab, experiment: str, recipe: Recipe, setting: Setting, k: int, **more: Any
) -> Point:
    """A parent with k of 12 blocks: whole, pruned by `method`, nested (`pick`) or n random ones."""
    more = {"setting": setting, "k": k, "ratio": lab.scale.ratio(k), **more}
    about = lab.about(experiment, recipe, **{"tokens": lab.scale.tokens, **more})

    def measure() -> Result:
        what = WHOLE if k == N else about.get("method") or about.get("pick", RANDOM)
        sweep = lab.sweep(recipe, about["tokens"])
        return sweep.measure(what, setting, about["ratio"], about.get("n", 0))[0]

    return Point(about, measure)


def subnets(
    lab: Lab, experiment: str, recipe: Recipe, setting: Setting, k: int, n: int, **more: Any
) -> Point:
    """n random subnets with k of 12 blocks; k = 12 is the whole model once."""
    more |= {"n": n, "treatment": TRIED} if k < N else {"n": 1}
    return sized(lab, experiment, recipe, setting, k, seed=lab.base.run.seed, **more)


def table1(lab: Lab) -> list[Point]:
    """Table 1: random blocks of every parent, nested ones, and the pruners on data parallel."""
    scale, found = lab.scale, []
    for setting in scale.settings:
        mine = parents_of(setting)
        asked = [(recipe, k) for recipe in (START, *mine) for k in (N, *scale.table1)]
        # the paper's column of parents trained at the size they are cut at
        asked += [(own, k) for k in scale.table1 if (own := trained_at(k, setting)) not in mine]
        found += [subnets(lab, "table1", r, setting, k, n=scale.n_subnets) for r, k in asked]
        for k in scale.table1:
            nested = {"pick": "nested", "treatment": TRIED}
            found += [sized(lab, "table1", r, setting, k, **nested) for r in mine if r.fresh]
            shared = {"n_calibration": scale.n_calibration, "seed": lab.base.run.seed}
            for method in COMPARED:  # of `twistlm lab prune`, after training
                tried = {"treatment": TRIED} if method.startswith(STRUCTURED) else {}
                more = {"method": method, "ratio": f"{k}/{N}", **tried, **shared}
                # whole blocks need a whole number of them in every layer
                if not tried or k * scale.n_attn % N == 0:
                    found.append(sized(lab, "table1", DENSE, setting, k, **more))
    return found


def stability(lab: Lab) -> list[Point]:
    """The distribution of random subnets of every parent of a setting, at every size."""
    sample = {"n": lab.scale.n_stability, "tokens": lab.scale.stability_tokens}
    return [
        subnets(lab, "stability", recipe, setting, k, **sample)
        for setting in lab.scale.settings
        for recipe in parents_of(setting)
        for k in lab.scale.stability
    ]


def robustness(lab: Lab) -> list[Point]:
    """A heat-map per setting: trained on X blocks, evaluated on Y."""
    sample = {"n": lab.scale.n_subnets, "tokens": lab.scale.stability_tokens}
    return [
        subnets(lab, "robustness", trained_at(x, setting), setting, y, widths=[x], **sample)
        for setting in lab.scale.settings
        for x in lab.scale.widths
        for y in lab.scale.widths
    ]


def nodeloss(lab: Lab) -> list[Point]:
    """The parent is served by n nodes that hold its blocks, and some of them die."""
    tokens, found = lab.scale.tokens, []

    def measure(recipe: Recipe, nodes: int, lost: int) -> Result:
        named = {recipe.label: lab.sweep(recipe, tokens).parent}
        (made,) = lost_nodes.drop(named, nodes, lost, tokens=tokens, quiet=True)["parents"]
        return {key: made[key] for key in ("full", "worst", "treatment")}

    for recipe, (nodes, lost) in product(PARENTS, lab.scale.nodes):
        case = {"setting": "both", "nodes": nodes, "lost": lost, "tokens": tokens}
        about = lab.about("nodeloss", recipe, **case, treatment=TRIED)
        found.append(Point(about, partial(measure, recipe, nodes, lost)))
    return found


# ---------------------------------------------------------------- the recipe


def recipe(lab: Lab) -> list[Point]:
    """Every way at each of its rates and seeds; the first seed of all ways comes first."""
    scale, t, found = lab.scale, lab.base.train, []
    for seed, (name, way) in product(scale.seeds, WAYS.items()):
        for i, rate in enumerate(way.rates if name in (scale.ways or WAYS) else (), 1):
            about: Result = {"experiment": "recipe", "scale": lab.name, "way": name}
            about |= {"rate": rate * t.lr, "changes": way.changes(scale, t, rate)}
            about |= {"start": lab.hash_of(START), "seed": seed, "tokens": scale.tokens}
            about |= {"before": before} if (before := way.before(scale, t)) else {}
            about["treatment"] = TRIED
            found += [Point(about, partial(measure_way, lab, about))] if i in scale.rates else []
    return found


def measure_way(lab: Lab, about: Mapping[str, Any]) -> Result:
    """Train a way from the lab's start and measure it on the reported text and on other text.

    bytes: down from the central model and up to it, or around a ring; links: of these between ranks
    that keep 1/S of the central model each (`sharded`); a ring's are all between ranks.
    """
    start, folder = lab.trained(START), lab.folder / "ways" / name_of(about)
    spent: Result = {"tokens": 0, "bytes": 0, "seconds": 0.0, "links": 0.0}
    for part in (part for part in ("before", "changes") if part in about):
        own = [f"model.weights={start}", f"run.seed={about['seed']}", f"run.out={folder / part}"]
        cfg = config.override(lab.base, [*about[part], *own])
        start = lab.train(cfg, spent["tokens"] // cfg.data.seq_len)  # behind those of before
        made = summary(folder / part)
        spent |= {key: spent[key] + made[key] for key in ("tokens", "bytes", "seconds")}
        t = cfg.train
        spent["links"] += made["bytes"] * (1 - 1 / t.n_workers if t.method == "twist" else 1)
    found = perplexities(lab, start)
    shutil.rmtree(folder)
    return spent | {"loss": made["loss"], **found}


def perplexities(lab: Lab, source: str) -> Result:
    """Whole, random and nested subnets; a parent without an order is cut along the start's.

    Tickets of every way have the activation scale that suits them best on other text: data parallel
    and dropout must not lose by a scale that was made for TwIST.
    """
    parent = lab.open(source)
    order = parent.progress.order or lab.once(START, "order", start_order)
    parent = replace(parent, progress=replace(parent.progress, order=order))
    n, seed = SAMPLE
    sweep = lab.sweep_of(parent, lab.scale.tokens, seed)
    cut = sweep.cut("both")
    found: Result = {"test": {"whole": cut.ready.full_perplexity()}}
    if (other := cut.choice) is not None:
        found["choice"] = {"whole": replace(cut.ready, text=other).full_perplexity()}
    for k in lab.scale.table1:
        tickets = sweep.tickets(RANDOM, "both", lab.scale.ratio(k), n)
        drawn = score_tickets(cut, *tickets)
        nested, _ = sweep.measure(NESTED, "both", lab.scale.ratio(k))
        chosen = {"nested": nested["values"][0], "nested_treatment": nested["treatment"]}
        found["test"][str(k)] = drawn | chosen
        if other is not None:
            by_name = {str(each): each for each in cut.candidates()}
            ready = cut.evaluator(by_name[drawn["treatment"]["chosen"]], other)
            values = [ready.subnet_perplexity(each) for each in tickets[0]]
            found["choice"][str(k)] = summarize(values)
    return found


def start_order(start: Parent) -> Order:
    tokens = open_text(start.source, start.cfg, None, "train")
    ids = scored_sequences(tokens, start.cfg.data.seq_len)
    return order_of(importance.score(start, "mask-fisher", ids))


# ---------------------------------------------------------------- costs, counted or timed


def latency(lab: Lab) -> list[Point]:
    """A worker's local step: the whole model once, then every size of every setting."""
    cfg = config.override(lab.base, ["train.batch=2"])
    t, scale = cfg.train, lab.scale
    shared = {key: getattr(t, key) for key in ("batch", "interval", "n_workers", "moments")}
    shared |= {"experiment": "latency", "scale": lab.name, "seq_len": cfg.data.seq_len}
    shared |= {"model": {"type": cfg.model.type, **cfg.model.config}}

    def point(setting: Setting, k: int) -> Point:
        def measure() -> Result:
            lab.close()
            template = huggingface.load(replace(cfg.model, weights="random"), cfg.run.seed)
            cluster = Cluster("local", t.n_workers, "physical", cfg.run.device)
            ratio = f"{N}/{N}" if k == N else scale.ratio(k)
            return measure_worker(template, cfg, cluster, setting, ratio, scale.bench_steps)

        return Point(shared | {"setting": setting, "k": k, "ratio": scale.ratio(k)}, measure)

    return [point("both", N), *(point(s, k) for s in SETTINGS for k in scale.bench_widths)]


def table2(lab: Lab) -> list[Point]:
    """Latency's points (time, memory, bytes of a round), and the paper's set-up, counted."""
    cfg = config.load("paper")
    about = {"experiment": "table2", "scale": lab.name, "n_workers": cfg.train.n_workers}
    about |= {"epochs": cfg.train.epochs, "n_sequences": cfg.data.planned_sequences}
    return [*latency(lab), Point(about, lambda: make(cfg))]


def shift(lab: Lab) -> list[Point]:
    """The untrained model, the start, and every parent: all layers and all K in one pass."""
    base, n = lab.base, N_SUBSETS

    def point(recipe: Recipe, is_init: bool = False) -> Point:
        def measure() -> Result:
            ready = lab.sweep(recipe, lab.scale.tokens).cut("both").ready
            model, block_map = ready.full.model, ready.block_map
            if is_init:
                model = huggingface.load(base.model, base.run.seed)
                block_map = families.partition(model, base.blocks)
                torch.nn.Module.to(model, pick_device(base.run.device))
            rows = list(range(min(N_SEQUENCES, ready.text.n_sequences)))
            ids = ready.text.file.sequences(rows, ready.text.seq_len)
            return {"rows": shifts(model, block_map, to_device(ids, model.device), n)}

        about = lab.about("shift", recipe, n=n, n_sequences=N_SEQUENCES)
        return Point(about | ({"parent": INIT, "slug": INIT} if is_init else {}), measure)

    init = [point(START, is_init=True)] if base.model.weights == "random" else []
    return [*init, *(point(recipe) for recipe in (START, *PARENTS))]


@torch.no_grad()
def shifts(model: Model, block_map: BlockMap, ids: Tensor, n: int) -> list[Result]:
    """What is left of a layer's output when only K of its N blocks add to it: every group and K.

    measured  mean ||y'|| over mean ||y||, y' the sum of K random blocks' shares of the output
    paper     sqrt(K/N): right when blocks are uncorrelated
    exact     sqrt((p - p2)/rho + p2), p = K/N, p2 = K(K-1)/(N(N-1)),
              rho = ||sum y_b||^2 / sum ||y_b||^2
    """
    rows: list[Result] = []

    def add(group: BlockGroup, shares: Tensor) -> None:  # [tokens, blocks, d]
        whole, rho, n_blocks = shares.sum(1).norm(dim=1).mean(), rho_of(shares), group.n_blocks
        for k in range(1, n_blocks):
            rng = random.Random(f"shift/0/{group.name}/{k}")
            kept = [rng.sample(range(n_blocks), k) for _ in range(n)]
            norms = [float(shares[:, some].sum(1).norm(dim=1).mean() / whole) for some in kept]
            row = {"group": group.name, "kind": group.kind, "k": k}
            row["measured"] = statistics.fmean(norms)
            row["paper"] = 1 / activation_scale("sqrt", n_blocks, k)
            rows.append(row | {"exact": 1 / activation_scale("measured", n_blocks, k, rho)})

    with block_outputs(model, block_map, add):
        model(input_ids=ids, use_cache=False)
    return rows


# ---------------------------------------------------------------- all of them in a row

EXPERIMENTS: dict[str, Callable[[Lab], list[Point]]] = {name: globals()[name] for name in NAMES}


def run(
    names: Sequence[str],
    scale: str,
    out: Path,
    overrides: Sequence[str] = (),
    only: Sequence[str] = (),
) -> None:
    """Measure every point that is not on disk."""
    for name in names:
        if name not in (*NAMES, "all"):
            raise ValueError(f"experiment {name!r}: use {', '.join(NAMES)}, or all")
    lab = Lab(out, scale, _scale(scale, only), overrides)
    every = [p for name in (NAMES if "all" in names else names) for p in EXPERIMENTS[name](lab)]
    found = {name_of(point.config): point for point in every}  # some experiments share points
    # all points of one parent in a row: to open one takes seconds
    parents = list(dict.fromkeys(point.config.get("parent_hash") for point in every))
    todo = sorted(found.values(), key=lambda p: parents.index(p.config.get("parent_hash")))
    missing = [point for point in todo if lab.points.find(point.config) is None]
    n_done = len(todo) - len(missing)
    console.print(f"{len(todo)} points in {lab.points.file}, {n_done} of them finished")
    for n, point in enumerate(missing, n_done + 1):
        seconds = lab.points.measure(*point)["seconds"]
        said = " ".join(str(v) for v in point.config.values() if isinstance(v, str | int))
        console.print(f"{n}/{len(todo)} {said} ({seconds:.1f} s)", highlight=False)
    lab.close()


def _scale(name: str, only: Sequence[str]) -> Scale:
    """The scale of this name, with the settings, ways, seeds and rates of `only`."""
    if name not in SCALES:
        raise ValueError(f"--scale {name!r}: use {', '.join(SCALES)}")
    scale = SCALES[name]
    legal: dict[str, tuple[str, Any]] = {word: ("settings", word) for word in scale.settings}
    legal |= {f"seed {seed}": ("seeds", seed) for seed in scale.seeds}
    legal |= {f"rate {i}": ("rates", i) for i in scale.rates}
    legal |= {way: ("ways", way) for way in scale.ways or WAYS}
    chosen: dict[str, Any] = {}
    for word in only:
        for part in [word] if word in WAYS else word.split(","):
            if part not in legal:
                raise ValueError(f"--only {word!r}: scale {name} has {'; '.join(legal)}")
            field, value = legal[part]
            chosen[field] = (*chosen.get(field, ()), value)
    return replace(scale, **chosen)
