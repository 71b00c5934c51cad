"""The table of unstructured pruners: each is a pure function of one matrix and its statistic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..model.blocks import BlockMap
from . import sparsegpt
from .pattern import Pattern, check_width
from .scores import input_norms, magnitude, wanda, zpruner, zpruner_repair, zpruner_rows
from .walk import Linear, Observe, Tick, linears, walk_


@dataclass(frozen=True)
class PruneMethod:
    """`prune(weight [out, in], mean over sequences of observe(inputs), pattern)`: the new weight."""

    prune: Callable[..., Tensor]
    observe: Observe | None = None  # None: it needs no data
    # what `prune` takes as `factor`, made of the mean once for all matrices with the same inputs
    factor: Callable[[Tensor], Tensor] | None = None


METHODS: dict[str, PruneMethod] = {  # `pruners.SINGLE_WEIGHTS`
    "sparsegpt": PruneMethod(sparsegpt.prune, sparsegpt.observe, sparsegpt.inverse_factor),
    "wanda": PruneMethod(wanda, input_norms),
    "zpruner": PruneMethod(zpruner, input_norms),
    "zpruner-datafree": PruneMethod(zpruner),
    "zpruner-rows": PruneMethod(zpruner_rows, input_norms),
    "zpruner-repair": PruneMethod(zpruner_repair, sparsegpt.observe, sparsegpt.inverse_factor),
    "magnitude": PruneMethod(magnitude),
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
        check_width(linear.weight(model).shape[1], patterns[linear.group])

    def some_(alike: list[Linear], mean: Tensor | None) -> None:
        shared = {}
        if mean is not None:
            _check_finite(mean, f"what the model feeds into {alike[0].param} has")
            if method.factor is not None:
                shared = {"factor": method.factor(mean)}
        for linear in alike:
            weight, pattern = linear.weight(model), patterns[linear.group]
            if pattern.sparsity > 0:  # every rule by threshold would take one weight at 0 too
                weight.copy_(method.prune(weight, mean, pattern, **shared))
            _check_finite(weight, f"{linear.param}, pruned, holds")
            zeros[linear.param] = (weight == 0).sum()

    if method.observe is None:
        some_(matrices, None)
    else:
        assert ids is not None
        walk_(model, matrices, ids, method.observe, some_, tick)
    return {name: int(n) for name, n in zeros.items()}


def _check_finite(values: Tensor, what: str) -> None:
    if n_bad := int((~values.isfinite()).sum()):
        raise ValueError(f"{what} {n_bad:,} numbers that are not finite: it cannot be pruned")
