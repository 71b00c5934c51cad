"""Stability: how much a ticket's perplexity depends on which blocks it got."""

from __future__ import annotations

from .lab import Lab, Point
from .scales import only
from .subnets import subnets


def points(lab: Lab) -> list[Point]:
    """A distribution for every parent of a setting, at every size."""
    scale = lab.scale
    return [
        subnets(lab, "stability", recipe, setting, k, scale.n_stability, scale.stability_tokens)
        for setting in scale.settings
        for recipe in only(setting)
        for k in scale.stability
    ]
