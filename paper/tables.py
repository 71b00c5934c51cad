"""Finished points as tables, figures and claims: one function for each experiment of the paper."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from twistlm.baselines import STRUCTURED
from twistlm.lab.compare.table import by_size
from twistlm.system.terminal import markdown_cell

from . import printed
from .scales import DENSE, DROPOUT, SCALES, TWIST, N

Points = list[dict[str, Any]]
Sizes = dict[int, dict[str, Any]]  # K of 12 blocks -> result
Means = dict[int, float]  # K of 12 blocks -> perplexity

# pruner -> (its row in Table 1, the column of the paper's Table 1)
PRUNERS = {
    "sparsegpt": ("SparseGPT", "sparsegpt"),
    "wanda": ("Wanda", "wanda"),
    "zpruner": ("Z-Pruner", "zpruner"),
    "zpruner-datafree": ("Z-Pruner, no data", ""),
    "zpruner-rows": ("Z-Pruner, by rows", ""),
    "zpruner-repair": ("Z-Pruner, repaired", ""),
    "magnitude": ("magnitude", ""),
    "block:fisher": ("blocks by Fisher", "block"),
    "block:mask-fisher": ("blocks by mask Fisher", ""),
    "block:taylor": ("blocks by Taylor", ""),
    "block:magnitude": ("blocks by magnitude", ""),
}
ZEROS = {name for method, (name, _) in PRUNERS.items() if not method.startswith(STRUCTURED)}
RANDOM, NESTED = "random blocks of ", "nested blocks of "  # before a parent's name
AT_SIZE = f"{RANDOM}TwIST trained at that size"  # one parent for each size, as in the paper
CLOSE = 0.05  # relative error of a formula, and growth of a perplexity, that still count as none
SHARP = 1.5  # ratio of perplexities that is a sharp degradation


@dataclass(frozen=True)
class Table:
    """Cells are text; `title` says what they are."""

    name: str
    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        ruled = [self.head, ("---",) * len(self.head), *self.rows]
        return "\n".join(f"| {' | '.join(map(markdown_cell, row))} |" for row in ruled)


@dataclass(frozen=True)
class Figure:
    """What `figures.save` draws: `kind` names the drawing, `data` is by group or line, then x."""

    name: str
    title: str
    kind: str
    data: dict[str, dict[Any, Any]]
    x: str = ""
    y: str = "perplexity"


@dataclass(frozen=True)
class Claim:
    """A statement of the paper (or ours), the measured numbers, and whether they bear it out."""

    claim: str
    numbers: str
    holds: bool
    whose: str = "paper"


@dataclass
class Section:
    """All that is shown of one experiment."""

    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)


def number(value: float | None, digits: int = 2) -> str:
    """A perplexity or a like number; none of a thousand or more needs decimals."""
    if value is None:
        return ""
    return f"{value:,.{digits}f}" if abs(value) < 1000 else f"{value:,.0f}"


def count(n: float) -> str:
    """A number of tokens or parameters: `23,040`, `30.0M`, `1.2B`."""
    for unit, size in (("B", 1e9), ("M", 1e6)):
        if n >= size:
            return f"{n / size:,.1f}{unit}"
    return f"{n:,.0f}"


def spread(result: dict[str, Any]) -> str:
    """`mean ± sd`."""
    sd = result.get("sd")
    return number(result["mean"]) + ("" if sd is None else f" ± {number(sd)}")


def with_bold(rows: list[list[str]], values: list[list[float | None]], first: int = 1) -> None:
    """Mark the lowest value of every column, in place; `values` begin at column `first`."""
    for j in range(len(values[0]) if values else 0):
        there = [(row[j], i) for i, row in enumerate(values) if row[j] is not None]
        if len(there) > 1:
            i = min(there)[1]
            rows[i][first + j] = f"**{rows[i][first + j]}**"


def scales_of(results: Sizes, sizes: Iterable[int]) -> str:
    """The activation scales of a row's tickets."""
    chosen = (results[k].get("treatment", {}) for k in sizes if k in results and k < N)
    found = [scale.get("chosen", "") for scale in chosen]
    return by_size(found) if found else ""


def versus(ours: Means, other: Means, sizes: Iterable[int]) -> str:
    return ", ".join(f"{k}/{N}: {number(ours[k])} against {number(other[k])}" for k in sizes)


def of_setting(points: Points) -> Iterator[tuple[str, Points]]:
    for setting in dict.fromkeys(p["config"]["setting"] for p in points):
        yield setting, [p for p in points if p["config"]["setting"] == setting]


def by_parent(points: Points) -> dict[str, Sizes]:
    found: dict[str, Sizes] = {}
    for point in points:
        about = point["config"]
        found.setdefault(about["parent"], {})[about["k"]] = point["result"]
    return found


# ---------------------------------------------------------------- Table 1


def table1(points: Points) -> Section:
    """Perplexity by size: random and nested blocks of every parent, and the pruners."""
    shown = Section()
    for setting, mine in of_setting(points):
        rows, theirs = table1_rows(mine)
        shown.tables.append(_table1(setting, rows, theirs))
        means = {name: {k: r["mean"] for k, r in sizes.items()} for name, sizes in rows.items()}
        kept = {n: m for n, m in means.items() if n.startswith((RANDOM, NESTED))}
        kept["best chosen blocks"] = best_of(chosen_rows(means))
        kept["best zeros"] = best_of(m for n, m in means.items() if n in ZEROS)
        lines = {name: line for name, line in kept.items() if line}
        title = f"Perplexity over the size, {setting}"
        shown.figures.append(
            Figure(f"table1-{setting}", title, "log-lines", lines, "blocks kept of 12")
        )
        shown.claims += table1_claims(setting, means)
    return shown


def table1_rows(points: Points) -> tuple[dict[str, Sizes], dict[str, str]]:
    """Results by row, and the paper's column of each row that has one."""
    rows: dict[str, Sizes] = {}
    theirs: dict[str, str] = {}
    alike = all(SCALES[p["config"]["scale"]].n_attn == N for p in points)  # GPT-2, as in the paper

    def add(name: str, column: str, point: dict[str, Any]) -> None:
        theirs[name] = column if alike else ""
        rows.setdefault(name, {})[point["config"]["k"]] = point["result"]

    for point in points:
        about = point["config"]
        if "method" in about:
            name, column = PRUNERS.get(about["method"], (about["method"], ""))
            add(name, column, point)
        elif about.get("pick") == "nested":
            add(f"{NESTED}{about['parent']}", "", point)
        else:
            trained = about["slug"].removesuffix(f"-{about['setting']}")
            if trained == f"twist-{about['k']}":
                add(AT_SIZE, "twist", point)
                if trained != TWIST.slug:  # other widths stand in that row alone
                    continue
            column = {"dense": "dense", TWIST.slug: TWIST.slug}.get(trained, "")
            add(f"{RANDOM}{about['parent']}", column, point)
    if set(rows.get(AT_SIZE, ())) <= {*TWIST.widths}:  # nothing that the row of TWIST does not say
        rows.pop(AT_SIZE, None)
    known = [name for name, _ in PRUNERS.values()]  # pruners first, in the paper's order
    order = sorted(rows, key=lambda name: known.index(name) if name in known else len(known))
    return {name: rows[name] for name in order}, theirs


def _table1(setting: str, rows: dict[str, Sizes], theirs: dict[str, str]) -> Table:
    sizes = sorted({k for results in rows.values() for k in results}, reverse=True)
    cells = {
        name: [name, *(spread(r[k]) if k in r else "" for k in sizes), scales_of(r, sizes)]
        for name, r in rows.items()
    }
    for zeros in (True, False):  # zeros and really smaller models do not compete
        names = [name for name in rows if (name in ZEROS) == zeros]
        values = [[rows[n][k]["mean"] if k in rows[n] else None for k in sizes] for n in names]
        with_bold([cells[name] for name in names], values)
    lines: list[tuple[str, ...]] = []
    for name, row in cells.items():
        lines.append(tuple(row))
        if column := theirs[name]:
            known = printed.TABLE1[setting]
            beside = (number(known[k][column]) if k in known else "" for k in sizes)
            lines.append(("the paper", *beside, ""))
    head = (setting, *("whole" if k == N else f"{k}/{N}" for k in sizes), "scale")
    title = f"Table 1, {setting}: perplexity by size"
    return Table(f"table1-{setting}", title, head, tuple(lines))


def chosen_rows(means: dict[str, Means]) -> Iterator[Means]:
    """Rows whose blocks a score chose after training."""
    for name, row in means.items():
        if name not in ZEROS and not name.startswith((RANDOM, NESTED)):
            yield row


def best_of(rows: Iterable[Means]) -> Means:
    """The lowest perplexity at every size."""
    some = list(rows)
    sizes = sorted({k for row in some for k in row})
    return {k: min(row[k] for row in some if k in row) for k in sizes}


def table1_claims(setting: str, means: dict[str, Means]) -> Iterator[Claim]:
    dense, twist, dropout = (
        means.get(f"{RANDOM}{recipe.label}", {}) for recipe in (DENSE, TWIST, DROPOUT)
    )
    sizes = sorted(k for k in set(dense) & set(twist) if k < N)
    if not sizes:
        return

    def beats(claim: str, ours: Means, other: Means, whose: str = "ours") -> Iterator[Claim]:
        if shared := [k for k in sizes if k in ours and k in other]:
            won = all(ours[k] < other[k] for k in shared)
            yield Claim(f"{setting}: {claim}", versus(ours, other, shared), won, whose)

    yield from beats("TwIST's random blocks beat data parallel's", twist, dense, "paper")
    low, high = sizes[0], sizes[-1]
    growth = [row[low] / row[high] for row in (twist, dense)]
    said = f"{high}/{N} to {low}/{N}: {growth[0]:.2f} times against {growth[1]:.2f} times"
    says = f"{setting}: TwIST's curve over the size is flatter than data parallel's"
    yield Claim(says, said, growth[0] < growth[1])
    for name, mine in ((TWIST.label, twist), ("TwIST trained at that size", means.get(AT_SIZE))):
        other = means.get("SparseGPT", {})
        shared = sorted(k for k in set(mine or ()) & set(other) if k < N)
        lean, wide = [k for k in shared if k <= 4], [k for k in shared if k >= 6]
        if mine and lean and wide:
            won = [k for k in shared if mine[k] < other[k]]
            says = f"{setting}: SparseGPT is ahead at 6/12 and above, {name} at 4/12 and below"
            yield Claim(says, versus(mine, other, shared), won == lean)
    yield from beats(
        "TwIST's random blocks beat blocks of data parallel that a score chooses",
        twist,
        best_of(chosen_rows(means)),
    )
    if N in dense and N in twist:
        says = f"{setting}: the whole TwIST model is as good as the whole data-parallel one"
        yield Claim(says, versus(twist, dense, [N]), twist[N] <= dense[N], "ours")
    versions = (m for n, m in means.items() if n.startswith(f"{RANDOM}TwIST") and n != AT_SIZE)
    yield from beats(
        "TwIST (its best version) beats structured dropout", best_of(versions), dropout
    )


# ---------------------------------------------------------------- stability and robustness


def stability(points: Points) -> Section:
    """Mean and sd of the perplexity of random subnets, and their distributions."""
    shown, rows = Section(), []
    sizes = sorted({p["config"]["k"] for p in points})
    for setting, mine in of_setting(points):
        found = by_parent(mine)
        for parent, results in found.items():
            cells = (spread(results[k]) if k in results else "" for k in sizes)
            rows.append((setting, parent, *cells, scales_of(results, sizes)))
        groups = {
            f"{k}/{N}": {p: [math.log(v) for v in r[k]["values"]] for p, r in found.items()}
            for k in sizes
        }
        title = f"Loss of random subnets, {setting}"
        name = f"stability-{setting}"
        shown.figures.append(Figure(name, title, "violins", groups, y="loss (ln perplexity)"))
        shown.claims += stability_claims(setting, found)
    head = ("setting", "parent", *(f"{k}/{N}" for k in sizes), "scale")
    n = max(p["result"]["n"] for p in points)
    title = f"Stability: perplexity, mean ± sd over {n} random subnets"
    shown.tables.append(Table("stability", title, head, tuple(rows)))
    return shown


def stability_claims(setting: str, found: dict[str, Sizes]) -> Iterator[Claim]:
    twist, dense = (
        {k: r["sd"] for k, r in found.get(recipe.label, {}).items() if r["sd"]}
        for recipe in (TWIST, DENSE)
    )
    sizes = sorted(set(twist) & set(dense))
    if not sizes:
        return
    factors = [dense[k] / twist[k] for k in sizes]
    yield Claim(
        f"{setting}: TwIST's subnets vary less than data parallel's at every size",
        f"sd {min(factors):.1f} to {max(factors):.1f} times smaller",
        min(factors) > 1,
    )
    yield Claim(
        f"{setting}: data parallel's subnets vary more the smaller they are",
        ", ".join(f"{k}/{N}: sd {number(dense[k])}" for k in sizes),
        all(dense[a] >= dense[b] for a, b in pairwise(sizes)),
    )


def robustness(points: Points) -> Section:
    """Trained on X blocks (rows), evaluated on Y (columns)."""
    shown, lines = Section(), []
    columns = sorted({p["config"]["k"] for p in points})
    for setting, mine in of_setting(points):
        maps: dict[int, Means] = {}  # trained on -> evaluated on -> perplexity
        for point in sorted(mine, key=lambda p: p["config"]["widths"]):
            (x,) = point["config"]["widths"]
            maps.setdefault(x, {})[point["config"]["k"]] = point["result"]["mean"]
        values = [[row.get(k) for k in columns] for row in maps.values()]
        rows = [[setting, f"{x}/{N}", *map(number, v)] for x, v in zip(maps, values, strict=True)]
        with_bold(rows, values, first=2)
        lines += [tuple(row) for row in rows]
        data = {str(x): row for x, row in maps.items()}
        title = f"Trained on X (rows), evaluated on Y (columns), {setting}"
        shown.figures.append(
            Figure(f"robustness-{setting}", title, "heatmap", data, "evaluated on", "trained on")
        )
        shown.claims += robustness_claims(setting, maps)
    found = (p["result"].get("treatment", {}) for p in points if p["config"]["k"] < N)
    scales = Counter(scale.get("chosen", "as trained") for scale in found)
    told = ", ".join(f"{scale}: {n}" for scale, n in scales.most_common())
    head = ("setting", "trained on", *(f"{k}/{N}" for k in columns))
    title = f"Robustness: perplexity at sizes other than that of training (scales: {told})"
    shown.tables.append(Table("robustness", title, head, tuple(lines)))
    return shown


def robustness_claims(setting: str, maps: dict[int, Means]) -> Iterator[Claim]:
    """The paper's three; `maps` is trained on -> evaluated on -> perplexity."""
    wide, lean = 10, 4  # the paper's pair; a smaller map has its own widest and leanest
    if not {lean, wide} <= set(maps.get(wide, {})):
        wide = max((x for x in maps if x < N and x in maps[x]), default=0)
        lean = min(maps.get(wide, {0: 0.0}))
    if lean < wide:
        factor = maps[wide][lean] / maps[wide][wide]
        known = printed.ROBUSTNESS.get(setting, {})
        theirs = known[wide, lean] / known[wide, wide] if (wide, lean) in known else None
        yield Claim(
            f"{setting}, downward: trained on wide subnets, lean ones are {SHARP} times worse",
            f"{wide} to {lean}: {factor:.2f} times (the paper: {number(theirs) or 'no number'})",
            factor >= SHARP,
        )
    ups = [(r[y] / r[x], x, y) for x, r in maps.items() for y in r if x in r and y > x]
    if ups:
        factor, x, y = max(ups)
        yield Claim(
            f"{setting}, upward: trained on lean subnets, wider ones are at most {CLOSE:.0%} worse",
            f"worst, {x} to {y}: {factor:.2f} times",
            factor <= 1 + CLOSE,
        )
    full = [x for x in maps if len(maps[x]) == max(map(len, maps.values()))]
    if len(full) > 2 and min(full) <= 3 and max(full) >= 10:
        worst = {x: max(maps[x].values()) for x in sorted(full)}
        best = min(worst, key=worst.__getitem__)
        yield Claim(
            f"{setting}, sweet spot: a middle width in training has the lowest worst case",
            ", ".join(f"{x}: {number(v)}" for x, v in worst.items()) + f"; lowest at {best}",
            min(full) < best < max(full),
        )


# ---------------------------------------------------------------- lost nodes, activation shift


def nodeloss(points: Points) -> Section:
    """Perplexity after the worst loss of nodes, absolute and against the whole model."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for point in points:
        about = point["config"]
        case = f"{about['lost']} of {about['nodes']}"
        found.setdefault(about["parent"], {})[case] = point["result"]
    cases = list(dict.fromkeys(case for results in found.values() for case in results))
    rows, values = [], []
    for parent, results in found.items():
        whole = next(iter(results.values()))["full"]
        worst = [results[case]["worst"] if case in results else None for case in cases]
        values.append([whole, *worst])
        cells = ["" if w is None else f"{number(w)} ({w / whole:.2f}x)" for w in worst]
        chosen = [r.get("treatment", {}).get("chosen", "") for r in results.values()]
        rows.append([parent, number(whole), *cells, by_size(chosen)])
    with_bold(rows, values)
    head = ("parent", "none lost", *(f"{case} lost" for case in cases), "scale")
    title = "Lost nodes: perplexity after the worst such loss (times the whole model)"
    factors = {
        case: {p: r[case]["worst"] / r[case]["full"] for p, r in found.items() if case in r}
        for case in cases
    }
    shown = Section([Table("nodeloss", title, head, tuple(map(tuple, rows)))])
    shown.figures.append(Figure("nodeloss", title, "bars", factors, y="times worse than whole"))
    pairs = {
        case: (found[TWIST.label], found[DENSE.label])
        for case, found in factors.items()
        if {TWIST.label, DENSE.label} <= set(found)
    }
    if pairs:
        shown.claims.append(
            Claim(
                "a TwIST parent loses less by lost nodes than a data-parallel one",
                "; ".join(f"{c}: {t:.2f}x against {d:.2f}x" for c, (t, d) in pairs.items()),
                all(t < d for t, d in pairs.values()),
            )
        )
    return shown


def shift(points: Points) -> Section:
    """||y'|| / ||y|| of a layer with K of N blocks, against sqrt(K/N) and the exact formula."""
    shown, rows = Section(), []
    lines: dict[str, dict[str, dict[int, float]]] = {"attn": {}, "ffn": {}}
    for point in points:
        parent, found = point["config"]["parent"], point["result"]["rows"]
        kinds = {kind: [r for r in found if r["kind"] == kind] for kind in lines}
        errors = {
            formula: statistics.fmean(abs(r[formula] / r["measured"] - 1) for r in found)
            for formula in ("paper", "exact")
        }
        rho = (number(statistics.fmean(r["rho"] for r in mine)) for mine in kinds.values())
        rows.append((parent, *rho, *(f"{error:.1%}" for error in errors.values())))
        for kind, mine in kinds.items():
            for k in sorted({r["k"] for r in mine}):
                some = [r for r in mine if r["k"] == k]
                at = statistics.fmean(r["measured"] for r in some)
                lines[kind].setdefault(parent, {})[k] = at
                lines[kind].setdefault("sqrt(K/N)", {})[k] = some[0]["paper"]
        if parent in ("init", "start", DENSE.label, TWIST.label):
            when = "at initialisation" if parent == "init" else f"after training ({parent})"
            shown.claims.append(
                Claim(
                    f"a layer's norm shrinks by sqrt(K/N), {when}",
                    f"sqrt(K/N) is off by {errors['paper']:.1%} (holds: under {CLOSE:.0%})",
                    errors["paper"] < CLOSE,
                    "paper" if parent == "init" else "ours",
                )
            )
    head = ("model", "rho, attn", "rho, ffn", "error of sqrt(K/N)", "error of the exact formula")
    title = "Activation shift: mean of |formula / measured - 1| over layers and K"
    shown.tables.append(Table("shift", title, head, tuple(rows)))
    for kind, data in lines.items():
        title = f"||y'|| / ||y|| of {kind} layers, mean over layers"
        x, y = "blocks kept", "ratio of norms"
        shown.figures.append(Figure(f"shift-{kind}", title, "lines", data, x, y))
    return shown


# ---------------------------------------------------------------- what it costs


def table2(points: Points) -> Section:
    """Memory, bytes and wall clock of a worker: measured, by the formula, and as printed."""
    plans = [p["result"] for p in points if p["config"]["experiment"] == "table2"]
    if not plans:
        return Section()
    plan, rows, errors = plans[-1], [], []
    measured = {
        (p["config"]["setting"], p["config"]["k"]): p["result"]
        for p in points
        if p["config"]["experiment"] == "latency"
    }
    for row in plan["rows"]:
        setting = "both" if row["setting"] == "full" else row["setting"]
        k = int(row["ratio"].split("/")[0])
        gb, tb, clock = printed.TABLE2.get(setting, {}).get(k, (None, None, ""))
        if tb is not None:
            errors.append(abs(row["paper_bytes"] / 1e12 - tb))
        state = per_round = hours = ""
        if found := measured.get((setting, k)):
            state = number(found["state_bytes"] / 1e9, 3)
            per_round = number(found["round_bytes"] / 1e6, 1)
            hours = _clock(found["round_ms"] / 1e3 * plan["true_rounds"])
        rows.append(
            (
                "whole" if k == N else setting,
                row["ratio"],
                f"{row['n_params'] / 1e6:.1f}M",
                state,
                number(gb),
                number(row["paper_bytes"] / 1e12),
                number(tb),
                number(row["carried_bytes"] / 1e12),
                per_round,
                hours,
                clock,
            )
        )
    head = "setting, blocks, parameters, GB, paper GB, formula TB, paper TB, with moments TB, "
    head += "counted MB per round, wall clock, paper"
    title = f"Table 2: {plan['paper_rounds']:,} rounds by the paper's formula, "
    title += f"{plan['true_rounds']:,} with moments; GB: weights, gradient and moments of a worker"
    table = Table("table2", title, tuple(head.split(", ")), tuple(rows))
    claim = Claim(
        "Table 2's communication is params x 4 bytes x 2 directions x 4 workers x rounds",
        f"{len(errors)} entries, largest difference {max(errors):.4f} TB",
        max(errors) < 0.0051,
        "ours",
    )
    return Section([table], claims=[claim])


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def latency(points: Points) -> Section:
    """Milliseconds of a worker's local step, beside what FLOPs alone would give."""
    whole = next((p["result"] for p in points if p["config"]["k"] == N), None)
    bars: dict[str, dict[str, float]] = {}
    rows, faster = [], {}
    for point in sorted(points, key=lambda p: (-p["config"]["k"], p["config"]["setting"])):
        about, result = point["config"], point["result"]
        is_whole = about["k"] == N
        size, setting = ("whole", "") if is_whole else (f"{about['k']}/{N}", about["setting"])
        known = printed.LATENCY.get(setting) if about["k"] == 4 else None
        gain = ideal = None
        if whole:
            gain, ideal = whole["ms"] / result["ms"], whole["flops"] / result["flops"]
            bars.setdefault(size, {})[setting or "whole"] = gain
            if about["k"] == 4:
                faster[setting] = gain
        cells = (gain, ideal, printed.LATENCY["whole"] / known if known else None)
        times = ("" if x is None else f"{x:.2f}x" for x in cells)
        speed = f"{result['tokens_per_s']:,.0f}"
        rows.append((size, setting, f"{result['ms']:.2f}", *times, speed))
    head = ("blocks", "setting", "ms per step", "faster", "ideal by FLOPs", "the paper", "tokens/s")
    about = points[0]["config"]
    title = f"Latency of a local step, batch {about['batch']} of {about['seq_len']} tokens"
    shown = Section([Table("latency", title, head, tuple(rows))])
    shown.figures.append(Figure("latency", title, "bars", bars, y="times as fast as whole"))
    if faster:
        order = sorted(faster, key=faster.__getitem__, reverse=True)
        says = "4/12 blocks: both is fastest (1.46x), then attn (1.21x), then ffn (1.15x)"
        said = ", ".join(f"{name} {faster[name]:.2f}x" for name in order)
        shown.claims.append(Claim(says, said, order == ["both", "attn", "ffn"]))
    return shown


def memory(points: Points) -> Section:
    """What a subnet with half the blocks keeps of GPT-2 small to XL."""
    half = points[-1]["result"]["half"]
    kinds = list(dict.fromkeys(kind for shares in half.values() for kind in shares))
    rows = tuple(
        (name, *(f"{shares[kind]:.1%}" for kind in kinds)) for name, shares in half.items()
    )
    title = "Share of the parameters in a subnet with half the blocks"
    columns = {kind: [shares[kind] for shares in half.values()] for kind in kinds}
    claim = Claim(
        "the larger the model, the closer half the blocks come to 50% of its memory",
        "; ".join(f"{kind}: {', '.join(f'{s:.1%}' for s in v)}" for kind, v in columns.items()),
        all(a > b for shares in columns.values() for a, b in pairwise(shares)),
    )
    figure = Figure("memory", title, "bars", half, y="share of the whole model")
    return Section([Table("memory", title, ("model", *kinds), rows)], [figure], [claim])


def parents(points: Points) -> Section:
    """What every parent's training cost."""
    rows = []
    for point in points:
        about, result = point["config"], point["result"]
        rows.append(
            (
                about["parent"],
                about["setting"],
                count(result["tokens"]),
                f"{result['seconds']:,.0f}",
                f"{result['tokens_per_s']:,.0f}",
                number(result["loss"], 3),
                f"{result['bytes'] / 1e9:,.1f}",
                str(about["seed"]),
                about["parent_hash"][:8],
                point["run"]["git"][:12],
            )
        )
    head = "parent, setting, tokens, seconds, tokens/s, loss, GB moved, seed, hash, commit"
    title = "Parents: all from one start, on as many tokens (loss: of the last tenth of the rounds)"
    return Section([Table("parents", title, tuple(head.split(", ")), tuple(rows))])


SHOWN: dict[str, Callable[[Points], Section]] = {  # experiment -> how its points are shown
    "table1": table1,
    "stability": stability,
    "robustness": robustness,
    "nodeloss": nodeloss,
    "shift": shift,
    "table2": table2,
    "latency": latency,
    "memory": memory,
    "parents": parents,
}
