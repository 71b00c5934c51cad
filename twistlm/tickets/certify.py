"""`twistlm eval --certify`: what n random tickets of one size promise for all of them."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)  # the quantiles of a certificate


def certificate(values: Sequence[float], coverage: float, confidence: float) -> dict[str, Any]:
    """Of the perplexities of n random tickets: a bound on `coverage` of all, with `confidence`."""
    r, n = rank(len(values), coverage, confidence), len(values)
    return {
        "coverage": coverage,
        "confidence": confidence,
        "rank": r,
        "bound": sorted(values)[r - 1],
        "quantiles": {percent(share): float(np.quantile(values, share)) for share in SHARES},
        "covered_by_worst": float(1 - Fraction(str(confidence))) ** (1 / n),
        "n": n,
    }


def reading(made: dict[str, Any]) -> str:
    """What the draws promise, in three sentences."""
    worst = int(made["covered_by_worst"] * 1000) / 10  # rounded down: a promise must hold
    seen = (f"{share} are at or below {value:.2f}" for share, value in made["quantiles"].items())
    return (
        f"{percent(made['coverage'])} of tickets are at or below {made['bound']:.2f}, with "
        f"{percent(made['confidence'])} confidence (draw {made['rank']} of {made['n']} in order). "
        f"With the same confidence, {worst}% are no worse than the worst one seen. "
        f"Of those seen, {', '.join(seen)}."
    )


def rank(n: int, coverage: float, confidence: float) -> int:
    """The smallest r with P(Binomial(n, coverage) >= r) <= 1 - confidence, in exact integers.

    With this confidence, the r-th smallest of n draws bounds that share of all tickets.
    """
    for name, value in {"coverage": coverage, "confidence": confidence}.items():
        if not 0 < value < 1:
            raise ValueError(f"{name} = {value}: must lie between 0 and 1")
    p, wrong = Fraction(str(coverage)), 1 - Fraction(str(confidence))  # as typed: 0.95 is 19/20
    hits, misses = p.numerator, p.denominator - p.numerator
    left, r = wrong * p.denominator**n, n + 1  # in units of p.denominator ** -n
    while (left := left - math.comb(n, r - 1) * hits ** (r - 1) * misses ** (n - r + 1)) >= 0:
        r -= 1
    if r > n:
        raise ValueError(
            f"n = {n} draws bound no {percent(coverage)} of tickets with {percent(confidence)} "
            f"confidence: n must be at least {math.ceil(math.log(wrong) / math.log(p) - 1e-9)}"
        )
    return r


def percent(share: float) -> str:
    """`99.9%`, with no more digits than it has."""
    return f"{100 * share:.10g}%"
