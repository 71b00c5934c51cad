"""Activation shift: what is left of a layer's output when only K of its N blocks add to it.

measured  mean ||y'|| over mean ||y||, y' = sum of K random blocks' shares of the output projection
paper     sqrt(K/N): right when blocks are uncorrelated
exact     sqrt((p - p2)/rho + p2), p = K/N, p2 = K(K-1)/(N(N-1)), rho = ||sum y_b||^2 / sum ||y_b||^2
"""

from __future__ import annotations

import random
import statistics
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from twistlm.model import families, huggingface
from twistlm.model.blocks import BlockGroup, BlockMap
from twistlm.model.subnet import activation_scale, block_shares, rho_of
from twistlm.system.device import pick_device, to_device

from .lab import Lab, Point
from .page import draw
from .page.section import Claim, Figure, Section, Table, number
from .scales import DENSE, PARENTS, TWIST, Recipe

N_SEQUENCES = 4
INIT = "init"  # random weights, before any training
SQRT = "sqrt(K/N)"
CLOSE = 0.05  # mean relative error up to which a formula holds


def points(lab: Lab) -> list[Point]:
    """The untrained model, the start, and every parent: all layers and all K in one pass."""
    has_init = [INIT] if lab.base.model.weights == "random" else []
    return [_point(lab, which) for which in (*has_init, None, *PARENTS)]


def _point(lab: Lab, which: Recipe | str | None) -> Point:
    recipe = None if isinstance(which, str) else which
    about = lab.about("shift", recipe, n=lab.scale.n_shift, n_sequences=N_SEQUENCES)
    if which == INIT:
        about |= {"parent": INIT, "slug": INIT}

    def measure() -> dict[str, Any]:
        _, ready = lab.open(recipe, "both")
        model, block_map = ready.full.model, ready.block_map
        if which == INIT:
            model = huggingface.load(lab.base.model, lab.base.run.seed)
            block_map = families.partition(model, lab.base.blocks)
            torch.nn.Module.to(model, pick_device(lab.base.run.device))
        n = min(N_SEQUENCES, ready.text.n_sequences)
        ids = ready.text.file.sequences(list(range(n)), ready.text.seq_len)
        rows = shifts(model, block_map, to_device(ids, model.device), lab.scale.n_shift)
        return {"rows": rows, "n_tokens": ids.numel()}

    return Point(about, measure)


@torch.no_grad()
def shifts(
    model: PreTrainedModel, block_map: BlockMap, ids: Tensor, n: int, seed: int = 0
) -> list[dict[str, Any]]:
    """For every group and K: the measured ratio of norms over n random subsets, and both formulas."""
    rows: list[dict[str, Any]] = []

    def add(group: BlockGroup, shares: Tensor) -> None:
        whole = shares.sum(1)  # [tokens, d]
        rho = rho_of(shares)
        for k in range(1, group.n_blocks):
            rng = random.Random(f"shift/{seed}/{group.name}/{k}")
            ratios = []
            for _ in range(n):
                kept = rng.sample(range(group.n_blocks), k)
                part = shares[:, kept].sum(1)
                ratios.append(float(part.norm(dim=1).mean() / whole.norm(dim=1).mean()))
            rows.append(
                {
                    "group": group.name,
                    "kind": group.kind,
                    "layer": group.layer,
                    "k": k,
                    "n_blocks": group.n_blocks,
                    "rho": rho,
                    "measured": statistics.fmean(ratios),
                    "sd": statistics.stdev(ratios) if n > 1 else None,
                    "paper": 1 / activation_scale("sqrt", group.n_blocks, k),
                    "exact": 1 / activation_scale("measured", group.n_blocks, k, rho),
                }
            )

    with block_shares(model, block_map, add):
        model(input_ids=ids, use_cache=False)
    return rows


def section(points: list[dict[str, Any]]) -> Section:
    """A figure per kind: measured ratios (mean over layers) beside sqrt(K/N)."""
    rows = [{"parent": p["config"]["parent"], **row} for p in points for row in p["result"]["rows"]]
    figures = [_figure(kind, [r for r in rows if r["kind"] == kind]) for kind in ("attn", "ffn")]
    parents = list(dict.fromkeys(row["parent"] for row in rows))
    cells = []
    for parent in parents:
        mine = [row for row in rows if row["parent"] == parent]
        rho = [
            statistics.fmean(r["rho"] for r in mine if r["kind"] == kind)
            for kind in ("attn", "ffn")
        ]
        cells.append(
            (
                parent,
                *(number(x) for x in rho),
                f"{_error(mine, 'paper'):.1%}",
                f"{_error(mine, 'exact'):.1%}",
            )
        )
    head = ("model", "rho, attn", "rho, ffn", "error of sqrt(K/N)", "error of the exact formula")
    note = "errors: mean of |formula / measured - 1| over layers and K"
    claims = [
        Claim(
            "a layer's norm shrinks by sqrt(K/N) when K of N blocks stay: "
            + ("at initialisation" if parent == INIT else f"after training ({parent})"),
            (error := _error([r for r in rows if r["parent"] == parent], "paper")) < CLOSE,
            f"sqrt(K/N) is off by {error:.1%} on average (holds: under {CLOSE:.0%})",
            "paper" if parent == INIT else "ours",
        )
        for parent in parents
        if parent in (INIT, "start", DENSE.label, TWIST.label)
    ]
    what = (
        "How much of a layer's output is left when only K of its N blocks add to it, on real text. "
        "rho = ||sum of blocks||² / sum of ||block||²: 1 where blocks are uncorrelated, which is what "
        "sqrt(K/N) assumes; the exact formula takes rho into account."
    )
    return Section(
        "shift",
        "Activation shift",
        what,
        (Table(head, tuple(cells), note=note),),
        tuple(figures),
        tuple(claims),
    )


def _error(rows: list[dict[str, Any]], formula: str) -> float:
    return statistics.fmean(abs(row[formula] / row["measured"] - 1) for row in rows)


def _figure(kind: str, rows: list[dict[str, Any]]) -> Figure:
    series: dict[str, dict[float, float]] = {}
    for parent in dict.fromkeys(row["parent"] for row in rows):
        mine = [row for row in rows if row["parent"] == parent]
        series[parent] = {
            k: statistics.fmean(row["measured"] for row in mine if row["k"] == k)
            for k in sorted({row["k"] for row in mine})
        }
    series[SQRT] = {row["k"]: row["paper"] for row in rows}
    middle = sorted(series[SQRT])[len(series[SQRT]) // 2]
    far = max(
        (p for p in series if p != SQRT),
        key=lambda p: abs(series[p][middle] / series[SQRT][middle] - 1),
    )
    reading = (
        f"With {middle} blocks sqrt(K/N) is {series[SQRT][middle]:.2f}; the furthest from it is {far} with "
        f"{series[far][middle]:.2f}."
    )
    style = draw.LineStyle(dashed=(SQRT,))
    return Figure(
        f"shift-{kind}",
        f"||y'|| / ||y|| of {kind} layers, mean over layers",
        reading,
        series,
        lambda axes: draw.lines(axes, series, x="blocks kept", y="ratio of norms", style=style),
        height=3.5,
    )
