"""Node loss: the parent is served by n nodes that hold its blocks, and some of them die."""

from __future__ import annotations

from typing import Any

from .. import drop
from .lab import Lab, Point
from .scales import FIVE, Recipe

CASES = ((4, 1), (4, 2), (6, 1), (12, 1))  # nodes, lost ones


def points(lab: Lab) -> list[Point]:
    cases = [case for case in CASES if case[0] <= lab.scale.n_attn]
    cases = cases or [(lab.scale.n_attn, 1)]
    return [_point(lab, recipe, *case) for recipe in FIVE for case in cases]


def _point(lab: Lab, recipe: Recipe, n_nodes: int, n_lost: int) -> Point:
    about = lab.about(
        "nodeloss", recipe, setting="both", nodes=n_nodes, lost=n_lost, tokens=lab.scale.tokens
    )

    def measure() -> dict[str, Any]:
        parent, _ = lab.open(recipe, "both")
        (made,) = drop.drop(
            {recipe.label: parent}, n_nodes, n_lost, tokens=lab.scale.tokens, quiet=True
        )
        return {
            "full": made.full, "mean": made.mean, "worst": made.worst,
            "values": list(made.losses.values()), "n_tokens": made.n_tokens,
        }  # fmt: skip

    return Point(about, measure)
