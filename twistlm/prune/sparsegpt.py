"""SparseGPT: drop what costs least, and let the weights that are still to come make up for it.

H = mean over sequences of 2 X X^T, H^-1 = U^T U with U upper. Dropping w_i costs w_i^2 / U_ii^2, and
the best answer of the later columns is to subtract w_i / U_ii * U[i, i:].
"""

from __future__ import annotations

import torch
from torch import Tensor

from .pattern import Pattern, lowest, lowest_of_m

COLUMNS = 128  # columns whose weights are chosen together
DAMP = 0.01  # of the mean diagonal of H


def observe(inputs: Tensor) -> Tensor:
    """2 X X^T of one sequence [tokens, in]; its mean over sequences is H."""
    return 2 * inputs.T @ inputs


def prune(
    weight: Tensor,
    mean: Tensor | None,
    pattern: Pattern,
    columns: int = COLUMNS,
    damp: float = DAMP,
) -> Tensor:
    """`weight` [out, in] pruned and updated for the inputs that `mean` = H [in, in] tells of."""
    assert mean is not None
    weight, n_inputs = weight.clone(), weight.shape[1]
    if pattern.m:
        columns = max(columns // pattern.m, 1) * pattern.m
    dead = mean.diagonal() == 0
    weight[:, dead] = 0
    upper = inverse_factor(mean, damp)
    for start in range(0, n_inputs, columns):
        end = min(start + columns, n_inputs)
        group, u = weight[:, start:end].clone(), upper[start:end, start:end]
        errors = torch.zeros_like(group)
        if not pattern.m:
            drop = lowest(_cost(group, u), pattern.sparsity)
        for i in range(end - start):
            if pattern.m and i % pattern.m == 0:
                here = slice(i, i + pattern.m)
                drop = lowest_of_m(_cost(group[:, here], u[here, here]), pattern)
            gone = drop[:, i % pattern.m if pattern.m else i]
            errors[:, i] = torch.where(gone, group[:, i], 0) / u[i, i]
            group[:, i:] -= errors[:, i, None] * u[i, i:]
            group[:, i].masked_fill_(gone, 0)  # subtraction leaves a rounding error
        weight[:, start:end] = group
        weight[:, end:] -= errors @ upper[start:end, end:]
    return weight


def inverse_factor(hessian: Tensor, damp: float) -> Tensor:
    """U, upper, with (H + damp * mean(diag H) I)^-1 = U^T U; a dead input has H_jj = 1."""
    hessian = hessian.clone()
    diagonal = hessian.diagonal()
    diagonal[diagonal == 0] = 1
    diagonal += damp * diagonal.mean()
    try:
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
        return torch.linalg.cholesky(inverse, upper=True)
    except torch.linalg.LinAlgError:
        raise ValueError(
            f"the inputs of a matrix leave their Hessian singular: damp = {damp:g} is too little"
        ) from None


def _cost(weight: Tensor, upper: Tensor) -> Tensor:
    return weight.square() / upper.diagonal().square()
