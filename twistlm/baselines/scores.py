"""Pruners that drop the lowest scores of a matrix: magnitude, Wanda, Z-Pruner.

Each takes `weight` [out, in], the mean over sequences of what was observed, and the pattern of zeros.
"""

from __future__ import annotations

from torch import Tensor

from . import sparsegpt
from .pattern import Pattern, lowest, lowest_of_m, lowest_of_rows


def input_norms(inputs: Tensor) -> Tensor:
    """|X_j|^2 of the inputs [tokens, in]; its mean over sequences is Wanda's a_j."""
    return inputs.square().sum(0)


def magnitude(weight: Tensor, mean: Tensor | None, pattern: Pattern) -> Tensor:
    """The smallest |W| of a matrix go; no data is needed."""
    score = weight.abs()
    drop = lowest_of_m(score, pattern) if pattern.m else lowest(score, pattern.sparsity)
    return weight.masked_fill(drop, 0)


def wanda(weight: Tensor, mean: Tensor | None, pattern: Pattern) -> Tensor:
    """The lowest |W| sqrt(a_j) of each output row go; an input that is always 0 goes first."""
    assert mean is not None
    score = weight.abs() * mean.sqrt()
    drop = lowest_of_m(score, pattern) if pattern.m else lowest_of_rows(score, pattern.sparsity)
    return weight.masked_fill(drop, 0)


def zpruner(weight: Tensor, mean: Tensor | None, pattern: Pattern) -> Tensor:
    """The lowest Z-Pruner scores of the whole matrix go; without data (`mean` is None) by weights alone."""
    return weight.masked_fill(_lowest_z(z_scores(weight, mean), pattern), 0)


def zpruner_rows(weight: Tensor, mean: Tensor | None, pattern: Pattern) -> Tensor:
    """Z-Pruner's scores compared within each output row, an option of its code."""
    score = z_scores(weight, mean)
    drop = lowest_of_m(score, pattern) if pattern.m else lowest_of_rows(score, pattern.sparsity)
    return weight.masked_fill(drop, 0)


def zpruner_repair(
    weight: Tensor, mean: Tensor | None, pattern: Pattern, factor: Tensor | None = None
) -> Tensor:
    """Z-Pruner's choice with SparseGPT's update of the weights that stay, an option of its code.

    `mean` is SparseGPT's H = 2 X X^T, whose diagonal holds 2 a_j.
    """
    assert mean is not None
    drop = _lowest_z(z_scores(weight, mean.diagonal() / 2), pattern)
    return sparsegpt.prune(weight, mean, pattern, factor=factor, drop=drop)


def z_scores(weight: Tensor, mean: Tensor | None) -> Tensor:
    """Z-scores of row- and column-normalised weights [out, in].

    R = W/|row|, C = W/|column|, z = (. - mean)/std over the matrix, rho = share of |W| < 0.1 mean|W|,
    alpha = 0.7 (1 - 0.3 rho), S = (alpha |z_R|^3 + (1 - alpha) |z_C|^3) sqrt(a_j)^1.5.
    Without data (`mean` is None) the last factor is left out.
    """
    small = (weight.abs() < 0.1 * weight.abs().mean()).to(weight.dtype).mean()
    alpha = 0.7 * (1 - 0.3 * small)
    rows, columns = (_z(_normalised(weight, dim)).abs() ** 3 for dim in (1, 0))
    score = alpha * rows + (1 - alpha) * columns
    return score if mean is None else score * mean.sqrt() ** 1.5


def _lowest_z(score: Tensor, pattern: Pattern) -> Tensor:
    return lowest_of_m(score, pattern) if pattern.m else lowest(score, pattern.sparsity)


def _normalised(weight: Tensor, dim: int) -> Tensor:
    """Vectors along `dim` of length 1; one of length 0 stays 0."""
    norm = weight.norm(dim=dim, keepdim=True)
    return weight / norm.masked_fill(norm == 0, 1)


def _z(values: Tensor) -> Tensor:
    """Mean 0 and (unbiased) standard deviation 1 over the matrix; equal values are all 0."""
    centred = values - values.mean()
    std = values.std() if values.numel() > 1 else centred.sum()
    return centred / std.masked_fill(std == 0, 1)
