"""What a ticket may cost: a ratio, a number of parameters, a file size, a memory or a latency."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

from ..fields import WHOLE

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
