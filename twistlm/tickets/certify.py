"""`twistlm eval --certify`: n random tickets of one size, and what they promise for all of them.

FOLDER/
  draws.jsonl        what is measured, then one line per ticket as it comes: an interrupted
                     certificate goes on from here, and a larger n adds to it
  certificate.json   all numbers
  histogram.png
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from ..compute.perplexity import Evaluator, Spread
from ..model.blocks import Widths, widths_of_ratio
from ..model.generator import draws
from ..model.masks import prefixes
from ..system import terminal
from ..system.files import whole_file
from ..system.manifest import parse_json
from ..system.provenance import describe_run
from ..system.terminal import console, progress
from . import score
from .bounds import Bound, bound, covered_by_worst, percent
from .parent import Parent
from .requests import CertificateRequest

SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)  # the quantiles of a certificate
N_BINS = 24
DRAWS = "draws.jsonl"


@dataclass(frozen=True)
class Certificate:
    """The spread of random tickets of one size, and the bound that follows."""

    source: str
    full: float  # perplexity of the whole parent
    spread: Spread
    bound: Bound
    seed: int
    data: str
    n_tokens: int
    run: dict[str, Any]
    nested: float | None = None  # perplexity of the nested ticket, where the parent has an order

    def to_dict(self) -> dict[str, Any]:
        values = self.spread.values
        counts, edges = np.histogram(values, bins=N_BINS)
        return {
            **asdict(self),
            "spread": {**asdict(self.spread), **self.spread.summary()},
            "quantiles": quantiles(values),
            "covered_by_worst": covered_by_worst(len(values), self.bound.confidence),
            "histogram": {"counts": counts.tolist(), "edges": edges.tolist()},
        }


def certify(
    parent: Parent, request: CertificateRequest, out: Path | None = None, quiet: bool = False
) -> Certificate:
    """Measure n random tickets, going on from those that the folder `out` holds.

    Of a parent with an order the nested ticket is measured, too: it is the only one of its kind.
    """
    widths = widths_of_ratio(parent.block_map, request.ratio)
    ready = score.evaluator(parent, request.data, request.tokens)
    values: list[float] = []
    if out is not None:
        values = _read_draws(out, _identity(parent, ready, widths, request.seed))
    with progress(quiet) as bar:
        task = bar.add_task(f"certify {request.ratio}", total=1 + request.n, note="")
        full = ready.full_perplexity()
        bar.update(task, completed=1 + min(request.n, len(values)))
        first = len(values)
        tickets = draws(parent.block_map, widths, seed=request.seed, n=request.n, first=first)
        for number, blueprint in enumerate(tickets, first):
            value = ready.subnet_perplexity(blueprint)
            if math.isnan(value):
                raise ValueError(f"{parent.source}: ticket {number} has no perplexity (NaN logits)")
            values.append(value)
            if out is not None:  # at once: a stopped certificate goes on from here
                _add_line(out, {"draw": number, "perplexity": value})
            bar.update(task, advance=1, note=f"worst {max(values):.2f}")
    nested = None
    if order := parent.progress.order:
        nested = ready.subnet_perplexity(prefixes(parent.block_map, order, widths))
    n_params = parent.central.layout.narrowed(parent.block_map, widths).n_params
    spread = Spread(request.ratio, n_params, tuple(values[: request.n]))
    made = Certificate(
        source=parent.source,
        full=full,
        spread=spread,
        bound=bound(spread.values, request.coverage, request.confidence),
        seed=request.seed,
        data=ready.text.file.stem,
        n_tokens=ready.text.n_sequences * ready.text.seq_len,
        run=describe_run(),
        nested=nested,
    )
    if out is not None:
        whole_file(out / "certificate.json", json.dumps(made.to_dict(), indent=1) + "\n")
        try:
            whole_file(out / "histogram.png", lambda path: _draw_histogram(made, path))
        except ImportError:
            console.print("no histogram.png: it needs matplotlib: pip install -e '.[plot]'")
    return made


def _identity(parent: Parent, ready: Evaluator, widths: Widths, seed: int) -> dict[str, Any]:
    """Everything that a draw's perplexity follows from: draws of one file must agree in it."""
    text, cut = ready.text, parent.block_map
    ids = text.file.tokens[: text.n_sequences * text.seq_len]
    weights = parent.central.weights.detach().cpu().view(torch.uint8).numpy()
    tickets = {g.name: f"{widths[g.name]}/{g.n_blocks}" for g in cut.groups}
    for group in (group for group in cut.groups if group.common):
        tickets[group.name] += f" with {', '.join(map(str, group.common))}"
    return {
        "weights_sha256": hashlib.sha256(weights.data).hexdigest(),
        "tokens_sha256": hashlib.sha256(np.ascontiguousarray(ids).data).hexdigest(),
        "seq_len": text.seq_len,
        "precision": f"{ready.precision} on {parent.central.buffer.device.type}",
        "tickets": tickets,
        "attn_by": parent.cfg.blocks.attn_by,
        "scales": parent.scales(widths),
        "seed": seed,
    }


def _read_draws(folder: Path, identity: dict[str, Any]) -> list[float]:
    """The draws that a folder holds of this very thing; half a line of a killed process goes."""
    path = folder / DRAWS
    folder.mkdir(parents=True, exist_ok=True)
    whole = path.read_bytes().rpartition(b"\n")[0] if path.is_file() else b""
    lines = [parse_json(line, path) for line in whole.split(b"\n") if line]
    if not lines:
        path.write_bytes(b"")
        _add_line(folder, identity)
        return []
    if odd := [key for key in identity if lines[0].get(key) != identity[key]]:
        raise ValueError(
            f"{folder} holds a certificate of something else ({', '.join(odd)} differ): choose "
            "another folder or remove it"
        )
    os.truncate(path, len(whole) + 1)
    return [line["perplexity"] for line in lines[1:]]


def _add_line(folder: Path, line: dict[str, Any]) -> None:
    with (folder / DRAWS).open("a") as file:
        file.write(json.dumps(line) + "\n")


def _draw_histogram(made: Certificate, path: Path) -> None:
    """Counts of tickets over perplexity, with the bound and the whole parent marked."""
    from matplotlib.figure import Figure  # no pyplot: it looks for a display

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.hist(made.spread.values, bins=N_BINS, color="tab:blue", alpha=0.6)
    axes.axvline(made.bound.value, color="tab:red", label=str(made.bound))
    axes.axvline(made.full, color="black", linestyle=":", label=f"whole parent: {made.full:.2f}")
    if made.nested is not None:
        axes.axvline(made.nested, color="tab:green", label=f"nested ticket: {made.nested:.2f}")
    axes.set_title(f"{len(made.spread.values)} random tickets of {made.spread.ratio} blocks")
    axes.set_xlabel(f"perplexity on {made.n_tokens:,} tokens")
    axes.set_ylabel("tickets")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False)
    figure.savefig(path, format="png", dpi=150)


def table(made: Certificate) -> Table:
    spread, n = made.spread, len(made.spread.values)
    title = (
        f"perplexity of {n} random tickets of {spread.ratio} blocks ({spread.n_params:,} "
        f"parameters) on {made.n_tokens:,} tokens"
    )
    rows = {"whole parent": made.full}
    rows |= {} if made.nested is None else {"nested ticket": made.nested}
    rows |= {"mean": spread.mean}
    rows |= {} if spread.sd is None else {"sd": spread.sd}
    rows |= quantiles(spread.values) | {"worst": spread.worst}
    result = terminal.table(title, *rows, words=0)
    result.add_row(*(f"{value:.2f}" for value in rows.values()))
    return result


def reading(made: Certificate) -> str:
    """What the draws promise, in two sentences."""
    n = len(made.spread.values)
    # rounded down: a promise must hold
    share = int(covered_by_worst(n, made.bound.confidence) * 1000) / 10
    return (
        f"{made.bound} (draw {made.bound.rank} of {n} in order). "
        f"With the same confidence, {share}% are no worse than the worst one seen."
    )


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Sample quantiles, linear between draws."""
    return {percent(share): float(np.quantile(values, share)) for share in SHARES}
