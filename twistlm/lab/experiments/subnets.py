"""The measurement that most experiments share: n random subnets of one size of one parent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...config import Setting
from ...model.blocks import widths_of_ratio
from .lab import Lab, Point
from .scales import N, Recipe

ByParent = dict[str, dict[int, dict[str, Any]]]  # label -> K -> result


def subnets(
    lab: Lab,
    experiment: str,
    recipe: Recipe | None,
    setting: Setting,
    k: int,
    n: int,
    tokens: int,
    **more: Any,
) -> Point:
    """Perplexities of n random subnets with k of 12 blocks; the whole model for k = 12."""
    scale, seed = lab.scale, lab.base.run.seed
    n = n if k < N else 1
    about = lab.about(
        experiment, recipe, setting=setting, k=k, ratio=scale.ratio(k), n=n, tokens=tokens,
        seed=seed, **more,
    )  # fmt: skip

    def measure() -> dict[str, Any]:
        parent, ready = lab.open(recipe, setting, tokens)
        if k == N:
            whole = ready.full_perplexity()
            return {
                "values": [whole],
                "mean": whole,
                "sd": None,
                "worst": whole,
                "n": 1,
                "n_params": parent.central.layout.n_params,
            }
        widths = widths_of_ratio(parent.block_map, scale.ratio(k))
        spread = ready.random_subnets(scale.ratio(k), widths, n, seed)
        return {"values": list(spread.values), **spread.summary(), "n_params": spread.n_params}

    return Point(about, measure)


def by_parent(points: Iterable[dict[str, Any]]) -> ByParent:
    """Results of finished points, sorted by parent and size."""
    found: ByParent = {}
    for point in points:
        config = point["config"]
        found.setdefault(config["parent"], {})[config["k"]] = point["result"]
    return found
