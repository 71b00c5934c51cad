"""Latency: a worker's local step at every size, beside the whole model and the ideal by FLOPs."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from .. import config, models
from ..bench import train as benches
from ..cluster import Cluster
from ..config import Setting
from .lab import Lab, Point
from .scales import N

SETTINGS: tuple[Setting, ...] = ("both", "attn", "ffn")


def points(lab: Lab) -> list[Point]:
    """The whole model once, then every size of every setting."""
    sizes = lab.scale.bench_widths
    return [_point(lab, "both", N), *(_point(lab, s, k) for s in SETTINGS for k in sizes)]


def _point(lab: Lab, setting: Setting, k: int) -> Point:
    cfg = config.override(lab.base, lab.scale.bench)
    t = cfg.train
    about = {
        "experiment": "latency", "scale": lab.name, "setting": setting, "k": k,
        "ratio": lab.scale.ratio(k), "batch": t.batch, "seq_len": cfg.data.seq_len,
        "interval": t.interval, "n_workers": t.n_workers, "moments": t.moments,
        "model": {"type": cfg.model.type, **cfg.model.config},
    }  # fmt: skip

    def measure() -> dict[str, Any]:
        lab.close()
        template = models.load(replace(cfg.model, weights="random"), cfg.run.seed)
        cluster = Cluster("local", t.n_workers, "physical", cfg.run.device)
        ratio = benches.FULL if k == N else lab.scale.ratio(k)
        return asdict(
            benches.measure(template, cfg, cluster, setting, ratio, lab.scale.bench_steps)
        )

    return Point(about, measure)
