"""`twistlm eval --certify`: n random tickets of one size, and what they promise for all of them."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
from rich.table import Table

from ..system import terminal
from .parent import Parent
from .requests import ScoreRequest
from .score import score_parent

SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)  # the quantiles of a certificate


def certify(
    parent: Parent, request: ScoreRequest, coverage: float, confidence: float
) -> dict[str, Any]:
    """Measure n random tickets; with `confidence`, `coverage` of all are within the bound."""
    r = rank(request.n, coverage, confidence)
    scores = score_parent(parent, request, parent.source)
    plain, drawn = scores.to_dict(), scores.subnets[0].values
    bound = {"coverage": coverage, "confidence": confidence, "rank": r}
    return {
        "source": parent.source,
        **{key: plain[key] for key in ("full", "seed", "data", "n_tokens", "run")},
        "nested": scores.nested[0] if scores.nested else None,
        "spread": plain["subnets"][0],
        "bound": bound | {"value": sorted(drawn)[r - 1]},
        "quantiles": {percent(share): float(np.quantile(drawn, share)) for share in SHARES},
        "covered_by_worst": float(1 - Fraction(str(confidence))) ** (1 / request.n),
    }


def table(made: dict[str, Any]) -> Table:
    spread = made["spread"]
    title = (
        f"perplexity of {spread['n']} random tickets of {spread['ratio']} blocks "
        f"({spread['n_params']:,} parameters) on {made['n_tokens']:,} tokens"
    )
    rows = {"whole parent": made["full"], "nested ticket": made["nested"], "mean": spread["mean"]}
    rows |= {"sd": spread["sd"], **made["quantiles"], "worst": spread["worst"]}
    rows = {name: value for name, value in rows.items() if value is not None}
    result = terminal.table(title, *rows, words=0)
    result.add_row(*(f"{value:.2f}" for value in rows.values()))
    return result


def reading(made: dict[str, Any]) -> str:
    """What the draws promise, in two sentences."""
    bound, n = made["bound"], made["spread"]["n"]
    worst = int(made["covered_by_worst"] * 1000) / 10  # rounded down: a promise must hold
    return (
        f"{percent(bound['coverage'])} of tickets are at or below {bound['value']:.2f}, with "
        f"{percent(bound['confidence'])} confidence (draw {bound['rank']} of {n} in order). "
        f"With the same confidence, {worst}% are no worse than the worst one seen."
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
