"""Pruners of single weights: a pure function of one matrix and its statistic each, on one walk.

`prune(weight [out, in], mean, sparsity)` returns the new weight; `mean` is the mean over
calibration sequences of what `observe` made of the matrix's inputs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from ..model.blocks import BlockMap, shares_of_ratio
from ..model.huggingface import Model
from .walk import Linear, Observe, Tick, linears, walk_

DAMP = 0.01  # of the mean diagonal of H
Sparsity = float | Fraction  # a fraction counts without rounding: int(100 * 0.29) is 28


def sparsities(block_map: BlockMap, ratio: str) -> dict[str, Fraction]:
    """What share of each group's single weights goes where `ratio` of them stays, exactly."""
    shares = shares_of_ratio(block_map, ratio)
    try:
        found = {name: 1 - Fraction(text) for name, text in shares.items()}
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"ratio {ratio!r} is not a fraction such as 6/12 or 0.5") from None
    if not all(0 <= sparsity < 1 for sparsity in found.values()):
        raise ValueError(f"ratio {ratio!r}: it must lie in (0, 1]")
    return found


def lowest(score: Tensor, sparsity: Sparsity, by_row: bool = False) -> Tensor:
    """True where a score [out, in] is among the lowest, of equal ones in a row the first.

    Over the matrix: score <= sorted(score)[int(count * sparsity)], so int(count * s) + 1 go.
    """
    if by_row:
        order = score.argsort(dim=1, stable=True)[:, : int(score.shape[1] * sparsity)]
        return torch.zeros_like(score, dtype=torch.bool).scatter_(1, order, True)
    return score <= score.flatten().sort().values[int(score.numel() * sparsity)]


def input_norms(inputs: Tensor) -> Tensor:
    """|X_j|^2 of the inputs [tokens, in]; its mean over sequences is Wanda's a_j."""
    return inputs.square().sum(0)


def magnitude(weight: Tensor, mean: None, sparsity: Sparsity) -> Tensor:
    """The smallest |W| of a matrix go; no data is needed."""
    return weight.masked_fill(lowest(weight.abs(), sparsity), 0)


def wanda(weight: Tensor, mean: Tensor, sparsity: Sparsity) -> Tensor:
    """The lowest |W| sqrt(a_j) of each output row go; an input that is always 0 goes first."""
    return weight.masked_fill(lowest(weight.abs() * mean.sqrt(), sparsity, by_row=True), 0)


def zpruner(weight: Tensor, mean: Tensor, sparsity: Sparsity) -> Tensor:
    return weight.masked_fill(lowest(z_scores(weight, mean), sparsity), 0)


def z_scores(weight: Tensor, mean: Tensor) -> Tensor:
    """Z-scores of row- and column-normalised weights [out, in].

    R = W/|row|, C = W/|column|, z = (. - mean)/std over the matrix,
    rho = share of |W| < 0.1 mean|W|, alpha = 0.7 (1 - 0.3 rho),
    S = (alpha |z_R|^3 + (1 - alpha) |z_C|^3) sqrt(a_j)^1.5.
    """
    small = (weight.abs() < 0.1 * weight.abs().mean()).to(weight.dtype).mean()
    alpha = 0.7 * (1 - 0.3 * small)
    rows, columns = (_z(weight, dim).abs() ** 3 for dim in (1, 0))
    return (alpha * rows + (1 - alpha) * columns) * mean.sqrt() ** 1.5


def _z(weight: Tensor, dim: int) -> Tensor:
    """Vectors along `dim` of length 1, then mean 0 and (unbiased) standard deviation 1 over the
    matrix; where one is 0, so is what it would divide."""
    norm = weight.norm(dim=dim, keepdim=True)
    values = weight / norm.masked_fill(norm == 0, 1)
    centred = values - values.mean()
    std = values.std() if values.numel() > 1 else centred.sum()
    return centred / std.masked_fill(std == 0, 1)


def hessian(inputs: Tensor) -> Tensor:
    """2 X X^T of the inputs [tokens, in]; its mean over sequences is H."""
    return 2 * inputs.T @ inputs


def sparsegpt(
    weight: Tensor, mean: Tensor, sparsity: Sparsity, columns: int = 128, damp: float = DAMP
) -> Tensor:
    """Drop what costs least, and let the weights that are still to come make up for it.

    `mean` = H = mean over sequences of 2 X X^T, H^-1 = U^T U with U upper. Dropping w_i costs
    w_i^2 / U_ii^2, and the best answer of the later columns is to subtract w_i * U[i, i:] / U_ii.
    So many `columns` are chosen together.
    """
    n_inputs = weight.shape[1]
    upper = _inverse_factor(mean, damp)
    # with rows of diagonal 1 a dropped weight answers for itself: w - w * 1 is exactly 0
    unit = upper / upper.diagonal()[:, None]
    # [in, out]: a column of the matrix is contiguous. Nothing below waits for the device
    turned = weight.T.contiguous().masked_fill((mean.diagonal() == 0)[:, None], 0)
    for start in range(0, n_inputs, columns):
        end = min(start + columns, n_inputs)
        group, u = turned[start:end], upper[start:end, start:end]
        errors, v = torch.empty_like(group), unit[start:end, start:end]
        cost = group.square() / u.diagonal().square()[:, None]
        gone = lowest(cost, sparsity).to(group.dtype)
        for i in range(end - start):
            torch.mul(group[i], gone[i], out=errors[i])
            group[i:].addcmul_(v[i, i:, None], errors[i], value=-1)
        turned[end:].addmm_(unit[start:end, end:].T, errors, alpha=-1)
    return turned.T.contiguous()


def _inverse_factor(mean: Tensor, damp: float) -> Tensor:
    """U, upper, with (H + damp * mean(diag H) I)^-1 = U^T U; a dead input has H_jj = 1."""
    mean = mean.clone()
    diagonal = mean.diagonal()
    diagonal.masked_fill_(diagonal == 0, 1)
    diagonal += damp * diagonal.mean()
    try:
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(mean))
        return torch.linalg.cholesky(inverse, upper=True)
    except torch.linalg.LinAlgError:
        raise ValueError(
            f"the inputs of a matrix leave their Hessian singular: damp = {damp:g} is too little"
        ) from None


@dataclass(frozen=True)
class PruneMethod:
    """How one matrix is pruned, and what is observed of its inputs."""

    prune: Callable[..., Tensor]
    observe: Observe | None = None  # None: it needs no data


METHODS: dict[str, PruneMethod] = {  # `baselines.SINGLE_WEIGHTS`
    "sparsegpt": PruneMethod(sparsegpt, hessian),
    "wanda": PruneMethod(wanda, input_norms),
    "zpruner": PruneMethod(zpruner, input_norms),
    "magnitude": PruneMethod(magnitude),
}


@torch.no_grad()
def prune_(
    model: Model,
    block_map: BlockMap,
    method: PruneMethod,
    sparsity: Mapping[str, Sparsity],  # by group name
    ids: Tensor | None = None,
    tick: Tick = lambda: None,
) -> dict[str, int]:
    """Prune every matrix of the map in place; returns the zeros in each, by parameter.

    `ids` [n_sequences, seq_len] is what a method with statistics calibrates on.
    """
    zeros: dict[str, Tensor] = {}
    matrices = linears(model, block_map)
    for linear in matrices:
        _check_finite(linear.weight(model), f"{linear.param} holds")

    def prune_alike(alike: list[Linear], mean: Tensor | None) -> None:
        if mean is not None:
            _check_finite(mean, f"what the model feeds into {alike[0].param} has")
        for linear in alike:
            weight, share = linear.weight(model), sparsity[linear.group]
            if share > 0:  # every rule by threshold would take one weight at 0 too
                weight.copy_(method.prune(weight, mean, share))
            zeros[linear.param] = (weight == 0).sum()

    if method.observe is None:
        prune_alike(matrices, None)
    else:
        assert ids is not None
        walk_(model, matrices, ids, method.observe, prune_alike, tick)
    return {name: int(n) for name, n in zeros.items()}


def _check_finite(values: Tensor, what: str) -> None:
    if n_bad := int((~values.isfinite()).sum()):
        raise ValueError(f"{what} {n_bad:,} numbers that are not finite: it cannot be pruned")
