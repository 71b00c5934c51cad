"""From a budget to widths: a ratio, a number of parameters, a file size, a memory or a latency.

Parameters and bytes are spent exactly: the result fits, and one more block anywhere would not.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

from ..model.blocks import KINDS, BlockGroup, BlockMap, Shapes, Widths, count, widths_of_ratio
from ..system.manifest import LARGEST

Cost = Callable[[Widths], float]

UNITS: dict[str, dict[str, int | Fraction]] = {
    "params": {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9},
    "size": {
        "": 1,
        **{"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9},
        **{"kib": 2**10, "mib": 2**20, "gib": 2**30},
    },
    "latency": {"us": Fraction(1, 1000), "ms": 1, "s": 1000},
    "context": {"": 1, "k": 2**10, "m": 2**20},  # tokens
}
UNITS["memory"], UNITS["tokens"] = UNITS["size"], UNITS["params"]
EXAMPLES = {
    "params": "85M or 1.5B",
    "size": "60MB or 512KiB",
    "latency": "12ms or 0.5s",
    "memory": "2GB or 512MiB",
    "context": "8k or 2048",
    "tokens": "20M or 500k",
}
# in a safetensors file: name and bytes
STORED = {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2)}


@dataclass(frozen=True)
class Budget:
    """What a ticket may cost."""

    kind: str  # ratio, params, size, latency or memory
    asked: str  # as it was typed
    limit: float = math.inf  # parameters, bytes or ms; a ratio has none
    context: int = 0  # tokens whose keys and values count as memory

    @property
    def slug(self) -> str:
        """A name for a folder: `params-85M`, `ratio-4-12`."""
        context = f"-context-{self.context}" if self.context else ""
        return re.sub(r"[^A-Za-z0-9.=_]+", "-", f"{self.kind}-{self.asked}{context}")


def parse_budget(context: str | None = None, **options: str | None) -> Budget:
    """The one budget among `ratio`, `params`, `size`, `latency` and `memory` (with `context`)."""
    given = {kind: text for kind, text in options.items() if text is not None}
    if len(given) != 1:
        what = " and ".join(f"--{kind}" for kind in given) or "none"
        raise ValueError(
            f"give exactly one of --ratio, --params, --size, --latency and --memory (given: {what})"
        )
    return parse_budgets(context, **{kind: [text] for kind, text in given.items()})[0]


def parse_budgets(context: str | None = None, **options: list[str] | None) -> list[Budget]:
    """Every budget that is given, each for a ticket of its own; `context` belongs to `memory`."""
    given = [(kind, text) for kind, texts in options.items() for text in texts or ()]
    if not given:
        raise ValueError(
            "give --ratio, --params, --size, --latency or --memory, several for several tickets"
        )
    if (context is None) != all(kind != "memory" for kind, _ in given):
        raise ValueError(
            "--memory and --context go together, as in --memory 2GB --context 8k: the weights and "
            "the cached keys and values of so many tokens"
        )
    n_tokens = 0 if context is None else int(amount("context", context))
    if context is not None and not n_tokens:
        raise ValueError(f"--context {context}: must be 1 token at least")
    found = []
    for kind, text in given:
        limit = math.inf if kind == "ratio" else amount(kind, text)
        found.append(Budget(kind, text, limit, n_tokens if kind == "memory" else 0))
    if twice := [b.slug for b in found if [o.slug for o in found].count(b.slug) > 1]:
        raise ValueError(f"{twice[0]} is asked for twice")
    return found


def amount(kind: str, text: str, option: str | None = None) -> float:
    """Parameters of `85M`, bytes of `60MB` (10^6) or `60MiB` (2^20), milliseconds of `12ms`."""
    found = re.fullmatch(r"\s*(\d[\d_,]*(?:\.\d+)?)\s*([a-z]*)\s*", text, re.IGNORECASE)
    units, option = UNITS[kind], option or f"--{kind}"
    if found is None or found[2].lower() not in units:
        legal = f"(units: {', '.join(unit for unit in units if unit)})"
        raise ValueError(f"{option} {text!r} is no amount such as {EXAMPLES[kind]} {legal}")
    digits = re.sub("[_,]", "", found[1])
    value = Fraction(digits) * units[found[2].lower()] if len(digits) <= 40 else LARGEST
    if value >= LARGEST:  # a ticket's record could not be read again
        raise ValueError(f"{option} {text[:40]}: legal are less than 2^63")
    return float(value) if kind == "latency" else math.floor(value)


def weights_bytes(shapes: Shapes, dtype: str = "float32") -> int:
    """Bytes of a safetensors file of these tensors: 8 + JSON header, padded to 8, + the numbers."""
    name_in_file, itemsize = STORED[dtype]
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(shapes):  # the file's own order: it decides how long the offsets are
        start, end = end, end + math.prod(shapes[name]) * itemsize
        about = {"dtype": name_in_file, "shape": list(shapes[name]), "data_offsets": [start, end]}
        header[name] = about
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return 8 + math.ceil(len(text) / 8) * 8 + end


def ladder(block_map: BlockMap) -> list[Widths]:
    """Uniform widths from the fewest blocks to all: at each rung a kind gets one block more."""
    shares = sorted(
        {Fraction(k, g.n_blocks) for g in block_map.groups for k in range(1, g.n_blocks + 1)}
    )
    rungs: list[Widths] = []
    for share in shares:
        widths = {g.name: max(g.least, math.floor(share * g.n_blocks)) for g in block_map.groups}
        if not rungs or widths != rungs[-1]:
            rungs.append(widths)
    return rungs


def climb(rungs: list[Widths], budget: Budget, cost: Cost, unit: str) -> list[Widths]:
    """The rungs within the budget, smallest first; the bisection looks at few of them."""

    @cache  # a latency is measured
    def at(rung: int) -> float:
        return cost(rungs[rung])

    n_within = bisect_right(range(len(rungs)), budget.limit, key=at)
    if n_within == 0:
        raise impossible(budget, at(0), unit)
    return rungs[:n_within]


def impossible(budget: Budget, least: float, unit: str) -> ValueError:
    takes = f"{least:.2f}" if unit == "ms" else f"{least:,}"
    return ValueError(
        f"--{budget.kind} {budget.asked} is impossible: the smallest ticket of this parent (one "
        f"block, or the common ones, in every cut layer) takes {takes} {unit}"
    )


def add_blocks(block_map: BlockMap, widths: Widths, limit: float, cost: Cost) -> Widths:
    """Add blocks while any fits: first where the kept share is smallest, then spread over depth."""
    widths = dict(widths)

    def turn(group: BlockGroup) -> tuple[Fraction, int]:
        # reversed bits put layers in the order 0, 8, 4, 12, 2, ...: any beginning is spread evenly
        return Fraction(widths[group.name], group.n_blocks), int(f"{group.layer:032b}"[::-1], 2)

    growing = [group for group in block_map.groups if widths[group.name] < group.n_blocks]
    while growing:
        group = min(growing, key=turn)
        widths[group.name] += 1
        over = cost(widths) > limit
        if over:
            widths[group.name] -= 1
        if over or widths[group.name] == group.n_blocks:  # cost only grows: it will never fit
            growing.remove(group)
    return widths


def most(legal: list[Widths], budget: Budget, costs: Costs) -> Widths:
    """The largest legal widths that fit: the kind that is cut most decides, then all blocks."""
    n_blocks = costs.block_map.full_widths()
    cost, unit = costs.of(budget)
    within = [widths for widths in legal if cost(widths) <= budget.limit]
    if not within:
        raise impossible(budget, min(map(cost, legal)), unit)

    def order(widths: Widths) -> tuple[Fraction, int]:
        return min(Fraction(k, n_blocks[name]) for name, k in widths.items()), sum(widths.values())

    return max(within, key=order)


@dataclass(frozen=True)
class Costs:
    """What subnets of a model cost; `milliseconds` measures one decoded token."""

    block_map: BlockMap
    shapes: Shapes
    dtype: str
    milliseconds: Cost
    cached: Callable[[Shapes, int], int] = lambda shapes, context: 0  # keys and values, numbers

    def parameters(self, widths: Widths) -> int:
        return count(self.block_map, self.shapes, widths)

    def size(self, widths: Widths) -> int:
        """Bytes of the weights file."""
        return weights_bytes(self.block_map.narrowed(self.shapes, widths), self.dtype)

    def memory(self, widths: Widths, context: int) -> int:
        """Bytes of weights, and of the keys and values of one sequence of `context` tokens."""
        cached = self.cached(self.block_map.narrowed(self.shapes, widths), context)
        return STORED[self.dtype][1] * (self.parameters(widths) + cached)

    def of(self, budget: Budget) -> tuple[Cost, str]:
        """The cost that a budget limits, and its unit."""
        if budget.kind == "memory":
            return lambda widths: self.memory(widths, budget.context), "bytes"
        known: dict[str, tuple[Cost, str]] = {
            "params": (self.parameters, "parameters"),
            "size": (self.size, "bytes"),
            "latency": (self.milliseconds, "ms"),
        }
        return known[budget.kind]


def fit(budget: Budget, costs: Costs, legal: list[Widths] | None = None) -> list[Widths]:
    """Even widths that a budget buys; for a latency, which is a measurement, smaller ones follow.

    `legal` are the only ones to choose from (`--stock`).
    """
    if budget.kind == "ratio":
        return [widths_of_ratio(costs.block_map, budget.asked)]
    if legal is not None and budget.kind != "latency":
        return [most(legal, budget, costs)]
    cost, unit = costs.of(budget)
    steps = [rung for rung in ladder(costs.block_map) if legal is None or rung in legal]
    rungs = climb(steps, budget, cost, unit)
    if budget.kind == "latency":
        return rungs[::-1]
    return [add_blocks(costs.block_map, rungs[-1], budget.limit, cost)]


def predicted(costs: Costs, even: Widths) -> Cost:
    """Milliseconds as a line: those of even widths, and a measured slope for each kind."""
    base, slopes = costs.milliseconds(even), {}
    for kind in KINDS:
        groups = [g for g in costs.block_map.groups if g.kind == kind]
        n = sum(even[g.name] - g.least for g in groups)
        less = costs.milliseconds(even | {g.name: g.least for g in groups}) if n else 0.0
        # a clock may find less to be slower
        slopes[kind] = max((base - less) / max(1, n), base / 1e4)

    def milliseconds(widths: Widths) -> float:
        groups = costs.block_map.groups
        return base + sum(slopes[g.kind] * (widths[g.name] - even[g.name]) for g in groups)

    return milliseconds
