"""Wanda: |W| times the size of its input, compared within an output row; no weight is updated."""

from __future__ import annotations

from torch import Tensor

from .pattern import Pattern, lowest_of_m, lowest_of_rows


def observe(inputs: Tensor) -> Tensor:
    """|X_j|^2 of the inputs [tokens, in]; its mean over sequences is a_j."""
    return inputs.square().sum(0)


def prune(weight: Tensor, mean: Tensor | None, pattern: Pattern) -> Tensor:
    """`weight` [out, in] without the lowest |W| sqrt(a_j) of each row; an input that is always 0 goes first."""
    assert mean is not None
    score = weight.abs() * mean.sqrt()
    drop = lowest_of_m(score, pattern) if pattern.m else lowest_of_rows(score, pattern.sparsity)
    return weight.masked_fill(drop, 0)
