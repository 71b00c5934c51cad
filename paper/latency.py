"""Latency: a worker's local step at every size, beside the whole model and the ideal by FLOPs."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from twistlm import config
from twistlm.config import Setting
from twistlm.lab.bench.train import FULL, measure_worker
from twistlm.model import huggingface
from twistlm.transport.ranks import Cluster

from . import paper
from .lab import Lab, Point
from .page import draw
from .page.section import Claim, Figure, Section, Table
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
        "experiment": "latency",
        "scale": lab.name,
        "setting": setting,
        "k": k,
        "ratio": lab.scale.ratio(k),
        "batch": t.batch,
        "seq_len": cfg.data.seq_len,
        "interval": t.interval,
        "n_workers": t.n_workers,
        "moments": t.moments,
        "model": {"type": cfg.model.type, **cfg.model.config},
    }

    def measure() -> dict[str, Any]:
        lab.close()
        template = huggingface.load(replace(cfg.model, weights="random"), cfg.run.seed)
        cluster = Cluster("local", t.n_workers, "physical", cfg.run.device)
        ratio = FULL if k == N else lab.scale.ratio(k)
        return asdict(measure_worker(template, cfg, cluster, setting, ratio, lab.scale.bench_steps))

    return Point(about, measure)


def section(points: list[dict[str, Any]]) -> Section:
    """Bars of ms per step for every setting and size, with the ideal by FLOPs across each."""
    whole = next((p["result"] for p in points if p["config"]["k"] == N), None)
    groups: dict[str, dict[str, float]] = {}
    ideal: dict[str, dict[str, float]] = {}
    rows = []
    for point in sorted(points, key=lambda p: (-p["config"]["k"], p["config"]["setting"])):
        config, result = point["config"], point["result"]
        size = "whole" if config["k"] == N else f"{config['k']}/{N}"
        name = "data parallel" if config["k"] == N else config["setting"]
        groups.setdefault(size, {})[name] = result["ms"]
        goal = whole["ms"] * result["flops"] / whole["flops"] if whole else None
        if goal is not None and config["k"] < N:
            ideal.setdefault(size, {})[name] = goal
        known = paper.LATENCY.get(config["setting"]) if config["k"] == 4 else None
        rows.append(
            (
                size,
                config["setting"] if config["k"] < N else "",
                f"{result['ms']:.2f}",
                "" if whole is None else f"{whole['ms'] / result['ms']:.2f}x",
                "" if goal is None or whole is None else f"{whole['ms'] / goal:.2f}x",
                "" if known is None else f"{paper.LATENCY['whole'] / known:.2f}x",
                f"{result['tokens_per_s']:,.0f}",
            )
        )
    head = ("blocks", "setting", "ms per step", "faster", "ideal by FLOPs", "the paper", "tokens/s")
    config = points[0]["config"]
    speedups = _speedups(points, whole)
    fastest = max(speedups, key=speedups.__getitem__) if speedups else None
    reading = (
        ""
        if fastest is None
        else f"The fastest, {fastest}, is {speedups[fastest]:.2f} times as fast as the whole model."
    )
    figure = Figure(
        "latency",
        "Milliseconds of a local step",
        reading,
        {"ms": groups, "ideal": ideal},
        lambda axes: draw.bars(axes, groups, y="ms per step", ideal=ideal),
        height=3.4,
    )
    what = (
        f"A worker's local step, optimizer included: batch {config['batch']} of {config['seq_len']} tokens, "
        "random weights and tokens, median of repeats. The paper: ms per batch on a P100, 385 whole."
    )
    claims = []
    if whole and (mine := {s: v for s, v in speedups.items() if s.startswith(f"4/{N}")}):
        order = sorted(mine, key=mine.__getitem__, reverse=True)
        claims.append(
            Claim(
                "4/12 blocks: both is fastest (1.46x), then attn (1.21x), then ffn (1.15x)",
                [name.split()[1] for name in order] == ["both", "attn", "ffn"],
                ", ".join(f"{name} {mine[name]:.2f}x" for name in order),
            )
        )
    return Section(
        "latency",
        "Latency of a local step",
        what,
        (Table(head, tuple(rows), names=2),),
        (figure,),
        tuple(claims),
    )


def _speedups(points: list[dict[str, Any]], whole: dict[str, Any] | None) -> dict[str, float]:
    return {
        f"{p['config']['k']}/{N} {p['config']['setting']}": whole["ms"] / p["result"]["ms"]
        for p in points
        if whole and p["config"]["k"] < N
    }
