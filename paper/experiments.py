"""The experiments of the paper: each a list of points, a point a config and its measurement."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from twistlm import config
from twistlm.baselines import COMPARED, STRUCTURED
from twistlm.baselines.methods import METHODS, prune_
from twistlm.baselines.pattern import Pattern
from twistlm.compute.attention import causal_
from twistlm.compute.perplexity import Spread, perplexity
from twistlm.config import Setting
from twistlm.lab.bench.train import FULL, measure_worker
from twistlm.lab.points import name_of
from twistlm.model import families, huggingface
from twistlm.model.blocks import widths_of_ratio
from twistlm.model.masks import prefixes
from twistlm.model.subnet import build
from twistlm.system.device import pick_device, to_device
from twistlm.system.terminal import console
from twistlm.tickets import importance, lost_nodes
from twistlm.tickets.calibration import calibrate
from twistlm.tickets.ticket_scale import random_tickets, score_tickets
from twistlm.transport.ranks import Cluster

from . import NAMES, printed
from .lab import Lab, Point, TimeIsUp, summary
from .recipe import TRIED, recipe_points
from .scales import DENSE, PARENTS, SCALES, N, Recipe, Scale, parents_of, trained_at
from .shift import shifts
from .ways import WAYS

N_SEQUENCES = 4  # that the activation shift is measured on
INIT = "init"  # random weights, before any training


# ---------------------------------------------------------------- trained models


def parents(lab: Lab) -> list[Point]:
    """The start, TwIST and its controls in each setting, and TwIST at every size of Table 1.

    The other ones of the heat-maps are trained, and recorded here, when `robustness` needs them.
    """
    recipes: list[Recipe | None] = [None] if lab.scale.start is not None else []
    for setting in lab.scale.settings:
        recipes += [*parents_of(setting), *(trained_at(k, setting) for k in lab.scale.table1)]

    def point(recipe: Recipe | None) -> Point:
        def measure() -> dict[str, Any]:
            lab.trained(recipe)
            return summary(lab.out(recipe))

        return Point(lab.about_training(recipe), measure)

    return [point(recipe) for recipe in dict.fromkeys(recipes)]


# ---------------------------------------------------------------- perplexity of tickets


def subnets(
    lab: Lab,
    experiment: str,
    recipe: Recipe | None,
    setting: Setting,
    k: int,
    *,
    n: int,
    tokens: int,
    **more: Any,
) -> Point:
    """n random subnets with k of 12 blocks on `tokens` tokens; k = 12 is the whole model once."""
    scale, seed = lab.scale, lab.base.run.seed
    more |= {"treatment": TRIED} if k < N else {}
    n = n if k < N else 1
    size = {"setting": setting, "k": k, "ratio": scale.ratio(k)}
    about = lab.about(experiment, recipe, **size, n=n, tokens=tokens, seed=seed, **more)

    def measure() -> dict[str, Any]:
        scales = lab.scales(recipe, setting, tokens)
        parent = scales.parent
        layout = parent.central.layout
        if k == N:
            values = (scales.ready.full_perplexity(),)
            whole = Spread("", layout.n_params, values)
            return {"values": list(values), **whole.summary(), "n_params": layout.n_params}
        widths = widths_of_ratio(parent.block_map, scale.ratio(k))
        tickets, held_out = random_tickets(parent.block_map, widths, n=n, seed=seed)
        n_params = layout.narrowed(parent.block_map, widths).n_params
        return score_tickets(scales, tickets, held_out).to_dict() | {"n_params": n_params}

    return Point(about, measure)


def nested(lab: Lab, recipe: Recipe, setting: Setting, k: int) -> Point:
    """The ticket of the first blocks in the parent's own order."""
    tokens, ratio = lab.scale.tokens, lab.scale.ratio(k)
    size = {"setting": setting, "k": k, "ratio": ratio}
    more = {"pick": "nested", "tokens": tokens, "treatment": TRIED}
    about = lab.about("table1", recipe, **size, **more)

    def measure() -> dict[str, Any]:
        scales = lab.scales(recipe, setting, tokens)
        parent = scales.parent
        widths = widths_of_ratio(parent.block_map, ratio)
        ticket = prefixes(parent.block_map, parent.progress.order, widths)
        return score_tickets(scales, [ticket]).to_dict()

    return Point(about, measure)


def pruned(lab: Lab, method: str, setting: Setting, k: int) -> Point:
    """The data-parallel parent, pruned after training by one of `twistlm lab prune`'s methods."""
    scale, seed, ratio = lab.scale, lab.base.run.seed, f"{k}/{N}"
    size = {"method": method, "setting": setting, "k": k, "ratio": ratio, "tokens": scale.tokens}
    more = {"treatment": TRIED} if method.startswith(STRUCTURED) else {}
    n = scale.n_calibration
    about = lab.about("table1", DENSE, **size, n_calibration=n, seed=seed, **more)

    def measure() -> dict[str, Any]:
        scales = lab.scales(DENSE, setting, scale.tokens)
        parent = scales.parent
        ids = lab.once(DENSE, "calibration", lambda: calibrate(parent, None, n, seed).ids)
        if method.startswith(STRUCTURED):
            whole = lab.scales(DENSE, "both", scale.tokens).parent
            name = method.removeprefix(STRUCTURED)
            scores = lab.once(DENSE, method, lambda: importance.score(whole, name, ids, seed))
            widths = widths_of_ratio(parent.block_map, ratio)
            ticket = importance.keep_best(parent.block_map, scores, widths)
            return score_tickets(scales, [ticket]).to_dict()
        central, ready = parent.central, scales.ready
        weights = central.weights.clone()
        model = build(parent.template, parent.block_map, central.layout, weights).model
        causal_(model)
        pattern = Pattern(1 - Fraction(k, N))
        patterns = {group.name: pattern for group in parent.block_map.groups}
        prune_(model, parent.block_map, METHODS[method], patterns, ids)
        values = (perplexity(model, ready.text, ready.precision, ready.loss),)
        return {"values": list(values), **Spread("", 0, values).summary()}

    return Point(about, measure)


def table1(lab: Lab) -> list[Point]:
    """Table 1: random blocks of every parent, nested ones, and the pruners on data parallel."""
    scale, found = lab.scale, []
    sample = {"n": scale.n_subnets, "tokens": scale.tokens}
    for setting in scale.settings:
        mine = parents_of(setting)
        for recipe in (None, *mine):
            for k in (N, *scale.table1):
                found.append(subnets(lab, "table1", recipe, setting, k, **sample))
        for k in scale.table1:  # the paper's column of parents trained at the size they are cut at
            if (own := trained_at(k, setting)) not in mine:
                found.append(subnets(lab, "table1", own, setting, k, **sample))
            found += [nested(lab, recipe, setting, k) for recipe in mine if recipe.fresh]
            for method in COMPARED:
                # whole blocks need a whole number of them in every layer
                if not method.startswith(STRUCTURED) or k * scale.n_attn % N == 0:
                    found.append(pruned(lab, method, setting, k))
    return found


def stability(lab: Lab) -> list[Point]:
    """The distribution of random subnets of every parent of a setting, at every size."""
    scale = lab.scale
    sample = {"n": scale.n_stability, "tokens": scale.stability_tokens}
    return [
        subnets(lab, "stability", recipe, setting, k, **sample)
        for setting in scale.settings
        for recipe in parents_of(setting)
        for k in scale.stability
    ]


def robustness(lab: Lab) -> list[Point]:
    """A heat-map per setting: trained on X blocks, evaluated on Y."""
    scale = lab.scale
    sample = {"n": scale.n_subnets, "tokens": scale.stability_tokens}
    return [
        subnets(lab, "robustness", trained_at(x, setting), setting, y, widths=[x], **sample)
        for setting in scale.settings
        for x in scale.trained_on
        for y in scale.evaluated_on
    ]


def nodeloss(lab: Lab) -> list[Point]:
    """The parent is served by n nodes that hold its blocks, and some of them die."""
    tokens = lab.scale.tokens

    def point(recipe: Recipe, nodes: int, lost: int) -> Point:
        case = {"setting": "both", "nodes": nodes, "lost": lost}
        about = lab.about("nodeloss", recipe, **case, tokens=tokens, treatment=TRIED)

        def measure() -> dict[str, Any]:
            parent = lab.scales(recipe, "both", tokens).parent
            named = {recipe.label: parent}
            (made,) = lost_nodes.drop(named, nodes, lost, tokens=tokens, quiet=True)
            return {
                "full": made.full,
                "mean": made.mean,
                "worst": made.worst,
                "values": list(made.losses.values()),
                "n_tokens": made.n_tokens,
                "treatment": made.treatment,
            }

        return Point(about, measure)

    return [point(recipe, *case) for recipe in PARENTS for case in lab.scale.nodes]


# ---------------------------------------------------------------- costs, counted or timed


def latency(lab: Lab) -> list[Point]:
    """A worker's local step: the whole model once, then every size of every setting."""
    cfg = config.override(lab.base, lab.scale.bench)
    t = cfg.train

    def point(setting: Setting, k: int) -> Point:
        about = {
            "experiment": "latency",
            "scale": lab.name,
            "setting": setting,
            "k": k,
            "ratio": lab.scale.ratio(k),
            "batch": t.batch,
            "seq_len": cfg.data.seq_len,
            "interval": t.interval,
            "n_workers": t.n_workers,
            "moments": t.moments,
            "model": {"type": cfg.model.type, **cfg.model.config},
        }

        def measure() -> dict[str, Any]:
            lab.close()
            template = huggingface.load(replace(cfg.model, weights="random"), cfg.run.seed)
            cluster = Cluster("local", t.n_workers, "physical", cfg.run.device)
            ratio = FULL if k == N else lab.scale.ratio(k)
            steps = lab.scale.bench_steps
            return asdict(measure_worker(template, cfg, cluster, setting, ratio, steps))

        return Point(about, measure)

    settings: tuple[Setting, ...] = ("both", "attn", "ffn")
    sizes = [(setting, k) for setting in settings for k in lab.scale.bench_widths]
    return [point(*size) for size in (("both", N), *sizes)]


def table2(lab: Lab) -> list[Point]:
    """Latency's points (time, memory, bytes of a round), and the paper's set-up, counted."""
    cfg = printed.config()
    about = {
        "experiment": "table2",
        "scale": lab.name,
        "n_workers": cfg.train.n_workers,
        "epochs": cfg.train.epochs,
        "n_sequences": cfg.data.planned_sequences,
    }

    def measure() -> dict[str, Any]:
        plan = printed.plan()
        rounds = {"paper_rounds": plan.paper_rounds, "true_rounds": plan.true_rounds}
        rows = [asdict(row) for row in plan.rows]
        return {"n_params": plan.n_params, **rounds, "rows": rows}

    return [*latency(lab), Point(about, measure)]


def memory(lab: Lab) -> list[Point]:
    """What half the blocks keep of GPT-2 small to XL, counted: the same at every scale."""
    about = {"experiment": "memory", "scale": lab.name, "share": "6/12"}
    return [Point(about, lambda: {"half": printed.half_shares()})]


def shift(lab: Lab) -> list[Point]:
    """The untrained model, the start, and every parent: all layers and all K in one pass."""
    base, n = lab.base, lab.scale.n_shift

    def point(recipe: Recipe | None, is_init: bool = False) -> Point:
        about = lab.about("shift", recipe, n=n, n_sequences=N_SEQUENCES)
        if is_init:
            about |= {"parent": INIT, "slug": INIT}

        def measure() -> dict[str, Any]:
            ready = lab.scales(recipe, "both").ready
            model, block_map = ready.full.model, ready.block_map
            if is_init:
                model = huggingface.load(base.model, base.run.seed)
                block_map = families.partition(model, base.blocks)
                torch.nn.Module.to(model, pick_device(base.run.device))
            rows = list(range(min(N_SEQUENCES, ready.text.n_sequences)))
            ids = ready.text.file.sequences(rows, ready.text.seq_len)
            found = shifts(model, block_map, to_device(ids, model.device), n)
            return {"rows": found, "n_tokens": ids.numel()}

        return Point(about, measure)

    init = [point(None, is_init=True)] if base.model.weights == "random" else []
    return [*init, *(point(recipe) for recipe in (None, *PARENTS))]


EXPERIMENTS: dict[str, Callable[[Lab], list[Point]]] = {  # with what they measure: `paper.NAMES`
    "parents": parents,
    "recipe": recipe_points,
    "table1": table1,
    "stability": stability,
    "robustness": robustness,
    "table2": table2,
    "latency": latency,
    "memory": memory,
    "shift": shift,
    "nodeloss": nodeloss,
}


# ---------------------------------------------------------------- all of them in a row

# of a point's config, in the line that says it is finished
HIDDEN = {"before", "experiment", "scale", "slug", "parent_hash", "changes", "start"}


def run(
    names: Sequence[str],
    scale: str,
    out: Path,
    overrides: Sequence[str] = (),
    *,
    minutes: float = 0,
    only: Sequence[str] = (),
) -> bool:
    """Measure every point that is not on disk; False when the time was up before the last."""
    for name in names:
        if name not in (*NAMES, "all"):
            raise ValueError(f"experiment {name!r}: use {', '.join(NAMES)}, or all")
    lab = Lab(out, scale, _scale(scale, only), overrides, seconds=60 * minutes or math.inf)
    wanted = NAMES if "all" in names else dict.fromkeys(names)
    every = [point for name in wanted for point in EXPERIMENTS[name](lab)]
    # some experiments share points
    todo = _by_parent(list({name_of(point.config): point for point in every}.values()))
    n_done = sum(lab.is_done(point) for point in todo)
    console.print(f"{len(todo)} points in {lab.points.file}, {n_done} of them finished")
    try:
        for point in todo:
            if not lab.is_done(point):
                made = lab.measure(point)
                n_done += 1
                console.print(f"{n_done}/{len(todo)} {line(made)}", highlight=False)
    except TimeIsUp:
        console.print(f"the time is up: {n_done} of {len(todo)} points are finished; call it again")
        return False
    finally:
        lab.close()
    return True


def _by_parent(todo: list[Point]) -> list[Point]:
    """All points of one parent in a row: to open one takes seconds."""
    parents = [point.config.get("parent_hash") for point in todo]
    return [todo[i] for i in sorted(range(len(todo)), key=lambda i: parents.index(parents[i]))]


def _scale(name: str, only: Sequence[str]) -> Scale:
    """The scale of this name, with the settings, ways, seeds and rates of `only`."""
    if name not in SCALES:
        raise ValueError(f"--scale {name!r}: use {', '.join(SCALES)}")
    scale = SCALES[name]
    ways, seeds = scale.ways or tuple(WAYS), {f"seed {seed}": seed for seed in scale.seeds}
    rates = {f"rate {i}": i for i in scale.rates}
    asked = {word: [word] if word in WAYS else word.split(",") for word in only}
    only = [part for parts in asked.values() for part in parts]
    for word, parts in asked.items():
        if not {*parts} <= {*scale.settings, *seeds, *rates, *ways}:
            words = ", ".join((*scale.settings, *seeds, *rates))
            legal = f"{words}, or ways of the recipe: {'; '.join(ways)}"
            raise ValueError(f"--only {word!r}: scale {name} has {legal}")
    settings = tuple(s for s in scale.settings if s in only) or scale.settings
    return replace(
        scale,
        settings=settings,
        ways=tuple(w for w in ways if w in only) or ways,
        seeds=tuple(seed for word, seed in seeds.items() if word in only) or scale.seeds,
        rates=tuple(i for word, i in rates.items() if word in only) or scale.rates,
    )


def line(made: dict[str, Any]) -> str:
    """A finished point in one line."""
    about = made["config"]
    said = [str(v) for k, v in about.items() if k not in HIDDEN and not isinstance(v, dict)]
    numbers = [f"{k} {v:.4g}" for k, v in made["result"].items() if isinstance(v, float)]
    what = f"{about['experiment']}: {' '.join(said)}"
    return f"{what}: {', '.join(numbers[:4])} ({made['seconds']:.1f} s)"
