"""The recipe: every way to train, over seeds and rates, and its random and nested tickets.

Dozens of trainings that leave no checkpoint: a way is trained, measured and forgotten.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from twistlm import config
from twistlm.compute.perplexity import Spread
from twistlm.compute.slopes import mask_fisher, mask_slopes, order_of
from twistlm.config import Config
from twistlm.data.stream import Leases
from twistlm.model.blocks import widths_of_ratio
from twistlm.model.masks import Order, prefixes
from twistlm.system import terminal
from twistlm.tickets.parent import Parent
from twistlm.tickets.ticket_scale import TicketScales, choice_text, random_tickets, score_tickets
from twistlm.training import checkpoint, engines
from twistlm.training.run import Progress, Run
from twistlm.training.startup import scored_sequences, set_up
from twistlm.transport.ranks import Cluster

from .lab import Lab, Point, TimeIsUp
from .ways import WAYS, changes, dense_changes

TRIED = "best of some on other text"  # in a point's config: how its tickets' scale is chosen
DRAWS = 1  # the seed that random subnets are drawn with


def recipe_points(lab: Lab) -> list[Point]:
    """Every way at each of its rates and seeds; the first seed of all ways comes first."""
    scale, t = lab.scale, lab.base.train
    found = []
    for seed in scale.seeds:
        for name, way in WAYS.items():
            if name not in (scale.ways or WAYS):
                continue
            for rate in (rate for i, rate in enumerate(way.rates, 1) if i in scale.rates):
                about = {
                    "experiment": "recipe",
                    "scale": lab.name,
                    "way": name,
                    "rate": rate * t.lr,
                    "changes": changes(scale, t, way, rate),
                    "start": lab.hash_of(None),
                    "seed": seed,
                    "tokens": scale.tokens,
                    "treatment": TRIED,
                }
                if before := dense_changes(scale, t, way):
                    about["before"] = before
                found.append(Point(about, partial(measure, lab, about)))
    return found


def measure(lab: Lab, about: Mapping[str, Any]) -> dict[str, Any]:
    """Train a way from the lab's start and measure it on the reported text and on other text."""
    start = lab.trained(None)
    lab.close()
    spent, leases = Spent(), Leases()
    with tempfile.TemporaryDirectory(prefix="twistlm-") as folder:
        if before := about.get("before", []):
            cfg = _config(lab, about, before, start, f"{folder}/before")
            with closing(engines.join(cfg)) as cluster:
                run, progress, spent = train(lab, cfg, cluster, leases, spent)
                start, leases = saved(run, progress), progress.leases
        cfg = _config(lab, about, about["changes"], start, f"{folder}/run")
        with closing(engines.join(cfg)) as cluster:
            run, progress, spent = train(lab, cfg, cluster, leases, spent)
            found = perplexities(lab, cfg, run, progress)
    return {**found, **asdict(spent)}


def _config(lab: Lab, about: Mapping[str, Any], some: list[str], weights: str, out: str) -> Config:
    own = [f"model.weights={weights}", f"run.seed={about['seed']}", f"run.out={out}"]
    return config.override(lab.base, [*some, *own])


@dataclass(frozen=True)
class Spent:
    """What the rounds of a training took."""

    tokens: int = 0
    bytes: int = 0  # down from the central model and up to it, or around a ring
    links: float = 0.0  # of these between ranks that keep 1/S of the central model each (`sharded`)
    seconds: float = 0.0
    loss: float = 0.0  # of the last round


def train(
    lab: Lab, cfg: Config, cluster: Cluster, leases: Leases, before: Spent
) -> tuple[Run, Progress, Spent]:
    """All rounds, on the sequences that follow those in `leases`."""
    run, progress = set_up(cfg, cluster, False, True)
    run = replace(run, kept_trainers=lab.kept.setdefault(progress.teacher, {}))
    spent, progress, t = before, replace(progress, leases=leases), cfg.train
    # a ring's bytes are all between ranks
    share = 1 - 1 / t.n_workers if t.method == "twist" else 1.0
    began = time.perf_counter()
    with terminal.progress(lab.quiet) as bar:
        task = bar.add_task(f"{t.method} rounds", total=run.end(progress), note="")
        for outcome in _rounds(lab, run, progress):
            progress, sent, stats = outcome.progress, outcome.traffic, outcome.stats
            n_bytes = sent.down + sent.up
            spent = Spent(
                tokens=spent.tokens + stats.n_tokens,
                bytes=spent.bytes + n_bytes,
                links=spent.links + n_bytes * share,
                loss=float(stats.loss_sum) / stats.n_steps,
            )
            bar.update(task, completed=progress.round, note=f"loss {spent.loss:.3f}")
    return run, progress, replace(spent, seconds=before.seconds + time.perf_counter() - began)


def _rounds(lab: Lab, run: Run, progress: Progress) -> Iterator[Any]:
    engine = engines.start(run, progress, True)
    try:
        while progress.round < run.end(progress):
            if lab.is_late():
                raise TimeIsUp
            outcome = engine.round(progress)
            progress = outcome.progress
            yield outcome
    finally:
        engine.close(crashed=False)


def saved(run: Run, progress: Progress) -> str:
    """Where the trained model lies as a start of another training."""
    assert run.central is not None
    folder = Path(run.cfg.run.out) / "checkpoints"
    tokenizer = run.batches.file.tokenizer_path
    found = tokenizer if tokenizer.is_file() else None
    return str(checkpoint.save(folder, run.central, progress, run.cfg, run.template, found, 1))


def perplexities(lab: Lab, cfg: Config, run: Run, progress: Progress) -> dict[str, Any]:
    """Whole, random and nested subnets; a parent without an order is cut along the start's.

    Tickets of every way have the scale that suits them best on other text: data parallel and
    dropout must not lose by a scale that was made for TwIST.
    """
    assert run.evaluator is not None
    assert run.central is not None
    text = replace(run.evaluator.text, max_tokens=lab.scale.tokens)
    if not progress.order and lab.order is None:
        lab.order = _order(cfg, run)
    order = progress.order or lab.order
    assert order is not None
    parent = Parent("", cfg, run.template, run.block_map, run.central, None, None, progress)
    scales = TicketScales(parent, text, choice_text(text, cfg.data))
    found: dict[str, Any] = {"test": {"whole": scales.ready.full_perplexity()}}
    if (other := scales.choice) is not None:
        found["choice"] = {"whole": replace(scales.ready, text=other).full_perplexity()}
    for k in lab.scale.table1:
        widths = widths_of_ratio(run.block_map, lab.scale.ratio(k))
        ticket = prefixes(run.block_map, order, widths)
        tickets, held_out = random_tickets(run.block_map, widths, n=lab.scale.n_ways, seed=DRAWS)
        random, nested = score_tickets(scales, tickets, held_out), score_tickets(scales, [ticket])
        chosen = {"treatment": random.record, "nested_treatment": nested.record}
        found["test"][str(k)] = random.to_dict() | {"nested": nested.values[0], **chosen}
        if other is not None:
            ready = scales.evaluator(random.scale, other)
            values = tuple(ready.subnet_perplexity(each) for each in tickets)
            own = scales.evaluator(nested.scale, other).subnet_perplexity(ticket)
            drawn = {**Spread("", 0, values).summary(), "values": list(values)}
            found["choice"][str(k)] = drawn | {"nested": own, **chosen}
    return found


def _order(cfg: Config, run: Run) -> Order:
    """The order of the blocks of the start itself, which has the weights of the template."""
    assert run.central is not None
    ids = scored_sequences(run.batches.file, cfg.data.seq_len)
    views = run.central.layout.views(run.central.weights)
    now = {name: view.clone() for name, view in views.items()}
    for name, param in run.template.named_parameters():
        if name in views:
            views[name].copy_(param.detach())
    slopes = mask_slopes(run.template, run.block_map, run.central, ids)
    order = order_of(mask_fisher(slopes, len(ids)))
    for name, view in views.items():
        view.copy_(now[name])
    return order
