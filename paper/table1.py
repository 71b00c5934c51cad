"""Table 1: perplexity by setting and size, for every parent's random subnets and every pruner."""

from __future__ import annotations

from functools import partial
from typing import Any

from twistlm.baselines import COMPARED, STRUCTURED
from twistlm.config import Setting
from twistlm.lab.compare.cells import Asked, Cell, Grid
from twistlm.lab.compare.rivals import Rival
from twistlm.lab.compare.table import unless_blank
from twistlm.model import huggingface
from twistlm.tickets.calibration import calibrate
from twistlm.tickets.ticket_scale import choice_text

from . import paper, ranking
from .lab import Lab, Point
from .page import draw
from .page.section import Figure, Section, Table, lowest, number, spread
from .ranking import (
    EXTRACTED,
    NESTED,
    TRIED,
    Rows,
    Sample,
    is_chosen,
    is_zeros,
    scales_of,
    subnets,
)
from .scales import DENSE, N, Recipe, only, trained_at

BEST_ZEROS, BEST_BLOCKS = "best zeros", "best chosen blocks"  # of the pruners, in a figure


def points(lab: Lab) -> list[Point]:
    """Random extraction (SE) from every parent, whole models first; then the pruners on data parallel.

    The paper's column of parents that were trained at the size they are extracted at is a row of ours.
    """
    scale = lab.scale
    extracted = [
        _extracted(lab, recipe, setting, k)
        for setting in scale.settings
        for recipe in (None, *only(setting))
        for k in (N, *scale.table1)
    ]
    extracted += [
        _extracted(lab, trained_at(k, setting), setting, k)
        for setting in scale.settings
        for k in scale.table1
        if trained_at(k, setting) not in only(setting)
    ]
    extracted += [
        ranking.nested(lab, recipe, Sample(setting, k, 1, scale.tokens))
        for setting in scale.settings
        for recipe in only(setting)
        for k in scale.table1
        if recipe.fresh  # others have no order of their own
    ]
    pruned = [
        _pruned(lab, method, setting, k)
        for setting in scale.settings
        for k in scale.table1
        for method in COMPARED
        # whole blocks need a whole number of them in every layer
        if not method.startswith(STRUCTURED) or k * scale.n_attn % N == 0
    ]
    return extracted + pruned


def _extracted(lab: Lab, recipe: Recipe | None, setting: Setting, k: int) -> Point:
    """Random tickets: a cell of `twistlm compare` where its one ratio fits all kinds of layer."""
    scale = lab.scale
    if scale.n_attn != N:
        sample = Sample(setting, k, scale.n_subnets, scale.tokens)
        return subnets(lab, "table1", recipe, sample)
    what, n = ("random", scale.n_subnets) if k < N else ("whole", 1)
    about = lab.about(
        "table1",
        recipe,
        setting=setting,
        k=k,
        ratio=scale.ratio(k),
        n=n,
        tokens=scale.tokens,
        seed=lab.base.run.seed,
        **({"treatment": TRIED} if k < N else {}),
    )
    return Point(about, partial(_cell, lab, recipe, what, setting, k))


def _pruned(lab: Lab, method: str, setting: Setting, k: int) -> Point:
    """A cell of `twistlm compare`: the data-parallel parent, pruned after training."""
    scale = lab.scale
    about = lab.about(
        "table1",
        DENSE,
        method=method,
        setting=setting,
        k=k,
        ratio=f"{k}/{N}",
        tokens=scale.tokens,
        n_calibration=scale.n_calibration,
        seed=lab.base.run.seed,
        **({"treatment": TRIED} if method.startswith(STRUCTURED) else {}),
    )
    return Point(about, partial(_cell, lab, DENSE, method, setting, k))


def _cell(lab: Lab, recipe: Recipe | None, what: str, setting: Setting, k: int) -> dict[str, Any]:
    """Measured, or found, among the cells of `twistlm compare -o LAB`."""
    place = (what, None, None) if what == "whole" else (what, setting, f"{k}/{N}")
    cells = lab.once(recipe, "cells of compare", partial(_cells, lab, recipe))
    return cells[place].fill(lab.points, lambda note: None)


def _cells(lab: Lab, recipe: Recipe | None) -> dict[tuple[str, str | None, str | None], Cell]:
    """Everything that `compare` could ask of one parent, by its place."""
    scale, seed = lab.scale, lab.base.run.seed
    parent, ready = lab.open(recipe, "both")
    ids = calibrate(parent, None, scale.n_calibration, seed).ids
    ratios = tuple(f"{k}/{N}" for k in scale.table1)
    n = scale.n_subnets if scale.n_attn == N else 0
    asked = Asked(
        settings=scale.settings,
        ratios=ratios,
        methods=COMPARED,
        on=("dense",),
        repairs=(),
        n=n,
        seed=seed,
        text=ready.text,
        choice=choice_text(ready.text, parent.cfg.data),
        ids=ids,
    )
    method = recipe.method if recipe else "dense"
    rival = Rival(
        lab.out(recipe).name,
        method,
        parent,
        huggingface.weights_sha256(parent.template),
        scale.settings,
    )
    cells = Grid([rival], asked, lab.points).cells()
    return {(cell.what, cell.setting, cell.ratio): cell for cell in cells}


def section(points: list[dict[str, Any]]) -> Section:
    """A table and a figure per setting, the paper's numbers below ours."""
    tables, figures, claims, headlines = [], [], [], []
    for setting in dict.fromkeys(p["config"]["setting"] for p in points):
        rows, theirs = ranking.rows_of([p for p in points if p["config"]["setting"] == setting])
        tables.append(_table(setting, rows, theirs))
        figures.append(_figure(setting, rows))
        claims += ranking.claims(setting, rows)
        if setting == "both":
            headlines += ranking.headlines(rows)
    what = (
        "Random blocks: the mean of random subnets, taken as they are; nested blocks: the one ticket of a parent's "
        "own order. The other rows prune the "
        "data-parallel parent after training: single weights (zeros, which save neither bytes nor time without "
        "sparse kernels) or whole blocks. Scale: what a ticket's layers are multiplied by, with `+ mean` where biases "
        "make up for absent blocks: the best of some for each parent and size, chosen on other text. Bold: the lowest of the zeros, and the lowest of all that is really smaller."
    )
    if any(table.small for table in tables):
        what += f" Small print: the paper's numbers ({paper.SETUP})."
    return Section(
        "table1",
        "Table 1: perplexity by size",
        what,
        tuple(tables),
        tuple(figures),
        tuple(claims),
        tuple(headlines),
        lead=True,
    )


def _table(setting: str, rows: Rows, theirs: dict[str, str]) -> Table:
    sizes = sorted({k for results in rows.values() for k in results}, reverse=True)
    best: set[tuple[int, int]] = set()  # of either kind: they do not compete for the same use
    for kind in (True, False):
        best |= lowest(
            [
                [r[k]["mean"] if k in r and is_zeros(name) == kind else None for k in sizes]
                for name, r in rows.items()
            ]
        )
    cells: list[tuple[str, ...]] = []
    small, marks = set(), set()
    for i, (name, results) in enumerate(rows.items()):
        marks |= {(len(cells), j + 1) for row, j in best if row == i}
        means = (spread(results[k]) if k in results else "" for k in sizes)
        cells.append((name, *means, scales_of(results, sizes)))
        if column := theirs[name]:
            small.add(len(cells))
            known = paper.TABLE1[setting]
            beside = (number(known[k][column]) if k in known else "" for k in sizes)
            cells.append(("the paper", *beside, ""))
    head = (setting, *("whole" if k == N else f"{k}/{N}" for k in sizes), "scale")
    head, *cells = unless_blank([head, *cells], "scale")
    return Table(head, tuple(cells), frozenset(marks), small=frozenset(small))


def _figure(setting: str, rows: Rows) -> Figure:
    """Random extraction from every parent over the size, with the best pruners at each size."""
    curves = {n.removeprefix(EXTRACTED): r for n, r in rows.items() if n.startswith(EXTRACTED)}
    curves |= {n.removeprefix(NESTED) + ", nested": r for n, r in rows.items() if NESTED in n}
    means = {label: {k: r["mean"] for k, r in results.items()} for label, results in curves.items()}
    sds = {
        label: {k: r["sd"] or 0.0 for k, r in results.items()} for label, results in curves.items()
    }
    for label, kind in ((BEST_BLOCKS, False), (BEST_ZEROS, True)):
        pruners = [r for name, r in rows.items() if (is_zeros if kind else is_chosen)(name)]
        if sizes := {k for results in pruners for k in results}:
            means[label] = {k: min(r[k]["mean"] for r in pruners if k in r) for k in sizes}
    smallest = min(k for values in means.values() for k in values)
    there = {label: values[smallest] for label, values in means.items() if smallest in values}
    low, high = min(there, key=there.__getitem__), max(there, key=there.__getitem__)
    reading = (
        f"At {smallest}/{N} blocks {low} is lowest with {number(there[low])}, {high} highest with "
        f"{number(there[high])}."
    )
    x = "blocks kept, of 12 (12: the whole model)"
    style = draw.LineStyle(sd=sds, log=True, dashed=(BEST_BLOCKS, BEST_ZEROS))
    return Figure(
        f"table1-{setting}",
        f"Perplexity of random subnets over their size, {setting}",
        reading,
        means,
        lambda axes: draw.lines(axes, means, x=x, y="perplexity", style=style),
        height=3.6,
    )
