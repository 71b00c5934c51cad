"""What n random draws promise for all tickets: order statistics, whatever the distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Bound:
    """At least `coverage` of all tickets lie at or below `value`, said with this confidence."""

    coverage: float
    confidence: float
    rank: int  # `value` is the rank-th smallest draw
    value: float

    def __str__(self) -> str:
        share, confidence = (percent(x) for x in (self.coverage, self.confidence))
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
            f"n = {n} draws bound no {percent(coverage)} of tickets with {percent(confidence)} "
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
    n = max(1, round(math.log(wrong) / math.log(p)) - 1)
    while p**n > wrong:  # the logarithms round
        n += 1
    return n


def covered_by_worst(n: int, confidence: float) -> float:
    """The share of all tickets that lies at or below the worst of n, with this confidence."""
    return float(1 - _share(confidence, "confidence")) ** (1 / n)


def _share(value: float, name: str) -> Fraction:
    """The decimal that was typed, exactly: 0.95 is 19/20."""
    if not 0 < value < 1:
        raise ValueError(f"{name} = {value}: must lie between 0 and 1")
    return Fraction(str(value))


def percent(share: float) -> str:
    """`99.9%`, with no more digits than it has."""
    return f"{100 * share:.10g}%"
