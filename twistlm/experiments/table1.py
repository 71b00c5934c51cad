"""Table 1: perplexity by setting and size, for every parent's random subnets and every pruner."""

from __future__ import annotations

from typing import Any

from ..compare.cells import Asked, Grid
from ..compare.rivals import Rival
from ..compare.run import DEFAULT
from ..config import Setting
from ..prune import calibrate
from ..prune.write import STRUCTURED
from .lab import Lab, Point
from .scales import DENSE, N, only
from .subnets import subnets


def points(lab: Lab) -> list[Point]:
    """Random extraction (SE) from every parent, whole models first; then the pruners on data parallel."""
    scale = lab.scale
    extracted = [
        subnets(lab, "table1", recipe, setting, k, scale.n_subnets, scale.tokens)
        for setting in scale.settings
        for recipe in (None, *only(setting))
        for k in (N, *scale.table1)
    ]
    pruned = [
        _pruned(lab, method, setting, k)
        for setting in scale.settings
        for k in scale.table1
        for method in DEFAULT
        # whole blocks need a whole number of them in every layer
        if not method.startswith(STRUCTURED) or k * scale.n_attn % N == 0
    ]
    return extracted + pruned


def _pruned(lab: Lab, method: str, setting: Setting, k: int) -> Point:
    """A cell of `twistlm compare`: the data-parallel parent, pruned after training."""
    scale, seed, ratio = lab.scale, lab.base.run.seed, f"{k}/{N}"
    about = lab.about(
        "table1", DENSE, method=method, setting=setting, k=k, ratio=ratio, tokens=scale.tokens,
        n_calibration=scale.n_calibration, seed=seed,
    )  # fmt: skip

    def measure() -> dict[str, Any]:
        parent, ready = lab.open(DENSE, "both")
        ids = calibrate.windows(parent, None, scale.n_calibration, seed)[1]
        asked = Asked(
            (setting,), (ratio,), (method,), ("dense",), (), 0, seed, lab.text(ready), ids
        )
        rival = Rival("dense", "dense", parent, lab.hash_of(DENSE), scale.settings)
        cells = Grid([rival], asked, lab.folder / "scores").cells()
        return next(cell for cell in cells if cell.what == method).measure(lambda note: None)

    return Point(about, measure)
