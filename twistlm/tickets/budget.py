"""From a budget to widths: a ratio, a number of parameters, a file size or a latency.

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
from typing import Literal

from ..model.blocks import BlockGroup, BlockMap, Shapes, Widths, widths_of_ratio
from ..model.count import count

BudgetKind = Literal["ratio", "params", "size", "latency"]
Cost = Callable[[Widths], float]

UNITS: dict[str, dict[str, int | Fraction]] = {
    "params": {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9},
    "size": {
        "": 1,
        **{"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9},
        **{"kib": 2**10, "mib": 2**20, "gib": 2**30},
    },
    "latency": {"us": Fraction(1, 1000), "ms": 1, "s": 1000},
}
EXAMPLES = {"params": "85M or 1.5B", "size": "60MB or 512KiB", "latency": "12ms or 0.5s"}
# in a safetensors file: name and bytes
STORED = {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2)}


@dataclass(frozen=True)
class Budget:
    """What a ticket may cost."""

    kind: BudgetKind
    asked: str  # as it was typed
    limit: float = math.inf  # parameters, bytes or ms; a ratio has none


def parse_budget(**options: str | None) -> Budget:
    """The one budget among `ratio`, `params`, `size` and `latency`."""
    given = {kind: text for kind, text in options.items() if text is not None}
    if len(given) != 1:
        what = " and ".join(f"--{kind}" for kind in given) or "none"
        raise ValueError(
            f"give exactly one of --ratio, --params, --size and --latency (given: {what})"
        )
    ((kind, text),) = given.items()
    if kind == "ratio":
        return Budget("ratio", text)
    return Budget(kind, text, amount(kind, text))  # type: ignore[arg-type]


def amount(kind: str, text: str) -> float:
    """Parameters of `85M`, bytes of `60MB` (10^6) or `60MiB` (2^20), milliseconds of `12ms`."""
    found = re.fullmatch(r"\s*(\d[\d_,]*(?:\.\d+)?)\s*([a-z]*)\s*", text, re.IGNORECASE)
    units = UNITS[kind]
    if found is None or found[2].lower() not in units:
        legal = ", ".join(unit for unit in units if unit)
        raise ValueError(
            f"--{kind} {text!r} is no amount such as {EXAMPLES[kind]} (units: {legal})"
        )
    value = Fraction(re.sub("[_,]", "", found[1])) * units[found[2].lower()]
    return float(value) if kind == "latency" else math.floor(value)


def weights_bytes(shapes: Shapes, dtype: str = "float32") -> int:
    """Bytes of a safetensors file of these tensors: 8 + JSON header, padded to 8, + the numbers."""
    name_in_file, itemsize = STORED[dtype]
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(shapes):  # the file's own order: it decides how long the offsets are
        start, end = end, end + math.prod(shapes[name]) * itemsize
        header[name] = {
            "dtype": name_in_file,
            "shape": list(shapes[name]),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return 8 + math.ceil(len(text) / 8) * 8 + end


def ladder(block_map: BlockMap) -> list[Widths]:
    """Uniform widths from the fewest blocks per layer to all: at each rung a kind gets one block more."""
    shares = sorted(
        {Fraction(k, g.n_blocks) for g in block_map.groups for k in range(1, g.n_blocks + 1)}
    )
    rungs: list[Widths] = []
    for share in shares:
        widths = {g.name: max(g.least, math.floor(share * g.n_blocks)) for g in block_map.groups}
        if not rungs or widths != rungs[-1]:
            rungs.append(widths)
    return rungs


def climb(block_map: BlockMap, budget: Budget, cost: Cost, unit: str) -> list[Widths]:
    """The rungs within the budget, smallest first; the bisection looks at few of them."""
    rungs = ladder(block_map)

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
        f"--{budget.kind} {budget.asked} is impossible: the smallest ticket of this parent (one block, or "
        f"the common ones, in every cut layer) takes {takes} {unit}"
    )


def spend(block_map: BlockMap, widths: Widths, limit: float, cost: Cost) -> Widths:
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


def fit(
    block_map: BlockMap, shapes: Shapes, budget: Budget, dtype: str, milliseconds: Cost
) -> list[Widths]:
    """The widths that a budget buys; for a latency, which is a measurement, smaller ones follow.

    `milliseconds` measures one decoded token of a subnet with these widths.
    """

    def parameters(widths: Widths) -> int:
        return count(block_map, shapes, widths)

    def size(widths: Widths) -> int:
        return weights_bytes(block_map.narrowed(shapes, widths), dtype)

    if budget.kind == "ratio":
        return [widths_of_ratio(block_map, budget.asked)]
    if budget.kind == "latency":
        return climb(block_map, budget, milliseconds, "ms")[::-1]
    cost, unit = (parameters, "parameters") if budget.kind == "params" else (size, "bytes")
    return [spend(block_map, climb(block_map, budget, cost, unit)[-1], budget.limit, cost)]
