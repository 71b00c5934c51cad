"""Perplexities of the parent and of its subnets while it trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..compute.perplexity import Evaluator, summarize
from ..config import RunConfig
from ..model.blocks import widths_of_ratio
from ..model.masks import prefixes
from .run import Progress


def evaluate(
    evaluator: Evaluator, cfg: RunConfig, progress: Progress, advance: Callable[[], None]
) -> tuple[dict[str, Any], str]:
    """Perplexities of the full model and of random subnets, and a line for a person."""
    ready, block_map = replace(evaluator, rho=progress.rho), evaluator.block_map
    scores: dict[str, Any] = {"full": ready.full_perplexity()}
    advance()
    line = f"perplexity full {scores['full']:.2f}"
    for ratio in cfg.eval_ratios:
        widths = widths_of_ratio(block_map, ratio)
        spread = ready.random_subnets(ratio, widths, cfg.eval_n, cfg.seed, advance)
        scores[ratio] = summarize(spread.values)
        line += f"   {ratio} {spread}"
        if progress.order:
            kept = prefixes(block_map, progress.order, widths)
            scores[ratio] |= {"nested": ready.subnet_perplexity(kept)}
            line += f" nested {scores[ratio]['nested']:.2f}"
    return scores, line
