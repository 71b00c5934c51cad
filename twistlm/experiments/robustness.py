"""Robustness: trained on X blocks, evaluated on Y, for the setting `both`."""

from __future__ import annotations

from .lab import Lab, Point
from .scales import TWIST_MIXED, TWIST_OUTER, Recipe
from .subnets import subnets


def points(lab: Lab) -> list[Point]:
    """One heat-map with the paper's mean (rows X), and two rows beside it with the outer optimizer."""
    rows = [Recipe("twist", (x,)) for x in lab.scale.trained_on]
    return [
        subnets(
            lab, "robustness", recipe, "both", y, lab.scale.n_subnets, lab.scale.tokens, widths=list(recipe.widths),
            outer=recipe.outer,
        )
        for recipe in (*rows, TWIST_OUTER, TWIST_MIXED)
        for y in lab.scale.evaluated_on
    ]  # fmt: skip
