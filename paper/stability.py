"""Stability: how much a ticket's perplexity depends on which blocks it got."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from twistlm.lab.compare.table import unless_blank

from .lab import Lab, Point
from .page import draw
from .page.section import Claim, Figure, Section, Table, number, spread
from .ranking import ByParent, Sample, by_parent, scales_of, subnets
from .scales import DENSE, TWIST, N, only


def points(lab: Lab) -> list[Point]:
    """A distribution for every parent of a setting, at every size."""
    scale = lab.scale
    n, tokens = scale.n_stability, scale.stability_tokens
    return [
        subnets(lab, "stability", recipe, Sample(setting, k, n, tokens))
        for setting in scale.settings
        for recipe in only(setting)
        for k in scale.stability
    ]


def section(points: list[dict[str, Any]]) -> Section:
    """A figure per setting, like the paper's: the loss of every random subnet."""
    settings = {p["config"]["setting"]: None for p in points}
    figures, rows, claims = [], [], []
    for setting in settings:
        found = by_parent(p for p in points if p["config"]["setting"] == setting)
        figures.append(_figure(setting, found))
        for label, results in found.items():
            rows.append(
                (
                    setting,
                    label,
                    *(spread(results[k]) if k in results else "" for k in _sizes(points)),
                    scales_of(results, _sizes(points)),
                )
            )
        claims += _claims(setting, found)
    n = max(p["result"]["n"] for p in points)
    head = ("setting", "parent", *(f"{k}/{N}" for k in _sizes(points)), "scale")
    head, *rows = unless_blank([head, *rows], "scale")
    table = Table(head, tuple(rows), note="perplexity, mean ± sd over random subnets", names=2)
    what = (
        f"{n} random subnets of every size, all on the same tokens: does it matter which blocks a "
        "ticket gets? A parent is drawn where its training cut the same kind of layer."
    )
    return Section(
        "stability", "Stability of random subnets", what, (table,), tuple(figures), tuple(claims)
    )


def _sizes(points: list[dict[str, Any]]) -> list[int]:
    return sorted({p["config"]["k"] for p in points})


def _figure(setting: str, found: ByParent) -> Figure:
    sizes = sorted({k for results in found.values() for k in results})
    groups = {
        f"{k}/{N}": {
            label: [math.log(v) for v in results[k]["values"]]
            for label, results in found.items()
            if k in results
        }
        for k in sizes
    }
    smallest = sizes[0]
    shares = {
        label: results[smallest]["sd"] / results[smallest]["mean"]
        for label, results in found.items()
        if smallest in results and results[smallest]["sd"] is not None
    }
    said = [f"{shares[label]:.1%} of the mean for {label}" for label in _ends(shares)]
    reading = f"At {smallest}/{N} the standard deviation is {' and '.join(said)}." if said else ""
    return Figure(
        f"stability-{setting}",
        f"Loss of random subnets, {setting}",
        reading,
        groups,
        lambda axes: draw.violins(axes, groups, y="loss (ln perplexity)"),
        height=3.4,
    )


def _ends(shares: dict[str, float]) -> list[str]:
    """The lowest and the highest; one, where there is one."""
    return list(dict.fromkeys(f(shares, key=shares.__getitem__) for f in (min, max) if shares))


def _claims(setting: str, found: ByParent) -> list[Claim]:
    dense, twist = found.get(DENSE.label), found.get(TWIST.label)
    if not dense or not twist:
        return []
    sizes = sorted(k for k in set(dense) & set(twist) if dense[k]["sd"] and twist[k]["sd"])
    if not sizes:
        return []
    factors = [dense[k]["sd"] / twist[k]["sd"] for k in sizes]
    grows = all(dense[a]["sd"] >= dense[b]["sd"] for a, b in pairwise(sizes))
    return [
        Claim(
            f"{setting}: TwIST's subnets vary less than data parallel's at every size",
            min(factors) > 1,
            f"the standard deviation is {min(factors):.1f} to {max(factors):.1f} times smaller",
        ),
        Claim(
            f"{setting}: data parallel's subnets vary more the smaller they are",
            grows,
            ", ".join(f"{k}/{N}: sd {number(dense[k]['sd'])}" for k in sizes),
        ),
    ]
