"""Magnitude: the smallest |W| of a matrix go."""

from __future__ import annotations

from torch import Tensor

from .pattern import Pattern, lowest, lowest_of_m


def prune(weight: Tensor, mean: Tensor | None, pattern: Pattern) -> Tensor:
    """`weight` [out, in] with its smallest entries zero; no data is needed."""
    score = weight.abs()
    drop = lowest_of_m(score, pattern) if pattern.m else lowest(score, pattern.sparsity)
    return weight.masked_fill(drop, 0)
