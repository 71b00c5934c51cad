"""`twistlm lab drop`: the parent is served by n nodes, some die, the others go on.

As in tensor-parallel serving every node holds one contiguous run of each layer's blocks (where they
do not divide evenly, the first nodes one more), and everything that is not cut, the common blocks
among it. A parent with an order of blocks is striped instead: node i of n holds places i, i + n,
... of it, so that no loss takes all important ones. The survivors are a subnet, with the activation
scale that suits them best on other text.
"""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from ..model.blocks import BlockMap, Blueprint
from ..model.masks import Order
from ..system import provenance, terminal
from ..system.terminal import progress
from ..training import checkpoint
from . import score
from .parent import Parent
from .ticket_scale import N_DRAWS, TicketScales, choice_text, score_tickets


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


def survivors(
    block_map: BlockMap, n_nodes: int, lost: tuple[int, ...], order: Order | None = None
) -> Blueprint:
    """The blocks that the other nodes hold; common ones are on every node, as in training."""
    blueprint = {}
    for group in block_map.groups:
        ranked = order[group.name] if order else range(group.n_blocks)
        own = np.array([block for block in ranked if block not in group.common])
        parts = [own[i::n_nodes] for i in range(n_nodes)] if order else np.array_split(own, n_nodes)
        gone = {block for node in lost for block in parts[node].tolist()}
        blueprint[group.name] = tuple(b for b in range(group.n_blocks) if b not in gone)
    return blueprint


def check(parent: Parent, n_nodes: int, n_lost: int) -> None:
    """Every node holds a block of each layer, and one node at least survives."""
    if not 1 <= n_lost < n_nodes:
        raise ValueError(
            f"--lose {n_lost} of --nodes {n_nodes}: lose at least 1 and keep at least 1"
        )
    least = min(parent.block_map.groups, key=lambda g: g.n_blocks - len(g.common))
    if n_nodes > (most := least.n_blocks - len(least.common)):
        common = " that are not common" if least.common else ""
        raise ValueError(
            f"--nodes {n_nodes}: {parent.source} has {most} {least.kind} blocks{common} in a layer "
            f"({least.name}), so at most {most} nodes can hold one each"
        )


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
    """Every parent on the same tokens, whole and after each loss of `n_lost` out of `n_nodes`."""
    for parent in parents.values():
        check(parent, n_nodes, n_lost)
    texts = [score.text_of(parent, data, tokens) for parent in parents.values()]
    if len({(text.file.stem, text.seq_len, text.n_sequences) for text in texts}) > 1:
        raise ValueError(
            "these parents would be measured on different tokens: give --data STEM and "
            "data.seq_len=LENGTH for all"
        )
    results, cases = [], list(itertools.combinations(range(n_nodes), n_lost))
    with progress(quiet) as bar:
        total = len(parents) * (1 + len(cases))
        task = bar.add_task(f"lose {n_lost} of {n_nodes} nodes", total=total, note="")
        for (name, parent), text in zip(parents.items(), texts, strict=True):
            order, source = parent.progress.order, Path(parent.source)
            scales = TicketScales(parent, text, choice_text(text, parent.cfg.data, source))
            rests = [survivors(parent.block_map, n_nodes, lost, order) for lost in cases]
            full = scales.ready.full_perplexity()
            bar.advance(task)
            found = score_tickets(scales, rests, rests[:: -(-len(rests) // N_DRAWS)])
            bar.advance(task, len(rests))
            is_ours = (source / checkpoint.MANIFEST).is_file()
            results.append(
                Drops(
                    name=name,
                    source=parent.source,
                    method=parent.cfg.train.method if is_ours else "",
                    full=full,
                    losses=dict(zip(cases, found.values, strict=True)),
                    data=text.file.stem,
                    n_tokens=text.n_sequences * text.seq_len,
                    treatment=found.record,
                )
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

    def add(name: str, values: list[float], end_section: bool = False) -> None:
        cells = (f"{v:.2f} ({v / row.full:.2f}x)" for v, row in zip(values, drops, strict=True))
        result.add_row(name, *cells, end_section=end_section)

    result.add_row("none", *(f"{row.full:.2f}" for row in drops), end_section=True)
    for lost in drops[0].losses:
        add(", ".join(map(str, lost)), [row.losses[lost] for row in drops])
    result.add_section()
    add("mean", [row.mean for row in drops])
    add("worst", [row.worst for row in drops], end_section=True)
    result.add_row("scale", *(row.treatment["chosen"] for row in drops))
    return result
