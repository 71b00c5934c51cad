"""`twistlm drop`: the parent is served by n nodes, some die, the others go on.

As in tensor-parallel serving every node holds one contiguous run of each layer's blocks, and
everything that is not cut, the common blocks among it. Where blocks do not divide evenly, the first
nodes hold one more. A parent with an order of blocks is striped instead: node i of n holds places
i, i + n, ... of it, so that no loss takes all important ones. The survivors are a subnet of K of N blocks and are scaled like one, by what suits
their parent best (`treatment`).
"""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from ..model.blocks import BlockGroup, BlockMap, Blueprint
from ..model.masks import Order
from ..system import provenance, terminal
from ..system.terminal import progress
from ..training import checkpoint
from . import score
from .parent import Parent
from .ticket_scale import N_DRAWS, TicketScales, choice_text


@dataclass(frozen=True)
class Drops:
    """The perplexities of one parent, whole and after every possible loss."""

    name: str
    source: str
    method: str  # how it was trained, "" for a model that is none of ours
    full: float
    losses: dict[tuple[int, ...], float]  # lost nodes -> perplexity of the rest
    data: str
    n_tokens: int
    treatment: dict[str, Any]  # the activation scale of the survivors, and how it was chosen

    @property
    def mean(self) -> float:
        return statistics.fmean(self.losses.values())

    @property
    def worst(self) -> float:
        return max(self.losses.values())

    def to_dict(self) -> dict[str, Any]:
        losses = [{"lost": lost, "perplexity": value} for lost, value in self.losses.items()]
        return {**asdict(self), "losses": losses, "mean": self.mean, "worst": self.worst}


def shard(n_blocks: int, n_nodes: int) -> list[range]:
    """Contiguous runs of blocks, one per node, whose lengths differ by one at most."""
    size, more = divmod(n_blocks, n_nodes)
    ends = [size * node + min(node, more) for node in range(n_nodes + 1)]
    return [range(first, last) for first, last in itertools.pairwise(ends)]


def survivors(
    block_map: BlockMap, n_nodes: int, lost: tuple[int, ...], order: Order | None = None
) -> Blueprint:
    """The blocks that the other nodes hold; common ones are on every node, as in training."""
    blueprint = {}
    for group in block_map.groups:
        ranked = order[group.name] if order else range(group.n_blocks)
        own = [block for block in ranked if block not in group.common]
        if order:
            gone = {block for node in lost for block in own[node::n_nodes]}
        else:
            gone = {own[i] for node in lost for i in shard(len(own), n_nodes)[node]}
        blueprint[group.name] = tuple(b for b in range(group.n_blocks) if b not in gone)
    return blueprint


def check(parent: Parent, n_nodes: int, n_lost: int) -> None:
    if not 1 <= n_lost < n_nodes:
        raise ValueError(
            f"--lose {n_lost} of --nodes {n_nodes}: lose at least 1 and keep at least 1"
        )
    least = min(parent.block_map.groups, key=_n_own)
    if n_nodes > (most := _n_own(least)):
        common = " that are not common" if least.common else ""
        raise ValueError(
            f"--nodes {n_nodes}: {parent.source} has {most} {least.kind} blocks{common} in a layer "
            f"({least.name}), so at most {most} nodes can hold one each"
        )


def _n_own(group: BlockGroup) -> int:
    """Blocks that one node holds and no other."""
    return group.n_blocks - len(group.common)


@torch.no_grad()
def drop(
    parents: dict[str, Parent],
    n_nodes: int,
    n_lost: int,
    *,
    data: str | None = None,
    tokens: int = 0,
    quiet: bool = False,
) -> list[Drops]:
    """Every parent on the same tokens, whole and after each loss of `n_lost` out of `n_nodes`.

    The survivors of each parent get the activation scale that suits them best on other text.
    """
    for parent in parents.values():
        check(parent, n_nodes, n_lost)
    ready = [score.evaluator(parent, data, tokens) for parent in parents.values()]
    if len({(e.text.file.stem, e.text.seq_len, e.text.n_sequences) for e in ready}) > 1:
        raise ValueError(
            "these parents would be measured on different tokens: give --data STEM and "
            "data.seq_len=LENGTH for all"
        )
    results = []
    combinations = list(itertools.combinations(range(n_nodes), n_lost))
    with progress(quiet) as bar:
        total = len(parents) * (1 + len(combinations))
        task = bar.add_task(f"lose {n_lost} of {n_nodes} nodes", total=total, note="")
        for (name, parent), evaluator in zip(parents.items(), ready, strict=True):
            full, losses = evaluator.full_perplexity(), {}
            bar.advance(task)
            order = parent.progress.order
            rests = {
                lost: survivors(parent.block_map, n_nodes, lost, order) for lost in combinations
            }
            text = evaluator.text
            choice = choice_text(text, parent.cfg.data, Path(parent.source))
            treatments = TicketScales(parent, text, choice)
            some = list(rests.values())[:: -(-len(rests) // N_DRAWS)]
            treatment, chosen = treatments.best(some)
            treated = treatments.evaluator(treatment)
            for lost, rest in rests.items():
                losses[lost] = treated.subnet_perplexity(rest)
                bar.advance(task)
            is_ours = (Path(parent.source) / checkpoint.MANIFEST).is_file()
            method = parent.cfg.train.method if is_ours else ""
            n_tokens = text.n_sequences * text.seq_len
            results.append(
                Drops(name, parent.source, method, full, losses, text.file.stem, n_tokens, chosen)
            )
    return results


def record(drops: list[Drops], n_nodes: int, n_lost: int) -> dict[str, Any]:
    """Plain data for JSON; nodes are numbered from 0."""
    parents = [row.to_dict() for row in drops]
    return {"nodes": n_nodes, "lose": n_lost, "parents": parents, **provenance.describe_run()}


def table(drops: list[Drops], n_nodes: int, n_lost: int) -> Table:
    """One column per parent, one row per loss; in brackets, how many times worse than whole."""
    title = (
        f"perplexity on {drops[0].n_tokens:,} tokens when {n_lost} of {n_nodes} nodes are lost: "
        f"all {math.comb(n_nodes, n_lost)} cases (x whole)"
    )
    heads = (f"{row.name} ({row.method})" if row.method else row.name for row in drops)
    result = terminal.table(title, "lost nodes", *heads)
    result.add_row("none", *(f"{row.full:.2f}" for row in drops), end_section=True)
    for lost in drops[0].losses:
        cells = (_beside(row.losses[lost], row.full) for row in drops)
        result.add_row(", ".join(str(node) for node in lost), *cells)
    result.add_section()
    result.add_row("mean", *(_beside(row.mean, row.full) for row in drops))
    result.add_row("worst", *(_beside(row.worst, row.full) for row in drops), end_section=True)
    result.add_row("scale", *(row.treatment["chosen"] for row in drops))
    return result


def _beside(value: float, full: float) -> str:
    return f"{value:.2f} ({value / full:.2f}x)"
