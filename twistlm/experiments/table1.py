"""Table 1: perplexity by setting and size, for every parent's random subnets and every pruner."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from ..compare.cells import Asked, Cell, Grid
from ..compare.rivals import Rival, weights_sha256
from ..compare.run import DEFAULT
from ..config import Setting
from ..evaluate import Evaluator
from ..parent import Parent
from ..prune import calibrate
from ..prune.write import STRUCTURED
from ..report import draw, paper
from ..report.section import Claim, Figure, Section, Table, lowest, number, spread
from .lab import Lab, Point
from .scales import DENSE, DROPOUT, TWIST, N, Recipe, only
from .subnets import subnets


def points(lab: Lab) -> list[Point]:
    """Random extraction (SE) from every parent, whole models first; then the pruners on data parallel."""
    scale = lab.scale
    extracted = [
        _extracted(lab, recipe, setting, k)
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


def _extracted(lab: Lab, recipe: Recipe | None, setting: Setting, k: int) -> Point:
    """Random tickets: a cell of `twistlm compare` where its one ratio fits all kinds of layer."""
    scale = lab.scale
    if scale.n_attn != N:
        return subnets(lab, "table1", recipe, setting, k, scale.n_subnets, scale.tokens)
    what, n = ("random", scale.n_subnets) if k < N else ("whole", 1)
    about = lab.about(
        "table1", recipe, setting=setting, k=k, ratio=scale.ratio(k), n=n, tokens=scale.tokens,
        seed=lab.base.run.seed,
    )  # fmt: skip
    return Point(about, partial(_cell, lab, recipe, what, setting, k))


def _pruned(lab: Lab, method: str, setting: Setting, k: int) -> Point:
    """A cell of `twistlm compare`: the data-parallel parent, pruned after training."""
    scale = lab.scale
    about = lab.about(
        "table1", DENSE, method=method, setting=setting, k=k, ratio=f"{k}/{N}", tokens=scale.tokens,
        n_calibration=scale.n_calibration, seed=lab.base.run.seed,
    )  # fmt: skip
    return Point(about, partial(_cell, lab, DENSE, method, setting, k))


def _cell(lab: Lab, recipe: Recipe | None, what: str, setting: Setting, k: int) -> dict[str, Any]:
    """Measured, or found, among the cells of `twistlm compare -o FOLDER/compare`."""
    folder, whole = lab.folder / "compare" / "points", what == "whole"
    place = (what, None, None) if whole else (what, setting, f"{k}/{N}")
    cells = lab.beside(recipe, partial(_cells, lab, recipe, folder))
    return cells[place].fill(folder, lambda note: None)


def _cells(
    lab: Lab, recipe: Recipe | None, folder: Path, parent: Parent, ready: Evaluator
) -> dict[tuple[str, str | None, str | None], Cell]:
    """Everything that `compare` could ask of one parent, by its place."""
    scale, seed = lab.scale, lab.base.run.seed
    ids = calibrate.windows(parent, None, scale.n_calibration, seed)[1]
    ratios = tuple(f"{k}/{N}" for k in scale.table1)
    n = scale.n_subnets if scale.n_attn == N else 0
    asked = Asked(
        scale.settings, ratios, DEFAULT, ("dense",), (), n, seed, lab.text(ready), ids
    )  # fmt: skip
    method = recipe.method if recipe else "dense"
    rival = Rival(lab.out(recipe).name, method, parent, weights_sha256(parent), scale.settings)
    cells = Grid([rival], asked, folder).cells()
    return {(cell.what, cell.setting, cell.ratio): cell for cell in cells}


# slug or method -> (what the table calls it, the paper's name for its column)
NAMES = {
    "sparsegpt": ("SparseGPT", "sparsegpt"),
    "wanda": ("Wanda", "wanda"),
    "zpruner": ("Z-Pruner", "zpruner"),
    "zpruner-datafree": ("Z-Pruner, no data", ""),
    "magnitude": ("magnitude", ""),
    "block:fisher": ("blocks by Fisher", "block"),
    "block:mask-fisher": ("blocks by mask Fisher", ""),
    "block:taylor": ("blocks by Taylor", ""),
    "block:magnitude": ("blocks by magnitude", ""),
}
EXTRACTED = "random blocks of "  # before a parent's name
Rows = dict[str, dict[int, dict[str, Any]]]  # name of a row -> K -> result


def section(points: list[dict[str, Any]]) -> Section:
    """A table and a figure per setting, the paper's numbers below ours."""
    tables, figures, claims, headlines = [], [], [], []
    for setting in dict.fromkeys(p["config"]["setting"] for p in points):
        rows, theirs = _rows([p for p in points if p["config"]["setting"] == setting])
        tables.append(_table(setting, rows, theirs))
        figures.append(_figure(setting, rows))
        claims += _claims(setting, rows)
        headlines += _headlines(setting, rows)
    what = (
        "Random blocks: the mean of random subnets, taken as they are. The other rows prune the "
        "data-parallel parent after training: single weights (zeros that need sparse kernels to be "
        f"faster) or whole blocks. Small print: the paper's numbers ({paper.SETUP})."
    )
    return Section(
        "table1", "Table 1: perplexity by size", what, tuple(tables), tuple(figures), tuple(claims),
        tuple(headlines), lead=True,
    )  # fmt: skip


def _rows(points: list[dict[str, Any]]) -> tuple[Rows, dict[str, str]]:
    """Results by row, and the paper's column of each row that has one."""
    rows: Rows = {}
    theirs = {}
    for point in points:
        config = point["config"]
        if "method" in config:
            name, column = NAMES.get(config["method"], (config["method"], ""))
        else:
            name, column = f"{EXTRACTED}{config['parent']}", ""
            plain = config["slug"].removesuffix(f"-{config['setting']}")
            column = {"dense": "dense", "twist-6": "twist-6"}.get(plain, "")
        theirs[name] = column
        rows.setdefault(name, {})[config["k"]] = point["result"]
    known = [name for name, _ in NAMES.values()]  # pruners first, in the paper's order
    order = sorted(rows, key=lambda name: known.index(name) if name in known else len(known))
    return {name: rows[name] for name in order}, theirs


def _table(setting: str, rows: Rows, theirs: dict[str, str]) -> Table:
    sizes = sorted({k for results in rows.values() for k in results}, reverse=True)
    ours = [[r[k]["mean"] if k in r else None for k in sizes] for r in rows.values()]
    best = lowest(ours)
    cells: list[tuple[str, ...]] = []
    small, marks = set(), set()
    for i, (name, results) in enumerate(rows.items()):
        marks |= {(len(cells), j + 1) for row, j in best if row == i}
        cells.append((name, *(spread(results[k]) if k in results else "" for k in sizes)))
        if column := theirs[name]:
            small.add(len(cells))
            known = paper.TABLE1[setting]
            beside = (number(known[k][column]) if k in known else "" for k in sizes)
            cells.append(("the paper", *beside))
    head = (setting, *("whole" if k == N else f"{k}/{N}" for k in sizes))
    return Table(head, tuple(cells), frozenset(marks), small=frozenset(small))


def _figure(setting: str, rows: Rows) -> Figure:
    """Random extraction from every parent over the size, with the best pruner at each size."""
    curves = {n.removeprefix(EXTRACTED): r for n, r in rows.items() if n.startswith(EXTRACTED)}
    means = {label: {k: r["mean"] for k, r in results.items()} for label, results in curves.items()}
    sds = {
        label: {k: r["sd"] or 0.0 for k, r in results.items()} for label, results in curves.items()
    }
    pruners = [results for name, results in rows.items() if not name.startswith(EXTRACTED)]
    if pruners:
        sizes = {k for results in pruners for k in results}
        means["best pruner"] = {
            k: min(results[k]["mean"] for results in pruners if k in results) for k in sizes
        }
    smallest = min(k for values in means.values() for k in values)
    there = {label: values[smallest] for label, values in means.items() if smallest in values}
    low, high = min(there, key=there.__getitem__), max(there, key=there.__getitem__)
    reading = (
        f"At {smallest}/{N} blocks {low} is lowest with {number(there[low])}, {high} highest with "
        f"{number(there[high])}."
    )
    return Figure(
        f"table1-{setting}", f"Perplexity of random subnets over their size, {setting}", reading, means,
        lambda axes: draw.lines(
            axes, means, sd=sds, x="blocks kept, of 12 (12: the whole model)", y="perplexity", log=True,
            dashed=("best pruner",),
        ),
        height=3.6,
    )  # fmt: skip


def _headlines(setting: str, rows: Rows) -> list[str]:
    """Who wins at each size, and what random blocks of the data-parallel parent give there."""
    if setting != "both":
        return []
    found = []
    for k in (8, 6, 4, 3):
        there = {n.removeprefix(EXTRACTED): r[k]["mean"] for n, r in rows.items() if k in r}
        if len(there) < 2:
            continue
        first, second = sorted(there, key=there.__getitem__)[:2]
        line = f"{k}/{N} of the blocks: {first} wins with {number(there[first])}, then {second} with {number(there[second])}"
        if DENSE.label in there and DENSE.label not in (first, second):
            line += f"; random blocks of a data-parallel model: {number(there[DENSE.label])}"
        found.append(f"{line}.")
    whole = {n.removeprefix(EXTRACTED): r[N]["mean"] for n, r in rows.items() if N in r}
    if len(whole) > 1:
        order = sorted(whole, key=whole.__getitem__)
        found.append(f"Whole models: {', '.join(f'{n} {number(whole[n])}' for n in order[:3])}.")
    return found


def _claims(setting: str, rows: Rows) -> list[Claim]:
    dense = rows.get(f"{EXTRACTED}{DENSE.label}", {})
    twist = rows.get(f"{EXTRACTED}{TWIST.label}", {})
    sizes = sorted(k for k in set(dense) & set(twist) if k < N)
    if not sizes:
        return []
    beats = [k for k in sizes if twist[k]["mean"] < dense[k]["mean"]]
    claims = [
        Claim(
            f"{setting}: TwIST's random subnets beat data parallel's at every size",
            beats == sizes,
            ", ".join(
                f"{k}/{N}: {number(twist[k]['mean'])} against {number(dense[k]['mean'])}" for k in sizes
            ),
        ),
        _flat(setting, dense, twist, sizes),
    ]  # fmt: skip
    gpt = rows.get("SparseGPT", {})
    if shared := [k for k in sizes if k in gpt]:
        won = [k for k in shared if twist[k]["mean"] < gpt[k]["mean"]]
        lean, wide = [k for k in shared if k <= 4], [k for k in shared if k >= 6]
        claims.append(Claim(
            f"{setting}: SparseGPT is ahead at 6/12 and above, TwIST at 4/12 and below (crossover)",
            set(won) == set(lean) and bool(lean) and bool(wide) if lean or wide else None,
            f"TwIST is ahead at {', '.join(f'{k}/{N}' for k in won) or 'no size'}: "
            + ", ".join(f"{k}/{N}: {number(twist[k]['mean'])} against {number(gpt[k]['mean'])}" for k in shared),
        ))  # fmt: skip
    return claims + _ours(setting, rows, dense, twist, sizes)


def _flat(setting: str, dense: dict, twist: dict, sizes: list[int]) -> Claim:
    low, high = sizes[0], sizes[-1]
    growth = [r[low]["mean"] / r[high]["mean"] for r in (twist, dense)]
    return Claim(
        f"{setting}: TwIST's curve over the size is flatter than data parallel's",
        growth[0] < growth[1],
        f"from {high}/{N} to {low}/{N} perplexity grows {growth[0]:.2f} times, data parallel's "
        f"{growth[1]:.2f} times",
    )


def _ours(setting: str, rows: Rows, dense: dict, twist: dict, sizes: list[int]) -> list[Claim]:
    """What the paper does not ask: the whole model, and the control that shares TwIST's idea."""
    claims = []
    if N in dense and N in twist:
        claims.append(Claim(
            f"{setting}: the whole TwIST model is as good as the whole data-parallel one",
            twist[N]["mean"] <= dense[N]["mean"],
            f"{number(twist[N]['mean'])} against {number(dense[N]['mean'])}", "ours",
        ))  # fmt: skip
    control = rows.get(f"{EXTRACTED}{DROPOUT.label}", {})
    versions = {n: r for n, r in rows.items() if n.startswith(f"{EXTRACTED}TwIST")}
    if shared := [k for k in sizes if k in control]:
        best = {k: min((r[k]["mean"], n) for n, r in versions.items() if k in r) for k in shared}
        claims.append(Claim(
            f"{setting}: TwIST (its best version) beats structured dropout at every size",
            all(best[k][0] < control[k]["mean"] for k in shared),
            "; ".join(
                f"{k}/{N}: {number(best[k][0])} ({best[k][1].removeprefix(EXTRACTED)}) against "
                f"{number(control[k]['mean'])}" for k in shared
            ), "ours",
        ))  # fmt: skip
    return claims
