"""What n random tickets say about all tickets: order statistics, with no assumption on their shape.

The r-th smallest of n independent draws lies at or above the p-quantile of their distribution with
probability P(Binomial(n, p) < r), whatever the distribution (at least that, where values tie).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)  # the quantiles of a certificate


@dataclass(frozen=True)
class Bound:
    """At least `coverage` of all tickets lie at or below `value`, said with this confidence."""

    coverage: float
    confidence: float
    rank: int  # `value` is the rank-th smallest draw
    value: float

    def __str__(self) -> str:
        share, confidence = (_percent(x) for x in (self.coverage, self.confidence))
        return f"{share} of tickets are at or below {self.value:.2f}, with {confidence} confidence"


def bound(values: Sequence[float], coverage: float, confidence: float) -> Bound:
    """The tightest upper bound on a share of all tickets that these draws allow."""
    r = rank(len(values), coverage, confidence)
    return Bound(coverage, confidence, r, sorted(values)[r - 1])


def rank(n: int, coverage: float, confidence: float) -> int:
    """The smallest r with P(Binomial(n, coverage) >= r) <= 1 - confidence, in exact integers."""
    p, wrong = _share(coverage, "coverage"), 1 - _share(confidence, "confidence")
    if n < (least := smallest_n(coverage, confidence)):
        raise ValueError(
            f"n = {n} draws bound no {_percent(coverage)} of tickets with {_percent(confidence)} "
            f"confidence: n must be at least {least}"
        )
    hits, misses = p.numerator, p.denominator - p.numerator
    allowed = wrong * p.denominator**n  # in units of p.denominator ** -n
    tail, r = 0, n + 1
    while r > 1:
        tail += math.comb(n, r - 1) * hits ** (r - 1) * misses ** (n - r + 1)
        if tail > allowed:
            break
        r -= 1
    return r


def smallest_n(coverage: float, confidence: float) -> int:
    """How few draws can bound that share: the smallest n with coverage ** n <= 1 - confidence."""
    p, wrong = _share(coverage, "coverage"), 1 - _share(confidence, "confidence")
    n = max(1, round(math.log(wrong) / math.log(p)))
    while p**n > wrong:  # the logarithms round
        n += 1
    while n > 1 and p ** (n - 1) <= wrong:
        n -= 1
    return n


def covered_by_worst(n: int, confidence: float) -> float:
    """The share of all tickets that lies at or below the worst of n, with this confidence."""
    return float(1 - _share(confidence, "confidence")) ** (1 / n)


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Sample quantiles, linear between draws."""
    return {_percent(share): float(np.quantile(values, share)) for share in SHARES}


def _share(value: float, name: str) -> Fraction:
    """The decimal that was typed, exactly: 0.95 is 19/20."""
    if not 0 < value < 1:
        raise ValueError(f"{name} = {value}: must lie between 0 and 1")
    return Fraction(str(value))


def _percent(share: float) -> str:
    return f"{100 * share:.10g}%"
