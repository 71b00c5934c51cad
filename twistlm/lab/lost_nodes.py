"""`twistlm lab drop`: the parent is served by n nodes, some die, the others go on.

As in tensor-parallel serving every node holds one contiguous run of each layer's blocks, and
everything that is not cut, the common blocks among it. A parent with an order of blocks is striped:
node i of n holds places i, i + n, ... of it, so that no loss takes all important ones. The
survivors are a subnet, with the activation scale that suits them best on other text.
"""

import itertools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from ..model.blocks import BlockMap, Blueprint
from ..model.masks import Order
from ..system import provenance, terminal
from ..system.terminal import progress
from ..tickets.parent import Parent
from ..tickets.text import text_of
from ..tickets.ticket_scale import N_DRAWS, TicketScales, choice_text, score_tickets


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


@torch.no_grad()
def drop(
    parents: dict[str, Parent],
    n_nodes: int,
    n_lost: int,
    *,
    data: str | None = None,
    tokens: int = 0,
    quiet: bool = False,
) -> dict[str, Any]:
    """Every parent on the same tokens, whole and after each loss of `n_lost` of `n_nodes`."""
    if not 1 <= n_lost < n_nodes:
        raise ValueError(
            f"--lose {n_lost} of --nodes {n_nodes}: lose at least 1 and keep at least 1"
        )
    for parent in parents.values():
        least = min(parent.block_map.groups, key=lambda g: g.n_blocks - len(g.common))
        if n_nodes > (most := least.n_blocks - len(least.common)):
            common = " that are not common" if least.common else ""
            raise ValueError(
                f"--nodes {n_nodes}: {parent.source} has {most} {least.kind} blocks{common} in a "
                f"layer ({least.name}), so at most {most} nodes can hold one each"
            )
    texts = [text_of(parent, data, tokens) for parent in parents.values()]
    if len({(text.file.stem, text.seq_len, text.n_sequences) for text in texts}) > 1:
        raise ValueError(
            "these parents would be measured on different tokens: give --data STEM and "
            "data.seq_len=LENGTH for all"
        )
    results, cases = [], list(itertools.combinations(range(n_nodes), n_lost))
    with progress(quiet) as bar:
        task = bar.add_task(f"lose {n_lost} of {n_nodes} nodes", total=len(parents), note="")
        for (name, parent), text in zip(parents.items(), texts, strict=True):
            order, source = parent.progress.order, Path(parent.source)
            scales = TicketScales(parent, text, choice_text(text, parent.cfg.data, source))
            rests = [survivors(parent.block_map, n_nodes, lost, order) for lost in cases]
            # at most `N_DRAWS` of all cases choose the scale
            found = score_tickets(scales, rests, rests[:: math.ceil(len(rests) / N_DRAWS)])
            losses = zip(cases, found["values"], strict=True)
            results.append(
                {
                    "name": name,
                    "source": parent.source,
                    "data": text.file.stem,
                    "n_tokens": text.n_tokens,
                    "full": scales.ready.full_perplexity(),
                    "losses": [{"lost": lost, "perplexity": value} for lost, value in losses],
                    **found,  # with their scale, and how it was chosen
                }
            )
            bar.advance(task)
    return {"nodes": n_nodes, "lose": n_lost, "parents": results, **provenance.describe_run()}


def table(made: dict[str, Any]) -> Table:
    """One column per parent, one row per loss; in brackets, how many times worse than whole."""
    drops = made["parents"]
    title = (
        f"perplexity on {drops[0]['n_tokens']:,} tokens when {made['lose']} of {made['nodes']} "
        f"nodes are lost: all {len(drops[0]['losses'])} cases (x whole)"
    )
    result = terminal.table(title, "lost nodes", *(row["name"] for row in drops))
    result.add_row("none", *(f"{row['full']:.2f}" for row in drops), end_section=True)

    def add(name: str, values: Iterable[float]) -> None:
        pairs = zip(values, drops, strict=True)
        result.add_row(name, *(f"{v:.2f} ({v / row['full']:.2f}x)" for v, row in pairs))

    for cases in zip(*(row["losses"] for row in drops), strict=True):
        add(", ".join(map(str, cases[0]["lost"])), (case["perplexity"] for case in cases))
    for name in ("mean", "worst"):
        add(name, (row[name] for row in drops))
    result.add_row("scale", *(row["treatment"]["chosen"] for row in drops))
    return result
