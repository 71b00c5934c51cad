"""Pruners of single weights: a pure function of one matrix and its statistic each, on one walk.

`prune(weight [out, in], mean, pattern)` returns the new weight; `mean` is the mean over calibration
sequences of what `observe` made of the matrix's inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..model.blocks import BlockMap
from . import sparsegpt
from .pattern import Pattern
from .walk import Linear, Observe, Tick, linears, walk_


def input_norms(inputs: Tensor) -> Tensor:
    """|X_j|^2 of the inputs [tokens, in]; its mean over sequences is Wanda's a_j."""
    return inputs.square().sum(0)


def magnitude(weight: Tensor, mean: Tensor | None, pattern: Pattern) -> Tensor:
    """The smallest |W| of a matrix go; no data is needed."""
    return weight.masked_fill(pattern.lowest(weight.abs()), 0)


def wanda(weight: Tensor, mean: Tensor | None, pattern: Pattern) -> Tensor:
    """The lowest |W| sqrt(a_j) of each output row go; an input that is always 0 goes first."""
    assert mean is not None
    return weight.masked_fill(pattern.lowest(weight.abs() * mean.sqrt(), by_row=True), 0)


def zpruner(
    weight: Tensor,
    mean: Tensor | None,
    pattern: Pattern,
    by_row: bool = False,
    update: bool = False,
) -> Tensor:
    """The lowest Z-Pruner scores go; without data (`mean` is None) by weights alone.

    Options of its published code: `by_row` compares scores within each output row; `update` lets
    the weights that stay make up for the others as SparseGPT does, with `mean` = H = 2 X X^T.
    """
    if not update:
        return weight.masked_fill(pattern.lowest(z_scores(weight, mean), by_row), 0)
    assert mean is not None
    drop = pattern.lowest(z_scores(weight, mean.diagonal() / 2), by_row)
    return sparsegpt.prune(weight, mean, pattern, drop=drop)


def z_scores(weight: Tensor, mean: Tensor | None) -> Tensor:
    """Z-scores of row- and column-normalised weights [out, in].

    R = W/|row|, C = W/|column|, z = (. - mean)/std over the matrix,
    rho = share of |W| < 0.1 mean|W|, alpha = 0.7 (1 - 0.3 rho),
    S = (alpha |z_R|^3 + (1 - alpha) |z_C|^3) sqrt(a_j)^1.5; without data (`mean` is None) a_j = 1.
    """
    small = (weight.abs() < 0.1 * weight.abs().mean()).to(weight.dtype).mean()
    alpha = 0.7 * (1 - 0.3 * small)
    rows, columns = (_z(_normalised(weight, dim)).abs() ** 3 for dim in (1, 0))
    score = alpha * rows + (1 - alpha) * columns
    return score if mean is None else score * mean.sqrt() ** 1.5


def _normalised(weight: Tensor, dim: int) -> Tensor:
    """Vectors along `dim` of length 1; one of length 0 stays 0."""
    norm = weight.norm(dim=dim, keepdim=True)
    return weight / norm.masked_fill(norm == 0, 1)


def _z(values: Tensor) -> Tensor:
    """Mean 0 and (unbiased) standard deviation 1 over the matrix; equal values are all 0."""
    centred = values - values.mean()
    std = values.std() if values.numel() > 1 else centred.sum()
    return centred / std.masked_fill(std == 0, 1)


@dataclass(frozen=True)
class PruneMethod:
    """How one matrix is pruned, and what is observed of its inputs."""

    prune: Callable[..., Tensor]
    observe: Observe | None = None  # None: it needs no data


METHODS: dict[str, PruneMethod] = {  # `baselines.SINGLE_WEIGHTS`
    "sparsegpt": PruneMethod(sparsegpt.prune, sparsegpt.observe),
    "wanda": PruneMethod(wanda, input_norms),
    "zpruner": PruneMethod(zpruner, input_norms),
    "magnitude": PruneMethod(magnitude),
    "zpruner-datafree": PruneMethod(zpruner),
    "zpruner-rows": PruneMethod(partial(zpruner, by_row=True), input_norms),
    "zpruner-repair": PruneMethod(partial(zpruner, update=True), sparsegpt.observe),
}


@torch.no_grad()
def prune_(
    model: PreTrainedModel,
    block_map: BlockMap,
    method: PruneMethod,
    patterns: Mapping[str, Pattern],  # by group name
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
        patterns[linear.group].check_width(linear.weight(model).shape[1])

    def prune_alike(alike: list[Linear], mean: Tensor | None) -> None:
        if mean is not None:
            _check_finite(mean, f"what the model feeds into {alike[0].param} has")
        for linear in alike:
            weight, pattern = linear.weight(model), patterns[linear.group]
            if pattern.sparsity > 0:  # every rule by threshold would take one weight at 0 too
                weight.copy_(method.prune(weight, mean, pattern))
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
