"""What `twistlm lab prune` is asked for; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from .. import fields
from ..fields import option, seed_of, words
from . import NAMES, REPAIRS, SINGLE_WEIGHTS, STRUCTURED, WHOLE_BLOCKS


@dataclass(frozen=True, kw_only=True)
class PruneRequest:
    """How a parent is pruned: the method, how much goes, and the text that it goes by."""

    method: str = option(
        f"{words(SINGLE_WEIGHTS)} (single weights); {words(WHOLE_BLOCKS)} (whole blocks).",
        choices=NAMES,
    )
    sparsity: str | None = option("Share of weights that go from every matrix: 0.667.", None)
    ratio: str | None = option(
        "Share of blocks that stay: 4/12; of single weights 1 - 4/12 go.", None
    )
    nm: str | None = option("N of every M weights in a row go: 2:4.", None, "--nm")
    data: str | None = option("Token file to calibrate on; default: the run's data.train.", None)
    n: int = option("Calibration sequences.", 128, "--n", least=1)
    seed: int = seed_of("the sequences and of block:random")
    repair: str | None = option(
        "Fit what is left of each block:* layer to what it wrote when whole, without gradients: "
        f"{words(REPAIRS)} (a constant, a factor per block, the output projection).",
        None,
    )

    def __post_init__(self) -> None:
        fields.check(self)
        if self.importance is None:
            if self.repair is not None:
                raise ValueError(
                    f"--repair {self.repair} is for whole blocks: --method {self.method} "
                    "removes none"
                )
        elif self.ratio is None or self.sparsity or self.nm:
            raise ValueError(
                f"--method {self.method} keeps whole blocks: give --ratio, and only that"
            )

    @property
    def importance(self) -> str | None:
        """What whole blocks are scored by; None where single weights go."""
        is_block = self.method.startswith(STRUCTURED)
        return self.method.removeprefix(STRUCTURED) if is_block else None
