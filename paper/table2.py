"""Table 2: memory, bytes and wall clock of a worker, measured and by the paper's formula."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from . import latency, paper
from .lab import Lab, Point
from .page.section import Claim, Section, Table, number
from .scales import N

STATE = 16  # bytes per parameter: weight, gradient and two moments in float32


def points(lab: Lab) -> list[Point]:
    """Latency's own points (time, memory and counted bytes of a round), and the arithmetic of the plan."""
    return [*latency.points(lab), _plan(lab)]


def _plan(lab: Lab) -> Point:
    """The paper's own set-up, counted: the same at every scale."""
    cfg = paper.config()
    about = {
        "experiment": "table2",
        "scale": lab.name,
        "n_workers": cfg.train.n_workers,
        "epochs": cfg.train.epochs,
        "n_sequences": cfg.data.planned_sequences,
    }

    def measure() -> dict[str, Any]:
        made = paper.plan()
        return {
            "n_params": made.n_params,
            "paper_rounds": made.paper_rounds,
            "true_rounds": made.true_rounds,
            "rows": [asdict(row) for row in made.rows],
        }

    return Point(about, measure)


def section(points: list[dict[str, Any]]) -> Section | None:
    """Per setting and size: memory, bytes and wall clock, ours measured, formula, and the paper's."""
    plans = [p["result"] for p in points if p["config"]["experiment"] == "table2"]
    if not plans:
        return None
    plan = plans[-1]
    measured = {
        (p["config"]["setting"], p["config"]["k"]): p["result"]
        for p in points
        if p["config"]["experiment"] == "latency"
    }
    rows, exact, off = [], [], []
    for row in plan["rows"]:
        setting, k = (
            ("both" if row["setting"] == "full" else row["setting"]),
            int(row["ratio"].split("/")[0]),
        )
        found = measured.get((setting, k))
        gb, tb, clock = paper.TABLE2.get(setting, {}).get(k, (None, None, ""))
        formula = row["paper_bytes"] / 1e12
        if tb is not None:
            exact.append(abs(formula - tb))
            off.append(STATE * row["n_params"] / 1e9 / gb - 1)
        rows.append(
            (
                "whole" if k == N else setting,
                row["ratio"],
                f"{row['n_params'] / 1e6:.1f}M",
                "" if found is None else number(found["state_bytes"] / 1e9, 3),
                number(gb),
                number(formula),
                number(tb),
                number(row["carried_bytes"] / 1e12),
                "" if found is None else number(found["round_bytes"] / 1e6, 1),
                "" if found is None else _clock(found["round_ms"] / 1e3 * plan["true_rounds"]),
                clock,
            )
        )
    head = (
        "setting",
        "blocks",
        "parameters",
        "GB",
        "paper GB",
        "formula TB",
        "paper TB",
        "with moments, TB",
        "counted MB per round",
        "wall clock",
        "paper",
    )
    note = (
        "GB: what a worker holds between steps: weights and any bf16 copy, gradient, moments (the paper: GPU memory allocated; "
        f"{STATE} bytes per parameter are {min(off):.1%} to {max(off):.1%} more than it prints). "
        f"Formula: the paper's {plan['paper_rounds']:,} rounds, weights only. With moments: "
        f"{plan['true_rounds']:,} rounds of 15 local steps, what we really send. Counted: bytes down and up of a "
        "round of the measured model. Wall clock: a worker's measured round times these rounds, on its own device."
    )
    claim = Claim(
        "the communication column of Table 2 is params x 4 bytes x 2 directions x 4 workers x rounds",
        max(exact) < 0.0051,
        f"{len(exact)} entries, largest difference {max(exact):.4f} TB",
        "ours",
    )
    what = (
        "What a worker costs in memory, bytes and hours: three epochs of WikiText-103 with four workers, by the paper's "
        "formula and measured here (columns GB, MB and wall clock belong to the model of this scale)."
    )
    return Section(
        "table2",
        "Table 2: memory, bytes and wall clock",
        what,
        (Table(head, tuple(rows), note=note, names=2),),
        claims=(claim,),
    )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
