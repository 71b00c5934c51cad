"""Rows of Table 1, who wins among them, and which claims they decide."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from twistlm.baselines import STRUCTURED
from twistlm.config import Setting
from twistlm.lab.compare.table import by_size
from twistlm.model.blocks import widths_of_ratio
from twistlm.model.generator import draws
from twistlm.model.masks import prefixes
from twistlm.tickets.ticket_scale import N_DRAWS

from .lab import Lab, Point
from .page.section import Claim, number
from .scales import DENSE, DROPOUT, SCALES, TWIST, N, Recipe

# slug or method -> (what the table calls it, the paper's name for its column)
NAMES = {
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
TRIED = "best of some on other text"  # how the activation scale of a ticket comes about
EXTRACTED = "random blocks of "  # before a parent's name
NESTED = "nested blocks of "  # the first ones of a parent's own order
AT_SIZE = f"{EXTRACTED}TwIST trained at that size"  # one parent for each size, the paper's SE
Rows = dict[str, dict[int, dict[str, Any]]]  # name of a row -> K -> result
ZEROS = {name for method, (name, _) in NAMES.items() if not method.startswith(STRUCTURED)}


def is_zeros(name: str) -> bool:
    """Whether a row has single weights removed: zeros, where others have a smaller model."""
    return name in ZEROS


def is_chosen(name: str) -> bool:
    """Whether a row has whole blocks that a score chose after training."""
    return not name.startswith((EXTRACTED, NESTED)) and not is_zeros(name)


def rows_of(points: list[dict[str, Any]]) -> tuple[Rows, dict[str, str]]:
    """Results by row, and the paper's column of each row that has one."""
    rows: Rows = {}
    theirs = {}
    alike = all(SCALES[p["config"]["scale"]].n_attn == N for p in points)  # GPT-2, as in the paper
    for point in points:
        config = point["config"]
        if "method" in config:
            name, column = NAMES.get(config["method"], (config["method"], ""))
        elif config.get("pick") == "nested":
            name, column = f"{NESTED}{config['parent']}", ""
        else:
            name, column = f"{EXTRACTED}{config['parent']}", ""
            plain = config["slug"].removesuffix(f"-{config['setting']}")
            column = {"dense": "dense", "twist-6": "twist-6"}.get(plain, "")
            if plain == f"twist-{config['k']}":
                theirs[AT_SIZE] = "twist" if alike else ""
                rows.setdefault(AT_SIZE, {})[config["k"]] = point["result"]
                if plain != TWIST.slug:  # other widths stand in that row alone
                    continue
        theirs[name] = column if alike else ""
        rows.setdefault(name, {})[config["k"]] = point["result"]
    if set(rows.get(AT_SIZE, ())) <= {*TWIST.widths}:  # nothing that the row of TWIST does not say
        rows.pop(AT_SIZE, None)
    known = [name for name, _ in NAMES.values()]  # pruners first, in the paper's order
    order = sorted(rows, key=lambda name: known.index(name) if name in known else len(known))
    return {name: rows[name] for name in order}, theirs


def headlines(rows: Rows) -> list[str]:
    """Who wins at each size among what is really smaller, and what zeros alone would give."""
    found = []
    for k in (8, 6, 4, 3):
        there = {_short(n): r[k]["mean"] for n, r in rows.items() if k in r}
        zeros = {n: v for n, v in there.items() if is_zeros(n)}
        smaller = {n: v for n, v in there.items() if n not in zeros}
        if len(smaller) < 2:
            continue
        first, second = sorted(smaller, key=smaller.__getitem__)[:2]
        line = f"{k}/{N} of the blocks: {first} {number(smaller[first])}, then {second} {number(smaller[second])}"
        if DENSE.label in smaller and DENSE.label not in (first, second):
            line += f"; random blocks of {DENSE.label} {number(smaller[DENSE.label])}"
        if zeros:
            best = min(zeros, key=zeros.__getitem__)
            line += (
                f"; as many zeros instead, no smaller and no faster: {best} {number(zeros[best])}"
            )
        found.append(f"{line}.")
    whole = {_short(n): r[N]["mean"] for n, r in rows.items() if N in r}
    if len(whole) > 1:
        order = sorted(whole, key=whole.__getitem__)
        found.append(f"Whole models: {', '.join(f'{n} {number(whole[n])}' for n in order[:3])}.")
    return found


def _short(name: str) -> str:
    return name.removeprefix(EXTRACTED).replace(NESTED, "nested, ")


def claims(setting: str, rows: Rows) -> list[Claim]:
    """What the numbers of one setting say: the paper's claims, then ours."""
    dense = rows.get(f"{EXTRACTED}{DENSE.label}", {})
    twist = rows.get(f"{EXTRACTED}{TWIST.label}", {})
    sizes = sorted(k for k in set(dense) & set(twist) if k < N)
    if not sizes:
        return []
    beats = [k for k in sizes if twist[k]["mean"] < dense[k]["mean"]]
    found = [
        Claim(
            f"{setting}: TwIST's random subnets beat data parallel's at every size",
            beats == sizes,
            ", ".join(
                f"{k}/{N}: {number(twist[k]['mean'])} against {number(dense[k]['mean'])}"
                for k in sizes
            ),
        ),
        _flat(setting, dense, twist, sizes),
    ]
    for name, mine in ((TWIST.label, twist), (_short(AT_SIZE), rows.get(AT_SIZE, {}))):
        found += _crossover(setting, name, mine, rows.get("SparseGPT", {}))
    return found + _ours(setting, rows, dense, twist, sizes)


def _crossover(setting: str, name: str, twist: dict, gpt: dict) -> list[Claim]:
    """Whether TwIST is behind SparseGPT at 6/12 and above, ahead at 4/12 and below, and nothing else."""
    shared = sorted(k for k in set(twist) & set(gpt) if k < N)
    lean, wide = [k for k in shared if k <= 4], [k for k in shared if k >= 6]
    if not lean or not wide:
        return []
    won = [k for k in shared if twist[k]["mean"] < gpt[k]["mean"]]
    return [
        Claim(
            f"{setting}: SparseGPT is ahead at 6/12 and above, {name} at 4/12 and below (crossover)",
            won == lean,
            f"{name} is ahead at {', '.join(f'{k}/{N}' for k in won) or 'no size'}: "
            + ", ".join(
                f"{k}/{N}: {number(twist[k]['mean'])} against {number(gpt[k]['mean'])}"
                for k in shared
            ),
        )
    ]


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
    """What the paper does not ask: the whole model, chosen blocks, and the control with TwIST's idea."""
    claims = []
    chosen = [r for n, r in rows.items() if is_chosen(n)]
    if shared := [k for k in sizes if any(k in r for r in chosen)]:
        best_of = {k: min(r[k]["mean"] for r in chosen if k in r) for k in shared}
        claims.append(
            Claim(
                f"{setting}: TwIST's random blocks beat blocks that a score chooses from data parallel, at every size",
                all(twist[k]["mean"] < best_of[k] for k in shared),
                ", ".join(
                    f"{k}/{N}: {number(twist[k]['mean'])} against {number(best_of[k])}"
                    for k in shared
                ),
                "ours",
            )
        )
    if N in dense and N in twist:
        claims.append(
            Claim(
                f"{setting}: the whole TwIST model is as good as the whole data-parallel one",
                twist[N]["mean"] <= dense[N]["mean"],
                f"{number(twist[N]['mean'])} against {number(dense[N]['mean'])}",
                "ours",
            )
        )
    control = rows.get(f"{EXTRACTED}{DROPOUT.label}", {})
    versions = {  # one parent for all sizes, as the control is
        n: r for n, r in rows.items() if n.startswith(f"{EXTRACTED}TwIST") and n != AT_SIZE
    }
    if shared := [k for k in sizes if k in control]:
        best = {k: min((r[k]["mean"], n) for n, r in versions.items() if k in r) for k in shared}
        claims.append(
            Claim(
                f"{setting}: TwIST (its best version) beats structured dropout at every size",
                all(best[k][0] < control[k]["mean"] for k in shared),
                "; ".join(
                    f"{k}/{N}: {number(best[k][0])} ({best[k][1].removeprefix(EXTRACTED)}) against "
                    f"{number(control[k]['mean'])}"
                    for k in shared
                ),
                "ours",
            )
        )
    return claims


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
        **({"treatment": TRIED} if k < N else {}),
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
        others = draws(parent.block_map, widths, seed=seed, n=n + N_DRAWS, first=n)
        treatments = lab.treatments(recipe, sample.setting, sample.tokens)
        treatment, chosen = treatments.best(list(others))
        spread = treatments.evaluator(treatment).random_subnets(scale.ratio(k), widths, n, seed)
        return {
            "values": list(spread.values),
            **spread.summary(),
            "n_params": spread.n_params,
            "treatment": chosen,
        }

    return Point(about, measure)


def nested(lab: Lab, recipe: Recipe, sample: Sample) -> Point:
    """The point with the perplexity of the ticket that a parent's own order gives."""
    scale, k = lab.scale, sample.k
    about = lab.about(
        "table1",
        recipe,
        setting=sample.setting,
        k=k,
        ratio=scale.ratio(k),
        pick="nested",
        tokens=sample.tokens,
        treatment=TRIED,
    )

    def measure() -> dict[str, Any]:
        parent, _ = lab.open(recipe, sample.setting, sample.tokens)
        widths = widths_of_ratio(parent.block_map, scale.ratio(k))
        ticket = prefixes(parent.block_map, parent.progress.order, widths)
        treatments = lab.treatments(recipe, sample.setting, sample.tokens)
        treatment, chosen = treatments.best([ticket])
        value = treatments.evaluator(treatment).subnet_perplexity(ticket)
        return {"mean": value, "sd": None, "values": [value], "n": 1, "treatment": chosen}

    return Point(about, measure)


def by_parent(points: Iterable[dict[str, Any]]) -> ByParent:
    """Results of finished points, sorted by parent and size."""
    found: ByParent = {}
    for point in points:
        config = point["config"]
        found.setdefault(config["parent"], {})[config["k"]] = point["result"]
    return found


def scales_of(results: dict[int, dict[str, Any]], sizes: Iterable[int]) -> str:
    """The activation scales of a row's tickets, one for all sizes or one after the other."""
    found = [
        results[k].get("treatment", {}).get("chosen", "") for k in sizes if k in results and k < N
    ]
    return by_size(found) if found else ""
