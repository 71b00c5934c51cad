"""Table 2: memory, bytes and wall clock of a worker, measured and by the paper's formula."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from .. import config
from ..plan import make
from . import latency
from .lab import Lab, Point


def points(lab: Lab) -> list[Point]:
    """Latency's own points (time, memory and counted bytes of a round), and the arithmetic of the plan."""
    return [*latency.points(lab), _plan(lab)]


def _plan(lab: Lab) -> Point:
    """Sizes of the scale's own model; rounds, epochs and sequences of the paper."""
    paper = config.load("paper")
    cfg = config.override(
        paper,
        [f"blocks.n_ffn={lab.base.blocks.n_ffn}", f"blocks.attn_by={lab.base.blocks.attn_by}"],
    )
    about = {
        "experiment": "table2", "scale": lab.name, "n_workers": paper.train.n_workers,
        "epochs": paper.train.epochs, "n_sequences": paper.data.planned_sequences,
    }  # fmt: skip

    def measure() -> dict[str, Any]:
        made = make(cfg)
        return {
            "n_params": made.n_params,
            "paper_rounds": made.paper_rounds,
            "true_rounds": made.true_rounds,
            "rows": [asdict(row) for row in made.rows],
        }

    return Point(about, measure)
