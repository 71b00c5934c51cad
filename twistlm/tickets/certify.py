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
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from ..model.blocks import widths_of_ratio
from ..system import terminal
from ..system.files import whole_file
from ..system.manifest import parse_json
from ..system.terminal import console
from .parent import Parent
from .requests import ScoreRequest
from .score import score_parent, text_of

SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)  # the quantiles of a certificate
N_BINS = 24
DRAWS = "draws.jsonl"


def certify(
    parent: Parent,
    request: ScoreRequest,
    coverage: float = 0.95,
    confidence: float = 0.99,
    out: Path | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Measure n random tickets, going on from those that the folder `out` holds.

    At least `coverage` of all tickets lie at or below the bound, said with `confidence`.
    """
    r, values = rank(request.n, coverage, confidence), []
    if out is not None:
        values = _read_draws(out, _identity(parent, request))

    def note(number: int, value: float) -> None:
        if math.isnan(value):
            raise ValueError(f"{parent.source}: ticket {number} has no perplexity (NaN logits)")
        if out is not None:  # at once: a stopped certificate goes on from here
            _add_line(out, {"draw": number, "perplexity": value})

    scores = score_parent(parent, request, parent.source, quiet, values, note)
    plain, drawn = scores.to_dict(), scores.subnets[0].values
    bound = {"coverage": coverage, "confidence": confidence, "rank": r}
    made = {
        "source": parent.source,
        **{key: plain[key] for key in ("full", "seed", "data", "n_tokens", "run")},
        "nested": scores.nested[0] if scores.nested else None,
        "spread": plain["subnets"][0],
        "bound": bound | {"value": sorted(drawn)[r - 1]},
        "quantiles": {percent(share): float(np.quantile(drawn, share)) for share in SHARES},
        "covered_by_worst": float(1 - Fraction(str(confidence))) ** (1 / request.n),
    }
    if out is not None:
        whole_file(out / "certificate.json", json.dumps(made, indent=1) + "\n")
        try:
            whole_file(out / "histogram.png", lambda path: _draw_histogram(made, path))
        except ImportError:
            console.print("no histogram.png: it needs matplotlib: pip install -e '.[plot]'")
    return made


def _identity(parent: Parent, request: ScoreRequest) -> dict[str, Any]:
    """Everything that a draw's perplexity follows from: draws of one file must agree in it."""
    text = text_of(parent, request.data, request.tokens)
    widths = widths_of_ratio(parent.block_map, request.ratios[0])
    ids = text.file.tokens[: text.n_sequences * text.seq_len]
    weights = parent.central.weights.detach().cpu().view(torch.uint8).numpy()
    tickets = {}
    for group in parent.block_map.groups:
        common = f" with {', '.join(map(str, group.common))}" if group.common else ""
        tickets[group.name] = f"{widths[group.name]}/{group.n_blocks}{common}"
    return {
        "weights_sha256": hashlib.sha256(weights.data).hexdigest(),
        "tokens_sha256": hashlib.sha256(np.ascontiguousarray(ids).data).hexdigest(),
        "seq_len": text.seq_len,
        "precision": f"{parent.cfg.train.precision} on {parent.central.buffer.device.type}",
        "tickets": tickets,
        "attn_by": parent.cfg.blocks.attn_by,
        "scales": parent.scales(widths),
        "seed": request.seed,
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


def _draw_histogram(made: dict[str, Any], path: Path) -> None:
    """Counts of tickets over perplexity, with the bound and the whole parent marked."""
    from matplotlib.figure import Figure  # no pyplot: it looks for a display

    figure, spread = Figure(figsize=(7, 4), layout="constrained"), made["spread"]
    title = f"{spread['n']} random tickets of {spread['ratio']} blocks"
    axes = figure.add_subplot(xlabel="perplexity", ylabel="tickets", title=title)
    axes.hist(spread["values"], bins=N_BINS, color="tab:blue", alpha=0.6)
    axes.axvline(made["bound"]["value"], color="tab:red", label=reading(made).partition(" (")[0])
    axes.axvline(made["full"], color="black", label=f"whole parent: {made['full']:.2f}")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False)
    figure.savefig(path, format="png", dpi=150)


def table(made: dict[str, Any]) -> Table:
    spread = made["spread"]
    title = (
        f"perplexity of {spread['n']} random tickets of {spread['ratio']} blocks "
        f"({spread['n_params']:,} parameters) on {made['n_tokens']:,} tokens"
    )
    rows = {"whole parent": made["full"], "nested ticket": made["nested"], "mean": spread["mean"]}
    rows |= {"sd": spread["sd"], **made["quantiles"], "worst": spread["worst"]}
    rows = {name: value for name, value in rows.items() if value is not None}
    result = terminal.table(title, *rows, words=0)
    result.add_row(*(f"{value:.2f}" for value in rows.values()))
    return result


def reading(made: dict[str, Any]) -> str:
    """What the draws promise, in two sentences."""
    bound, n = made["bound"], made["spread"]["n"]
    worst = int(made["covered_by_worst"] * 1000) / 10  # rounded down: a promise must hold
    return (
        f"{percent(bound['coverage'])} of tickets are at or below {bound['value']:.2f}, with "
        f"{percent(bound['confidence'])} confidence (draw {bound['rank']} of {n} in order). "
        f"With the same confidence, {worst}% are no worse than the worst one seen."
    )


def rank(n: int, coverage: float, confidence: float) -> int:
    """The smallest r with P(Binomial(n, coverage) >= r) <= 1 - confidence, in exact integers.

    With this confidence, the r-th smallest of n draws bounds that share of all tickets.
    """
    for name, value in {"coverage": coverage, "confidence": confidence}.items():
        if not 0 < value < 1:
            raise ValueError(f"{name} = {value}: must lie between 0 and 1")
    p, wrong = Fraction(str(coverage)), 1 - Fraction(str(confidence))  # as typed: 0.95 is 19/20
    hits, misses = p.numerator, p.denominator - p.numerator
    left, r = wrong * p.denominator**n, n + 1  # in units of p.denominator ** -n
    while (left := left - math.comb(n, r - 1) * hits ** (r - 1) * misses ** (n - r + 1)) >= 0:
        r -= 1
    if r > n:
        raise ValueError(
            f"n = {n} draws bound no {percent(coverage)} of tickets with {percent(confidence)} "
            f"confidence: n must be at least {math.ceil(math.log(wrong) / math.log(p) - 1e-9)}"
        )
    return r


def percent(share: float) -> str:
    """`99.9%`, with no more digits than it has."""
    return f"{100 * share:.10g}%"
