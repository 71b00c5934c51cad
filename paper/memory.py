"""Asymptotic memory: what a subnet with half the blocks keeps of GPT-2 small, medium, large and XL."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from . import paper
from .lab import Lab, Point
from .page import draw
from .page.section import Claim, Figure, Section, Table


def points(lab: Lab) -> list[Point]:
    """Counted from shapes: the same at every scale."""
    about = {"experiment": "memory", "scale": lab.name, "share": "6/12"}

    def measure() -> dict[str, Any]:
        return {"half": paper.plan().half}

    return [Point(about, measure)]


def section(points: list[dict[str, Any]]) -> Section:
    """Bars like the paper's figure."""
    half = points[-1]["result"]["half"]
    groups = {name: dict(shares) for name, shares in half.items()}
    by_way: dict[str, list[float]] = {}
    for shares in half.values():
        for way, share in shares.items():
            by_way.setdefault(way, []).append(share)
    falls = all(a > b for shares in by_way.values() for a, b in pairwise(shares))
    last = list(half)[-1]
    reading = f"{last} keeps " + ", ".join(f"{v:.1%} ({w})" for w, v in half[last].items()) + "."
    rows = ((name, *(f"{shares[way]:.1%}" for way in by_way)) for name, shares in half.items())
    table = Table(("model", *by_way), tuple(rows))
    figure = Figure(
        "memory",
        "Share of the parameters in a subnet with half the blocks",
        reading,
        half,
        lambda axes: draw.bars(axes, groups, y="share of the whole model", base=0.5),
        height=3.2,
    )
    claim = Claim(
        "the larger the model, the closer a subnet with half the blocks comes to 50% of its memory",
        falls,
        "; ".join(f"{way}: " + ", ".join(f"{s:.1%}" for s in v) for way, v in by_way.items()),
    )
    what = "Counted from shapes: embeddings and norms are shared, and their share falls as models grow."
    return Section("memory", "Asymptotic memory", what, (table,), (figure,), (claim,))
