"""Robustness: trained on X blocks, evaluated on Y, for the setting `both`."""

from __future__ import annotations

from typing import Any

from ..report import draw, paper
from ..report.section import Claim, Figure, Section, number
from .lab import Lab, Point
from .scales import TWIST_MIXED, TWIST_OUTER, N, Recipe
from .subnets import by_parent, subnets

KEEPS = 1.05  # a ratio of perplexities up to which a size "keeps" another's
SHARP = 1.5  # and from which it degrades sharply


def points(lab: Lab) -> list[Point]:
    """One heat-map with the paper's mean (rows X), and two rows below it with the outer optimizer."""
    rows = [Recipe("twist", (x,)) for x in lab.scale.trained_on]
    return [
        subnets(
            lab, "robustness", recipe, "both", y, lab.scale.n_subnets, lab.scale.tokens,
            widths=list(recipe.widths), outer=recipe.outer,
        )
        for recipe in (*rows, TWIST_OUTER, TWIST_MIXED)
        for y in lab.scale.evaluated_on
    ]  # fmt: skip


def section(points: list[dict[str, Any]]) -> Section:
    """The heat-map, and what it says about the paper's three claims."""
    found = by_parent(points)
    names = {
        p["config"]["parent"]: ("mixed" if len(p["config"]["widths"]) > 1 else str(p["config"]["widths"][0]))
        + (" + outer" if p["config"]["outer"] else "")
        for p in points
    }  # fmt: skip
    columns = sorted({p["config"]["k"] for p in points})
    values = [[r[k]["mean"] if k in r else None for k in columns] for r in found.values()]
    worst = {
        names[label]: max(r["mean"] for r in results.values()) for label, results in found.items()
    }
    best = min(worst, key=worst.__getitem__)
    reading = (
        f"Trained on {best}, the worst size costs {number(worst[best])}: the lowest worst case of "
        f"{len(worst)} ways to train."
    )
    shown = {
        names[label]: {k: r["mean"] for k, r in results.items()} for label, results in found.items()
    }
    figure = Figure(
        "robustness-both", "Trained on X (rows), evaluated on Y (columns), both", reading, shown,
        lambda axes: draw.heatmap(
            axes, list(shown), [str(k) for k in columns], values,
            x="blocks in the evaluated subnet", y="blocks in training",
        ),
        height=0.9 + 0.34 * len(shown),
    )  # fmt: skip
    low, high = paper.ROBUSTNESS_ON_4
    what = (
        "Every parent is trained from the same start with subnets of X blocks; random subnets of Y blocks "
        f"are then evaluated (12: the whole model). The paper, on its own text: trained on 10, "
        f"{paper.ROBUSTNESS[10, 10]} at 10 and {paper.ROBUSTNESS[10, 4]} at 4; trained on 4, {low} to {high}."
    )
    plain = {int(names[label]): r for label, r in found.items() if names[label].isdigit()}
    return Section(
        "robustness", "Robustness to the size", what, (), (figure,), tuple(_claims(plain))
    )


def _claims(plain: dict[int, dict[int, dict[str, Any]]]) -> list[Claim]:
    """`plain`: X -> Y -> result, for the paper's mean."""
    claims = []
    wide = max((x for x in plain if x < N), default=None)
    if wide is not None and wide in plain[wide]:
        lean = min(plain[wide])
        factor = plain[wide][lean]["mean"] / plain[wide][wide]["mean"]
        claims.append(Claim(
            "downward: trained on wide subnets, lean ones degrade sharply",
            factor >= SHARP,
            f"trained on {wide}, perplexity at {lean}/{N} is {factor:.2f} times that at {wide}/{N} "
            f"(paper: 3.3 times from 10 to 4; sharply means {SHARP} times or more)",
        ))  # fmt: skip
    ups = [
        (plain[x][y]["mean"] / plain[x][x]["mean"], x, y)
        for x in plain for y in plain[x] if x in plain[x] and y > x
    ]  # fmt: skip
    if ups:
        factor, x, y = max(ups)
        claims.append(Claim(
            "upward: trained on lean subnets, wider ones keep the perplexity or improve it",
            factor <= KEEPS,
            f"the largest increase is {factor:.2f} times, from {x}/{N} to {y}/{N} (keeps: up to {KEEPS})",
        ))  # fmt: skip
    full = [x for x in plain if len(plain[x]) == max(len(r) for r in plain.values())]
    if len(full) > 2:
        worst = {x: max(r["mean"] for r in plain[x].values()) for x in full}
        best = min(worst, key=worst.__getitem__)
        claims.append(Claim(
            "sweet spot: a mid-level training width has the lowest worst case over all sizes",
            min(full) < best < max(full),
            ", ".join(f"X={x}: {number(worst[x])}" for x in sorted(worst)) + f"; lowest at X={best}",
        ))  # fmt: skip
    return claims
