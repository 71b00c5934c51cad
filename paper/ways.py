"""Ways to train that the recipe is held against: each a recipe, what differs from it, its rates, rounds and tickets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from twistlm.compute.slopes import mask_fisher, mask_slopes, order_of
from twistlm.config import Config, TrainConfig
from twistlm.data.stream import Leases
from twistlm.model.blocks import widths_of_ratio
from twistlm.model.generator import draws
from twistlm.model.masks import Order, prefixes
from twistlm.system import terminal
from twistlm.tickets.parent import Parent
from twistlm.tickets.ticket_scale import N_DRAWS, TicketScales, choice_text
from twistlm.training import checkpoint, engines
from twistlm.training.progress import Progress
from twistlm.training.run import Run
from twistlm.training.startup import scored_sequences, set_up
from twistlm.transport.ranks import Cluster

from .lab import Lab, TimeIsUp
from .scales import DENSE, DROPOUT, TWIN, TWIST, TWIST_FRESH, Recipe, Scale

WHOLE_FIRST = (12, 12, 12, 12, 12, 8, 6, 3)  # widths of masks, most of them whole
OURS, WHOLE_NAME, TWIN_NAME = "TwIST", "TwIST, whole first", "synchronous twin"
DENSE_NAME, DROPOUT_NAME = "data parallel", "dropout K=6"
NESTED_NAME = "TwIST, 0.35 nested"  # more masks along the order than the presets' quarter
OFTEN_NAME = "TwIST, interval 4"  # as near to its twin as 0.45 of the bytes allow


@dataclass(frozen=True)
class Way:
    """One way to train: a recipe, what differs from it, and its rates, times the scale's own."""

    recipe: Recipe
    rates: tuple[float, ...]
    changes: tuple[str, ...] = ()
    share: float = 1.0  # of the usual interval
    widths: tuple[int, ...] = ()  # of masks, where they are not the recipe's
    dense: float = 0.0  # share of the tokens that train the whole model first: the start and teacher of the rest


BYTES = ("run.wire=int8",)  # what independent workers send; a ring sends gradients in bf16
HALF_DECAY = "train.weight_decay=0.05"  # of the preset's 0.1
# a single worker's gradient is noisier: v averages it over longer than with the preset's 0.95
BETA2 = {beta2: f"train.betas=[0.9, {beta2}]" for beta2 in (0.98, 0.99)}
WHOLE = (*BYTES, "blocks.nested=0.5")
SHARE = 0.4  # of the usual interval: six steps
OFTEN = 4 / 15  # of it: four steps
FIRST = 1  # the seed that random subnets are drawn with

WAYS: dict[str, Way] = {
    DENSE_NAME: Way(DENSE, (1, 2)),
    DROPOUT_NAME: Way(DROPOUT, (1, 2)),
    "TwIST K=6, the paper's masks": Way(TWIST, (1, 2)),
    OURS: Way(TWIST_FRESH, (4, 3), BYTES, SHARE),
    NESTED_NAME: Way(TWIST_FRESH, (4, 3), (*BYTES, "blocks.nested=0.35"), SHARE),
    OFTEN_NAME: Way(TWIST_FRESH, (4, 3), BYTES, OFTEN),
    # sqrt(S) times the twin's rate decays weights sqrt(S) times as fast; a noisier gradient is longer
    f"{OFTEN_NAME}, half the decay": Way(TWIST_FRESH, (4,), (*BYTES, HALF_DECAY), OFTEN),
    f"{OFTEN_NAME}, half the decay, twice the clip": Way(
        TWIST_FRESH, (4,), (*BYTES, HALF_DECAY, "train.clip=2.0"), OFTEN
    ),
    f"{OFTEN_NAME}, half the decay, beta2 0.98": Way(
        TWIST_FRESH, (4,), (*BYTES, HALF_DECAY, BETA2[0.98]), OFTEN
    ),
    f"{OFTEN_NAME}, half the decay, beta2 0.99": Way(
        TWIST_FRESH, (4,), (*BYTES, HALF_DECAY, BETA2[0.99]), OFTEN
    ),
    TWIN_NAME: Way(TWIN, (2, 3)),
    f"{TWIN_NAME}, half the decay": Way(TWIN, (2,), (HALF_DECAY,)),
    f"{TWIN_NAME}, half the decay, beta2 0.98": Way(TWIN, (2,), (HALF_DECAY, BETA2[0.98])),
    f"{TWIN_NAME}, half the decay, beta2 0.99": Way(TWIN, (2,), (HALF_DECAY, BETA2[0.99])),
    WHOLE_NAME: Way(TWIST_FRESH, (1, 2), WHOLE, SHARE, WHOLE_FIRST),
    f"{OURS}, dense first": Way(TWIST_FRESH, (4, 3), BYTES, SHARE, dense=1 / 3),
    f"{WHOLE_NAME} after dense": Way(TWIST_FRESH, (1, 2), WHOLE, SHARE, WHOLE_FIRST, dense=1 / 2),
    f"{WHOLE_NAME} after 2/3 dense": Way(
        TWIST_FRESH, (1, 2), WHOLE, SHARE, WHOLE_FIRST, dense=2 / 3
    ),
    "… half the decay": Way(TWIST_FRESH, (4,), (*BYTES, HALF_DECAY), SHARE),
    "… interval 1, half the decay": Way(TWIST_FRESH, (4,), ("run.wire=fp32", HALF_DECAY), 1 / 15),
    "… fp32": Way(TWIST_FRESH, (4,), ("run.wire=fp32",), SHARE),
    "… bf16, interval 10": Way(TWIST_FRESH, (4,), ("run.wire=bf16",), 2 / 3),
    "… no teacher": Way(TWIST_FRESH, (4,), (*BYTES, "train.teacher=none"), SHARE),
    "… no order": Way(TWIST_FRESH, (4,), (*BYTES, "blocks.nested=0.0"), SHARE),
    "… a mask per step": Way(TWIST_FRESH, (4,), (*BYTES, "blocks.masks=step"), SHARE),
    "… a mask per round, teacher": Way(TWIST, (2,), (*BYTES, "train.teacher=start"), SHARE),
}


def changes(scale: Scale, t: TrainConfig, way: Way, rate: float) -> list[str]:
    """A way as `section.key=value` on a scale's own training, each key once: as many tokens whatever the interval."""
    interval = max(1, round(t.interval * way.share))
    n_rounds = (t.rounds - _n_dense(t, way)) * t.interval // interval
    some = [*scale.changes_of(way.recipe), f"train.lr={rate * t.lr:g}"]
    some += [f"train.interval={interval}", f"train.rounds={n_rounds}"]
    if way.widths:
        attn = [scale.k_attn(k) for k in way.widths]
        some += [f"blocks.mask_attn={attn}", f"blocks.mask_ffn={list(way.widths)}"]
    last = {change.partition("=")[0]: change for change in [*some, *way.changes]}
    return sorted(last.values())


def dense_changes(scale: Scale, t: TrainConfig, way: Way) -> list[str]:
    """What comes before them where a way trains the whole model first, at data parallel's rate."""
    if not (n_rounds := _n_dense(t, way)):
        return []
    lr = WAYS[DENSE_NAME].rates[0] * t.lr
    return sorted([*scale.changes_of(DENSE), f"train.lr={lr:g}", f"train.rounds={n_rounds}"])


def _n_dense(t: TrainConfig, way: Way) -> int:
    return round(t.rounds * way.dense)


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
            n_bytes = sent.down.total + sent.up.total
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

    Every way's tickets have the treatment that suits them best on other text: data parallel and dropout
    must not lose by a scale that was made for TwIST.
    """
    assert run.evaluator is not None
    assert run.central is not None
    text = replace(run.evaluator.text, max_tokens=lab.scale.tokens)
    order = lab.order(lambda: _order(cfg, run)) if not progress.order else progress.order
    parent = Parent("", cfg, run.template, run.block_map, run.central, None, None, progress)
    ways = TicketScales(parent, text, choice_text(text, cfg.data))
    found: dict[str, Any] = {"test": {"whole": ways.ready.full_perplexity()}}
    if (other := ways.choice) is not None:
        found["choice"] = {"whole": replace(ways.ready, text=other).full_perplexity()}
    for k in lab.scale.table1:
        widths, n = widths_of_ratio(run.block_map, lab.scale.ratio(k)), lab.scale.n_ways
        ticket = prefixes(run.block_map, order, widths)
        others = draws(run.block_map, widths, seed=FIRST, n=n + N_DRAWS, first=n)
        random, nested = ways.best(list(others)), ways.best([ticket])
        for which in found:
            on = text if which == "test" else ways.choice
            drawn = ways.evaluator(random[0], on).random_subnets(str(k), widths, n, FIRST)
            found[which][str(k)] = {
                **drawn.summary(),
                "values": list(drawn.values),
                "nested": ways.evaluator(nested[0], on).subnet_perplexity(ticket),
                "treatment": random[1],
                "nested_treatment": nested[1],
            }
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
