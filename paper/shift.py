"""Activation shift: what is left of a layer's output when only K of its N blocks add to it.

measured  mean ||y'|| over mean ||y||, y' = sum of K random blocks' shares of the output projection
paper     sqrt(K/N): right when blocks are uncorrelated
exact     sqrt((p - p2)/rho + p2), p = K/N, p2 = K(K-1)/(N(N-1)),
          rho = ||sum y_b||^2 / sum ||y_b||^2
"""

from __future__ import annotations

import random
import statistics
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from twistlm.model.blocks import BlockGroup, BlockMap
from twistlm.model.subnet import activation_scale, block_shares, rho_of


@torch.no_grad()
def shifts(
    model: PreTrainedModel, block_map: BlockMap, ids: Tensor, n: int, seed: int = 0
) -> list[dict[str, Any]]:
    """For every group and K: the ratio of norms over n random subsets, and both formulas."""
    rows: list[dict[str, Any]] = []

    def add(group: BlockGroup, shares: Tensor) -> None:
        whole = shares.sum(1)  # [tokens, d]
        rho = rho_of(shares)
        for k in range(1, group.n_blocks):
            rng = random.Random(f"shift/{seed}/{group.name}/{k}")
            ratios = []
            for _ in range(n):
                kept = rng.sample(range(group.n_blocks), k)
                part = shares[:, kept].sum(1)
                ratios.append(float(part.norm(dim=1).mean() / whole.norm(dim=1).mean()))
            rows.append(
                {
                    "group": group.name,
                    "kind": group.kind,
                    "layer": group.layer,
                    "k": k,
                    "n_blocks": group.n_blocks,
                    "rho": rho,
                    "measured": statistics.fmean(ratios),
                    "sd": statistics.stdev(ratios) if n > 1 else None,
                    "paper": 1 / activation_scale("sqrt", group.n_blocks, k),
                    "exact": 1 / activation_scale("measured", group.n_blocks, k, rho),
                }
            )

    with block_shares(model, block_map, add):
        model(input_ids=ids, use_cache=False)
    return rows
