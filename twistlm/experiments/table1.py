"""Table 1: perplexity by setting and size, for every parent's random subnets and every pruner."""

from __future__ import annotations

from .lab import Lab, Point
from .scales import N, only
from .subnets import subnets


def points(lab: Lab) -> list[Point]:
    """Random extraction (SE) from every parent, whole models first."""
    scale = lab.scale
    return [
        subnets(lab, "table1", recipe, setting, k, scale.n_subnets, scale.tokens)
        for setting in scale.settings
        for recipe in (None, *only(setting))
        for k in (N, *scale.table1)
    ]
