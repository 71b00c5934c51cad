"""SparseGPT: drop what costs least, and let the weights that are still to come make up for it.

H = mean over sequences of 2 X X^T, H^-1 = U^T U with U upper. Dropping w_i costs w_i^2 / U_ii^2,
and the best answer of the later columns is to subtract w_i * U[i, i:] / U_ii.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .pattern import Pattern

COLUMNS = 128  # columns whose weights are chosen together
DAMP = 0.01  # of the mean diagonal of H


def observe(inputs: Tensor) -> Tensor:
    """2 X X^T of the inputs [tokens, in]; its mean over sequences is H."""
    return 2 * inputs.T @ inputs


def prune(
    weight: Tensor,
    mean: Tensor | None,
    pattern: Pattern,
    columns: int = COLUMNS,
    damp: float = DAMP,
    drop: Tensor | None = None,
) -> Tensor:
    """`weight` [out, in] pruned and updated for the inputs that `mean` = H [in, in] tells of.

    `drop` [out, in] is True where weights go that another method chose: what is left is the update.
    """
    assert mean is not None
    n_inputs = weight.shape[1]
    if pattern.m:
        columns = max(columns // pattern.m, 1) * pattern.m
    upper = _inverse_factor(mean, damp)
    # with rows of diagonal 1 a dropped weight answers for itself: w - w * 1 is exactly 0
    unit = upper / upper.diagonal()[:, None]
    # [in, out]: a column of the matrix is contiguous. Nothing below waits for the device
    turned = weight.T.contiguous().masked_fill((mean.diagonal() == 0)[:, None], 0)
    for start in range(0, n_inputs, columns):
        end = min(start + columns, n_inputs)
        group, u = turned[start:end], upper[start:end, start:end]
        errors, v = torch.empty_like(group), unit[start:end, start:end]
        if drop is not None:
            gone = drop[:, start:end].T.to(group.dtype)
        elif not pattern.m:
            gone = pattern.lowest(_cost(group, u)).to(group.dtype)
        for i in range(end - start):
            if drop is None and pattern.m and i % pattern.m == 0:
                here = slice(i, i + pattern.m)
                chosen = pattern.lowest(_cost(group[here], u[here, here]).T)
                gone = chosen.T.to(group.dtype)
            at = i % pattern.m if pattern.m and drop is None else i
            torch.mul(group[i], gone[at], out=errors[i])
            group[i:].addcmul_(v[i, i:, None], errors[i], value=-1)
        turned[end:].addmm_(unit[start:end, end:].T, errors, alpha=-1)
    return turned.T.contiguous()


def _inverse_factor(hessian: Tensor, damp: float) -> Tensor:
    """U, upper, with (H + damp * mean(diag H) I)^-1 = U^T U; a dead input has H_jj = 1."""
    hessian = hessian.clone()
    diagonal = hessian.diagonal()
    diagonal.masked_fill_(diagonal == 0, 1)
    diagonal += damp * diagonal.mean()
    try:
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
        return torch.linalg.cholesky(inverse, upper=True)
    except torch.linalg.LinAlgError:
        raise ValueError(
            f"the inputs of a matrix leave their Hessian singular: damp = {damp:g} is too little"
        ) from None


def _cost(turned: Tensor, upper: Tensor) -> Tensor:
    return turned.square() / upper.diagonal().square()[:, None]
