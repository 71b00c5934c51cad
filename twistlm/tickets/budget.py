"""From a budget to widths: a ratio, a number of parameters, a file size, a memory or a latency.

Parameters and bytes are spent exactly: the result fits, and one more block anywhere would not.
"""

import json
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import cache
from typing import Any

from ..fields import WHOLE
from ..model.blocks import KINDS, BlockMap, Shapes, Widths, widths_of_ratio

Cost = Callable[[Widths], float]

COUNT = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}
BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}
BYTES |= {"kib": 2**10, "mib": 2**20, "gib": 2**30}
AMOUNTS: dict[str, tuple[Mapping[str, int | Decimal], str]] = {  # units, and examples
    "params": (COUNT, "85M or 1.5B"),
    "tokens": (COUNT, "20M or 500k"),
    "size": (BYTES, "60MB or 512KiB"),
    "memory": (BYTES, "2GB or 512MiB"),
    "latency": ({"us": Decimal("0.001"), "ms": 1, "s": 1000}, "12ms or 0.5s"),
    "context": ({"": 1, "k": 2**10, "m": 2**20}, "8k or 2048"),  # tokens
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

    def count(self, shapes: Shapes, dtype: str, n_cached: Callable[[Shapes, int], int]) -> int:
        """Parameters or bytes of a model of these shapes; `n_cached` counts keys and values."""
        if self.kind == "size":
            return weights_bytes(shapes, dtype)
        n_params = sum(map(math.prod, shapes.values()))
        if self.kind == "params":
            return n_params
        return STORED[dtype][1] * (n_params + n_cached(shapes, self.context))

    def impossible(self, least: float) -> ValueError:
        unit = {"params": "parameters", "latency": "ms"}.get(self.kind, "bytes")
        takes = f"{least:.2f}" if unit == "ms" else f"{least:,}"
        return ValueError(
            f"--{self.kind} {self.asked} is impossible: the smallest ticket of this parent (one "
            f"block, or the common ones, in every cut layer that stays) takes {takes} {unit}"
        )


def parse_budgets(context: str | None, given: list[tuple[str, str]]) -> list[Budget]:
    """A budget of each (kind, text); `context` belongs to `memory`."""
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
    found: dict[str, Budget] = {}
    for kind, text in given:
        limit = math.inf if kind == "ratio" else amount(kind, text)
        each = Budget(kind, text, limit, n_tokens if kind == "memory" else 0)
        if found.setdefault(each.slug, each) is not each:
            raise ValueError(f"{each.slug} is asked for twice")
    return list(found.values())


def amount(kind: str, text: str, option: str | None = None) -> float:
    """Parameters of `85M`, bytes of `60MB` (10^6) or `60MiB` (2^20), milliseconds of `12ms`."""
    found = re.fullmatch(r"\s*(\d[\d_,]*(?:\.\d+)?)\s*([a-z]*)\s*", text, re.IGNORECASE)
    (units, examples), option = AMOUNTS[kind], option or f"--{kind}"
    if found is None or found[2].lower() not in units:
        legal = f"(units: {', '.join(unit for unit in units if unit)})"
        raise ValueError(f"{option} {text!r} is no amount such as {examples} {legal}")
    value = Decimal(re.sub("[_,]", "", found[1])) * units[found[2].lower()]
    if value > WHOLE:
        raise ValueError(f"{option} {text[:40]}: legal are less than 2^63")
    return float(value) if kind == "latency" else math.floor(value)


def weights_bytes(shapes: Shapes, dtype: str = "float32") -> int:
    """Bytes of a safetensors file of these tensors: 8 + JSON header, padded to 8, + the numbers."""
    name_in_file, itemsize = STORED[dtype]
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(shapes):  # the file's own order: it decides how long the offsets are
        start, end = end, end + math.prod(shapes[name]) * itemsize
        about = {"dtype": name_in_file, "shape": shapes[name], "data_offsets": [start, end]}
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


def grow(
    widths: Widths, most: Widths, limit: float, cost: Cost, turn: Callable[[str, int], Any]
) -> Widths:
    """Add blocks while any fits: next is the group whose `turn(name, width)` is the smallest.

    A layer that is left out (width 0) stays so.
    """
    widths = dict(widths)
    growing = [name for name, k in widths.items() if 0 < k < most[name]]
    while growing:
        name = min(growing, key=lambda name: turn(name, widths[name]))
        widths[name] += 1
        over = cost(widths) > limit
        widths[name] -= over
        if over or widths[name] == most[name]:  # cost only grows: it will never fit
            growing.remove(name)
    return widths


def grow_evenly(block_map: BlockMap, widths: Widths, limit: float, cost: Cost) -> Widths:
    """Add blocks first where the kept share is smallest, then spread over depth."""
    most = block_map.full_widths()
    # reversed bits put layers in the order 0, 8, 4, 12, 2, ...: any beginning is spread evenly
    place = {g.name: int(f"{g.layer:032b}"[::-1], 2) for g in block_map.groups}
    return grow(widths, most, limit, cost, lambda name, k: (Fraction(k, most[name]), place[name]))


def fit(
    budget: Budget,
    block_map: BlockMap,
    cost: Cost,
    legal: list[Widths] | None = None,
    left_out: Sequence[int] = (),
) -> list[Widths]:
    """Even widths that a budget buys; for a latency, which is a measurement, smaller ones follow.

    `legal` are the only ones to choose from (`--stock`); layers `left_out` get no blocks.
    """
    none = {group.name: 0 for group in block_map.groups if group.layer in left_out}
    if budget.kind == "ratio":
        return [widths_of_ratio(block_map, budget.asked) | none]
    legal = legal and [widths | none for widths in legal]
    if legal is not None and budget.kind != "latency":
        within = [widths for widths in legal if cost(widths) <= budget.limit]
        if not within:
            raise budget.impossible(min(map(cost, legal)))
        most = block_map.full_widths()  # the kind that is cut most decides, then all blocks
        order = [(min(Fraction(w[n], most[n]) for n in w if w[n]), sum(w.values())) for w in within]
        return [within[order.index(max(order))]]
    rungs = [rung | none for rung in ladder(block_map)]
    rungs = [rung for rung in rungs if legal is None or rung in legal]
    at = cache(lambda rung: cost(rungs[rung]))  # a latency is measured, at few rungs
    n_within = bisect_right(range(len(rungs)), budget.limit, key=at)
    if n_within == 0:
        raise budget.impossible(at(0))
    if budget.kind == "latency":
        return rungs[:n_within][::-1]
    return [grow_evenly(block_map, rungs[n_within - 1], budget.limit, cost)]


def predicted(block_map: BlockMap, cost: Cost, even: Widths) -> Cost:
    """Milliseconds as a line: those of even widths, and a measured slope for each kind."""
    base, slopes = cost(even), {}
    for kind in KINDS:
        groups = [g for g in block_map.groups if g.kind == kind and even[g.name]]
        n = sum(even[g.name] - g.least for g in groups)
        less = cost(even | {g.name: g.least for g in groups}) if n else 0.0
        # a clock may find less to be slower
        slopes[kind] = max((base - less) / max(1, n), base / 1e4)
    return lambda widths: (
        base + sum(slopes[g.kind] * (widths[g.name] - even[g.name]) for g in block_map.groups)
    )
