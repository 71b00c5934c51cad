"""Which entries of a score matrix [out, in] go: the lowest of all, of each row, or N of M."""

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

    def lowest(self, score: Tensor, by_row: bool = False) -> Tensor:
        """True where a score [out, in] is among the lowest, of equal ones in a row the first.

        Over the matrix: score <= sorted(score)[int(count * sparsity)], so int(count * s) + 1 go.
        """
        if self.m:
            neighbours = score.unflatten(1, (-1, self.m)).flatten(0, 1)
            return _first(neighbours, self.n).view(score.shape)
        if by_row:
            return _first(score, int(score.shape[1] * self.sparsity))
        return score <= score.flatten().sort().values[int(score.numel() * self.sparsity)]

    def check_width(self, n_inputs: int) -> None:
        """N:M needs rows of whole numbers of m neighbours."""
        if self.m and n_inputs % self.m:
            raise ValueError(
                f"--nm {self.n}:{self.m}: a matrix has {n_inputs} inputs, no multiple of {self.m}"
            )


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


def _first(score: Tensor, n: int) -> Tensor:
    """True for the n lowest of each row, in a stable order."""
    order = score.argsort(dim=1, stable=True)
    return torch.zeros_like(score, dtype=torch.bool).scatter_(1, order[:, :n], True)
