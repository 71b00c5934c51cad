"""Which entries of a score matrix [out, in] go: the lowest, by one of three rules of comparison."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

Sparsity = float | Fraction  # a fraction counts without rounding: int(100 * 0.29) is 28


@dataclass(frozen=True)
class Pattern:
    """A share of all weights, or `n` of every `m` neighbours in a row (N:M, where m > 0)."""

    sparsity: Sparsity
    n: int = 0
    m: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.sparsity < 1:
            raise ValueError(f"sparsity {float(self.sparsity):g}: it must lie in [0, 1)")


def sparsity_of(text: str) -> Fraction:
    """The exact number behind `0.667` or `2/3`."""
    try:
        return Fraction(text.strip())
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"--sparsity {text!r} is no number in [0, 1) such as 0.5") from None


def n_of_m(text: str) -> Pattern:
    """The pattern of `2:4`: 2 of every 4 weights in a row go."""
    n, colon, m = text.partition(":")
    if not colon or not n.isdecimal() or not m.isdecimal() or not 0 < int(n) < int(m):
        raise ValueError(f"--nm {text!r}: use N:M with 0 < N < M, as in 2:4")
    return Pattern(Fraction(int(n), int(m)), int(n), int(m))


def lowest(score: Tensor, sparsity: Sparsity) -> Tensor:
    """True where score <= sorted(score)[int(count * s)]: int(count * s) + 1 entries, or more if equal."""
    threshold = score.flatten().sort().values[int(score.numel() * sparsity)]
    return score <= threshold


def lowest_of_rows(score: Tensor, sparsity: Sparsity) -> Tensor:
    """True for the first int(in * s) of each row in a stable order."""
    order = score.argsort(dim=1, stable=True)
    return _mark(score, order[:, : int(score.shape[1] * sparsity)])


def lowest_of_m(score: Tensor, pattern: Pattern) -> Tensor:
    """True for the lowest n of every m neighbours in a row; of equal ones the first."""
    neighbours = score.unflatten(1, (-1, pattern.m)).flatten(0, 1)
    order = neighbours.argsort(dim=1, stable=True)
    return _mark(neighbours, order[:, : pattern.n]).view(score.shape)


def check_width(n_inputs: int, pattern: Pattern) -> None:
    """N:M needs rows of whole numbers of m neighbours."""
    if pattern.m and n_inputs % pattern.m:
        raise ValueError(
            f"--nm {pattern.n}:{pattern.m}: a matrix has {n_inputs} inputs, no multiple of {pattern.m}"
        )


def _mark(like: Tensor, index: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.bool).scatter_(1, index, True)
