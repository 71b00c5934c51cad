"""The measurement that most experiments share: n random subnets of one size of one parent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ...config import Setting
from ...model.blocks import widths_of_ratio
from .lab import Lab, Point
from .scales import N, Recipe

ByParent = dict[str, dict[int, dict[str, Any]]]  # label -> K -> result


@dataclass(frozen=True)
class Sample:
    """n random subnets with k of 12 blocks in the layers that `setting` cuts; one whole model for k = 12."""

    setting: Setting
    k: int
    n: int
    tokens: int  # behind each perplexity; 0: all


def subnets(lab: Lab, experiment: str, recipe: Recipe | None, sample: Sample, **more: Any) -> Point:
    """The point with the perplexities of a sample; `more` joins its config."""
    scale, seed, k = lab.scale, lab.base.run.seed, sample.k
    n = sample.n if k < N else 1
    about = lab.about(
        experiment,
        recipe,
        setting=sample.setting,
        k=k,
        ratio=scale.ratio(k),
        n=n,
        tokens=sample.tokens,
        seed=seed,
        **more,
    )

    def measure() -> dict[str, Any]:
        parent, ready = lab.open(recipe, sample.setting, sample.tokens)
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
